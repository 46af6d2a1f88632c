"""splitmix64 (Steele, Lea, Flood 2014) over torch's int64, on any device: numbers that depend on an index alone.

Twin of `reference/math.py`'s `mix64` for tensors too large to be made on the host; torch has no unsigned 64-bit
arithmetic, but the words are the same. Knows nothing of what the words are for.
"""

from __future__ import annotations

import torch

from isobit.kernels.reference.math import GOLDEN

__all__ = ["hash_words", "shift_right"]

_STEPS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def hash_words(first: int, count: int, device: torch.device) -> torch.Tensor:
    """Words int64 [count] of first, first + 1, ...: all but the last shift of splitmix64's finaliser."""
    z = torch.arange(first, first + count, dtype=torch.int64, device=device) * _signed(GOLDEN)
    for shift, factor in _STEPS:
        z = (z ^ shift_right(z, shift)) * _signed(factor)
    return z


def shift_right(words: torch.Tensor, by: int) -> torch.Tensor:
    """Logical shift right, as of unsigned words."""
    return (words >> by) & ((1 << (64 - by)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
