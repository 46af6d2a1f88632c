"""Mixture-of-experts kernels in Triton's interpreter: tiles cover every pair once, linears against float64, combine
against its formula bit by bit. (The interpreter's dot is no tensor core: bits of linears are a GPU's matter.)"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from isobit.kernels.reference.math import fma32
from isobit.order import MmaLinearOrder, MoeCombineOrder
from tests.interpreter import DEVICE, INTERPRETED  # before the kernels

from isobit.kernels.triton.moe import (  # isort: skip
    MoeRouting,
    MoeSchedule,
    align,
    default_schedule,
    moe_linear,
    moe_schedules,
    reference_moe_linear,
)
from isobit.kernels.triton.moe_combine import moe_combine  # isort: skip

EXPERTS, N, K = 5, 24, 64

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter; tests/gpu/test_moe.py is the GPU's")


def random_ids(tokens: int, top_k: int, experts: int, seed: int = 0) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    return torch.from_numpy(np.stack([rng.permutation(experts)[:top_k] for _ in range(tokens)]).astype(np.int32))


def tiles_of(routing: MoeRouting) -> list[tuple[int, list[int]]]:
    """(expert, pairs) of every tile that exists."""
    assert routing.pairs is not None and routing.tiles is not None and routing.num_tiles is not None
    assert routing.tiles.shape[0] == routing.max_tiles
    existing = int(routing.num_tiles)
    assert (routing.tiles[existing:, 0] == -1).all()
    return [
        (int(expert), routing.pairs[first : first + count].tolist())
        for expert, first, count, _ in routing.tiles[:existing]
    ]


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "block", "more"),
    [
        (1, 4, 8, 2, 1),
        (7, 2, 3, 3, 0),
        (90, 4, 5, 8, 0),
        (33, 1, 1, 64, 0),
        (3, 8, 33, 8, 4),
        (65, 1, 1, 32, 1),
        (66, 1, 1, 32, 1),
        (600, 4, 4, 128, 32),
    ],
)
def test_tiles_list_every_pair_once_by_expert(tokens: int, top_k: int, experts: int, block: int, more: int) -> None:
    ids = random_ids(tokens, top_k, experts)
    routing = align(ids.to(DEVICE), experts, block, more)
    flat = ids.flatten().tolist()
    tiles = tiles_of(routing)
    expected = []
    for expert in sorted(set(flat)):
        pairs = [pair for pair, chosen in enumerate(flat) if chosen == expert]
        starts = range(0, max(1, len(pairs) - more), block)
        expected += [(expert, pairs[start : start + block if start < starts[-1] else None]) for start in starts]
    assert tiles == expected
    assert len(tiles) <= routing.max_tiles


def test_ids_that_name_no_expert_have_no_tile() -> None:
    ids = torch.tensor([[0, -1], [2, 3], [7, 2], [1 << 30, -(1 << 31)]], dtype=torch.int32)
    assert tiles_of(align(ids.to(DEVICE), 3, 4)) == [(0, [0]), (2, [2, 5])]
    assert tiles_of(align(torch.full((2, 2), -1, dtype=torch.int32).to(DEVICE), 3, 4)) == []


def test_most_tiles_that_can_be_are_counted() -> None:
    ids = torch.tensor([[e] for e in [0] * 9 + [1, 2, 3]], dtype=torch.int32)
    routing = align(ids.to(DEVICE), 4, 8)
    assert routing.max_tiles == len(tiles_of(routing)) == 5


def test_align_refuses_what_it_cannot_read() -> None:
    with pytest.raises(ValueError, match="int32"):
        align(torch.zeros((2, 2), dtype=torch.int64), 4, 8)
    for experts, block, more in ((513, 8, 0), (0, 8, 0), (4, 0, 0), (4, 8, 8), (4, 1, 1)):
        with pytest.raises(ValueError, match="1 to 512 experts"):
            align(torch.zeros((2, 2), dtype=torch.int32), experts, block, more)


def small(schedule: MoeSchedule, depth: int = 32) -> MoeSchedule:
    """The schedule with a tile that the interpreter walks in no time."""
    rows, more = min(schedule.rows, 4), 2 if schedule.more else 0
    return dataclasses.replace(
        schedule, block=min(schedule.block, rows), rows=rows, columns=16, depth=depth,
        short=2 if schedule.short else 0, more=more, min_pairs=1,
    )  # fmt: skip


def distinct_schedules(order: MmaLinearOrder, depth: int = 32) -> list[MoeSchedule]:
    shrunk = {
        dataclasses.replace(small(schedule, depth), name="", warps=1, stages=1, max_pairs=1): schedule
        for schedule in moe_schedules(order)
    }
    return [small(schedule, depth) for schedule in shrunk.values()]


def run_all(ids: torch.Tensor, order: MmaLinearOrder, per_pair: bool, depth: int = 32) -> None:
    generator = torch.Generator().manual_seed(1)
    rows = ids.numel() if per_pair else ids.shape[0]
    x = torch.randn((rows, order.k), generator=generator).half()
    weights = torch.randn((EXPERTS, order.n, order.k), generator=generator).half()
    per_row = 1 if per_pair else ids.shape[1]
    known = (ids.flatten() >= 0) & (ids.flatten() < EXPERTS)
    exact = torch.stack([
        weights[e].double() @ x[pair // per_row].double() if known[pair] else torch.zeros(order.n).double()
        for pair, e in enumerate(ids.flatten().tolist())
    ])  # fmt: skip
    reference = reference_moe_linear(x, weights, ids, order)
    torch.testing.assert_close(reference[known].double(), exact[known], rtol=0, atol=1e-4)
    schedules = distinct_schedules(order, depth)
    assert schedules
    for schedule in schedules:
        out = torch.full((ids.numel(), order.n), torch.nan)
        moe_linear(x, weights, align(ids, EXPERTS, schedule.block, schedule.more), order, schedule, out)
        torch.testing.assert_close(out[known].double(), exact[known], rtol=0, atol=1e-4, msg=schedule.name)
        assert out[~known].isnan().all(), f"{schedule.name} wrote rows that nobody asked for"


@pytest.mark.parametrize("per_pair", [False, True])
def test_linear_of_every_kernel(per_pair: bool) -> None:
    ids = random_ids(7, 2, EXPERTS)
    ids[ids == 3] = 2  # an expert without a token, and a token with one expert twice
    ids[4, 1] = -1
    run_all(ids, MmaLinearOrder(N, K, "float16", "float32"), per_pair)


def test_sliced_linear_of_every_kernel() -> None:
    run_all(random_ids(6, 2, EXPERTS), MmaLinearOrder(16, 128, "float16", "float32", k_slices=2), False)


def test_a_tail_of_k_and_of_n() -> None:
    run_all(random_ids(5, 2, EXPERTS), MmaLinearOrder(24, 40, "float16", "float32"), False)


def test_any_k_has_a_kernel() -> None:
    order = MmaLinearOrder(17, 37, "float16", "float32")
    assert {s.kernel for s in moe_schedules(order)} == {"stream"}
    run_all(random_ids(4, 2, EXPERTS), order, False)


@pytest.mark.parametrize("num_pairs", [1, 4, 32, 256, 2048, 16384, 10**6])
@pytest.mark.parametrize("num_experts", [1, 8, 64, 512])
def test_there_is_a_schedule_for_any_size(num_pairs: int, num_experts: int) -> None:
    for order in (
        MmaLinearOrder(3072, 2048, "bfloat16", "bfloat16"),
        MmaLinearOrder(4096, 14336, "bfloat16", "float32", k_slices=2),
        MmaLinearOrder(33, 17, "float16", "float32"),
    ):
        schedule = default_schedule(order, num_pairs, num_experts)
        assert schedule in moe_schedules(order)
        assert schedule.min_pairs <= num_pairs <= schedule.max_pairs


def test_linear_refuses_what_does_not_fit() -> None:
    order = MmaLinearOrder(N, K, "float16", "float32")
    ids = random_ids(3, 2, EXPERTS)
    x, weights = torch.zeros((3, K)).half(), torch.zeros((EXPERTS, N, K)).half()
    stream = next(s for s in moe_schedules(order) if s.kernel == "stream" and s.block > 1)
    with pytest.raises(ValueError, match="takes tiles of"):
        moe_linear(x, weights, align(ids, EXPERTS, stream.block + 1), order, stream)
    routing = align(ids, EXPERTS, stream.block)
    with pytest.raises(ValueError, match="x must be"):
        moe_linear(x[:2], weights, routing, order, stream)
    with pytest.raises(ValueError, match="expert weights must be"):
        moe_linear(x, weights[:, :-1], routing, order, stream)
    with pytest.raises(ValueError, match="weights of 4"):
        moe_linear(x, weights[:4], routing, order, stream)
    with pytest.raises(ValueError, match="bias"):
        moe_linear(x, weights, routing, dataclasses.replace(order, has_bias=True), stream)
    with pytest.raises(ValueError, match="contiguous"):
        moe_linear(torch.zeros((K, 3)).half().T, weights, routing, order, stream)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("with_shared", [False, True])
def test_combine_is_its_formula(dtype: torch.dtype, with_shared: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    experts = torch.randn((3, 4, 70), generator=generator).to(dtype)
    weights = torch.rand((3, 4), generator=generator)
    residual, shared = torch.randn((2, 3, 70), generator=generator) * 100
    out = moe_combine(experts, weights, residual, MoeCombineOrder(4), shared if with_shared else None)
    e, w = experts.float().numpy(), weights.numpy()
    y = w[:, 0, None] * e[:, 0]
    for j in range(1, 4):  # REDUCTION ORDER: see MoeCombineOrder
        y = fma32(np.broadcast_to(w[:, j, None], y.shape), e[:, j], y)
    if with_shared:
        y = shared.numpy() + y
    assert (residual.numpy() + y).tobytes() == out.numpy().tobytes()
    other = moe_combine(experts.flip(1).contiguous(), weights.flip(1).contiguous(), residual, MoeCombineOrder(4))
    assert other.numpy().tobytes() != out.numpy().tobytes(), "the data does not tell one order from another"


def test_combine_refuses_what_does_not_fit() -> None:
    experts, weights, residual = torch.zeros((3, 4, 70)), torch.zeros((3, 4)), torch.zeros((3, 70))
    with pytest.raises(ValueError, match="expected"):
        moe_combine(experts, weights, residual, MoeCombineOrder(2))
    with pytest.raises(ValueError, match="float32"):
        moe_combine(experts, weights.half(), residual, MoeCombineOrder(4))
    with pytest.raises(ValueError, match="shared"):
        moe_combine(experts, weights, residual, MoeCombineOrder(4), residual[:2])
