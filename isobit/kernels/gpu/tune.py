"""Which admitted schedule of a GPU linear runs for how many rows: timed on this card, kept on disk.

Knows nothing of Orders' arithmetic: whatever is chosen among admitted schedules gives the same bits (a test makes the
choice at random). Timings are kept under everything they depended on; a file that cannot be used costs a few seconds.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from isobit.kernels.interface import Ladder
from isobit.kernels.verdict_cache import default_cache_path, digest, read_entries, replace_file

__all__ = ["MOST_ROWS", "ROW_BUCKETS", "RUNS_PER_GRAPH", "Candidate", "TuningCache", "choose_schedules"]

ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
MOST_ROWS = 2 * ROW_BUCKETS[-1]  # timed for the last step of a ladder
FORMAT = 1
RUNS_PER_GRAPH = 8
_REPETITIONS = 5
_LONG = 400.0  # microseconds: a launch no longer matters


@dataclass(frozen=True)
class Candidate:
    """An admitted schedule, the row counts it is offered for, and what runs it on `rows` rows `times` times over."""

    name: str
    min_rows: int
    max_rows: int
    run: Callable[[int, int], None]


class TuningCache:
    """Ladders of earlier starts, by key, in `tuning.json` beside the verdicts of admission."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or default_cache_path().with_name("tuning.json")
        self._entries = read_entries(self.path, "ladders", FORMAT)

    def get(self, key: Mapping[str, Any]) -> Ladder | None:
        """The ladder timed under exactly `key`, or None."""
        entry: Any = self._entries.get(digest(key))
        try:
            return tuple((int(most), str(name)) for most, name in entry["ladder"])
        except (TypeError, KeyError, ValueError):
            return None

    def put(self, key: Mapping[str, Any], ladder: Ladder) -> None:
        """Remember a ladder, at once; a folder that cannot be written to costs time at the next start only."""
        entry = {"key": dict(key), "ladder": ladder}
        self._entries = {**read_entries(self.path, "ladders", FORMAT), digest(key): entry}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self.path, json.dumps({"format": FORMAT, "ladders": self._entries}, indent=0))
        except OSError:
            return


def choose_schedules(candidates: Sequence[Candidate]) -> Ladder:
    """(most rows, schedule) steps: for each bucket the fastest candidate that is offered for all of it.

    Raises ValueError naming the first number of rows that no candidate takes.
    """
    steps: list[tuple[int, str]] = []
    least = 1
    for most in (*ROW_BUCKETS, sys.maxsize):
        fitting = [c for c in candidates if c.min_rows <= least and most <= c.max_rows]
        if not fitting:
            raise ValueError(
                f"no admitted schedule takes {least} to {most} rows; there are: {[c.name for c in candidates]}"
            )
        rows = min(most, MOST_ROWS)
        best = min(fitting, key=lambda c: _microseconds(c, rows)) if len(fitting) > 1 else fitting[0]
        if steps and steps[-1][1] == best.name:
            steps.pop()
        steps.append((most, best.name))
        least = most + 1
    return tuple(steps)


def _microseconds(candidate: Candidate, rows: int) -> float:
    """Median device time of one run. Short ones are replayed from a graph, or they would time their own launch."""
    candidate.run(rows, 1)
    once = _elapsed(lambda: candidate.run(rows, 1))
    if once > _LONG:
        return statistics.median([once, *(_elapsed(lambda: candidate.run(rows, 1)) for _ in range(2))])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        candidate.run(rows, RUNS_PER_GRAPH)
    graph.replay()
    return statistics.median(_elapsed(graph.replay) for _ in range(_REPETITIONS)) / RUNS_PER_GRAPH


def _elapsed(run: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3
