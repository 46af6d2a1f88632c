"""What probes are made of: numbers from integers, named inputs, and the row selections under which they are run.

Inputs come from integers (splitmix64), so they are the same on every machine. A probe's truth is computed once for all
its rows; each run hands the kernel some of the rows, some threads, aligned or not, and must give those rows of the
truth. Knows no op and no Order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from isobit.kernels.reference.math import GOLDEN, Float32, UInt64, mix64

__all__ = ["ROW_COUNTS", "THREADS", "Probe", "Run", "bits", "floats", "row_runs", "with_specials"]

ROW_COUNTS = (1, 2, 3, 5, 6, 7, 8, 9, 13, 16, 17, 31, 33, 64, 65, 97)  # both sides of every tile height in use
THREADS = (1, 2, 3)
_SPECIALS = np.array(
    [0x00000000, 0x80000000, 0x00000001, 0x807FFFFF, 0x007FFFFF, 0x00800000, 0x80800000, 0x007F8000, 0x3F7FFFFF],
    np.uint32,
).view(np.float32)  # zeros, subnormals (one that would round to a normal bfloat16), smallest normals, below one


@dataclass(frozen=True)
class Run:
    """Rows to hand over, in this order; threads to use; whether float buffers start off an allocation."""

    rows: tuple[int, ...]
    num_threads: int
    misaligned: bool


@dataclass(frozen=True)
class Probe:
    """`inputs` as in `calls.py` for all rows; those named in `row_inputs` have one leading entry per row."""

    op: str
    label: str
    inputs: Mapping[str, Any]
    row_inputs: tuple[str, ...]
    runs: tuple[Run, ...]

    def select(self, rows: Sequence[int]) -> dict[str, Any]:
        """The inputs of some rows."""
        index = list(rows)
        return {
            name: value[index] if name in self.row_inputs and value is not None else value
            for name, value in self.inputs.items()
        }


def bits(seed: int, *shape: int) -> UInt64:
    """Pseudo-random 64-bit integers, the same on every machine."""
    count = int(np.multiply.reduce(shape))
    with np.errstate(over="ignore"):
        state = (np.arange(count, dtype=np.uint64) + np.uint64(seed << 32 | 1)) * np.uint64(GOLDEN)
    return mix64(state).reshape(shape)


def floats(seed: int, *shape: int, low: int = -8, high: int = 4) -> Float32:
    """float32 of either sign, exponent uniform in [low, high], mantissa uniform: made of integers alone."""
    b = bits(seed, *shape)
    exponent = np.uint64(127 + low) + (b >> np.uint64(32)) % np.uint64(high - low + 1)
    sign = b >> np.uint64(63) << np.uint64(31)
    word = (sign | exponent << np.uint64(23) | b & np.uint64(0x7FFFFF)).astype(np.uint32)
    values: Float32 = word.view(np.float32)
    return values


def with_specials(seed: int, x: Float32, one_in: int = 23) -> Float32:
    """`x` with one value in `one_in` replaced by a zero, a subnormal or an edge value."""
    b = bits(seed, *x.shape)
    choice = ((b >> np.uint64(32)) % np.uint64(_SPECIALS.size)).astype(np.int64)
    chosen: Float32 = np.where(b % np.uint64(one_in) == 0, _SPECIALS[choice], x)
    return chosen


def row_runs(num_rows: int, counts: Sequence[int] = ROW_COUNTS) -> tuple[Run, ...]:
    """Every count up to `num_rows` under every number of threads, at the start, the end and the middle of the rows."""
    runs = []
    for i, count in enumerate(count for count in counts if count <= num_rows):
        for threads, start in zip(THREADS, (0, num_rows - count, (num_rows - count) // 2), strict=True):
            runs.append(Run(tuple(range(start, start + count)), threads, (i + threads) % 2 == 0))
    return tuple(runs)
