"""Attention kernels in Triton's interpreter: values against a float64 softmax, plans, NaN in pages, refusals.

The interpreter adds in another order than tensor cores, so bits are compared on a GPU (tests/gpu/test_attention.py).
What runs here are the plain kernels; those in Gluon are written for sm90 alone.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from isobit.kernels.interface import AttentionShape
from isobit.order import MmaAttentionOrder, mma_attention_order
from tests.interpreter import INTERPRETED  # before the kernels

from isobit.kernels.triton import attention as kernels  # isort: skip
from isobit.kernels.triton.attention_math import exponent_scale, row_sum, weigh  # isort: skip
from isobit.kernels.triton.attention_plan import cut_into_tiles  # isort: skip

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="the interpreter's; tests/gpu/test_attention.py is the GPU's")

Pieces = list[tuple[int, int]]  # (first position, rows) of each request


def _order(head_dim: int, split_size: int = 256, dtype: str = "float16") -> MmaAttentionOrder:
    return dataclasses.replace(mma_attention_order(head_dim, head_dim, dtype, "sm90"), kv_split_size=split_size)


class _Case:
    """Requests in scattered pages; unused tails and unowned pages are NaN."""

    def __init__(self, pieces: Pieces, shape: AttentionShape, order: MmaAttentionOrder) -> None:
        self.pieces, self.shape, self.order = pieces, shape, order
        dtype = torch.float16 if order.kv_dtype == "float16" else torch.bfloat16
        random = torch.Generator().manual_seed(7)
        lengths = [start + rows for start, rows in pieces]
        counts = [-(-length // order.kv_block) for length in lengths]
        free = iter(torch.randperm(sum(counts) + 2, generator=random).tolist())
        self.tables = torch.zeros(len(pieces), max(counts), dtype=torch.int32)
        size = (2, sum(counts) + 2, shape.num_kv_heads, order.kv_block, shape.head_dim)
        self.kv_layer = torch.full(size, torch.nan, dtype=dtype)
        self.kv = []
        for request, length in enumerate(lengths):
            kv = torch.randn(2, shape.num_kv_heads, length, shape.head_dim, generator=random).to(dtype)
            self.kv.append(kv)
            for page in range(counts[request]):
                own = kv[:, :, page * order.kv_block : (page + 1) * order.kv_block]
                self.tables[request, page] = number = next(free)
                self.kv_layer[:, number, :, : own.shape[2]] = own
        rows = sum(rows for _, rows in pieces)
        self.q = torch.randn(rows, shape.num_heads * shape.head_dim, generator=random).to(dtype)
        self.query_starts = np.cumsum([0] + [rows for _, rows in pieces]).astype(np.int32)
        self.start_positions = np.array([start for start, _ in pieces], np.int32)

    def run(self, schedule: str, pad: int = 0, scale: float | None = None) -> torch.Tensor:
        plan = kernels.plan_attention(self.query_starts, self.start_positions, self.order, self.shape, schedule)
        if pad:
            sizes = (plan.num_tiles, plan.num_items, plan.num_rows, plan.partial_rows)
            plan = plan.padded(*(n + pad if n else 0 for n in sizes))
        batch = kernels.AttentionBatch(
            torch.from_numpy(self.query_starts), torch.from_numpy(self.start_positions), self.tables, plan,
            torch.from_numpy(plan.words),
        )  # fmt: skip
        workspace = kernels.AttentionWorkspace(torch.device("cpu"))
        scale = self.shape.head_dim**-0.5 if scale is None else scale
        run = kernels.reference_attention if schedule == kernels.REFERENCE else kernels.attention
        return run(self.q, self.kv_layer, batch, self.order, self.shape, scale, workspace)

    def expected(self) -> torch.Tensor:
        out = []
        for (start, rows), (k, v), first in zip(self.pieces, self.kv, self.query_starts, strict=False):
            q = self.q[first : first + rows].double().view(rows, self.shape.num_kv_heads, -1, self.shape.head_dim)
            scores = torch.einsum("tkgd,ksd->tkgs", q, k.double()) * self.shape.head_dim**-0.5
            seen = torch.arange(k.shape[1]) <= start + torch.arange(rows)[:, None]
            weights = torch.where(seen[:, None, None], scores, -torch.inf).softmax(-1)
            out.append(torch.einsum("tkgs,ksd->tkgd", weights, v.double()).reshape(rows, -1))
        return torch.cat(out)


@pytest.mark.parametrize("schedule", [kernels.REFERENCE, "split-triton"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(3, 1, 64), (7, 1, 96), (4, 2, 16), (2, 2, 64)])
def test_mixed_batch_against_float64(schedule: str, heads: int, kv_heads: int, head_dim: int) -> None:
    pieces = [(0, 3), (63, 1), (62, 4), (300, 1), (250, 9)]
    case = _Case(pieces, AttentionShape(heads, kv_heads, head_dim), _order(head_dim))
    torch.testing.assert_close(case.run(schedule).double(), case.expected(), atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("schedule", [kernels.REFERENCE, "split-triton"])
def test_padding_entries_do_nothing(schedule: str) -> None:
    case = _Case([(300, 1), (5, 2)], AttentionShape(3, 1, 16), _order(16))
    assert torch.equal(case.run(schedule, pad=3), case.run(schedule))


@triton.jit
def _sum_rows(x, y, N: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, 4)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(y + tl.arange(0, 4), row_sum(tl.load(x + at)))


def test_row_sum_is_the_stated_tree() -> None:
    """By hand: halves down to 8, neighbours, then 4 and 2 apart."""
    for n in (64, 128):
        x = (torch.randn(4, n) * torch.logspace(-3, 3, n)).float()
        y = torch.empty(4)
        _sum_rows[(1,)](x, y, n)
        p = x
        while p.shape[1] > 8:
            p = p[:, : p.shape[1] // 2] + p[:, p.shape[1] // 2 :]
        p = p[:, 0::2] + p[:, 1::2]
        p = p[:, :2] + p[:, 2:]
        assert torch.equal(y, p[:, 0] + p[:, 1])


@triton.jit
def _weigh_rows(s, m, scale, m_next, alpha, p):  # type: ignore[no-untyped-def]
    row = tl.arange(0, 64)
    at = row[:, None] * 64 + tl.arange(0, 64)[None, :]
    products = tl.load(s + at)
    m_new, a, weights = weigh(products, tl.max(products, 1), tl.load(m + row), scale, True)
    tl.store(m_next + row, m_new)
    tl.store(alpha + row, a)
    tl.store(p + at, weights)


def test_a_block_that_a_row_does_not_see_leaves_the_row_alone() -> None:
    """Else a row's bits would depend on the other rows of its tile, whose blocks go on after its own position."""
    s, scale = torch.randn(64, 64) * 30, exponent_scale(0.3)
    m, m_next, alpha, p = torch.full((64,), -torch.inf), torch.empty(64), torch.empty(64), torch.empty(64, 64)
    s[0] = -torch.inf  # this row has not seen any key yet
    _weigh_rows[(1,)](s, m, scale, m_next, alpha, p)
    assert m_next[0] == -torch.inf and not p[0].any() and not alpha.any()
    assert torch.equal(m_next[1:], s[1:].amax(1) * scale)
    truth = torch.exp2(s.double() * scale - m_next.double()[:, None])
    torch.testing.assert_close(p[1:].double(), truth[1:], rtol=2e-5, atol=0)
    nothing, m = torch.full_like(s, -torch.inf), m_next.clone()
    _weigh_rows[(1,)](nothing, m, scale, m_next, alpha, p)
    assert torch.equal(m_next, m) and not p.any() and (alpha[1:] == 1).all() and alpha[0] == 0


