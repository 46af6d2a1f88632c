"""From logits to tokens on the CPU: argmax, log-probs, selection, sampling. Exact bits, and odds by chi-square.

The reference (`kernels/reference/ops.py`) was written from the Order alone and sorts, adds and draws in plain numpy.
The libraries of all instruction sets and any number of threads must agree with it to the last bit.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import numpy.typing as npt
import pytest
import torch

from isobit.kernels.cpu.features import supported_libraries
from isobit.kernels.cpu.library import CpuLibrary
from isobit.kernels.reference import ops
from isobit.kernels.reference.math import log64
from isobit.order import logprobs_order, sampling_order
from isobit.request import mix64

LIBRARIES = [CpuLibrary(name, threads) for name, threads in zip(supported_libraries(), itertools.cycle((2, 1, 3)))]
VOCABULARIES = (1, 2, 15, 16, 17, 255, 1025, 4095, 4096, 4097, 49152)
WORDS = (0, 1, 4095, 4096, 2**63 - 1, 2**63, 2**64 - 4096, 2**64 - 4097, 2**64 - 1)

Row = npt.NDArray[np.float32]


def make_rows(num_rows: int, vocab_size: int, seed: int = 0, spread: float = 4.0) -> Row:
    generator = np.random.default_rng(seed)
    return (generator.standard_normal((num_rows, vocab_size)) * spread).astype(np.float32)


def tensor(array: Row) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))


def draws(
    row: Row, count: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Counter[int]:
    """Tokens drawn at position 7 with seeds 0 .. count - 1."""
    values = tensor(row)
    return Counter(LIBRARIES[0].sample(values, temperature, top_k, top_p, min_p, seed, 7) for seed in range(count))


# ---- argmax


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_argmax_takes_the_lowest_id_and_flags_what_is_not_finite(vocab_size: int, library: CpuLibrary) -> None:
    rows = np.round(make_rows(8, vocab_size))  # whole numbers: many ties
    rows[1] = 0.0
    rows[1, ::2] = -0.0
    ids, finite = library.argmax(tensor(rows))
    assert finite.all() and ids.tolist() == rows.argmax(1).tolist()
    for bad, where in itertools.product((np.nan, np.inf, -np.inf), {0, vocab_size // 2, vocab_size - 1}):
        poisoned = rows.copy()
        poisoned[3, where] = bad
        ids, finite = library.argmax(tensor(poisoned))
        assert finite.tolist() == [row != 3 for row in range(8)], (bad, where)
        usable = np.where(np.isnan(poisoned), -np.inf, poisoned)
        assert ids.tolist() == usable.argmax(1).tolist(), "a NaN is never chosen before a number"


# ---- log-probabilities


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_logprobs_equal_the_reference_and_do_not_depend_on_company(vocab_size: int) -> None:
    rows = make_rows(5, vocab_size, spread=6.0)
    rows[2, ::3] = -np.inf
    rows[2, 0] = 1.0
    maxima, lse = ops.logprobs(logprobs_order(vocab_size, "cpu"), rows)
    for library in LIBRARIES:
        for picked in ([0, 1, 2, 3, 4], [4, 2, 0], [2], [3, 3]):
            got_maxima, got_lse = library.logprobs(tensor(rows[picked]))
            assert got_maxima.numpy().tobytes() == maxima[picked].tobytes(), library.name
            assert got_lse.numpy().tobytes() == lse[picked].tobytes(), library.name


def test_logprobs_are_close_to_float64() -> None:
    """The bound adds up what can go wrong in a weight; the log turns relative into absolute error.

    exp32 is good to 2^-22 relative; x - max is rounded once, by 2^-24 * |x - max|, at most 88 where it counts; a weight
    passes through at most 4096/16 additions of its lane, 4 of the halves and V/4096 of the blocks.
    """
    for vocab_size in VOCABULARIES:
        rows = make_rows(4, vocab_size, seed=1, spread=6.0)
        lse = LIBRARIES[0].logprobs(tensor(rows))[1]
        exact = torch.logsumexp(tensor(rows).double(), 1)
        unit = 2.0**-24
        bound = 4 * unit + 88 * unit + (min(vocab_size, 4096) / 16 + 5 + vocab_size / 4096) * unit
        assert (lse - exact).abs().max() <= bound


def test_control_another_order_of_additions_gives_other_bits() -> None:
    rows = make_rows(4, 49152, seed=2)
    maxima, lse = LIBRARIES[0].logprobs(tensor(rows))
    in_one_go = torch.exp(tensor(rows) - maxima[:, None]).sum(1).double().log() + maxima.double()
    assert not torch.equal(in_one_go, lse)
    assert torch.allclose(in_one_go, lse, atol=1e-4)


# ---- selection


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
@pytest.mark.parametrize("vocab_size", (1, 2, 17, 49, 1000, 49152))
def test_top_logits_by_value_then_id(vocab_size: int, library: CpuLibrary) -> None:
    smooth, tied, same = make_rows(3, vocab_size)
    tied = np.round(tied)
    tied[: vocab_size // 3] *= np.float32(-0.0)
    same[:] = 2.5
    for row in (smooth, tied, same):
        for n in sorted({0, 1, 2, 5, 48, 49, 500, vocab_size - 1, vocab_size}):
            if n <= vocab_size:
                assert np.array_equal(library.top_logits(tensor(row), n).numpy(), ops.top_logits(row, n)), n
    if vocab_size > 4:
        smooth[[1, 3]], smooth[2] = np.nan, -np.inf
        expected = [int(i) for i in np.argsort(-smooth, kind="stable") if i not in (1, 2, 3)]
        assert library.top_logits(tensor(smooth), vocab_size).tolist() == [*expected, 2, 1, 3], "-inf, then NaN by id"


# ---- noise


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
def test_case_35_noise_of_a_word(library: CpuLibrary) -> None:
    """Finite at the extremes of the hash, where a uniform number rounded to 0 or 1 would be infinite."""
    generator = np.random.default_rng(3)
    words = [*WORDS, *(int(word) for word in generator.integers(0, 2**64, 2000, dtype=np.uint64))]
    noise = np.array([library.gumbel_from_word(word) for word in words])
    u = np.array([((word >> 12) + 0.5) * 2.0**-52 for word in words])
    assert np.isfinite(noise).all() and ((u > 0) & (u < 1)).all()
    assert noise.tobytes() == (-log64(-log64(u))).tobytes()
    # Against libm: both logarithms are good to a few 2^-53 relative, and the outer one turns relative into absolute.
    exact = np.array([-math.log(-math.log(value)) for value in u])
    assert np.abs(noise - exact).max() < 1e-14
    assert noise.min() > -3.61 and noise.max() < 36.8


def test_words_come_from_seed_position_and_token() -> None:
    """An independent count: with equal logits the drawn token is the one whose word is the largest."""
    golden, row = 0x9E3779B97F4A7C15, np.zeros(37, np.float32)
    for seed, position in itertools.product((0, 1, 2**63 - 1), (0, 1, 5, 2**31)):
        key = mix64(mix64(seed + golden) + position * golden)
        words = [mix64(key + (token + 1) * golden) for token in range(37)]
        for library in LIBRARIES:
            assert library.sample(tensor(row), 1.0, 0, 1.0, 0.0, seed, position) == words.index(max(words))


# ---- sampling

FILTERS = [
    (0, 1.0, 0.0), (-1, 1.0, 0.0), (1, 1.0, 0.0), (5, 1.0, 0.0), (48, 0.9, 0.0), (49, 1.0, 0.02), (10**9, 1.0, 0.0),
    (0, 0.5, 0.0), (0, 0.95, 0.0), (0, 1e-9, 0.0), (0, 1.0 - 2**-53, 0.0), (0, 1.0, 0.1), (0, 1.0, 1.0),
    (200, 0.8, 0.05), (0, 0.99, 0.001),
]  # fmt: skip


@pytest.mark.parametrize("vocab_size", (1, 2, 17, 300, 5000))
def test_sample_equals_the_reference(vocab_size: int) -> None:
    order = sampling_order(vocab_size, "cpu")
    smooth, tied, banned = make_rows(3, vocab_size, seed=4)
    tied = np.round(tied / 2)
    banned[1::2] = -np.inf
    for number, (top_k, top_p, min_p) in enumerate(FILTERS):
        for temperature in (1e-38, 0.01, 0.7, 1.0, 1.7, 1e6):
            for row in (smooth, tied, banned):
                arguments = (temperature, top_k, top_p, min_p, 1000 * number + 17, number)
                expected = ops.sample(order, row, *arguments)
                assert [library.sample(tensor(row), *arguments) for library in LIBRARIES] == [expected] * len(LIBRARIES)
                assert np.isfinite(row[expected])


@pytest.mark.parametrize("top_k, top_p, min_p", [(0, 1.0, 0.0), (50, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.01)])
def test_sample_of_large_vocabularies_on_any_number_of_threads(top_k: int, top_p: float, min_p: float) -> None:
    for vocab_size in (49152, 300_000):
        row = make_rows(1, vocab_size, seed=5)[0]
        expected = ops.sample(sampling_order(vocab_size, "cpu"), row, 1.0, top_k, top_p, min_p, 11, 12)
        for name, threads in itertools.product(supported_libraries(), (1, 2, 3, 5)):
            drawn = CpuLibrary(name, threads).sample(tensor(row), 1.0, top_k, top_p, min_p, 11, 12)
            assert drawn == expected, (name, threads)


def chi_square(counts: Counter[int], odds: npt.NDArray[np.float64]) -> float:
    """Statistic in standard deviations above its mean (degrees of freedom: the tokens that can be drawn, less one)."""
    total = sum(counts.values())
    possible = np.flatnonzero(odds)
    assert set(counts) <= set(possible.tolist())
    expected = odds[possible] * total
    assert expected.min() > 20, "chi-square needs some counts in every cell"
    seen = np.array([counts[int(token)] for token in possible])
    freedom = len(possible) - 1
    return float((((seen - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


@pytest.mark.parametrize("temperature", (0.5, 1.0, 3.0))
def test_frequencies_are_those_of_softmax(temperature: float) -> None:
    row = make_rows(1, 24, seed=6, spread=0.45)[0]
    scaled = row.astype(np.float64) / temperature
    odds = np.exp(scaled - scaled.max())
    odds /= odds.sum()
    counts = draws(row, 20_000, temperature)
    assert abs(chi_square(counts, odds)) < 5
    by_position = Counter(
        LIBRARIES[0].sample(tensor(row), temperature, 0, 1.0, 0.0, 3, position) for position in range(20_000)
    )
    assert abs(chi_square(by_position, odds)) < 5
    wrong = np.roll(odds, 1)
    assert chi_square(counts, wrong) > 50, "the statistic must tell these odds from others"


def test_filters_keep_whom_they_should_at_the_odds_they_should() -> None:
    odds = np.array([0.30, 0.02, 0.25, 0.20, 0.13, 0.10])  # descending: 0 2 3 4 5 1; running sums .30 .55 .75 .88 .98
    row = np.log(odds).astype(np.float32)
    cases: list[tuple[dict[str, float], list[int]]] = [
        ({"top_k": 2}, [0, 2]), ({"top_p": 0.29}, [0]), ({"top_p": 0.31}, [0, 2]), ({"top_p": 0.74}, [0, 2, 3]),
        ({"top_p": 0.76}, [0, 2, 3, 4]), ({"top_p": 0.99}, [0, 2, 3, 4, 5, 1]), ({"min_p": 0.5}, [0, 2, 3]),
        ({"min_p": 0.05}, [0, 1, 2, 3, 4, 5]), ({"min_p": 1.0}, [0]), ({"top_k": 3, "top_p": 0.73}, [0, 2]),
        ({"top_k": 3, "top_p": 0.74, "min_p": 0.5}, [0, 2, 3]), ({"top_k": 4, "min_p": 0.6}, [0, 2, 3]),
    ]  # fmt: skip
    for arguments, kept in cases:
        counts = draws(row, 4000, **arguments)  # type: ignore[arg-type]
        expected = np.zeros(6)
        expected[kept] = odds[kept] / odds[kept].sum()
        assert sorted(counts) == sorted(kept), arguments
        assert len(kept) == 1 or abs(chi_square(counts, expected)) < 5, arguments


def test_top_p_counts_after_top_k() -> None:
    """Of the two kept, the first has 0.3/0.55 = 0.545 of the sum: 0.54 keeps it alone, 0.55 both."""
    row = np.log(np.array([0.30, 0.25, 0.45 - 0.25, 0.25 - 1e-3])).astype(np.float32)
    assert sorted(draws(row, 300, top_k=2, top_p=0.54)) == [0]
    assert sorted(draws(row, 300, top_k=2, top_p=0.55)) == [0, 1]


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
def test_top_k_one_and_tiny_temperatures_are_greedy(library: CpuLibrary) -> None:
    tied = np.round(make_rows(30, 700, seed=7))
    assert ((tied == tied.max(1, keepdims=True)).sum(1) > 1).any(), "no ties among the largest"
    smooth = make_rows(30, 700, seed=8)
    greedy = library.argmax(tensor(tied))[0].tolist()
    for seed in range(3):
        assert [library.sample(tensor(row), 1.0, 1, 1.0, 0.0, seed, 9) for row in tied] == greedy
        for temperature in (1e-38, 5e-324, 1e-30, 1e-7):
            drawn = [library.sample(tensor(row), temperature, 0, 1.0, 0.0, seed, 9) for row in smooth]
            assert drawn == library.argmax(tensor(smooth))[0].tolist(), temperature


def test_extreme_temperatures_stay_finite_and_fair() -> None:
    row = make_rows(1, 20, seed=9)[0]
    assert abs(chi_square(draws(row, 4000, 1e6), np.full(20, 0.05))) < 5, "at T = 1e6 all tokens are equally likely"
    for temperature, filters in itertools.product((1e-38, 1e-3, 1e6), FILTERS):
        assert 0 <= LIBRARIES[0].sample(tensor(row), temperature, *filters, 1, 1) < 20
    huge = np.array([3e38, -3e38, 3e38], np.float32)
    assert set(draws(huge, 100, 1.0)) == {0, 2}, "tied maxima are drawn alike, and their distance does not overflow"


@pytest.mark.parametrize("top_k, top_p, min_p", FILTERS)
def test_banned_tokens_are_never_drawn(top_k: int, top_p: float, min_p: float) -> None:
    row = np.full(1000, -np.inf, np.float32)
    row[[3, 500, 999]] = (-5.0, -5.0, -5.0)
    row[4] = np.nan
    counts = draws(row, 200, 1e6, top_k, top_p, min_p)
    assert set(counts) <= {3, 500, 999}
    assert len(counts) == 3 or top_k == 1 or top_p <= 0.5


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
def test_rows_without_a_finite_maximum_give_their_argmax(library: CpuLibrary) -> None:
    nothing, infinite = np.full(40, -np.inf, np.float32), make_rows(1, 40)[0]
    infinite[[7, 9]] = np.inf
    for top_k, top_p, min_p in FILTERS:
        assert library.sample(tensor(nothing), 1.0, top_k, top_p, min_p, 0, 0) == 0
        assert library.sample(tensor(infinite), 1.0, top_k, top_p, min_p, 0, 0) == 7
