"""Log-probs, argmax, largest entries and sampling of sm90 against the numpy reference, by bytes, in the interpreter.

`tests/gpu/test_pointwise.py` does the same on the card at the size of a real vocabulary.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import tests.interpreter  # noqa: F401  (rounds as the device does)
from isobit.kernels.interface import Draws
from isobit.kernels.probe_data import floats
from isobit.kernels.reference import ops
from isobit.kernels.triton.sampling import sample
from isobit.kernels.triton.top import top_logits
from isobit.kernels.triton.vocabulary import argmax, logprobs
from isobit.order import LogprobsOrder, SamplingOrder, logprobs_order, sampling_order

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs in the interpreter; tests/gpu has the card")

Settings = tuple[float, int, float, float]  # temperature, top_k, top_p, min_p


def make_rows(num_rows: int, vocab_size: int, kind: str) -> np.ndarray:
    """"smooth" values, "tied" ones, or tied ones of which a seventh is banned, and both zeros."""
    rows = np.minimum(floats(3, num_rows, vocab_size, low=-3, high=3), np.float32(12))
    if kind != "smooth":
        rows = np.round(rows / 2)
    if kind == "banned":
        rows[:, 3::7], rows[:, 1] = -np.inf, -0.0
    return rows


def draws_of(settings: list[Settings], seed: int = 5) -> Draws:
    rng = np.random.default_rng(seed)
    columns = list(zip(*settings, strict=True))
    return Draws(
        np.array(columns[0], np.float64), np.array(columns[1], np.int64), np.array(columns[2], np.float64),
        np.array(columns[3], np.float64), rng.integers(0, 2**64, len(settings), np.uint64),
        rng.integers(0, 100_000, len(settings)),
    )  # fmt: skip


def expected_draws(rows: np.ndarray, settings: list[Settings], draws: Draws, order: SamplingOrder) -> list[int]:
    keys = zip(draws.seed.tolist(), draws.position.tolist(), strict=True)
    return [ops.sample(order, row, *s, *key) for row, s, key in zip(rows, settings, keys, strict=True)]


@pytest.mark.parametrize(
    ("vocab_size", "kind"), [(1, "smooth"), (7, "banned"), (511, "smooth"), (4096, "banned"), (9001, "smooth")]
)
def test_logprobs(vocab_size: int, kind: str) -> None:
    rows = make_rows(3, vocab_size, kind)
    order = logprobs_order(vocab_size, "sm90")
    maxima, lse = logprobs(torch.from_numpy(rows), order)
    expected_maxima, expected_lse = ops.logprobs(order, rows)
    assert np.array_equal(maxima.numpy().view(np.int32), (expected_maxima + np.float32(0)).view(np.int32))
    assert np.array_equal(lse.numpy().view(np.int64), expected_lse.view(np.int64))
    alone = logprobs(torch.from_numpy(rows)[2:], order)
    assert torch.equal(alone[0], maxima[2:]) and torch.equal(alone[1], lse[2:])


def test_logprobs_of_what_is_not_finite_and_controls() -> None:
    rows = (np.random.default_rng(1).standard_normal((6, 5000)) * 2).astype(np.float32)
    order = logprobs_order(5000, "sm90")
    _, lse = ops.logprobs(order, rows)
    _, other = logprobs(torch.from_numpy(rows), LogprobsOrder(5000, 4096, 256))
    assert not np.array_equal(other.numpy(), lse)
    rows[0, 4999], rows[1, 0], rows[2] = np.nan, np.inf, -np.inf
    with np.errstate(invalid="ignore"):
        maxima, lse_of_broken = logprobs(torch.from_numpy(rows), order)
    assert np.array_equal(maxima.numpy()[:3], [np.nan, np.inf, -np.inf], equal_nan=True)
    assert lse_of_broken.isnan().tolist() == [True, True, True, False, False, False]
    with pytest.raises(ValueError, match="under"):
        logprobs(torch.zeros(1, 4), order)


@pytest.mark.parametrize("kind", ["smooth", "tied", "banned"])
def test_argmax(kind: str) -> None:
    rows = make_rows(6, 4097, kind)
    rows[3, 5], rows[4, 4096] = np.nan, np.inf
    ids, finite = argmax(torch.from_numpy(rows))
    expected_ids, expected_finite = ops.argmax(rows)
    assert np.array_equal(finite.numpy(), expected_finite)
    assert np.array_equal(ids.numpy()[expected_finite], expected_ids[expected_finite])
    zeros = torch.tensor([[-0.0, 0.0], [0.0, -0.0]])
    assert argmax(zeros)[0].tolist() == [0, 0]
    broken = torch.full((3, 5000), float("nan"))
    broken[1, 4998], broken[2] = 1.0, float("-inf")
    assert argmax(broken)[0].tolist() == [0, 4998, 0]


@pytest.mark.parametrize(("vocab_size", "n"), [(1, 1), (5, 5), (64, 64), (700, 20), (4500, 64), (4500, 65), (300, 300)])
def test_top_logits(vocab_size: int, n: int) -> None:
    rows = make_rows(2, vocab_size, "tied")
    rows[1, vocab_size // 2], rows[1, 0] = np.nan, -np.inf
    expected = np.stack([ops.top_logits(row, n) for row in rows])
    assert np.array_equal(top_logits(torch.from_numpy(rows), n).numpy(), expected)


def test_top_logits_refuses_more_than_there_are() -> None:
    with pytest.raises(ValueError, match="1 <= n <= V"):
        top_logits(torch.zeros(1, 4), 5)


MIXED: list[Settings] = [
    (1.0, 0, 1.0, 0.0), (0.7, 0, 1.0, 0.05), (1.3, 5, 1.0, 0.0), (1.0, 40, 0.6, 0.0), (0.8, 0, 0.9, 0.0),
    (2.0, 100, 0.97, 0.01), (30.0, 300, 1.0, 0.0), (1e-3, 1, 0.5, 0.5),
]  # fmt: skip


@pytest.mark.parametrize(("vocab_size", "kind"), [(5, "smooth"), (700, "banned")])
def test_sample_in_mixed_company(vocab_size: int, kind: str) -> None:
    rows, draws = make_rows(len(MIXED), vocab_size, kind), draws_of(MIXED)
    order = sampling_order(vocab_size, "sm90")
    drawn = sample(torch.from_numpy(rows), draws, order)
    assert drawn.tolist() == expected_draws(rows, MIXED, draws, order)


def test_sample_over_two_blocks_with_ties_across_them() -> None:
    settings: list[Settings] = [(3.0, 600, 0.8, 0.0), (4.0, 4095, 1.0, 0.0), (4.0, 0, 0.999, 0.0)]
    rows, draws = make_rows(3, 4200, "tied"), draws_of(settings)
    order = sampling_order(4200, "sm90")
    drawn = sample(torch.from_numpy(rows), draws, order)
    assert drawn.tolist() == expected_draws(rows, settings, draws, order)


@pytest.mark.parametrize("settings", [(1.0, 0, 1.0, 0.0), (1.0, 5, 0.9, 0.0), (1.0, 0, 0.9, 0.0), (1.0, 70, 1.0, 0.1)])
def test_rows_without_a_finite_maximum_give_their_argmax(settings: Settings) -> None:
    rows = torch.full((4, 80), float("-inf"))
    rows[1, 7], rows[2, 11], rows[2, 3], rows[3] = float("inf"), float("inf"), float("nan"), float("nan")
    with np.errstate(invalid="ignore"):
        drawn = sample(rows, draws_of([settings] * 4), sampling_order(80, "sm90"))
    assert drawn.tolist() == [0, 7, 11, 0]


def test_the_reference_sums_weights_as_its_order_says() -> None:
    row = make_rows(1, 600, "smooth")[0]
    chain, whole = sampling_order(600, "cpu"), sampling_order(600, "sm90")
    assert (chain.weight_sum, whole.weight_sum) == ("float64-chain", "int64-2^40")
    # The nucleus of p holds the tokens before whose sum stands less than p of the total, in either way.
    for order in (chain, whole):
        drawn = {ops.sample(order, row, 1.0, 0, 0.3, 0.0, seed, 1) for seed in range(200)}
        weights = np.sort(np.exp(row.astype(np.float64) - row.max()))[::-1]
        size = int((np.cumsum(weights) - weights < 0.3 * weights.sum()).sum())
        assert drawn <= set(ops.top_logits(row, size).tolist())
    # A weight below 2^-40 counts nothing as a whole number, and something in the chain.
    weights = np.array([1.0, 2.0**-41, 2.0**-41], np.float32)
    assert ops._weights_before(chain, weights)[1] == 1.0 + 2.0**-40
    before, total = ops._weights_before(whole, weights)
    assert total == 2.0**40 and before.tolist() == [0.0, 2.0**40, 2.0**40]
    with pytest.raises(AssertionError, match="unknown weight_sum"):
        ops.sample(SamplingOrder(600, weight_sum="?"), row, 1.0, 0, 0.5, 0.0, 1, 1)
