"""Pieces of the Gluon kernel of MLA that know one tensor at a time: a softmax step, NaN in unused places, folding.

They know no item, barrier or page table. Invariant: a maximum is exact in any order, everything else is elementwise or
moves elements without touching them, so nothing here depends on how a tensor lies in registers.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from isobit.kernels.triton.attention_wgmma import weigh

__all__ = ["clear_unseen", "flat", "softmax", "tall"]


@gluon.jit
def softmax(s, m, first_key, scale, limits, open_end, S: gl.constexpr):
    """(m', alpha, p) of a block whose rows see keys up to `limits`; all rows see the keys before `open_end`."""
    if first_key + s.shape[1] > open_end:
        keys = first_key + gl.arange(0, s.shape[1], gl.SliceLayout(0, S))
        s = gl.where(gl.expand_dims(keys, 0) <= gl.expand_dims(limits, 1), s, float("-inf"))
    return weigh(s, gl.max(s, 1), m, scale, True)


@gluon.jit
def clear_unseen(values, seen):
    """Zero the value rows from `seen` on: the cache may hold NaN there, and 0 * NaN is not 0."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, values.shape[0], gl.SliceLayout(1, layout))
    COLUMNS: gl.constexpr = values.shape[1]
    for column in gl.static_range(0, COLUMNS, 64):
        part = values.slice(column, 64, 1)
        x = part.load(layout)
        part.store(gl.where(gl.expand_dims(row < seen, 1), x, gl.zeros_like(x)))
    fence_async_shared()


@gluon.jit
def flat(o):
    """[64, N] of an accumulator as a vector, in the order in which its threads hold it: 16 bytes each, side by side.

    Registers hold columns c, c + 1 of rows r and r + 8, lanes 4 pairs of columns of 8 rows, warps 16 rows.
    """
    N: gl.constexpr = o.shape[1]
    o = gl.permute(gl.reshape(o, [4, 2, 8, N // 8, 4, 2]), [0, 3, 2, 4, 1, 5])
    return gl.reshape(o, [64 * N])


@gluon.jit
def tall(x, layout: gl.constexpr):
    """The inverse of `flat`."""
    N: gl.constexpr = x.shape[0] // 64
    x = gl.permute(gl.reshape(x, [4, N // 8, 8, 4, 2, 2]), [0, 4, 2, 1, 3, 5])
    return gl.convert_layout(gl.reshape(x, [64, N]), layout, assert_trivial=True)
