"""Attention on an H200: ours against the fastest unconstrained SDPA backend, the peers' way, and the floor.

Prefill is counted as 2*S*S*H*D (the causal half of two products). The peers' way of a batch-invariant decode is one
program that walks all keys of a (request, KV head): here the walking kernel under the same Order. Decode rotates over
enough caches to defeat the L2 cache. Every row also says whether ours gave the bytes of the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.testing import do_bench_cudagraph

from isobit.kernels.interface import AttentionShape
from isobit.kernels.triton import attention as kernels
from isobit.order import mma_attention_order

__all__ = ["run"]

Row = dict[str, Any]
_PREFILL = ((8192, 32, 8, 128), (2048, 32, 8, 128), (8192, 14, 2, 64), (4096, 8, 1, 256))
_DECODE = ((1, 8192), (1, 32768), (16, 8192), (64, 8192), (128, 8192))
_QUICK_PREFILL, _QUICK_DECODE = ((2048, 32, 8, 128),), ((1, 8192),)


def run(scale: str = "full", copy_bytes_per_s: float = 4.3e12, flops: float = 790e12) -> list[Row]:
    """Rows of all cases; "quick" takes one of each."""
    prefills, decodes = (_PREFILL, _DECODE) if scale == "full" else (_QUICK_PREFILL, _QUICK_DECODE)
    rows = [_prefill(*case, flops) for case in prefills]
    return rows + [_decode(*case, copy_bytes_per_s) for case in decodes]


def _time_us(call: Callable[[], Any], calls: int = 1) -> float:
    call()
    return float(do_bench_cudagraph(call, rep=20, return_mode="median")) * 1e3 / calls


class _Cache:
    """`requests` requests of `length` keys in scattered pages."""

    def __init__(self, requests: int, length: int, shape: AttentionShape) -> None:
        self.shape, self.order = shape, mma_attention_order(shape.head_dim, shape.head_dim, "bfloat16", "sm90")
        pages = -(-length // self.order.kv_block)
        size = (2, requests * pages, shape.num_kv_heads, self.order.kv_block, shape.head_dim)
        self.kv_layer = torch.randn(size, device="cuda", dtype=torch.bfloat16)
        self.tables = torch.randperm(requests * pages).int().view(requests, pages).cuda()

    def batch(self, starts: list[int], rows: int, schedule: str) -> kernels.AttentionBatch:
        query_starts = (np.arange(len(starts) + 1) * rows).astype(np.int32)
        positions = np.array(starts, np.int32)
        plan = kernels.plan_attention(query_starts, positions, self.order, self.shape, schedule)
        first, at, words = (torch.from_numpy(array).cuda() for array in (query_starts, positions, plan.words))
        return kernels.AttentionBatch(first, at, self.tables[: len(starts)], plan, words)

    def call(
        self, q: torch.Tensor, batch: kernels.AttentionBatch, workspace: kernels.AttentionWorkspace
    ) -> torch.Tensor:
        run = kernels.reference_attention if batch.plan.schedule == kernels.REFERENCE else kernels.attention
        return run(q, self.kv_layer, batch, self.order, self.shape, self.shape.head_dim**-0.5, workspace)

    def contiguous(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V as [requests, query heads, length, D]: what SDPA takes."""
        kv = self.kv_layer[:, self.tables.long()].transpose(2, 3).flatten(3, 4)
        return kv[0], kv[1]


def _call_all(
    pairs: Sequence[tuple[_Cache, kernels.AttentionBatch]], q: torch.Tensor, workspace: kernels.AttentionWorkspace
) -> None:
    for cache, batch in pairs:
        cache.call(q, batch, workspace)


def _fastest_sdpa(call: Callable[[], Any], calls: int = 1) -> tuple[float, str]:
    times = {}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        try:
            with sdpa_kernel(backend):
                times[backend.name] = _time_us(call, calls)
        except RuntimeError:  # a backend without kernels for this shape
            continue
    name = min(times, key=lambda key: times[key], default="")
    return times.get(name, float("nan")), name


