"""Which tiles the Triton linears of device class "sm90" offer for how many rows.

A schedule is a matter of speed: admission proves that none moves a bit of MmaLinearOrder. What can run depends on the
Order's (n, k) only. Each one costs compilation at a cold start, so each earned its place: dev/LOG.md has the sweep.
Knows no kernels. Invariant: for every Order, the schedules together take any number of rows.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from isobit.order import MmaLinearOrder

__all__ = ["ANY_ROWS", "LinearSchedule", "linear_schedules"]

ANY_ROWS = sys.maxsize


@dataclass(frozen=True)
class LinearSchedule:
    """A kernel with a tile of `rows` x `columns`, `depth` products at a time, offered for min_rows..max_rows rows."""

    name: str
    min_rows: int
    max_rows: int
    kernel: str  # "pointer", "slice" or "persistent": see linear_kernels.py
    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    swap: bool = False  # weights as the left operand
    parts: int = 1  # column parts in which a persistent program writes its tile
    group: int = 8  # row tiles that share a walk over the columns


def _schedule(
    kernel: str,
    rows: tuple[int, int],
    tile: tuple[int, int, int],
    warps: int,
    stages: int,
    swap: bool = False,
    parts: int = 1,
) -> LinearSchedule:
    name = f"{kernel} {tile[0]}x{tile[1]}x{tile[2]}"
    return LinearSchedule(name, *rows, kernel, *tile, warps, stages, swap, parts)


# Few rows are the latency of one pass over the weights: small tiles for many programs, deep pipelines.
_FINE = _schedule("pointer", (1, 8), (8, 16, 128), warps=1, stages=8)
_WIDE = _schedule("pointer", (1, 8), (8, 32, 256), warps=2, stages=5)
_EIGHT = _schedule("slice", (1, 8), (8, 64, 256), warps=4, stages=5, swap=True)
_TILES = (
    _schedule("slice", (1, 16), (16, 64, 256), warps=4, stages=4, swap=True),
    _schedule("slice", (9, 32), (32, 64, 256), warps=4, stages=4, swap=True),
    _schedule("slice", (9, 128), (64, 64, 128), warps=4, stages=6),
    _schedule("slice", (65, 512), (64, 128, 128), warps=4, stages=4),
)
_LARGE = _schedule("persistent", (257, ANY_ROWS), (128, 256, 64), warps=8, stages=3, parts=4)
# With slices a program holds two accumulators, or partial sums go through memory: smaller tiles.
_SLICED = _schedule("slice", (129, 2048), (128, 128, 64), warps=8, stages=6)
_LARGE_SLICED = _schedule("persistent", (513, ANY_ROWS), (128, 128, 64), warps=8, stages=5, parts=4)
_UNPERSISTENT = _schedule("slice", (129, ANY_ROWS), (128, 128, 64), warps=8, stages=6)
_GENERIC = _schedule("pointer", (1, ANY_ROWS), (64, 64, 32), warps=4, stages=3)


def linear_schedules(order: MmaLinearOrder) -> tuple[LinearSchedule, ...]:
    """The schedules that can run for the Order's (n, k).

    Tensor descriptors need rows of whole 16 bytes. They fill what lies behind K with zeros, but not what lies behind a
    slice: there the depth must divide the slice. `pointer` takes anything.
    """
    slice_k = order.k // order.k_slices
    if order.k % 8 or (order.k_slices > 1 and slice_k % 128):
        return (_FINE, _GENERIC)
    few = (_FINE, _EIGHT) if order.k_slices > 1 else (_FINE, _WIDE)
    if order.n % 8:
        many: tuple[LinearSchedule, ...] = (_UNPERSISTENT,)
    else:
        many = (_SLICED, _LARGE_SLICED) if order.k_slices > 1 else (_LARGE,)
    fitting = [s for s in (*few, *_TILES, *many) if order.k_slices == 1 or slice_k % s.depth == 0 or s == _FINE]
    return tuple(fitting)
