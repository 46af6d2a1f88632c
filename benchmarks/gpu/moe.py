"""Speed of mixture-of-experts linears: the best schedule of ours per token count, one fixed tile, the floor.

    python -m benchmarks.gpu.moe [quick]      # on an NVIDIA GPU

64 experts, 4 a token, chosen at random. A row times the grouped linear alone, its tiles prepared; alignment and combine
have rows of their own. Ours is the fastest among schedules whose bytes were the reference's, timed again, alternating
with the others, replayed from CUDA graphs; few tokens take other experts at every call, past the L2 cache. `peer` is
128x128x64 for every token count. `unconstrained` is torch's grouped matrix product on rows that were gathered before:
it neither gathers nor scatters. The floor is the larger of the used experts' weights over the copy bandwidth and
operations over the bf16 rate.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from benchmarks.gpu.timing import Call, alternating
from isobit.kernels.gpu.checks import device_floats, difference
from isobit.kernels.triton.moe import MoeSchedule, align, moe_linear, moe_schedules, reference_moe_linear
from isobit.kernels.triton.moe_combine import moe_combine
from isobit.order import MmaLinearOrder, MoeCombineOrder

__all__ = ["TOKENS", "run"]

EXPERTS, TOP_K = 64, 4
SHAPES = (("moe", 2048, 3072, "bfloat16"), ("moe_down", 1536, 2048, "float32"))  # op, K, N, output
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
PEER = MoeSchedule("one tile", "experts", 128, 128, 128, 64, 8, 3, parts=2)



class _Batch:
    """Routed tokens of one count: several choices of experts where one choice would stay in the L2 cache."""

    def __init__(self, order: MmaLinearOrder, weights: torch.Tensor, tokens: int, per_pair: bool) -> None:
        self.order, self.weights = order, weights
        device, top_k = weights.device, TOP_K
        choices = {1: 16, 2: 8, 4: 4, 8: 4}.get(tokens, 1)
        every = torch.stack([torch.randperm(EXPERTS, device=device) for _ in range(tokens * choices)]).int()
        if tokens == 1:  # each choice other experts: together all of them
            every = every[:1].view(choices, top_k)
        self.ids = [ids.contiguous() for ids in every[:, :top_k].view(choices, tokens, top_k)]
        rows = tokens * top_k if per_pair else tokens
        self.x = device_floats(99, (rows, order.k), torch.bfloat16, device, -6, 1)
        self.expected = [reference_moe_linear(self.x, weights, ids, order) for ids in self.ids]
        self.used = statistics.fmean(ids.unique().numel() for ids in self.ids)

    def calls(self, schedule: MoeSchedule) -> list[Call]:
        routings = [align(ids, EXPERTS, schedule.block, schedule.more) for ids in self.ids]
        outs = [torch.empty_like(expected) for expected in self.expected]

        def call_of(at: int) -> Call:
            return lambda: moe_linear(self.x, self.weights, routings[at], self.order, schedule, outs[at])

        return [call_of(at) for at in range(len(routings))]

    def same(self, schedule: MoeSchedule) -> bool:
        made = [call() for call in self.calls(schedule)]
        return all(difference(*pair) is None for pair in zip(self.expected, made, strict=True))

    def unconstrained(self) -> list[Call] | None:
        """torch's grouped product, where this torch has it and it takes these shapes."""
        if not hasattr(torch, "_grouped_mm") or self.order.output_dtype != "bfloat16":
            return None
        calls: list[Call] = []
        for ids in self.ids:
            flat = ids.flatten().long()
            rows = flat.sort(stable=True).indices // (flat.numel() // self.x.shape[0])
            ends = torch.bincount(flat, minlength=EXPERTS).cumsum(0).int()
            gathered, weights = self.x[rows], self.weights.transpose(1, 2)
            calls.append(lambda x=gathered, w=weights, at=ends: torch._grouped_mm(x, w, offs=at))  # type: ignore[misc]
        try:
            calls[0]()
        except RuntimeError:
            return None
        return calls