@pytest.mark.parametrize("scale", [0.0, -0.125, float("nan"), float("inf"), 1e-60, 1e60])
def test_a_scale_under_which_the_maximum_is_not_the_heaviest_is_refused(scale: float) -> None:
    with pytest.raises(ValueError, match=re.escape(f"scale={scale}")):
        exponent_scale(scale)


def test_plan_covers_every_row_once() -> None:
    random = np.random.default_rng(3)
    for _ in range(50):
        rows = random.integers(1, 200, random.integers(1, 9))
        starts = random.integers(0, 3000, rows.size).astype(np.int32)
        query_starts = np.concatenate([[0], np.cumsum(rows)]).astype(np.int32)
        group, most = int(random.integers(1, 9)), int(random.choice([0, 64, 1 << 30]))
        plan = cut_into_tiles(query_starts, starts, group, 512, "auto", 128, most)
        counts = [np.zeros(n * group, int) for n in rows]
        for request, first in plan.words[: 2 * plan.num_tiles].reshape(-1, 2):
            counts[request][first : first + 128] += 1
        splits: dict[tuple[int, int], list[int]] = {}
        for request, first, split, _ in plan.words[plan.items_at : plan.rows_at].reshape(-1, 4):
            splits.setdefault((request, first), []).append(split)
        for (request, first), found in splits.items():
            counts[request][first : first + 16] += 1
            last = min(first + 15, counts[request].size - 1)
            assert found == list(range((starts[request] + last // group) // 512 + 1))
        assert all((count == 1).all() for count in counts)
        partials = plan.words[plan.items_at : plan.rows_at].reshape(-1, 4)[:, 3]
        assert partials.max(initial=-1) < max(plan.partial_rows, 1)


def _changed(**changes: Any) -> MmaAttentionOrder:
    return dataclasses.replace(_order(64), **changes)


def test_refusals_name_the_value() -> None:
    shape = AttentionShape(4, 2, 64)
    starts, positions = np.array([0, 1], np.int32), np.array([5], np.int32)
    for order, word in ((_changed(head_dim=264, value_dim=264), "264"), (_changed(value_dim=32), "value_dim=32"),
                        (_changed(row_sum="mma"), "mma"), (_changed(kv_split_size=100), "100")):  # fmt: skip
        with pytest.raises(ValueError, match=word):
            kernels.attention_schedules(order)
    with pytest.raises(ValueError, match="no attention schedule 'fast'"):
        kernels.plan_attention(starts, positions, _order(64), shape, "fast")
    with pytest.raises(ValueError, match="cannot share 3"):
        kernels.plan_attention(starts, positions, _order(64), AttentionShape(4, 3, 64))
    case = _Case([(5, 1)], shape, _order(64))
    with pytest.raises(ValueError, match=r"scale=-0\.5"):
        case.run("split-triton", scale=-0.5)
    with pytest.raises(ValueError, match="contiguous"):
        case.q = torch.zeros(1, 512, dtype=torch.float16)[:, ::2]
        case.run("split-triton")
    with pytest.raises(ValueError, match="kv_dtype"):
        case.q = torch.zeros(1, 256)
        case.run("split-triton")
    plan = kernels.plan_attention(starts, positions, _order(64), shape)
    with pytest.raises(ValueError, match="no room"):
        plan.padded(0, 0, 0, 0)
