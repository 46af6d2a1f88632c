"""The bits of every op are those written in the repository: by the reference, and by every library that runs here."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from isobit.kernels.calls import call, prepare
from isobit.kernels.cpu.claims import library_kernels
from isobit.kernels.cpu.features import supported_libraries
from isobit.kernels.cpu.library import CpuLibrary
from isobit.kernels.golden import GoldenCase, digest, golden_cases
from isobit.kernels.reference.calls import expect
from isobit.kernels.registry import OPS
from isobit.order import NUMERICS_VERSION

GOLDEN = json.loads((Path(__file__).parent / "golden" / "cpu_ops.json").read_text(encoding="utf-8"))
CASES = {case.name: case for case in golden_cases()}
CHANGED = "{}: the bits moved. If that is meant: raise NUMERICS_VERSION, python -m isobit.kernels.golden --write"


def test_golden_file_covers_every_op_under_this_numerics_version() -> None:
    assert GOLDEN["numerics_version"] == NUMERICS_VERSION
    assert list(GOLDEN["digests"]) == list(CASES)
    assert {case.op for case in CASES.values()} == set(OPS)


@pytest.mark.parametrize("name", list(CASES))
def test_reference_gives_the_golden_bits(name: str) -> None:
    case = CASES[name]
    assert digest(expect(case.op, case.order, case.inputs)) == GOLDEN["digests"][name], CHANGED.format(case.op)


@pytest.mark.parametrize("library_name", supported_libraries())
@pytest.mark.parametrize("name", list(CASES))
def test_library_gives_the_golden_bits(name: str, library_name: str) -> None:
    case = CASES[name]
    for threads in (1, 2):
        library = CpuLibrary(library_name, threads)
        for schedule in schedules(library, case):
            kept = prepare(library, case.op, case.order, case.inputs)
            outputs = call(library, case.op, case.order, schedule, case.inputs, False, kept)
            message = f"{CHANGED.format(case.op)} ({library_name}, {schedule}, {threads} threads)"
            assert digest(outputs) == GOLDEN["digests"][name], message


def schedules(library: CpuLibrary, case: GoldenCase) -> list[str]:
    """Every schedule the library offers for the case; at least one."""
    kernels = [kernel for kernel in library_kernels(library) if kernel.op == case.op]
    found = [schedule for kernel in kernels if kernel.claims(case.order) is None for schedule in kernel.schedules]
    assert found, f"{library.name} offers nothing for {case.name}"
    return found


def test_one_flipped_bit_moves_a_digest() -> None:
    for case in CASES.values():
        outputs = expect(case.op, case.order, case.inputs)
        for name, array in outputs.items():
            flipped = np.array(array)
            flipped.reshape(-1).view(np.uint8)[-1] ^= 1
            assert digest({**outputs, name: flipped}) != GOLDEN["digests"][case.name], (case.name, name)


def test_another_order_moves_the_digest() -> None:
    case = CASES["linear float32 float32"]
    order = dataclasses.replace(case.order, k_block=128)  # type: ignore[type-var]
    assert digest(expect(case.op, order, case.inputs)) != GOLDEN["digests"][case.name]
