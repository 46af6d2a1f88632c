"""Absorbed MLA: prefill rate, chunked prefill, decode at several batch sizes and lengths, and bytes on the way.

`unconstrained_us` is the same kernel with the split size that is fastest for the batch at hand, which is what engines
choose when bits may change; `peer_us` is one split for all (num_splits=1), the usual batch-invariant setting. The floor
of a row is the larger of its bytes (latents once, q and output) over the copy bandwidth and its operations over the
bf16 rate, counted on real rows and keys.

    python -m benchmarks.gpu.mla
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from isobit.kernels.triton.mla import (
    MlaSchedule,
    MlaWorkspace,
    mla_attention,
    mla_plan,
    mla_schedules,
    reference_mla,
    upload_plan,
)
from isobit.order import MmaAttentionOrder, mma_attention_order

__all__ = ["run"]

_L2_BYTES = 60 << 20
_SCALE = 256**-0.5
_PROGRAMS = 132
_HEADS = 20
_ONE_SPLIT = 1 << 20
_SPLIT_SIZES = (256, 512, 1024, 2048, 4096)


@dataclass(frozen=True)
class _Case:
    op: str
    counts: tuple[int, ...]
    starts: tuple[int, ...]
    heads: int = _HEADS
    headline: bool = False

    @property
    def name(self) -> str:
        context = self.starts[0] + self.counts[0]
        return f"{len(self.counts)} x {self.counts[0]} tokens, context {context}, {self.heads} heads"


def _cases(scale: str) -> list[_Case]:
    prefill = [_Case("mla_prefill", (4096,), (0,), headline=True)]
    decode = [_Case("mla_decode", (1,) * 32, (8191,) * 32, headline=True), _Case("mla_decode", (1,), (8191,))]
    if scale != "full":
        return prefill + decode
    prefill += [_Case("mla_prefill", (1024,), (0,)), _Case("mla_prefill", (16384,), (0,))]
    prefill += [_Case("mla_chunk", (512,), (7680,)), _Case("mla_prefill", (4096,), (0,), 128)]
    decode += [_Case("mla_decode", (1,) * batch, (length - 1,) * batch) for batch, length in
               ((1, 1024), (1, 32768), (8, 8192), (64, 4096), (128, 8192))]  # fmt: skip
    decode += [_Case("mla_decode", (1,) * 32, (8191,) * 32, 128)]
    return prefill + decode


class _Inputs:
    """Random q and latents in scattered pages; copies of the cache so that each call finds none of it in L2."""

    def __init__(self, case: _Case, order: MmaAttentionOrder) -> None:
        lengths = [count + start for count, start in zip(case.counts, case.starts, strict=True)]
        pages = [-(-length // order.kv_block) for length in lengths]
        total = int(np.add.reduce(pages))
        size = total * order.kv_block * order.head_dim * 2
        copies = 1 if case.op != "mla_decode" or size > 4 * _L2_BYTES else -(-2 * _L2_BYTES // size)
        shape = (total, order.kv_block, order.head_dim)
        self.layers = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
        numbers = np.random.default_rng(0).permutation(total).astype(np.int32)
        self.tables = np.zeros((len(lengths), max(pages)), np.int32)
        for request, (end, count) in enumerate(zip(np.cumsum(pages), pages, strict=True)):
            self.tables[request, :count] = numbers[end - count : end]
        rows = int(np.add.reduce(case.counts))
        self.q = (torch.randn((rows, case.heads, order.head_dim), device="cuda") * 0.5).bfloat16()
        self.query_starts = np.concatenate([[0], np.cumsum(case.counts)]).astype(np.int32)
        self.start_positions = np.array(case.starts, np.int32)

    def call(self, order: MmaAttentionOrder, schedule: MlaSchedule) -> Callable[[], torch.Tensor]:
        """A function that attends once for each copy of the cache."""
        starts = self.query_starts, self.start_positions
        plan = mla_plan(*starts, self.q.shape[1], order, schedule.rows, _PROGRAMS)
        workspace = MlaWorkspace(self.q.device, order.value_dim)
        workspace.reserve(plan.partial_rows, _PROGRAMS)
        tables = upload_plan(plan, *starts, self.tables, self.q.device)

        def attend() -> torch.Tensor:
            for layer in self.layers:
                out = mla_attention(self.q, layer, tables, order, _SCALE, schedule, workspace)
            return out

        return attend


def _microseconds(calls: Sequence[Callable[[], Any]]) -> list[float]:
    """Medians of replayed graphs, the candidates in turn, twice; the lower of two."""
    from triton.testing import do_bench_cudagraph

    times = [[float("inf")] for _ in calls]
    for _ in range(2):
        for call, seen in zip(calls, times, strict=True):
            seen.append(1e3 * do_bench_cudagraph(call, rep=10, return_mode="median"))
    return [min(seen) for seen in times]


def _floor(case: _Case, order: MmaAttentionOrder, copy_bytes_per_s: float, flops: float) -> tuple[float, float]:
    """(floor in microseconds, operations counted as the causal triangle)."""
    counts, starts = (np.array(x, np.float64) for x in (case.counts, case.starts))
    widths = order.head_dim + order.value_dim
    pairs = float(np.add.reduce(counts * starts + counts * counts / 2 + counts / 2))
    rows = float(np.add.reduce(counts)) * case.heads
    size = 2 * (float(np.add.reduce(counts + starts)) * order.head_dim + rows * widths)
    work = 2 * pairs * case.heads * widths
    return 1e6 * max(size / copy_bytes_per_s, work / flops), work


def _row(case: _Case, copy_bytes_per_s: float, flops: float) -> dict[str, Any]:
    order = mma_attention_order(576, 512, "bfloat16", "sm90")
    inputs = _Inputs(case, order)
    schedules = mla_schedules(order)
    schedule = schedules[-1]
    sizes = [size for size in _SPLIT_SIZES if size != order.kv_split_size]
    others = [replace(order, kv_split_size=size) for size in [_ONE_SPLIT, *sizes]]
    calls = [inputs.call(order, schedule), *(inputs.call(other, schedule) for other in others)]
    times = [time / len(inputs.layers) for time in _microseconds(calls)]
    arrays = inputs.query_starts, inputs.start_positions, inputs.tables
    truth = reference_mla(inputs.q, inputs.layers[-1], *arrays, order, _SCALE)
    floor, work = _floor(case, order, copy_bytes_per_s, flops)
    return {
        "op": case.op, "shape": case.name, "m": len(inputs.q), "ours_us": times[0], "unconstrained_us": min(times),
        "peer_us": times[1], "floor_us": floor, "floor_share": floor / times[0], "tflops": work / times[0] / 1e6,
        "bits_equal": torch.equal(calls[0]().view(torch.int16), truth.view(torch.int16)),
        "schedule": schedule.name, "headline": case.headline,
    }  # fmt: skip


def run(scale: str = "full", copy_bytes_per_s: float = 4.3e12, flops: float = 790e12) -> list[dict[str, Any]]:
    """Rows for the table of `benchmarks/gpu_kernels.py`."""
    rows = []
    for case in _cases(scale):
        rows.append(_row(case, copy_bytes_per_s, flops))
        torch.cuda.empty_cache()
    return rows


def main() -> None:
    titles = f"{'ours us':>9} {'free us':>9} {'1 split':>9} {'floor':>8} {'share':>6} {'TF/s':>5} bits"
    print(f"{'op':12} {'shape':52} {titles}")
    for row in run():
        print(
            f"{row['op']:12} {row['shape']:52} {row['ours_us']:9.1f} {row['unconstrained_us']:9.1f} "
            f"{row['peer_us']:9.1f} {row['floor_us']:8.1f} {row['floor_share']:6.2f} {row['tflops']:5.0f} "
            f"{'equal' if row['bits_equal'] else 'DIFFER'}",
            flush=True,
        )


if __name__ == "__main__":
    main()
