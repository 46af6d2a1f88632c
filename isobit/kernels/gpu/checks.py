"""A check of a kernel on the device: what it gave against what its Order's reference gave, byte by byte.

Outputs are compared where they lie; only the first difference comes to the host. Data is made on the device from
integers: signs, exponents and mantissas of every kind, so that another order of additions shows. Knows no op.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch

from isobit.kernels.bitcompare import Difference, first_difference
from isobit.kernels.device_bits import hash_words

__all__ = ["Check", "device_floats", "difference", "same_rows"]

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Check:
    """One run of a kernel: `run` gives outputs by name, `expected` what they must be."""

    label: str
    run: Callable[[], Tensors]
    expected: Tensors


def difference(expected: torch.Tensor, actual: torch.Tensor) -> Difference | None:
    """The first differing element, or None; NaN equals NaN. Shapes and dtypes must agree as well."""
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        return Difference(
            (), str(expected.dtype), str(actual.dtype), f"shape {list(expected.shape)}", f"shape {list(actual.shape)}"
        )
    word = _WORDS[expected.element_size()]
    unequal = expected.contiguous().view(word) != actual.contiguous().view(word)
    if expected.is_floating_point():
        unequal &= ~(expected.isnan() & actual.isnan())
    if not bool(unequal.any()):
        return None
    flat = int(unequal.reshape(-1).to(torch.uint8).argmax())
    index = torch.unravel_index(torch.tensor(flat), expected.shape)
    coordinate = tuple(int(i) for i in index)
    pair = (_on_host(tensor[coordinate]) for tensor in (expected, actual))
    found = first_difference(*pair)
    assert found is not None, f"bytes differ at {coordinate} and values do not"
    return Difference(coordinate, found.expected, found.actual, found.expected_bits, found.actual_bits)


def _on_host(value: torch.Tensor) -> npt.NDArray[Any]:
    wide = value.float() if value.dtype in (torch.bfloat16, torch.float16) else value
    array: npt.NDArray[Any] = wide.reshape(1).cpu().numpy()
    return array


def same_rows(expected: Tensors, rows: slice) -> dict[str, torch.Tensor]:
    """Some rows of every expected output."""
    return {name: tensor[rows] for name, tensor in expected.items()}


def device_floats(
    seed: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, low: int = -8, high: int = 4
) -> torch.Tensor:
    """Values of either sign, exponent uniform in [low, high], mantissa uniform: a function of seed and index alone."""
    count = math.prod(shape)
    values = torch.empty(count, dtype=dtype, device=device)
    for start in range(0, count, 1 << 24):
        stop = min(start + (1 << 24), count)
        z = hash_words((seed << 32 | 1) + start, stop - start, device)
        exponent = 127 + low + (z >> 32 & 0x7FFFFFFF) % (high - low + 1)
        word = (z >> 63 & 1) << 31 | exponent << 23 | z & 0x7FFFFF
        values[start:stop] = word.to(torch.int32).view(torch.float32)
    return values.view(shape)
