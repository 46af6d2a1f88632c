"""Tokens that must never be drawn, on a peaked row of 100003 logits (bug case 35).

An engine mapped the greatest hash to exactly 1.0, whose noise is infinite, and an impossible token won. Random trials
alone have no power against 64-bit words, so seeds that lead to the extreme words are computed by inverting the hash.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import torch

from isobit.kernels.cpu.features import supported_libraries
from isobit.kernels.cpu.library import CpuLibrary
from isobit.request import mix64

VOCABULARY = 100_003  # smaller ones have less power still
GOLDEN, MASK = 0x9E3779B97F4A7C15, 2**64 - 1
LIBRARIES = [CpuLibrary(name, 2) for name in supported_libraries()]
LIBRARY = LIBRARIES[0]


def tensor(row: np.ndarray[Any, np.dtype[np.float32]]) -> torch.Tensor:
    return torch.from_numpy(row)


def unmix64(z: int) -> int:
    """Inverse of `mix64`, to find the inputs whose word is an extreme."""
    z ^= z >> 31 ^ z >> 62
    z = z * pow(0x94D049BB133111EB, -1, 2**64) & MASK
    z ^= z >> 27 ^ z >> 54
    z = z * pow(0xBF58476D1CE4E5B9, -1, 2**64) & MASK
    return z ^ z >> 30 ^ z >> 60


def seed_for_word(word: int, position: int, token: int) -> int:
    """The seed with which this token at this position gets exactly this word; it may lie above the seeds allowed."""
    key = (unmix64(word) - (token + 1) * GOLDEN) & MASK
    return (unmix64((unmix64(key) - position * GOLDEN) & MASK) - GOLDEN) & MASK


def test_case_35_an_impossible_token_never_wins_with_the_most_extreme_words() -> None:
    """(seed, position, token) triples with the greatest words there are, for tokens 45 below the best one."""
    row = np.full(VOCABULARY, -45.0, np.float32)
    row[5] = 0.0
    tried = 0
    for token in (0, 999, 65_536, VOCABULARY - 1):
        for position, word in itertools.product((0, 7, 4096), (2**64 - 1, 2**64 - 2, 2**64 - 4096, 2**63, 0)):
            seed = seed_for_word(word, position, token)
            if seed >= 2**63:
                continue
            assert mix64(mix64(mix64(seed + GOLDEN) + position * GOLDEN) + (token + 1) * GOLDEN) == word
            flat = np.zeros(VOCABULARY, np.float32)
            won = LIBRARY.sample(tensor(flat), 1.0, 0, 1.0, 0.0, seed, position)
            assert word < 2**64 - 4096 or won == token, "among equals the greatest word wins: it does reach the draw"
            assert {library.sample(tensor(row), 1.0, 0, 1.0, 0.0, seed, position) for library in LIBRARIES} == {5}
            tried += word >= 2**64 - 4096
    assert tried >= 10


def test_case_35_two_thousand_seeds_on_a_peaked_vocabulary() -> None:
    """Two tokens share the odds; the other 100001 have less than 1e-12 together and never appear."""
    row = (np.random.default_rng(10).standard_normal(VOCABULARY) * 0.3 - 42.0).astype(np.float32)
    row[[77, 90_001]] = 0.0
    odds = np.exp(np.delete(row, [77, 90_001]).astype(np.float64))
    assert odds.sum() < 1e-12
    counts = Counter(LIBRARY.sample(tensor(row), 1.0, 0, 1.0, 0.0, seed, 7) for seed in range(2000))
    assert set(counts) == {77, 90_001} and min(counts.values()) > 850, counts
