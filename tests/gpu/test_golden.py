"""The bits of every op on this device class are those written in the repository; an upgrade that moves them fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from isobit.order import NUMERICS_VERSION

pytestmark = pytest.mark.gpu
FILE = Path(__file__).parents[1] / "golden" / "sm90_ops.json"


def test_every_op_gives_the_golden_bits() -> None:
    from isobit.kernels.gpu.golden import all_digests

    golden = json.loads(FILE.read_text(encoding="utf-8"))
    assert golden["numerics_version"] == NUMERICS_VERSION
    found = all_digests()
    assert list(found) == list(golden["digests"])
    moved = [name for name, value in found.items() if golden["digests"][name] != value]
    assert not moved, f"the bits moved: {moved}. If that is meant: raise NUMERICS_VERSION, write the file anew"
