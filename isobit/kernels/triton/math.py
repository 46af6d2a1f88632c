"""exp32, log64 and the sampler's noise inside Triton kernels: byte for byte those of `kernels/reference/math.py`.

Multiplications, additions, fma, IEEE division and integer bit moves only: no library's `exp` or `log` can move a bit.
Kernels that use them must be launched with `enable_fp_fusion=False`. Knows no tensors' shapes. Invariant: equal to the
reference on everything but subnormals, which this device class keeps and the CPU's flushes to zero.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["add_halves", "exp32", "gumbel", "log64", "noise_key", "sortable"]

GOLDEN: tl.constexpr = tl.constexpr(0x9E3779B97F4A7C15)
MIX_1: tl.constexpr = tl.constexpr(0xBF58476D1CE4E5B9)
MIX_2: tl.constexpr = tl.constexpr(0x94D049BB133111EB)
ROUNDER: tl.constexpr = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding and subtracting it rounds to a whole number


@triton.constexpr_function
def _log2(n):
    return n.bit_length() - 1


@triton.jit
def add_halves(lanes, ROWS: tl.constexpr, LANES: tl.constexpr):
    """lanes [ROWS, LANES] -> [ROWS]: a[i] += a[i + LANES/2], then a quarter, ...

    Every sum is over an axis of two, so where its operands lie (registers, lanes, warps) cannot matter.
    """
    for step in tl.static_range(_log2(LANES)):  # REDUCTION ORDER: see NormOrder
        lanes = tl.sum(tl.reshape(lanes, [ROWS, 2, LANES >> (step + 1)]), axis=1)
    return tl.reshape(lanes, [ROWS])


@triton.jit
def exp32(x):
    """e^x for float32 x <= 88; +0 below -87.33."""
    clamped = tl.maximum(x, -87.33, propagate_nan=tl.PropagateNan.ALL)
    shifted = clamped * 1.44269504 + ROUNDER
    n = shifted - ROUNDER
    r = tl.fma(n, -0.693359375, clamped)
    r = tl.fma(n, 2.12194440e-4, r)
    p = tl.fma(r, 1.9875691500e-4, 1.3981999507e-3)
    p = tl.fma(p, r, 8.3334519073e-3)
    p = tl.fma(p, r, 4.1665795894e-2)
    p = tl.fma(p, r, 1.6666665459e-1)
    p = tl.fma(p, r, 5.0000001201e-1)
    p = tl.fma(p, r * r, r + 1.0)
    # The low bits of `shifted` are n: moved to the exponent, what stood above them falls out.
    power = ((shifted.to(tl.int32, bitcast=True) << 23) + 0x3F800000).to(tl.float32, bitcast=True)
    return tl.where(x < -87.33, 0.0, p * power)


@triton.jit
def log64(x):
    """Natural logarithm of a positive normal float64; NaN of NaN."""
    bits = x.to(tl.int64, bitcast=True)
    fraction = bits & 0xFFFFFFFFFFFFF
    large = fraction >= 0x6A09E667F3BCD  # the mantissa is sqrt(2) or more: halve it
    f = (fraction | tl.where(large, 0x3FE0000000000000, 0x3FF0000000000000)).to(tl.float64, bitcast=True)
    e = ((bits >> 52) - tl.where(large, 1022, 1023)).to(tl.int32).to(tl.float64)
    s = (f - 1.0) / (f + 1.0)
    z = s * s
    series = z * (1.0 / 21.0) + (1.0 / 19.0)
    series = series * z + (1.0 / 17.0)
    series = series * z + (1.0 / 15.0)
    series = series * z + (1.0 / 13.0)
    series = series * z + (1.0 / 11.0)
    series = series * z + (1.0 / 9.0)
    series = series * z + (1.0 / 7.0)
    series = series * z + (1.0 / 5.0)
    series = series * z + (1.0 / 3.0)
    series = series * z + 1.0
    return tl.where(x == x, e * 0.6931471805599453 + (2.0 * s) * series, x)


@triton.jit
def _mix64(z):
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014)."""
    z = (z ^ (z >> 30)) * MIX_1
    z = (z ^ (z >> 27)) * MIX_2
    return z ^ (z >> 31)


@triton.jit
def noise_key(seed, position):
    """uint64 key of (seed, absolute position), both uint64."""
    return _mix64(_mix64(seed + GOLDEN) + position * GOLDEN)


@triton.jit
def gumbel(key, ids):
    """Standard Gumbel noise, float64, of token ids (int32) under a `noise_key`."""
    word = _mix64(key + (ids.to(tl.uint64) + 1) * GOLDEN)
    # u = (upper 52 bits + 1/2) / 2^52; or-ing in the exponent of 2^52 makes an integer a float64 without a conversion
    u = ((word >> 12) | 0x4330000000000000).to(tl.float64, bitcast=True)
    u = (u - 4503599627370496.0 + 0.5) * 2.220446049250313e-16
    return -log64(-log64(u))


@triton.jit
def sortable(x):
    """int32 that sort as float32 values do: -0 equals +0, NaN is below -inf and has one form.

    The least int32 is left free, for what is not there.
    """
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), -2147483647)
