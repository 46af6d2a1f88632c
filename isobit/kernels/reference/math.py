"""IEEE fp32 arithmetic on numpy arrays as every CPU Order uses it, and exp32, log64, splitmix64. No torch, no libm.

Invariant: round to nearest even, operands that are subnormal read as zero of their sign (DAZ), results that are
subnormal become zero of their sign (FTZ), NaN stays NaN. "Subnormal result" is decided after rounding to 24 bits with
an unbounded exponent, as x86 does. float64 is used only where it is exact or where its extra bits provably leave one
rounding. All functions broadcast and return new arrays.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
UInt64 = npt.NDArray[np.uint64]

SMALLEST_NORMAL = np.float32(2.0**-126)
# Below this a result has a magnitude under 2^-126 once rounded to 24 bits; the tie itself goes up to 2^-126.
_TINY = np.float64(2.0**-126 * (1.0 - 2.0**-25))
_EXP_LOW = np.float32(-87.33)
_ROUNDER = np.float32(12582912.0)  # 1.5 * 2^23: adding and subtracting it rounds to a whole number
_EXP_COEFFICIENTS = (
    1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1,
)  # fmt: skip
GOLDEN = 0x9E3779B97F4A7C15


def flush(x: npt.ArrayLike) -> Float32:
    """`x` as float32 with subnormals replaced by zero of the same sign."""
    x = np.asarray(x, dtype=np.float32)
    return np.where(np.abs(x) < SMALLEST_NORMAL, np.copysign(np.float32(0), x), x)


def _to_float32(exact: Float64) -> Float32:
    """Round float64 to float32 (nearest even), subnormal results to zero. NaN and overflow to inf pass through."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        rounded = exact.astype(np.float32)
    return np.where(np.abs(exact) < _TINY, np.copysign(np.float32(0), rounded), rounded)


def _sum_rounded_to_odd(a: Float64, b: Float64) -> Float64:
    """a + b in float64, rounded to odd: an inexact sum gets an odd last bit, so that a second rounding is harmless.

    TwoSum (Knuth) gives the exact error; round to odd is Boldo and Melquiond 2008 (53 >= 24 + 2 bits).
    """
    total = a + b
    b_part = total - a
    error = (a - (total - b_part)) + (b - b_part)
    bits = total.view(np.int64)
    to_fix = np.isfinite(total) & (error != 0) & (bits & 1 == 0)
    away_from_zero = (error > 0) == (total > 0)
    return (bits + np.where(to_fix, np.where(away_from_zero, 1, -1), 0)).view(np.float64)


def fma32(a: npt.ArrayLike, b: npt.ArrayLike, c: npt.ArrayLike) -> Float32:
    """a * b + c with one rounding."""
    with np.errstate(invalid="ignore"):
        product = np.multiply(flush(a), flush(b), dtype=np.float64)  # 24 + 24 bits: exact
        product, addend = np.broadcast_arrays(product, flush(c).astype(np.float64))
        return _to_float32(_sum_rounded_to_odd(product, addend))


def mul32(a: npt.ArrayLike, b: npt.ArrayLike) -> Float32:
    """a * b."""
    with np.errstate(invalid="ignore"):
        return _to_float32(np.multiply(flush(a), flush(b), dtype=np.float64))


def add32(a: npt.ArrayLike, b: npt.ArrayLike) -> Float32:
    """a + b. float64 has more than twice 24 bits plus two, so rounding twice equals rounding once (Figueroa 1995)."""
    with np.errstate(invalid="ignore"):
        return _to_float32(np.add(flush(a), flush(b), dtype=np.float64))


def sub32(a: npt.ArrayLike, b: npt.ArrayLike) -> Float32:
    """a - b."""
    return add32(a, -np.asarray(b, dtype=np.float32))


def div32(a: npt.ArrayLike, b: npt.ArrayLike) -> Float32:
    """a / b (Figueroa 1995, as add32)."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return _to_float32(np.divide(flush(a), flush(b), dtype=np.float64))


def sqrt32(a: npt.ArrayLike) -> Float32:
    """Square root (Figueroa 1995, as add32)."""
    with np.errstate(invalid="ignore"):
        return _to_float32(np.sqrt(flush(a), dtype=np.float64))


def round_bf16(x: npt.ArrayLike) -> Float32:
    """`x` rounded to bfloat16 (nearest even), as float32. A subnormal reads as zero; NaN stays NaN."""
    x = flush(x)
    bits = x.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    return np.where(np.isnan(x), np.float32(np.nan), rounded)


def exp32(x: npt.ArrayLike) -> Float32:
    """e^x for x <= 88, relative error about 1e-7; +0 below -87.33 (Cephes expf's reduction and polynomial)."""
    x = flush(x)
    clamped = np.maximum(_EXP_LOW, x)  # NaN propagates
    n = sub32(add32(mul32(clamped, np.float32(1.44269504)), _ROUNDER), _ROUNDER)
    r = fma32(n, np.float32(-0.693359375), clamped)
    r = fma32(n, np.float32(2.12194440e-4), r)
    p = np.full_like(r, np.float32(_EXP_COEFFICIENTS[0]))
    for coefficient in _EXP_COEFFICIENTS[1:]:
        p = fma32(p, r, np.float32(coefficient))
    p = fma32(p, mul32(r, r), add32(r, np.float32(1)))
    exponent = np.where(np.isnan(n), 0, n).astype(np.int64)
    power = ((exponent + 127) << 23).astype(np.uint32).view(np.float32)
    return np.where(x < _EXP_LOW, np.float32(0), mul32(p, power))


def log64(x: npt.ArrayLike) -> Float64:
    """Natural logarithm of a positive normal float64: 2 * atanh series of degree 10 after reduction to sqrt(1/2)..."""
    half_to_one, exponent = np.frexp(np.asarray(x, dtype=np.float64))
    mantissa = half_to_one * 2.0
    large = mantissa >= 1.4142135623730951
    f = np.where(large, half_to_one, mantissa)
    e = np.where(large, exponent, exponent - 1).astype(np.float64)
    s = (f - 1.0) / (f + 1.0)
    z = s * s
    series = np.full_like(z, 1.0 / 21.0)
    for k in range(9, -1, -1):
        series = series * z + 1.0 / (2 * k + 1)
    return np.asarray(e * 0.6931471805599453 + (2.0 * s) * series)


def mix64(z: UInt64) -> UInt64:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014), modulo 2^64."""
    with np.errstate(over="ignore"):
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def gumbel(seed: int, position: int, tokens: npt.ArrayLike) -> Float64:
    """Standard Gumbel noise of each token id at an absolute position: a function of (seed, position, id) alone."""
    with np.errstate(over="ignore"):
        key = mix64(np.array([seed], np.uint64) + np.uint64(GOLDEN))
        key = mix64(key + np.array([position], np.uint64) * np.uint64(GOLDEN))
        h = mix64(key + (np.asarray(tokens, dtype=np.uint64) + np.uint64(1)) * np.uint64(GOLDEN))
    u = ((h >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return -log64(-log64(u))
