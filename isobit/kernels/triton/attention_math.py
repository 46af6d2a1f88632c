"""The arithmetic of `MmaAttentionOrder` that every attention kernel of this package shares: one block, one merge.

Knows tensors of scores and of partial results; knows no pages, requests or tiles. Invariant: nothing here depends on
how a tensor lies in registers. A maximum is exact in any order, and a sum is only ever a tree of pairs, whose two
operands may swap but not regroup; so tiles of any height and any number of warps give the same bits. `weigh` is the
one text of the exponents for all kernels, those in Gluon included.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

import math

import numpy as np
import triton
import triton.language as tl

__all__ = ["attend_block", "exponent_scale", "merge_splits", "row_sum", "weigh"]


def exponent_scale(scale: float) -> float:
    """scale * log2 e as the kernels take it. Raises ValueError for a scale under which the largest product of a row
    does not have the largest weight."""
    with np.errstate(over="ignore", under="ignore"):
        c = float(np.float32(scale * math.log2(math.e)))
    if not 0 < c < math.inf:
        raise ValueError(f"attention on sm90 takes a scale above 0 that float32 can hold, got scale={scale}")
    return c


@triton.jit
def row_sum(p):
    """Sum of the columns of p by halves: j with j + N/2, ... down to 8 columns, then neighbours, then j + 4, j + 2.

    # REDUCTION ORDER: see MmaAttentionOrder
    Columns 32, 16, 8 and 1 apart lie in one thread of a tensor-core accumulator, those 4 and 2 apart in two lanes:
    reduced last, when one value per lane is left. A reduction over an axis of two is one commutative addition.
    """
    rows: tl.constexpr = p.shape[0]
    if p.shape[1] == 128:
        p = tl.sum(tl.reshape(p, (rows, 2, 64)), 1)
    p = tl.sum(tl.reshape(p, (rows, 2, 32)), 1)
    p = tl.sum(tl.reshape(p, (rows, 2, 16)), 1)
    p = tl.sum(tl.reshape(p, (rows, 2, 8)), 1)
    p = tl.sum(tl.reshape(p, (rows, 4, 2)), 2)
    p = tl.sum(tl.reshape(p, (rows, 2, 2)), 1)
    return tl.sum(p, 1)


@triton.jit
def weigh(s, top, m, scale, GUARDED: tl.constexpr):
    """(m', alpha, p) after a block of products s with row maxima `top`; scale > 0 is that of `exponent_scale`.

    m' is rounded before it is used: p and alpha mean the same reference point. So alpha is exactly 1 where the maximum
    stays, and a block of which a row sees nothing leaves its (l, o) as they were, whatever tile the row is in; an FMA
    of the unscaled maximum would leave the rounding error of m' in alpha. Guarded: a row that has seen no key of its
    split yet has m' = -inf; 0 stands in for it, so that nothing becomes NaN.
    """
    m_new = tl.maximum(m, top * scale)
    shift = m_new
    if GUARDED:
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = tl.exp2(m - shift)
    minus = shift * -1.0  # the sign of an operand, so free; a unary minus is compiled as 0 - x
    return m_new, alpha, tl.exp2(tl.fma(s, scale, tl.expand_dims(minus, 1)))


@triton.jit
def attend_block(q, k, v, m, l, o, scale, limits, first_key, MASKED: tl.constexpr):
    """One block of keys: the next (m, l, o). `limits` are the rows' own positions; `first_key` is the block's."""
    s = tl.dot(q, tl.trans(k))
    if MASKED:
        keys = first_key + tl.arange(0, k.shape[0])
        s = tl.where(keys[None, :] <= limits[:, None], s, float("-inf"))
    m, alpha, p = weigh(s, tl.max(s, 1), m, scale, MASKED)
    l = l * alpha + row_sum(p)
    o = tl.dot(p.to(v.dtype), v, o * alpha[:, None])
    return m, l, o


@triton.jit
def merge_splits(m_left, l_left, o_left, m, l, o):
    """(left) merged with the split after it; a split of which a row sees nothing (m = -inf) leaves it as it was."""
    m_new = tl.maximum(m_left, m)
    alpha = tl.exp2(m_left - m_new)
    beta = tl.exp2(m - m_new)
    return m_new, l_left * alpha + l * beta, o_left * tl.expand_dims(alpha, -1) + o * tl.expand_dims(beta, -1)
