"""Which schedule of a CPU linear runs for how many rows: a choice of speed, measured where it cannot be known.

Knows nothing of Orders: whatever is chosen among admitted schedules gives the same bits. Whether VDPBF16PS beats plain
FMA differs from CPU to CPU (dev/LOG.md), so the two are timed once, when a model is loaded; a few milliseconds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

import torch

from isobit.kernels.interface import TORCH_DTYPES, Ladder

__all__ = ["choose_ladder"]

FEW_ROWS = 16  # up to this many rows "stream" is faster than "tile" (dev/LOG.md)
# (most rows, rows timed, schedules in question, the expected winner first)
_STEPS = (
    (2, 1, ("stream-dp", "stream")),
    (FEW_ROWS, FEW_ROWS, ("stream-dp", "stream")),
    (sys.maxsize, 96, ("tile-dp", "tile")),
)
_N, _K, _REPETITIONS = 256, 1024, 5

TimedLinear = Callable[[torch.Tensor, str], object]  # (x [M, _K], schedule)


def choose_ladder(admitted: Sequence[str], make_linear: Callable[[torch.Tensor], TimedLinear], dtype: str) -> Ladder:
    """Steps of (most rows, schedule) over the `admitted` schedules, at least one.

    `make_linear` packs a weight [N, K] of `dtype` and returns what runs it; called only if something must be timed.
    """
    steps = []
    timed: TimedLinear | None = None
    for most, rows, wishes in _STEPS:
        candidates = [wish for wish in wishes if wish in admitted] or [admitted[0]]
        if len(candidates) > 1:
            timed = timed or make_linear(torch.ones((_N, _K), dtype=TORCH_DTYPES[dtype]))
            seconds = {schedule: _fastest(timed, rows, schedule) for schedule in candidates}
            candidates.sort(key=seconds.__getitem__)
        steps.append((most, candidates[0]))
    return tuple(steps)


def _fastest(run: TimedLinear, rows: int, schedule: str) -> float:
    """Best wall time of a few calls, in seconds."""
    x = torch.ones((rows, _K))
    best = float("inf")
    for _ in range(_REPETITIONS):
        start = time.perf_counter()
        run(x, schedule)
        best = min(best, time.perf_counter() - start)
    return best
