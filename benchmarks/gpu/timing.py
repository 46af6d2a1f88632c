"""Device time of calls that take turns: replayed from CUDA graphs, so that no launch is timed, medians of several.

What is rotated past the L2 cache is the caller's business: a candidate is a list of calls over different data.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["Call", "alternating"]

Call = Callable[[], Any]
_GRAPH_MICROSECONDS = 800.0  # of work in one graph, about


def alternating(candidates: Sequence[Sequence[Call]], microseconds: float, replays: int) -> list[float]:
    """Median microseconds a call of each candidate; `microseconds` is a guess at one call, for the size of a graph."""
    graphs = [_graph(calls, microseconds) for calls in candidates]
    taken: list[list[float]] = [[] for _ in candidates]
    for _ in range(replays):
        for (graph, calls), times in zip(graphs, taken, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / calls)
    return [statistics.median(times) for times in taken]


def _graph(calls: Sequence[Call], microseconds: float) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph of the calls, some times over, and how many calls that is."""
    turns = max(1, round(_GRAPH_MICROSECONDS / (microseconds * len(calls))))
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(turns):
            for call in calls:
                call()
    graph.replay()
    return graph, turns * len(calls)
