"""Runs every kernel of a claim once on a little data, so that what must be compiled is compiled, several at a time.

Results are thrown away. Knows which operands change what a compiler makes (a residual, norms of heads, filters of
sampling), not what they compute. What only the checks run is warmed as well: a compiler that comes alone is slow.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from isobit.kernels.gpu.attention import StepPlans
from isobit.kernels.gpu.linear import LinearWeight
from isobit.kernels.interface import AttentionInputs, AttentionShape, Draws, HeadNorms, RopeTables, StepArrays
from isobit.order import MmaAttentionOrder, MmaLinearOrder, NormOrder, Order

__all__ = ["warm_up"]

_SHAPE = (16, 8)  # query heads, key/value heads: one kernel serves any numbers


def warm_up(library: Any, op: str, order: Order, schedule: str) -> None:
    """Have everything compiled that `op` under `order` and `schedule` runs."""
    if isinstance(order, MmaLinearOrder):
        _linear(library, op, order, schedule)
    elif isinstance(order, MmaAttentionOrder):
        _rope(library, order) if op == "rope_and_cache" else _attention(library, order, schedule)
    elif isinstance(order, NormOrder):
        weight = torch.zeros(order.width, device=library.device)
        library.rms_norm(torch.zeros((1, order.width), device=library.device), weight, 1e-5)
    elif op == "silu_mul":
        for width in (16, 8, 36):  # of service, and of the checks
            library.silu_mul(torch.zeros((1, 2 * width), dtype=library.dtype, device=library.device))
    else:
        _vocabulary(library, op, order.vocab_size)  # type: ignore[union-attr]


def _linear(library: Any, op: str, order: MmaLinearOrder, schedule: str) -> None:
    device, dtype = library.device, library.dtype
    bias = torch.zeros(order.n, device=device) if order.has_bias else None
    packed = LinearWeight(order, torch.zeros((order.n, order.k), dtype=dtype, device=device), bias)
    if op == "embedding":
        library.embedding(packed, torch.zeros(1, dtype=torch.int32, device=device))
        return
    rows, _ = library.linear_rows(order, schedule)
    x = torch.zeros((rows, order.k), dtype=dtype, device=device)
    library.linear(x, packed, order.weight_dtype, schedule)
    if order.output_dtype == "float32":
        addend = torch.zeros((rows, order.n), device=device)
        library.linear(x, packed, order.weight_dtype, schedule, addend)
    if schedule == library.schedules("linear", order)[0]:
        library.reference_linear(x, packed, None)


def _rope(library: Any, order: MmaAttentionOrder) -> None:
    device, width = library.device, order.head_dim
    shape = AttentionShape(*_SHAPE, width)
    [layer] = library.new_kv_layers(1, 1, order.kv_block, shape, order.kv_dtype)
    table, part = (torch.zeros((2, half), device=device) for half in (width // 2, max(1, width // 4)))
    where = torch.zeros(1, dtype=torch.int32, device=device)
    qkv = torch.zeros((1, (_SHAPE[0] + 2 * _SHAPE[1]) * width), dtype=library.dtype, device=device)
    norms = HeadNorms(torch.ones(width, device=device), torch.ones(width, device=device), 1e-6)
    for of_heads, tables in (
        (None, RopeTables(table, table)), (norms, RopeTables(table, table)),
        (None, RopeTables(table, table, interleaved=True)), (norms, RopeTables(part, part)),
    ):  # fmt: skip
        library.rope_and_cache(qkv, where, where, tables, of_heads, layer, shape)


def _attention(library: Any, order: MmaAttentionOrder, schedule: str) -> None:
    """A chunk, and one row beyond the first split: every kernel of a schedule has something to do."""
    shape, rows = AttentionShape(*_SHAPE, order.head_dim), 40
    pages = order.kv_split_size // order.kv_block + 1
    [layer] = library.new_kv_layers(1, pages, order.kv_block, shape, order.kv_dtype)
    layer.zero_()
    unused = np.zeros(rows + 1, np.int32)
    arrays = StepArrays(
        unused, unused, unused, np.array([0, rows, rows + 1], np.int32),
        np.array([0, order.kv_split_size + 1], np.int32), np.tile(np.arange(pages, dtype=np.int32), (2, 1)),
    )  # fmt: skip
    # not through `begin_step`, whose buffers several threads would share
    fields = ("positions", "slots", "query_starts", "start_positions", "page_tables")
    tensors = {name: torch.from_numpy(getattr(arrays, name)).to(library.device) for name in fields}
    inputs = AttentionInputs(**tensors, schedule=StepPlans(arrays))
    q = torch.zeros((rows + 1, shape.num_heads * order.head_dim), dtype=library.dtype, device=library.device)
    library.attention(q, layer, inputs, shape, 1.0, schedule)
    if schedule == library.schedules("attention", order)[0]:
        library.reference_attention(q, layer, inputs, shape, 1.0)


def _vocabulary(library: Any, op: str, vocab_size: int) -> None:
    logits = torch.zeros((3, vocab_size), device=library.device)
    if op == "sample":  # without filters, with a short list, and every kind of long one
        for top_k, top_p in ((0, 1.0), (40, 0.9), (500, 1.0), (0, 0.9), (500, 0.9)):
            ones, limits = np.ones(3), np.full(3, top_k)
            draws = Draws(ones, limits, top_p * ones, 0 * ones, np.zeros(3, np.uint64), np.arange(3))
            library.sample_rows(logits, draws)
    elif op == "top_logits":
        for n in {min(n, vocab_size) for n in (1, 17, 64, 65)}:
            library.top_rows(logits, n)
    elif op == "logprobs":
        library.logprobs(logits)
    else:
        library.argmax(logits)