def _measure(op: str, batch: _Batch, tokens: int, floor: float) -> dict[str, Any]:
    order, pairs = batch.order, tokens * TOP_K
    offered = [s for s in moe_schedules(order) if s.min_pairs <= pairs <= s.max_pairs]
    admitted = [schedule for schedule in offered if batch.same(schedule)]
    estimate = max(10.0, 1.2 * floor)
    first = alternating([batch.calls(schedule) for schedule in admitted], estimate, 3)
    best = min(zip(first, range(len(first)), strict=True))[1]
    ops, theirs = [batch.calls(admitted[best]), batch.calls(PEER)], batch.unconstrained()
    ours, peer, *rest = alternating(ops + ([theirs] if theirs else []), estimate, 7)
    return {
        "op": op, "shape": f"{EXPERTS}x{order.k}x{order.n} top {TOP_K}", "m": tokens, "ours_us": ours,
        "schedule": admitted[best].name, "unconstrained_us": rest[0] if rest else None, "peer_us": peer,
        "floor_us": floor, "experts_used": batch.used, "bits_equal": len(admitted) == len(offered),
        "refused": [schedule.name for schedule in offered if schedule not in admitted],
        "candidates": dict(sorted(zip((s.name for s in admitted), (round(t, 1) for t in first), strict=True),
                                  key=lambda pair: pair[1])),
    }  # fmt: skip


def _around(tokens: int, device: torch.device, bytes_per_s: float) -> list[dict[str, Any]]:
    """Alignment and combine of so many tokens."""
    ids = torch.stack([torch.randperm(EXPERTS, device=device)[:TOP_K] for _ in range(tokens)]).int()
    width = SHAPES[-1][2]
    experts, residual = torch.randn(tokens, TOP_K, width, device=device), torch.randn(tokens, width, device=device)
    shares, order = torch.rand(tokens, TOP_K, device=device), MoeCombineOrder(TOP_K)
    aligned, combined = alternating(
        [[lambda: align(ids, EXPERTS, 64)], [lambda: moe_combine(experts, shares, residual, order)]], 10.0, 5
    )
    floor = 4 * (experts.numel() + 2 * residual.numel()) / bytes_per_s * 1e6
    return [
        {"op": "moe_align", "shape": f"{EXPERTS} top {TOP_K}", "m": tokens, "ours_us": aligned},
        {"op": "moe_combine", "shape": f"{width} top {TOP_K}", "m": tokens, "ours_us": combined, "floor_us": floor},
    ]


def _compile_ahead(device: torch.device) -> None:
    """Every schedule once, on several threads."""
    ids = torch.zeros((64, TOP_K), dtype=torch.int32, device=device)
    x, weights = (torch.zeros(*size, dtype=torch.bfloat16, device=device) for size in ((64, 1024), (1, 256, 1024)))
    orders = [MmaLinearOrder(256, 1024, "bfloat16", output) for output in ("bfloat16", "float32")]
    jobs = [(order, schedule) for order in orders for schedule in (*moe_schedules(order), PEER)]

    def compile_one(job: tuple[MmaLinearOrder, MoeSchedule]) -> None:
        moe_linear(x, weights, align(ids, 1, job[1].block, job[1].more), *job)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(compile_one, jobs))


def run(scale: str = "full", copy_bytes_per_s: float = 4.3e12, flops: float = 790e12) -> list[dict[str, Any]]:
    """Rows for every shape and token count; "quick" takes one shape, three counts. A refused schedule is named."""
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    _compile_ahead(device)
    results = []
    counts = TOKENS if scale == "full" else (1, 64, 4096)
    for op, k, n, output in SHAPES if scale == "full" else SHAPES[:1]:
        order = MmaLinearOrder(n, k, "bfloat16", output)
        weights = device_floats(7, (EXPERTS, n, k), torch.bfloat16, device, -6, -1)
        for tokens in counts:
            batch = _Batch(order, weights, tokens, per_pair=op == "moe_down")
            floor = max(batch.used * n * k * 2 / copy_bytes_per_s, 2 * tokens * TOP_K * n * k / flops) * 1e6
            results.append(_measure(op, batch, tokens, floor))
        del weights
    for tokens in counts:
        results += _around(tokens, device, copy_bytes_per_s)
    return results


def table(rows: Sequence[dict[str, Any]]) -> str:
    """One line a row: time, its ratio to the floor, the peers' tile, torch's product."""
    lines = []
    for row in rows:
        ratios = "".join(
            f"  /{name} {row['ours_us'] / row[key]:5.2f}"
            for name, key in (("floor", "floor_us"), ("one tile", "peer_us"), ("torch", "unconstrained_us"))
            if row.get(key)
        )
        refused = f"  REFUSED {row['refused']}" if row.get("refused") else ""
        lines.append(f"{row['op']:>12} T={row['m']:<5} {row['ours_us']:8.1f} us{ratios}  "
                     f"{row.get('candidates', '')}{refused}")  # fmt: skip
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(run("quick" if sys.argv[1:] == ["quick"] else "full")))
