"""Which tiles the Triton mixture linears of device class "sm90" offer, and which to take where nothing was measured.

A schedule is a matter of speed: admission proves that none moves a bit of MmaLinearOrder. What can run depends on the
Order's (n, k) alone; what is fast depends on how many pairs there are and how they spread over experts. Knows no
kernels. Invariant: for every Order, the schedules together take any number of pairs.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from isobit.order import MmaLinearOrder

__all__ = ["MoeSchedule", "default_schedule", "moe_schedules"]

_ANY = sys.maxsize


@dataclass(frozen=True, slots=True)
class MoeSchedule:
    """A kernel with tiles of `rows` pairs x `columns` outputs, `depth` products at a time.

    `block` is what `align` must cut the pairs by: `rows`, or 1 where every pair is its own tile. Offered for
    `min_pairs` to `max_pairs` pairs.
    """

    name: str
    kernel: str  # "stream" or "experts": see moe_kernels.py
    block: int
    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    min_pairs: int = 1
    max_pairs: int = _ANY
    swap: bool = False
    parts: int = 1
    tail: int = 0
    copied: bool = False
    per_multiprocessor: int = 1


_STREAM = (
    MoeSchedule("pair", "stream", 1, 8, 16, 256, 1, 6, max_pairs=64),
    MoeSchedule("stream-8", "stream", 8, 8, 32, 128, 2, 5),
)
_EXPERTS: tuple[MoeSchedule, ...] = ()


def moe_schedules(order: MmaLinearOrder) -> tuple[MoeSchedule, ...]:
    """The schedules offered for an Order."""
    return _STREAM


def default_schedule(order: MmaLinearOrder, num_pairs: int, num_experts: int) -> MoeSchedule:
    """A good one where nothing was measured."""
    return _STREAM[0]
