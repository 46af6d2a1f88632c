"""Speed of linears: the best schedule of ours per shape and row count, cuBLAS as torch calls it, one fixed tile, floor.

    python -m benchmarks.gpu.gemm [quick]      # on an NVIDIA GPU

`run()` gives one row a (shape, row count). Ours is chosen as the engine chooses: the fastest among schedules whose
bytes were the reference's. It is then timed again, alternating with the others, replayed from CUDA graphs, weights
rotated past the L2 cache. `peer` is 128x128x64 for every row count, as batch-invariant modes of other engines have it.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.timing import alternating
from isobit.kernels.gpu.checks import device_floats, difference
from isobit.kernels.triton.linear import linear, reference_linear
from isobit.kernels.triton.linear_call import LinearWorkspace
from isobit.kernels.triton.linear_schedules import ANY_ROWS, LinearSchedule, linear_schedules
from isobit.kernels.vendor.cublaslt import CublasLt
from isobit.order import MmaLinearOrder, mma_linear_order

__all__ = ["ROW_COUNTS", "SHAPES", "run"]

SHAPES = (  # K x N
    (2048, 768), (2048, 576), (768, 5120), (5120, 2048), (2048, 20480), (10240, 2048), (4096, 6144), (4096, 24576),
    (12288, 4096), (4096, 151936),
)  # fmt: skip
ROW_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
PEER = LinearSchedule("one tile", 1, ANY_ROWS, "pointer", 128, 128, 64, warps=8, stages=3)

Op = Callable[[torch.Tensor], Any]  # of a weight


def _times(ops: Sequence[Op], weights: Sequence[torch.Tensor], microseconds: float, replays: int) -> list[float]:
    """Medians in microseconds a call; the ops take turns, each over all weights."""
    return alternating([[partial(op, weight) for weight in weights] for op in ops], microseconds, replays)


class _Shape:
    """Weights, inputs, reference outputs and admitted schedules of one (K, N)."""

    def __init__(self, k: int, n: int, vendor: CublasLt | None, workspace: LinearWorkspace) -> None:
        self.order = mma_linear_order(n, k, "bfloat16", "bfloat16", "sm90")
        self._vendor, self._workspace = vendor, workspace
        device, copies = workspace.device, max(1, min(48, math.ceil(130e6 / (2 * n * k))))
        self.weights = [device_floats(seed, (n, k), torch.bfloat16, device, -6, -1) for seed in range(copies)]
        self._x = device_floats(99, (max(ROW_COUNTS), k), torch.bfloat16, device, -6, 1)
        self._expected = reference_linear(self._x, self.weights[0], self.order)

    def candidates(self, rows: int) -> Iterator[tuple[str, Op, bool]]:
        """(name, op, are its bytes the reference's) of every schedule offered for so many rows."""
        for schedule in linear_schedules(self.order):
            if schedule.min_rows <= rows <= schedule.max_rows:
                yield self._checked(schedule, rows, linear)
        for chosen in self._vendor.schedules(self.order) if self._vendor else ():
            if chosen.min_rows <= rows <= chosen.max_rows:
                yield self._checked(chosen, rows, self._vendor.linear)  # type: ignore[union-attr]

    def _checked(self, schedule: Any, rows: int, run: Callable[..., torch.Tensor]) -> tuple[str, Op, bool]:
        x, order, workspace = self._x[:rows], self.order, self._workspace
        same = difference(self._expected[:rows], run(x, self.weights[0], order, schedule, workspace)) is None
        return schedule.name, lambda weight: run(x, weight, order, schedule, workspace), same

    def peer(self, rows: int) -> Op:
        x, workspace = self._x[:rows], self._workspace
        order = MmaLinearOrder(self.order.n, self.order.k, "bfloat16", "bfloat16")
        return lambda weight: linear(x, weight, order, PEER, workspace)

    def unconstrained(self, rows: int) -> Op:
        x = self._x[:rows]
        return lambda weight: torch.nn.functional.linear(x, weight)


def _measure(shape: _Shape, rows: int, floor: float) -> dict[str, Any]:
    candidates = list(shape.candidates(rows))
    admitted = [(name, op) for name, op, same in candidates if same]
    estimate = max(4.0, 1.2 * floor)
    first = _times([op for _, op in admitted], shape.weights, estimate, 3)
    name, best = min(zip(first, admitted, strict=True), key=lambda pair: pair[0])[1]
    ours, unconstrained = _times([best, shape.unconstrained(rows)], shape.weights, estimate, 7)
    peer = _times([shape.peer(rows)], shape.weights, 4 * estimate, 3)[0]
    return {
        "op": "gemm", "shape": f"{shape.order.k}x{shape.order.n}", "m": rows, "ours_us": ours, "schedule": name,
        "unconstrained_us": unconstrained, "peer_us": peer, "floor_us": floor, "k_slices": shape.order.k_slices,
        "bits_equal": len(admitted) == len(candidates), "refused": [n for n, _, same in candidates if not same],
        "candidates": {n: round(t, 2) for t, (n, _) in sorted(zip(first, admitted, strict=True), key=lambda p: p[0])},
    }  # fmt: skip


def _compile_ahead(workspace: LinearWorkspace) -> None:
    """Every schedule once, on several threads."""
    device = workspace.device
    x = torch.zeros(64, 1024, dtype=torch.bfloat16, device=device)
    weight = torch.zeros(256, 1024, dtype=torch.bfloat16, device=device)
    orders = [MmaLinearOrder(256, 1024, "bfloat16", "bfloat16", slices) for slices in (1, 2)]
    jobs = [(order, schedule) for order in orders for schedule in linear_schedules(order)] + [(orders[0], PEER)]

    def compile_one(job: tuple[MmaLinearOrder, LinearSchedule]) -> None:
        linear(x, weight, *job, LinearWorkspace(device))

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(compile_one, jobs))


