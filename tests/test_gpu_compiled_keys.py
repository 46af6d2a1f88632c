"""What a GPU has compiled when admission ends is all that it ever runs: no step of an engine waits for a compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.models import TENSOR_CORE_SIZES, write_config
from tests.tiny import make_tiny

pytest.importorskip("triton", reason="Triton is not installed: pip install -e '.[dev]'")


def compiled(folder: Path, left_out: str, *more: str) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.compiled_keys", str(folder), left_out, *more]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("heads", [(32, 8), (8, 8), (28, 4)], ids=str)
def test_no_step_compiles_anything(tmp_path: Path, heads: tuple[int, int]) -> None:
    folder = write_config(
        tmp_path, vocab_size=4096, hidden_size=2048, intermediate_size=6144, num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
    )  # fmt: skip
    found = compiled(folder, "nothing")
    assert found["added"] == []
    assert 30 <= found["warmed"] <= 70, "the time of a cold start is the compiler's"


@pytest.mark.parametrize("kind", ["qwen2", "mistral"])
def test_checks_of_an_odd_model_run_to_the_end_and_compile_little(tmp_path: Path, kind: str) -> None:
    """A vocabulary of 503 puts rows of logits on any boundary; what the checks run was warmed, all but a sort."""
    found = compiled(make_tiny(kind, tmp_path, **TENSOR_CORE_SIZES.get(kind, {})), "nothing", "checks")
    assert found["checks"] > 1000 and set(found["added"]) <= {"_keys_kernel"}


def test_control_what_was_not_warmed_shows(tmp_path: Path) -> None:
    found = compiled(write_config(tmp_path, vocab_size=4096, hidden_size=1024, intermediate_size=2048), "attention")
    assert {"wgmma_kernel", "decode_kernel", "combine_kernel"} <= set(found["added"])
