"""Mixtures of experts on the card, by bytes: every schedule against one pair at a time, whoever is routed beside it.

Each claim has a control that must differ. Inputs have exponents over a wide range, so that another order shows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")

from isobit.kernels.gpu.checks import device_floats, difference  # noqa: E402
from isobit.kernels.interface import TORCH_DTYPES  # noqa: E402
from isobit.kernels.reference.math import fma32  # noqa: E402
from isobit.kernels.triton.linear import reference_linear  # noqa: E402
from isobit.kernels.triton.moe import (  # noqa: E402
    MoeSchedule,
    align,
    moe_linear,
    moe_schedules,
    reference_moe_linear,
)
from isobit.kernels.triton.moe_combine import moe_combine  # noqa: E402
from isobit.order import MmaLinearOrder, MoeCombineOrder  # noqa: E402

DEVICE = torch.device("cuda", 0)
TOKENS = (1, 2, 8, 63, 64, 65, 257, 512, 4096)
ORDERS = [
    MmaLinearOrder(3072, 2048, "bfloat16", "bfloat16"),
    MmaLinearOrder(2048, 1536, "bfloat16", "float32"),
    MmaLinearOrder(512, 4096, "float16", "float32", 2),
    MmaLinearOrder(200, 1032, "bfloat16", "bfloat16"),  # a tail of N and of K
    MmaLinearOrder(77, 333, "bfloat16", "float32"),  # odd N and K
]


def name_of(order: MmaLinearOrder) -> str:
    return f"{order.k}x{order.n} in {order.k_slices}, {order.weight_dtype} to {order.output_dtype}"


def random_ids(tokens: int, top_k: int, experts: int, seed: int = 0) -> torch.Tensor:
    """Distinct experts a token, the lower ones far likelier than the higher, the last one never."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    liking = torch.arange(experts, 0, -1, device=DEVICE) ** 2.0
    liking[-1] = 0
    ids = torch.multinomial(liking.expand(tokens, -1), top_k, generator=generator)
    return ids.int()