def run(scale: str = "full", copy_bytes_per_s: float = 4.3e12, flops: float = 790e12) -> list[dict[str, Any]]:
    """Rows for every shape and row count; "quick" takes three of each. A refused schedule is named, not timed."""
    device = torch.device("cuda", torch.cuda.current_device())
    workspace = LinearWorkspace(device)
    workspace.reserve(32 << 20, 1 << 16)
    _compile_ahead(workspace)
    try:
        vendor: CublasLt | None = CublasLt(device)
    except ValueError:
        vendor = None
    results = []
    for k, n in SHAPES if scale == "full" else SHAPES[3:6]:
        shape = _Shape(k, n, vendor, workspace)
        for rows in ROW_COUNTS if scale == "full" else (1, 32, 512):
            bytes_moved = 2 * (n * k + rows * (n + k))
            floor = max(bytes_moved / copy_bytes_per_s, 2 * rows * n * k / flops) * 1e6
            results.append(_measure(shape, rows, floor))
        del shape
    return results


def table(rows: Sequence[dict[str, Any]]) -> str:
    """One line a cell, ratios to the unconstrained; then the geometric mean and the worst."""
    lines = []
    ratios = [row["ours_us"] / row["unconstrained_us"] for row in rows]
    for row, ratio in zip(rows, ratios, strict=True):
        peer = row["peer_us"] / row["unconstrained_us"]
        lines.append(
            f"{row['shape']:>12} M={row['m']:<5} ours {row['ours_us']:8.1f} us {ratio:5.2f}  one tile {peer:5.2f}  "
            f"floor {row['floor_us']:7.1f}  {row['schedule']}"
            + (f"  REFUSED {row['refused']}" if row["refused"] else "")
        )
    mean = math.exp(statistics.fmean(math.log(ratio) for ratio in ratios))
    lines.append(f"geometric mean {mean:.3f}, worst {max(ratios):.3f}, cells {len(rows)}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(run("quick" if sys.argv[1:] == ["quick"] else "full")))
