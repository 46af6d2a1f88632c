"""Tables of cos and sin for rotary position embedding (Su et al. 2021), the same bits on every machine.

Knows RopeConfig and positions, nothing of models. Inverse frequencies follow transformers' float32 steps, with pow and
log correctly rounded through `decimal` instead of a C library's; angle = float32(position) * float32(inv_freq) rounded
to float32; its cos and sin come from own float64 polynomials with mul and add alone, rounded to float32 once. A row
of the table depends on its position only, never on how long the table is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Context, Decimal, localcontext
from typing import Any

import numpy as np
import torch

from isobit.rope_config import RopeConfig

_FloatArray = np.ndarray[Any, np.dtype[Any]]

_CHUNK = 4096  # positions computed at a time; bounds the float64 temporaries
_MAX_POSITIONS = 1 << 24  # float32 holds every smaller position exactly
_MAX_ANGLE = 1 << 20  # quadrant counts below it times a part of pi/2 are exact in float64
_TWO_OVER_PI = 0.6366197723675814
# pi/2 in three parts of 33 bits (products with a quadrant count below 2^20 are exact), and what is left
_HALF_PI = (1.5707963267341256, 6.077100506303966e-11, 2.0222662487111665e-21, 8.478427660368899e-32)
_PI = Decimal("3.14159265358979323846264338327950288419716939937511")
_SIN = tuple((-1.0) ** k / math.factorial(2 * k + 1) for k in range(9))  # Taylor; |x| <= pi/4 leaves 1e-19
_COS = tuple((-1.0) ** k / math.factorial(2 * k) for k in range(10))


def rope_tables(rope: RopeConfig, max_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin), each float32 [max_positions, rotary_dim / 2], with yarn's attention factor multiplied in.

    Raises ValueError for more positions than float32 can count.
    """
    if not 1 <= max_positions <= _MAX_POSITIONS:
        raise ValueError(f"rope tables take 1 to {_MAX_POSITIONS} positions, got {max_positions}")
    frequencies, factor = inverse_frequencies(rope), np.float32(attention_factor(rope))
    if max_positions * max(frequencies.tolist()) > _MAX_ANGLE:
        raise ValueError(f"rope angles of {max_positions} positions go beyond {_MAX_ANGLE}; use fewer positions")
    cos = np.empty((max_positions, rope.rotary_dim // 2), dtype=np.float32)
    sin = np.empty_like(cos)
    for start in range(0, max_positions, _CHUNK):
        positions = np.arange(start, min(start + _CHUNK, max_positions), dtype=np.float32)
        angles = positions[:, None] * frequencies[None, :]
        cos_rows, sin_rows = cos_sin(angles)
        cos[start : start + _CHUNK] = cos_rows * factor
        sin[start : start + _CHUNK] = sin_rows * factor
    return torch.from_numpy(cos), torch.from_numpy(sin)


def cos_sin(angles: _FloatArray) -> tuple[_FloatArray, _FloatArray]:
    """(cos, sin) of float32 angles in [0, 2^20], float32: quadrant by Cody and Waite, then polynomials in float64."""
    x = angles.astype(np.float64)
    quadrant = np.rint(x * _TWO_OVER_PI)
    for part in _HALF_PI:
        x = x - quadrant * part
    square = x * x
    sine, cosine = x * _horner(_SIN, square), _horner(_COS, square)
    turn = quadrant.astype(np.int64) & 3
    odd = (turn & 1).astype(bool)
    cos = np.where(odd, sine, cosine)
    sin = np.where(odd, cosine, sine)
    cos = np.where((turn == 1) | (turn == 2), -cos, cos)
    sin = np.where(turn >= 2, -sin, sin)
    return cos.astype(np.float32), sin.astype(np.float32)


def _horner(coefficients: Sequence[float], x: _FloatArray) -> _FloatArray:
    value = np.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value = value * x + coefficient  # numpy rounds product and sum apart
    return value


def inverse_frequencies(rope: RopeConfig) -> _FloatArray:
    """Angle per position of each feature pair, float32 [rotary_dim / 2], scaled as `rope_type` says.

    dynamic: those of the unscaled model, right up to its trained length (`check_context_length` refuses more).
    """
    powers = _powers(rope.theta, rope.rotary_dim)
    plain = np.float32(1.0) / powers
    if rope.rope_type in ("default", "dynamic"):
        return plain
    if rope.rope_type == "factors":
        factors = np.array([value for _, value in rope.parameters], dtype=np.float32)
        if factors.shape != plain.shape:
            raise ValueError(
                f"rope has {factors.size} frequency factors, rotary_dim={rope.rotary_dim} needs {plain.size}"
            )
        return plain / factors
    if rope.rope_type == "linear":
        return plain / np.float32(_given(rope, "factor"))
    if rope.rope_type == "llama3":
        return _llama3(rope, plain)
    assert rope.rope_type == "yarn", f"rope type {rope.rope_type!r} passed parse_rope but has no table"
    return _yarn(rope, powers)


def attention_factor(rope: RopeConfig) -> float:
    """What cos and sin are multiplied by: yarn's temperature (Peng et al. 2023), by transformers' rules; else 1."""
    if rope.rope_type != "yarn":
        return 1.0
    given = rope.parameter("attention_factor")
    if given is not None:
        return given
    factor, mscale, all_dim = _given(rope, "factor"), rope.parameter("mscale"), rope.parameter("mscale_all_dim")
    if mscale and all_dim:
        return _yarn_scale(factor, mscale) / _yarn_scale(factor, all_dim)
    return _yarn_scale(factor, 1.0)


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * _log(factor) + 1.0


def _given(rope: RopeConfig, name: str) -> float:
    value = rope.parameter(name)
    assert value is not None, f"rope type {rope.rope_type} without {name} passed parse_rope"
    return value


def _powers(theta: float, rotary_dim: int) -> _FloatArray:
    """theta ** (2i / rotary_dim), float32: the exponent rounded to float32, the power rounded correctly from it."""
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    with localcontext(Context(prec=50)):
        base = Decimal(float(np.float32(theta)))
        return np.array([_round32(base ** Decimal(float(exponent))) for exponent in exponents], dtype=np.float32)


def _round32(value: Decimal) -> np.float32:
    """Nearest float32, without the double rounding of going through float64."""
    near = np.float32(float(value))
    around = (near, np.nextafter(near, np.float32(0)), np.nextafter(near, np.float32(np.inf)))
    return min(around, key=lambda candidate: abs(Decimal(float(candidate)) - value))


def _log(value: float) -> float:
    with localcontext(Context(prec=50)):
        return float(Decimal(value).ln())


def _llama3(rope: RopeConfig, plain: _FloatArray) -> _FloatArray:
    """Llama 3.1's scaling: long wavelengths divided by `factor`, short ones kept, a linear blend between."""
    factor, original = np.float32(_given(rope, "factor")), _given(rope, "original_max_position_embeddings")
    low, high = _given(rope, "low_freq_factor"), _given(rope, "high_freq_factor")
    wavelength = np.float32(2 * math.pi) * (np.float32(1) / plain)  # number / tensor in torch: reciprocal first
    is_long, is_short = wavelength > np.float32(original / low), wavelength < np.float32(original / high)
    blend = (np.float32(original) * (np.float32(1) / wavelength) - np.float32(low)) / np.float32(high - low)
    blended = (np.float32(1) - blend) * plain / factor + blend * plain
    scaled: _FloatArray = np.where(is_long, plain / factor, np.where(is_short, plain, blended))
    return scaled


def _yarn(rope: RopeConfig, powers: _FloatArray) -> _FloatArray:
    """YaRN (Peng et al. 2023): frequencies that turn often are kept, slow ones divided by `factor`, a ramp between."""
    low, high = _yarn_range(rope)
    high = high + 0.001 if low == high else high
    ramp = (np.arange(rope.rotary_dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    keep = np.float32(1) - np.clip(ramp, np.float32(0), np.float32(1))
    stretched = np.float32(1) / (np.float32(_given(rope, "factor")) * powers)
    scaled: _FloatArray = stretched * (np.float32(1) - keep) + (np.float32(1) / powers) * keep
    return scaled


def _yarn_range(rope: RopeConfig) -> tuple[float, float]:
    """First and last feature pair of the ramp, where the original context holds beta_fast and beta_slow turns."""
    dim, original = rope.rotary_dim, _given(rope, "original_max_position_embeddings")
    with localcontext(Context(prec=50)):
        bounds = [
            Decimal(dim) * (Decimal(original) / (Decimal(turns) * 2 * _PI)).ln() / (2 * Decimal(rope.theta).ln())
            for turns in (rope.parameter("beta_fast") or 32.0, rope.parameter("beta_slow") or 1.0)
        ]
    low, high = float(bounds[0]), float(bounds[1])
    if dict(rope.parameters).get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    return max(low, 0.0), min(high, dim - 1.0)
