"""Where two arrays first differ by bytes. Numpy only; knows no kernels and no Orders.

The sign of zero counts; NaN equals NaN of any payload, because instruction sets choose payloads differently.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Difference", "first_difference"]


@dataclass(frozen=True)
class Difference:
    """First differing element in row-major order, its values, and their bits in hexadecimal.

    For unequal shapes or dtypes `coordinate` is empty and the fields describe the arrays.
    """

    coordinate: tuple[int, ...]
    expected: str
    actual: str
    expected_bits: str
    actual_bits: str

    def __str__(self) -> str:
        where = f"at [{', '.join(map(str, self.coordinate))}]" if self.coordinate else "as arrays"
        return f"{where}: expected {self.expected} ({self.expected_bits}), got {self.actual} ({self.actual_bits})"


def first_difference(expected: npt.NDArray[Any], actual: npt.NDArray[Any]) -> Difference | None:
    """None when both have the same shape, dtype and bytes (NaN equals NaN), else the first difference."""
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        return Difference(
            (), str(expected.dtype), str(actual.dtype), f"shape {expected.shape}", f"shape {actual.shape}"
        )
    expected, actual = np.ascontiguousarray(expected), np.ascontiguousarray(actual)
    unequal = _bits(expected) != _bits(actual)
    if expected.dtype.kind == "f":
        unequal &= ~(np.isnan(expected) & np.isnan(actual))
    if not unequal.any():
        return None
    coordinate = tuple(int(i) for i in np.unravel_index(int(unequal.argmax()), expected.shape))
    return Difference(
        coordinate,
        _text(expected[coordinate]),
        _text(actual[coordinate]),
        _hex(expected[coordinate]),
        _hex(actual[coordinate]),
    )


def _bits(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return x.view(np.dtype(f"u{x.dtype.itemsize}"))


def _text(value: Any) -> str:
    return repr(value.item()) if value.dtype.kind != "f" else np.format_float_scientific(value, unique=True)


def _hex(value: Any) -> str:
    return f"0x{int(_bits(np.asarray(value)[None])[0]):0{2 * value.dtype.itemsize}x}"
