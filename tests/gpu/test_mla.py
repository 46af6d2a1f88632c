"""Absorbed MLA on the card: every schedule gives the reference's bytes, whatever else is in the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

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

pytestmark = pytest.mark.gpu

Piece = tuple[int, int, int]  # request, its first row, the row after its last
SCALE = 192**-0.5
LENGTHS = (1, 63, 64, 65, 300, 700, 1100, 2200)


class Requests:
    """Latents of some requests in scattered pages, NaN in all that they do not own, and their queries."""

    def __init__(self, order: MmaAttentionOrder, heads: int, lengths: Sequence[int] = LENGTHS, seed: int = 0) -> None:
        generator = torch.Generator("cuda").manual_seed(seed)
        self.order, self.heads, self.lengths = order, heads, lengths
        dtype = getattr(torch, order.kv_dtype)
        counts = [-(-length // 64) for length in lengths]
        numbers = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(seed)).tolist()
        self.layer = torch.full((sum(counts) + 3, 64, order.head_dim), torch.nan, dtype=dtype, device="cuda")
        self.tables = np.zeros((len(lengths), max(counts)), np.int32)
        self.keys, self.q = [], []
        for request, length in enumerate(lengths):
            shape = (length, order.head_dim)
            # mixed magnitudes and signs: another order of the sums gives other bits
            spread = torch.exp2(torch.randint(-6, 3, shape, generator=generator, device="cuda").float())
            keys = (torch.randn(shape, generator=generator, device="cuda") * spread).to(dtype)
            q = torch.randn((length, heads, order.head_dim), generator=generator, device="cuda") * 0.5
            self.keys.append(keys)
            self.q.append(q.to(dtype))
            for page in range(counts[request]):
                self.tables[request, page] = number = numbers.pop()
                own = keys[64 * page : 64 * page + 64]
                self.layer[number, : len(own)] = own

    def arrays(self, pieces: Sequence[Piece]) -> tuple[torch.Tensor, tuple[np.ndarray, ...]]:
        starts = np.cumsum([0] + [stop - start for _, start, stop in pieces]).astype(np.int32)
        first = np.array([start for _, start, _ in pieces], np.int32)
        q = torch.cat([self.q[i][start:stop] for i, start, stop in pieces])
        return q, (starts, first, np.ascontiguousarray(self.tables[[i for i, _, _ in pieces]]))

    def reference(self, request: int) -> torch.Tensor:
        q, arrays = self.arrays([(request, 0, self.lengths[request])])
        return reference_mla(q, self.layer, *arrays, self.order, SCALE)

    def run(
        self, pieces: Sequence[Piece], schedule: MlaSchedule, walk: bool | None = None, programs: int = 132
    ) -> torch.Tensor:
        q, arrays = self.arrays(pieces)
        plan = mla_plan(arrays[0], arrays[1], self.heads, self.order, schedule.rows, programs, walk)
        workspace = MlaWorkspace(q.device, self.order.value_dim)
        workspace.reserve(plan.partial_rows, programs)
        for scratch in (workspace.partial_ml, workspace.partial_o, workspace.folded):
            scratch.fill_(torch.nan)
        out = torch.full((*q.shape[:2], self.order.value_dim), torch.nan, dtype=q.dtype, device=q.device)
        tables = upload_plan(plan, *arrays, q.device)
        return mla_attention(q, self.layer, tables, self.order, SCALE, schedule, workspace, out)


def assert_same_bits(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    wrong = got.view(torch.int16) != expected.view(torch.int16)
    if wrong.any():
        at = wrong.nonzero()[0].tolist()
        raise AssertionError(
            f"{what}: {wrong.float().mean():.2%} of elements differ, first at {at}: "
            f"{got[tuple(at)].item()!r} is not {expected[tuple(at)].item()!r}"
        )


def order_of(split: int | None = None, dtype: str = "bfloat16") -> MmaAttentionOrder:
    order = mma_attention_order(576, 512, dtype, "sm90")
    return order if split is None else replace(order, kv_split_size=split)


def batches() -> list[list[Piece]]:
    """Whole prompts, decode of all, chunks at page and split ends, and mixtures."""
    whole = [(i, 0, length) for i, length in enumerate(LENGTHS)]
    last = [(i, length - 1, length) for i, length in enumerate(LENGTHS)]
    ends = [(7, start, start + 1) for start in (62, 63, 64, 127, 128, 255, 256, 511, 512, 1023, 1024, 2047, 2048)]
    return [
        whole, whole[::-1], last, last[::-1], ends,
        [(7, 0, 7)], [(7, 60, 71)], [(7, 505, 519)], [(7, 1020, 1029)], [(7, 2040, 2055)], [(6, 1099, 1100)],
        [(7, 100, 1371), last[0], last[5]], [last[7], (5, 3, 133), last[2], (6, 512, 1030), last[6]],
    ]  # fmt: skip


@pytest.mark.parametrize(("heads", "split", "dtype"), [
    (20, None, "bfloat16"), (16, 128, "bfloat16"), (128, 512, "float16"), (5, 1024, "bfloat16"),
])  # fmt: skip
def test_every_schedule_gives_the_bytes_of_the_reference(heads: int, split: int | None, dtype: str) -> None:
    requests = Requests(order_of(split, dtype), heads)
    expected = [requests.reference(i) for i in range(len(LENGTHS))]
    for schedule in mla_schedules(requests.order):
        for pieces in batches():
            truth = torch.cat([expected[i][start:stop] for i, start, stop in pieces])
            for walk, programs in ((None, 132), (True, 7), (False, 132)):
                got = requests.run(pieces, schedule, walk, programs)
                assert_same_bits(got, truth, f"{schedule.name} walk={walk} {pieces}")


def test_repeated_runs_give_the_same_bytes() -> None:
    requests = Requests(order_of(), 20)
    pieces = [(i, 0, length) for i, length in enumerate(LENGTHS)]
    for schedule in mla_schedules(requests.order):
        first = requests.run(pieces, schedule)
        for _ in range(20):
            assert_same_bits(requests.run(pieces, schedule), first, schedule.name)


def test_another_split_size_is_another_order() -> None:
    orders = [order_of(split) for split in (128, 512)]
    results = [Requests(order, 20).reference(6).view(torch.int16) for order in orders]
    assert torch.equal(results[0][:128], results[1][:128])
    assert not torch.equal(results[0][600:], results[1][600:])


def test_close_to_float64() -> None:
    requests = Requests(order_of(), 20)
    got = requests.run([(6, 0, 1100)], mla_schedules(requests.order)[-1]).double()
    keys, q = requests.keys[6].double(), requests.q[6].double()
    s = torch.einsum("thd,kd->htk", q, keys) * SCALE
    s.masked_fill_(torch.ones(1100, 1100, dtype=torch.bool, device="cuda").triu(1), -torch.inf)
    truth = torch.einsum("htk,kd->thd", s.softmax(2), keys[:, :512])
    assert (got - truth).norm() / truth.norm() < 5e-3


@pytest.mark.parametrize(("latent", "rope"), [(256, 64), (128, 32), (192, 64)])
def test_other_widths(latent: int, rope: int) -> None:
    order = MmaAttentionOrder(latent + rope, latent, "bfloat16", 64, 256, "mma")
    requests = Requests(order, 6, (700,))
    expected = requests.reference(0)
    for schedule in mla_schedules(order):
        for start, stop in ((0, 700), (699, 700), (250, 263)):
            assert_same_bits(requests.run([(0, start, stop)], schedule), expected[start:stop], schedule.name)
