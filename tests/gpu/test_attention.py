"""Attention on an H200: every schedule gives the reference's bytes, whatever a row's company, chunk or pages.

Inputs are order-sensitive: wide magnitudes, cancellation, scores that let a late key overthrow the maximum. Unused
tails of pages and pages that nobody owns are NaN. Another split size must differ, or the comparison proves nothing.
"""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from isobit.kernels.interface import AttentionShape
from isobit.kernels.triton import attention as kernels
from isobit.order import MmaAttentionOrder, mma_attention_order

pytestmark = pytest.mark.gpu

Piece = tuple[int, int, int]  # request, its first row, the row after its last

LENGTHS = (1, 63, 64, 65, 130, 700, 1100)
TOGETHER = [(i, 0, length) for i, length in enumerate(LENGTHS)]
LAST = [(i, length - 1, length) for i, length in enumerate(LENGTHS)]
CHUNKS = (0, 1, 64, 65, 128, 300, 301, 511, 512, 513, 517, 777, 1023, 1024, 1025, 1100)


class Case:
    """Some requests of one shape in scattered pages of one layer."""

    def __init__(self, heads: int, kv_heads: int, order: MmaAttentionOrder, lengths: tuple[int, ...] = LENGTHS) -> None:
        self.shape, self.order, self.lengths = AttentionShape(heads, kv_heads, order.head_dim), order, lengths
        self.dtype = torch.bfloat16 if order.kv_dtype == "bfloat16" else torch.float16
        self.random = torch.Generator(device="cuda").manual_seed(heads * 1000 + order.head_dim)
        counts = [-(-length // order.kv_block) for length in lengths]
        numbers = torch.randperm(sum(counts) + 5, generator=torch.Generator().manual_seed(1)).tolist()
        size = (2, sum(counts) + 5, kv_heads, order.kv_block, order.head_dim)
        self.kv_layer = torch.full(size, torch.nan, dtype=self.dtype, device="cuda")
        self.tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
        self.q, self.kv = [], []
        for request, length in enumerate(lengths):
            self.q.append((self.floats(length, heads * order.head_dim) * 2).to(self.dtype))
            kv = self.floats(2, kv_heads, length, order.head_dim)
            kv[1] *= torch.exp2(torch.randint(-8, 8, kv[1].shape, device="cuda", generator=self.random).float())
            self.kv.append(kv.to(self.dtype))
            for page in range(counts[request]):
                own = self.kv[-1][:, :, page * order.kv_block : (page + 1) * order.kv_block]
                self.tables[request, page] = number = numbers.pop()
                self.kv_layer[:, number, :, : own.shape[2]] = own
        self.workspace = kernels.AttentionWorkspace(torch.device("cuda"))

    def floats(self, *size: int) -> torch.Tensor:
        return torch.randn(size, device="cuda", generator=self.random)

    def run(self, pieces: list[Piece], schedule: str = "auto", order: MmaAttentionOrder | None = None) -> torch.Tensor:
        order = order or self.order
        starts = np.cumsum([0] + [stop - start for _, start, stop in pieces]).astype(np.int32)
        positions = np.array([start for _, start, _ in pieces], np.int32)
        plan = kernels.plan_attention(starts, positions, order, self.shape, schedule)
        arrays = (torch.from_numpy(starts), torch.from_numpy(positions), self.tables[[i for i, _, _ in pieces]])
        batch = kernels.AttentionBatch(*(a.cuda() for a in arrays), plan, torch.from_numpy(plan.words).cuda())
        q = torch.cat([self.q[i][start:stop] for i, start, stop in pieces])
        run: Any = kernels.reference_attention if schedule == kernels.REFERENCE else kernels.attention
        return run(q, self.kv_layer, batch, order, self.shape, self.order.head_dim**-0.5, self.workspace)

    def reference(self) -> list[torch.Tensor]:
        return [self.run([(i, 0, length)], kernels.REFERENCE) for i, length in enumerate(self.lengths)]


def order_of(head_dim: int, dtype: str = "bfloat16") -> MmaAttentionOrder:
    return mma_attention_order(head_dim, head_dim, dtype, "sm90")


def assert_same_bytes(found: torch.Tensor, expected: torch.Tensor, label: str) -> None:
    differ = found.view(torch.int16) != expected.view(torch.int16)
    if bool(differ.any()):
        row, column = (int(n) for n in differ.nonzero()[0])
        raise AssertionError(
            f"{label}: {int(differ.sum())} of {differ.numel()} elements; first at row {row}, column {column}: "
            f"{found[row, column].item()!r} is not {expected[row, column].item()!r}"
        )


def batches() -> list[list[Piece]]:
    chunks = [[(6, a, b)] for a, b in pairwise(CHUNKS)]
    edges = [(6, at, at + 1) for at in (0, 63, 64, 65, 127, 511, 512, 513, 1023, 1024)]
    mixed = [[(6, 512, 1030), *LAST[:6]], [(5, 640, 700), LAST[6], (4, 3, 130)], [LAST[6], (5, 690, 700), LAST[1]]]
    few = [[(5, 40, 40 + rows)] for rows in (2, 5, 16, 17, 33)]
    return [TOGETHER, TOGETHER[::-1], LAST, LAST[::-1], edges, edges[::-1], *chunks, *mixed, *few]


SHAPES = [
    (32, 8, 128, "bfloat16"), (14, 2, 64, "bfloat16"), (7, 1, 128, "float16"), (3, 1, 96, "bfloat16"),
    (2, 2, 64, "float16"), (8, 1, 256, "bfloat16"), (6, 2, 256, "float16"), (20, 1, 80, "bfloat16"),
]  # fmt: skip


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "dtype"), SHAPES)
def test_every_schedule_and_company_gives_the_reference(heads: int, kv_heads: int, head_dim: int, dtype: str) -> None:
    case = Case(heads, kv_heads, order_of(head_dim, dtype))
    truth = case.reference()
    for schedule in kernels.attention_schedules(case.order):
        for pieces in batches():
            expected = torch.cat([truth[i][start:stop] for i, start, stop in pieces])
            assert_same_bytes(case.run(pieces, schedule), expected, f"{schedule} {pieces}")
    other = dataclasses.replace(case.order, kv_split_size=256)
    assert not torch.equal(case.run([TOGETHER[6]], kernels.REFERENCE, other), truth[6]), "the control must differ"


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "dtype"), SHAPES)
def test_accuracy_against_float64(heads: int, kv_heads: int, head_dim: int, dtype: str) -> None:
    case = Case(heads, kv_heads, order_of(head_dim, dtype), (700,))
    k, v = (x.double().repeat_interleave(heads // kv_heads, 0) for x in case.kv[0])
    q = case.q[0].double().view(700, heads, head_dim).transpose(0, 1)
    scores = (q @ k.mT * head_dim**-0.5).masked_fill(~torch.ones(700, 700, device="cuda").tril().bool(), -torch.inf)
    expected = (scores.softmax(-1) @ v).transpose(0, 1).reshape(700, -1)
    found = case.run([(0, 0, 700)]).double()
    assert ((found - expected).norm() / expected.norm()).item() < (4e-3 if dtype == "bfloat16" else 5e-4)


def test_a_later_splits_key_overthrows_the_maximum() -> None:
    """Large scores in the middle: alpha underflows to zero; rows before and after take either side of every edge."""
    case = Case(4, 1, order_of(128), (1300,))
    big = case.kv[0][0, 0, 600]
    big.copy_(case.q[0][1200, :128] * 8)
    case.kv_layer[0, int(case.tables[0, 600 // 64]), 0, 600 % 64] = big
    truth = case.run([(0, 0, 1300)], kernels.REFERENCE)
    assert bool(torch.isfinite(truth).all())
    for schedule in kernels.attention_schedules(case.order):
        assert_same_bytes(case.run([(0, 0, 1300)], schedule), truth, schedule)
        assert_same_bytes(case.run([(0, 1200, 1203)], schedule), truth[1200:1203], schedule)


def test_thousand_repeats_beside_another_stream() -> None:
    case = Case(32, 8, order_of(128))
    pieces = [(6, 512, 1100), *LAST[:6]]
    expected = case.run(pieces).view(torch.int16)
    noise, side = torch.randn(2048, 2048, device="cuda"), torch.cuda.Stream()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for i in range(1000):
        if i % 4 == 0:
            with torch.cuda.stream(side):
                noise = (noise @ noise).clamp(-1, 1)
        wrong += (case.run(pieces).view(torch.int16) != expected).sum()
    assert int(wrong) == 0


def test_graph_replay_takes_new_positions() -> None:
    """One captured graph, padded to its largest plan, serves steps at other positions."""
    case = Case(8, 2, order_of(128))
    steps = [[(6, at, at + 1), (5, at - 450, at - 449)] for at in (1099, 600, 511, 512)]
    plans = []
    for pieces in steps:
        starts, positions = np.array([0, 1, 2], np.int32), np.array([start for _, start, _ in pieces], np.int32)
        plans.append((positions, kernels.plan_attention(starts, positions, case.order, case.shape)))
    plans = [(positions, plan.padded(2, 8, 16, 64)) for positions, plan in plans]
    static = kernels.AttentionBatch(
        torch.tensor([0, 1, 2], dtype=torch.int32, device="cuda"), torch.from_numpy(plans[0][0]).cuda(),
        case.tables[[6, 5]].cuda(), plans[0][1], torch.from_numpy(plans[0][1].words).cuda(),
    )  # fmt: skip
    q = torch.cat([case.q[i][start:stop] for i, start, stop in steps[0]])
    given = (static, case.order, case.shape, 128**-0.5, case.workspace)
    kernels.attention(q, case.kv_layer, *given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernels.attention(q, case.kv_layer, *given)
    for pieces, (positions, plan) in zip(steps, plans, strict=True):
        q.copy_(torch.cat([case.q[i][start:stop] for i, start, stop in pieces]))
        static.start_positions.copy_(torch.from_numpy(positions))
        static.words.copy_(torch.from_numpy(plan.words))
        graph.replay()
        assert_same_bytes(out, case.run(pieces), f"replay at {positions}")
