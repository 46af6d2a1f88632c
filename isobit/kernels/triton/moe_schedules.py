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
    """A kernel with tiles of `rows` pairs x `columns` outputs, `depth` products at a time; see moe_kernels.py.

    `align` must cut the pairs by `block` and `more`: a block is `rows`, or 1 where every pair is its own tile. Offered
    for `min_pairs` to `max_pairs` pairs.
    """

    name: str
    kernel: str  # "stream" or "experts"
    block: int
    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    min_pairs: int = 1
    max_pairs: int = _ANY
    once: bool = False
    short: int = 0
    more: int = 0
    swap: bool = False
    parts: int = 1
    per_multiprocessor: int = 1


# Few pairs: experts seldom meet twice, and sorting costs more than it saves.
_PAIRS = (
    MoeSchedule("pair", "stream", 1, 8, 32, 128, 2, 5, max_pairs=16),
    MoeSchedule("pair-once", "stream", 1, 8, 32, 128, 2, 5, max_pairs=16, once=True),
)
_STREAM = (
    MoeSchedule("stream-8", "stream", 8, 8, 32, 256, 2, 4),
    MoeSchedule("stream-16", "stream", 16, 16, 64, 128, 4, 4),
)
_EXPERTS = (
    MoeSchedule("experts-32", "experts", 32, 32, 128, 64, 4, 5, min_pairs=64, swap=True, per_multiprocessor=2),
    MoeSchedule("experts-64", "experts", 64, 64, 128, 64, 4, 4, min_pairs=64, short=32, swap=True,
                per_multiprocessor=2),
)  # fmt: skip
# One slice of K: nothing but the present accumulator is kept, and the tile can be large.
_LARGE = (
    MoeSchedule("experts-128", "experts", 128, 128, 256, 64, 8, 4, min_pairs=256, short=64, more=32, parts=4),
    MoeSchedule("experts-256", "experts", 256, 256, 128, 64, 8, 4, min_pairs=256, short=128, more=32, swap=True,
                parts=2),
)  # fmt: skip
_LARGE_SLICED = (
    MoeSchedule("experts-128-sliced", "experts", 128, 128, 128, 64, 8, 4, min_pairs=256, short=64, parts=2),
)


def moe_schedules(order: MmaLinearOrder) -> tuple[MoeSchedule, ...]:
    """The schedules offered for an Order: those that read through a tensor descriptor need rows of 16-byte multiples,
    and slices of whole steps, for a step past a slice would read the next one."""
    slice_k = order.k // order.k_slices
    experts: tuple[MoeSchedule, ...] = ()
    if order.k % 8 == 0:
        experts = _EXPERTS + (_LARGE if order.k_slices == 1 else _LARGE_SLICED)
    if order.k_slices > 1:
        experts = tuple(schedule for schedule in experts if slice_k % schedule.depth == 0)
    return _PAIRS + _STREAM + experts


def default_schedule(order: MmaLinearOrder, num_pairs: int, num_experts: int) -> MoeSchedule:
    """A good one where nothing was measured: the lowest tile that holds an expert's share of the pairs."""
    offered = {schedule.name: schedule for schedule in moe_schedules(order)}
    if num_pairs <= 16:
        return offered["pair"]
    share = num_pairs / min(num_pairs, num_experts)
    ladder = ((4, "stream-8"), (10, "stream-16"), (20, "experts-32"), (48, "experts-64"), (_ANY, "experts-128"),
              (_ANY, "experts-128-sliced"), (_ANY, "experts-64"), (_ANY, "stream-16"))  # fmt: skip
    for most, name in ladder:
        if share <= most and name in offered and offered[name].min_pairs <= num_pairs:
            return offered[name]
    raise AssertionError(f"no schedule for {num_pairs} pairs of {num_experts} experts under {order}")