def inputs(order: MmaLinearOrder, tokens: int, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = TORCH_DTYPES[order.weight_dtype]
    low, high = (-3, 2) if dtype == torch.float16 else (-10, 3)
    x = device_floats(21, (tokens, order.k), dtype, DEVICE, low, high)
    return x, device_floats(22, (experts, order.n, order.k), dtype, DEVICE, -3, 2)


def run(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, order: MmaLinearOrder, schedule: MoeSchedule
) -> torch.Tensor:
    out = torch.full((ids.numel(), order.n), torch.nan, dtype=TORCH_DTYPES[order.output_dtype], device=DEVICE)
    return moe_linear(x, weights, align(ids, weights.shape[0], schedule.block, schedule.more), order, schedule, out)


def assert_same(expected: torch.Tensor, actual: torch.Tensor, label: str) -> None:
    found = difference(expected, actual)
    assert found is None, f"{label}: {found}"


def offered(order: MmaLinearOrder, num_pairs: int) -> Iterator[MoeSchedule]:
    for schedule in moe_schedules(order):
        if schedule.min_pairs <= num_pairs <= schedule.max_pairs:
            yield schedule


@pytest.mark.parametrize("order", ORDERS, ids=name_of)
def test_every_schedule_gives_the_bytes_of_the_reference(order: MmaLinearOrder) -> None:
    experts, top_k = 24, 4
    x, weights = inputs(order, max(TOKENS), experts)
    ids = random_ids(max(TOKENS), top_k, experts)
    expected = reference_moe_linear(x, weights, ids, order)
    tried = set()
    for tokens in TOKENS:
        start = (max(TOKENS) - tokens) // 3
        rows, pairs = slice(start, start + tokens), slice(start * top_k, (start + tokens) * top_k)
        for schedule in offered(order, tokens * top_k):
            out = run(x[rows], weights, ids[rows], order, schedule)
            assert_same(expected[pairs], out, f"{schedule.name}, {tokens} tokens")
            tried.add(schedule)
    assert tried == set(moe_schedules(order))


def test_the_reference_is_that_of_the_plain_linear() -> None:
    for order in ORDERS:
        x, weights = inputs(order, 40, 5)
        ids = random_ids(40, 2, 5)
        expected = torch.stack([
            reference_linear(x[pair // 2 : pair // 2 + 1], weights[expert], order)[0]
            for pair, expert in enumerate(ids.flatten().tolist())
        ])  # fmt: skip
        assert_same(expected, reference_moe_linear(x, weights, ids, order), name_of(order))


@pytest.mark.parametrize("order", ORDERS[1:3], ids=name_of)
def test_rows_of_pairs_as_the_second_linear_reads_them(order: MmaLinearOrder) -> None:
    experts, top_k = 24, 4
    x, weights = inputs(order, 257 * top_k, experts)
    ids = random_ids(257, top_k, experts)
    expected = reference_moe_linear(x, weights, ids, order)
    for tokens in (2, 65, 257):
        for schedule in offered(order, tokens * top_k):
            out = run(x[: tokens * top_k], weights, ids[:tokens], order, schedule)
            assert_same(expected[: tokens * top_k], out, f"{schedule.name}, {tokens} tokens")


def test_crowded_and_repeated_and_absent_experts() -> None:
    """Tile heights from one pair up to full and one over, for each schedule; the same token many times."""
    order = MmaLinearOrder(256, 512, "bfloat16", "bfloat16")
    x, weights = inputs(order, 600, 6)
    for schedule in moe_schedules(order):
        rows, most = schedule.rows, schedule.rows + schedule.more
        crowds = {1, schedule.short, schedule.short + 1, rows, rows + 1, most, most + 1, rows + most, 2 * rows + 3, 600}
        for crowd in sorted(crowds):
            if not 1 <= crowd <= min(600, schedule.max_pairs):
                continue
            ids = torch.full((crowd, 1), 4, dtype=torch.int32, device=DEVICE)
            ids[crowd // 2] = 1
            expected = reference_moe_linear(x[:crowd], weights, ids, order)
            assert_same(expected, run(x[:crowd], weights, ids, order, schedule), f"{schedule.name}, {crowd} rows")
            same = x[:1].expand(crowd, -1).contiguous()
            ids.fill_(4)
            out = run(same, weights, ids, order, schedule)
            assert_same(out[:1].expand(crowd, -1), out, f"{schedule.name}, one token {crowd} times")


def test_another_order_of_tokens_gives_another_order_of_rows() -> None:
    order = ORDERS[0]
    x, weights = inputs(order, 512, 24)
    ids = random_ids(512, 4, 24)
    shuffle = torch.randperm(512, generator=torch.Generator(DEVICE).manual_seed(3), device=DEVICE)
    for schedule in offered(order, 2048):
        out = run(x, weights, ids, order, schedule).view(512, 4, -1)
        shuffled = run(x[shuffle].contiguous(), weights, ids[shuffle].contiguous(), order, schedule).view(512, 4, -1)
        assert_same(out[shuffle], shuffled, schedule.name)
    assert difference(out, shuffled) is not None


def test_ids_of_no_expert_write_nothing_and_disturb_nobody() -> None:
    order = ORDERS[1]
    x, weights = inputs(order, 100, 24)
    ids = random_ids(100, 4, 24)
    expected = reference_moe_linear(x, weights, ids, order)
    for tokens in (2, 100):
        stray = ids[:tokens].clone()
        stray[1:2, 2] = -1
        stray[tokens // 2 : tokens // 2 + 1, 0] = 24
        known = ((stray >= 0) & (stray < 24)).flatten()
        for schedule in offered(order, tokens * 4):
            out = run(x[:tokens], weights, stray, order, schedule)
            assert_same(expected[: tokens * 4][known], out[known], schedule.name)
            assert bool(out[~known].isnan().all()), schedule.name


def test_another_order_shows() -> None:
    order = MmaLinearOrder(512, 4096, "bfloat16", "float32")
    x, weights = inputs(order, 64, 6)
    ids = random_ids(64, 2, 6)
    expected = reference_moe_linear(x, weights, ids, order)
    sliced = dataclasses.replace(order, k_slices=2)
    assert difference(expected, reference_moe_linear(x, weights, ids, sliced)) is not None
    for schedule in offered(sliced, 128):
        assert difference(expected, run(x, weights, ids, sliced, schedule)) is not None, schedule.name
    backwards = reference_moe_linear(x.flip(1).contiguous(), weights.flip(2).contiguous(), ids, order)
    assert difference(expected, backwards) is not None


@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(1, 8, 512), (64, 4, 64), (1000, 8, 300), (4097, 10, 512)])
def test_tiles_are_those_of_a_stable_sort(tokens: int, top_k: int, experts: int) -> None:
    ids = random_ids(tokens, top_k, experts, seed=tokens)
    for block, more in ((8, 0), (128, 32)):
        routing = align(ids, experts, block, more)
        assert routing.pairs is not None and routing.tiles is not None and routing.num_tiles is not None
        assert torch.equal(routing.pairs.long(), ids.flatten().long().sort(stable=True).indices)
        counts = torch.bincount(ids.flatten().long(), minlength=experts).tolist()
        expected, first = [], 0
        for expert, count in enumerate(counts):
            starts = range(0, max(min(count, 1), count - more), block)
            expected += [[expert, first + at, block if at < starts[-1] else count - at, 0] for at in starts]
            first += count
        existing = int(routing.num_tiles)
        assert routing.tiles[:existing].tolist() == expected
        assert bool((routing.tiles[existing:, 0] == -1).all())


def test_captured_in_a_graph_it_follows_new_ids() -> None:
    order, down = MmaLinearOrder(256, 512, "bfloat16", "bfloat16"), MmaLinearOrder(512, 256, "bfloat16", "float32")
    x, weights = inputs(order, 96, 24)
    down_weights = device_floats(23, (24, 512, 256), torch.bfloat16, DEVICE, -3, 2)
    shares, residual = torch.rand((96, 4), device=DEVICE), torch.randn((96, 512), device=DEVICE)
    ids = random_ids(96, 4, 24)
    schedule = next(s for s in moe_schedules(order) if s.name == "experts-64")

    def layer() -> torch.Tensor:
        routing = align(ids, 24, schedule.block, schedule.more)
        hidden = moe_linear(x, weights, routing, order, schedule)
        out = moe_linear(hidden, down_weights, routing, down, schedule)
        return moe_combine(out.view(96, 4, 512), shares, residual, MoeCombineOrder(4))

    layer()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer()
    for seed in range(3):
        ids.copy_(random_ids(96, 4, 24, seed))
        graph.replay()
        assert_same(layer(), captured, f"ids {seed}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_combine_is_its_formula(dtype: torch.dtype) -> None:
    experts = device_floats(31, (33, 4, 1500), dtype, DEVICE)
    shares = device_floats(32, (33, 4), torch.float32, DEVICE, -4, 0).abs()
    residual, shared = device_floats(33, (2, 33, 1500), torch.float32, DEVICE)
    out = moe_combine(experts, shares, residual, MoeCombineOrder(4), shared)
    e, w = experts.float().cpu().numpy(), shares.cpu().numpy()
    y = w[:, 0, None] * e[:, 0]
    for j in range(1, 4):  # REDUCTION ORDER: see MoeCombineOrder
        y = fma32(w[:, j, None].repeat(1500, 1), e[:, j], y)
    expected = residual.cpu().numpy() + (shared.cpu().numpy() + y)
    assert_same(torch.from_numpy(expected), out.cpu(), "combine")
    flipped = moe_combine(
        experts.flip(1).contiguous(), shares.flip(1).contiguous(), residual, MoeCombineOrder(4), shared
    )
    assert difference(out, flipped) is not None
