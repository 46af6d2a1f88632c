"""Speed of the sm90 kernels that are not matrix products, beside unfused torch and the floor in bytes moved.

`run()` gives one row an (op, shape): microseconds of ours and of torch, medians under CUDA graphs with inputs rotated
past the L2 cache, and the time the bytes need at copy bandwidth (inputs read once, outputs written once). `bits_equal`
says that the last row computed alone has the bytes it has in the batch. Knows no model.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import triton.testing

from isobit.kernels.interface import AttentionShape, Draws, HeadNorms, RopeTables
from isobit.kernels.triton.activation import silu_mul
from isobit.kernels.triton.norm import rms_norm
from isobit.kernels.triton.rope import rope_and_cache
from isobit.kernels.triton.sampling import plan_draws, sample_planned
from isobit.kernels.triton.top import top_logits
from isobit.kernels.triton.vocabulary import argmax, logprobs
from isobit.order import logprobs_order, norm_order, sampling_order

__all__ = ["run"]

Op = Callable[[torch.Tensor], Any]
_ROTATED_BYTES = 200e6
_VOCAB_SIZE = 151936


def _microseconds(op: Op, inputs: Sequence[torch.Tensor]) -> float:
    def all_inputs() -> None:
        for x in inputs:
            op(x)

    milliseconds = triton.testing.do_bench_cudagraph(all_inputs, rep=20, return_mode="median")
    return float(milliseconds) * 1e3 / len(inputs)


def _row(name: str, x: torch.Tensor, ours: Op, theirs: Op, moved: float, copy_bytes_per_s: float) -> dict[str, Any]:
    size = x.numel() * x.element_size()
    inputs = [x] + [x.clone() for _ in range(min(15, int(_ROTATED_BYTES / size)))]
    whole, alone = ours(x), ours(x[-1:])
    return {
        "op": name, "shape": tuple(x.shape), "m": x.shape[0], "ours_us": _microseconds(ours, inputs),
        "unconstrained_us": _microseconds(theirs, inputs), "peer_us": None,
        "floor_us": moved / copy_bytes_per_s * 1e6,
        "bits_equal": torch.equal(whole[-1:].view(torch.uint8), alone.view(torch.uint8)),
    }  # fmt: skip


def _norm_rows(m: int, width: int, bandwidth: float) -> dict[str, Any]:
    order, weight = norm_order(width, "sm90"), torch.randn(width, device="cuda")

    def unfused(x: torch.Tensor) -> torch.Tensor:
        return (x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-6) * weight).bfloat16()

    x = torch.randn(m, width, device="cuda")
    return _row(
        "rms_norm", x, lambda x: rms_norm(x, weight, 1e-6, order, torch.bfloat16), unfused, m * width * 6, bandwidth
    )


def _silu_rows(m: int, width: int, bandwidth: float) -> dict[str, Any]:
    x = torch.randn(m, 2 * width, device="cuda", dtype=torch.bfloat16) * 3

    def unfused(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(x[:, :width]) * x[:, width:]

    return _row("silu_mul", x, silu_mul, unfused, m * width * 6, bandwidth)


def _rope_rows(m: int, bandwidth: float) -> dict[str, Any]:
    h, kv, d, page = 32, 8, 128, 64
    shape, norm = AttentionShape(h, kv, d), norm_order(d, "sm90")
    weights = torch.randn(2, d, device="cuda")
    tables = RopeTables(*torch.randn(2, 8192, d // 2, device="cuda"))
    norms = HeadNorms(weights[0], weights[1], 1e-6)
    kv_layer = torch.zeros(2, m // page + 2, kv, page, d, device="cuda", dtype=torch.bfloat16)
    places = torch.arange(m, device="cuda", dtype=torch.int32)
    ints = places.long()

    def ours(x: torch.Tensor) -> torch.Tensor:
        # a row alone is the last one: it has the last row's place
        at = places[m - x.shape[0] :]
        return rope_and_cache(x, at, at, tables, norms, kv_layer, shape, norm)

    def unfused(x: torch.Tensor) -> torch.Tensor:
        q, k, v = x.view(-1, h + 2 * kv, d).split([h, kv, kv], dim=1)
        cos, sin = tables.cos[ints][:, None], tables.sin[ints][:, None]
        out = []
        for heads, weight in ((q, weights[0]), (k, weights[1])):
            y = heads.float()
            y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6) * weight
            y1, y2 = y.chunk(2, dim=-1)
            out.append(torch.cat([y1 * cos - y2 * sin, y2 * cos + y1 * sin], dim=-1).bfloat16())
        kv_layer[0, ints // page, :, ints % page] = out[1]
        kv_layer[1, ints // page, :, ints % page] = v
        return out[0]

    x = torch.randn(m, (h + 2 * kv) * d, device="cuda", dtype=torch.bfloat16)
    return _row("rope_and_cache", x, ours, unfused, m * (h + 2 * kv) * d * 4 + m * d * 4, bandwidth)


def _head_rows(m: int, bandwidth: float) -> list[dict[str, Any]]:
    x = torch.randn(m, _VOCAB_SIZE, device="cuda") * 3
    order, sampling = logprobs_order(_VOCAB_SIZE, "sm90"), sampling_order(_VOCAB_SIZE, "sm90")
    moved = x.numel() * 4.0
    rows = [
        _row("logprobs", x, lambda x: logprobs(x, order)[1], lambda x: torch.logsumexp(x, 1), moved, bandwidth),
        _row("argmax", x, lambda x: argmax(x)[0], lambda x: x.argmax(1), moved, bandwidth),
        _row("top_logits 20", x, lambda x: top_logits(x, 20), lambda x: x.topk(20, dim=1), moved, bandwidth),
    ]

    def exponential(x: torch.Tensor) -> torch.Tensor:
        return (x.softmax(1) / torch.empty_like(x).exponential_()).argmax(1)

    def sorted_top_p(x: torch.Tensor) -> torch.Tensor:
        values, ids = x.sort(dim=1, descending=True)
        odds = values.softmax(1)
        odds = odds.masked_fill(odds.cumsum(1) - odds >= 0.9, 0)
        return ids.gather(1, (odds / torch.empty_like(odds).exponential_()).argmax(1, keepdim=True))

    for name, top_k, top_p, theirs in (
        ("sample", 0, 1.0, exponential), ("sample top_k 20", 20, 0.9, sorted_top_p),
        ("sample top_p 0.9", 0, 0.9, sorted_top_p), ("sample top_k 500 top_p 0.9", 500, 0.9, sorted_top_p),
    ):  # fmt: skip
        plans = {}
        for count in {m, 1}:  # one row alone has the settings of the last one
            last = np.arange(m - count, m)
            draws = Draws(
                np.full(count, 0.8), np.full(count, top_k), np.full(count, top_p), np.zeros(count),
                last.astype(np.uint64), last,
            )  # fmt: skip
            plans[count] = plan_draws(draws, _VOCAB_SIZE, x.device)
        rows.append(
            _row(name, x, lambda x, p=plans: sample_planned(x, p[x.shape[0]], sampling), theirs, moved, bandwidth)  # type: ignore[misc]
        )
    return rows


def run(scale: str = "full", copy_bytes_per_s: float = 4.3e12, flops: float = 790e12) -> list[dict[str, Any]]:
    """Rows of results; "small" takes one shape an op. `flops` is not used: nothing here is bound by arithmetic."""
    counts = (1, 64, 4096) if scale == "full" else (64,)
    rows = [_norm_rows(m, width, copy_bytes_per_s) for width, m in itertools.product((2048, 4096), counts)]
    rows += [_silu_rows(m, 12288, copy_bytes_per_s) for m in counts]
    rows += [_rope_rows(m, copy_bytes_per_s) for m in counts]
    for m in (1, 64) if scale == "full" else (64,):
        rows += _head_rows(m, copy_bytes_per_s)
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as aligned text."""
    lines = [f"{'op':<28}{'shape':<18}{'ours':>9}{'torch':>9}{'floor':>9}{'/torch':>8}{'/floor':>8}  bits"]
    for row in rows:
        ours, theirs, floor = row["ours_us"], row["unconstrained_us"], row["floor_us"]
        lines.append(
            f"{row['op']:<28}{row['shape']!s:<18}{ours:9.2f}{theirs:9.2f}{floor:9.2f}{ours / theirs:8.2f}"
            f"{ours / floor:8.2f}  {'equal' if row['bits_equal'] else 'DIFFER'}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(run()))