def _prefill(length: int, heads: int, kv_heads: int, dim: int, flops: float) -> Row:
    shape = AttentionShape(heads, kv_heads, dim)
    cache, workspace = _Cache(1, length, shape), kernels.AttentionWorkspace(torch.device("cuda"))
    q = torch.randn(length, heads * dim, device="cuda").bfloat16()
    batch = cache.batch([0], length, "auto")
    ours = _time_us(lambda: cache.call(q, batch, workspace))
    truth = cache.call(q, cache.batch([0], length, kernels.REFERENCE), workspace)
    equal = torch.equal(cache.call(q, batch, workspace), truth)
    peer_batch = cache.batch([0], length, "walk-triton" if dim <= 128 else kernels.REFERENCE)
    peer = _time_us(lambda: cache.call(q, peer_batch, workspace))
    k, v = (x.repeat_interleave(heads // kv_heads, 1).contiguous() for x in cache.contiguous())
    q4 = q.view(length, heads, dim).transpose(0, 1)[None]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    theirs, backend = _fastest_sdpa(lambda: sdpa(q4, k, v, is_causal=True))
    work = 2 * length * length * heads * dim
    return {
        "op": "attention_prefill", "shape": f"{heads}/{kv_heads}x{dim}", "m": length, "ours_us": ours,
        "unconstrained_us": theirs, "unconstrained": backend, "peer_us": peer, "floor_us": work / flops * 1e6,
        "bits_equal": equal, "tflops": work / ours / 1e6,
    }  # fmt: skip


def _decode(requests: int, length: int, copy_bytes_per_s: float) -> Row:
    shape = AttentionShape(32, 8, 128)
    num_bytes = requests * length * shape.num_kv_heads * shape.head_dim * 4
    caches = [_Cache(requests, length, shape) for _ in range(1 + int(150e6 / num_bytes))]
    workspace = kernels.AttentionWorkspace(torch.device("cuda"))
    q = torch.randn(requests, 4096, device="cuda").bfloat16()
    times = {}
    for schedule in ("auto", "walk-triton"):
        batches = [cache.batch([length - 1] * requests, 1, schedule) for cache in caches]
        pairs = list(zip(caches, batches, strict=True))
        times[schedule] = _time_us(partial(_call_all, pairs, q, workspace), len(caches))
    starts, schedules = [length - 1] * requests, ("auto", kernels.REFERENCE)
    equal = torch.equal(*(caches[0].call(q, caches[0].batch(starts, 1, s), workspace) for s in schedules))
    theirs, backend = float("nan"), ""
    if requests * length <= 1 << 20:
        given = [cache.contiguous() for cache in caches]
        q4, sdpa = q.view(requests, 32, 1, 128), torch.nn.functional.scaled_dot_product_attention
        theirs, backend = _fastest_sdpa(lambda: [sdpa(q4, k, v, enable_gqa=True) for k, v in given], len(caches))
    floor = num_bytes / copy_bytes_per_s * 1e6
    return {
        "op": "attention_decode", "shape": f"32/8x128 kv={length}", "m": requests, "ours_us": times["auto"],
        "unconstrained_us": theirs, "unconstrained": backend, "peer_us": times["walk-triton"], "floor_us": floor,
        "bits_equal": equal, "bandwidth_share": floor / times["auto"],
    }  # fmt: skip


if __name__ == "__main__":
    for row in run():
        rate = f"{row['tflops']:.0f} TFLOP/s" if "tflops" in row else f"{row['bandwidth_share']:.2f} of copy bandwidth"
        print(
            f"{row['op']:18} {row['shape']:22} m={row['m']:<6} ours {row['ours_us']:8.1f} us ({rate})  "
            f"{row['unconstrained']:16} {row['unconstrained_us']:8.1f}  peer {row['peer_us']:8.1f}  "
            f"floor {row['floor_us']:7.1f}  bits {row['bits_equal']}",
            flush=True,
        )
