"""Absorbed MLA on sm90, in Gluon: two warpgroups share a tile of 64 rows, one warp fetches pages; persistent programs.

The accumulator [64, latent] is too tall for one warpgroup, so each holds one half of the features. Blocks go in pairs:
warpgroup 0 computes scores and p of the even block, warpgroup 1 of the odd one, and each multiplies both p with its
half of the values. A page in shared memory is keys and values at once; p takes the place of its rope features, which
are done with by then. A split that ends is folded into float32 in global memory (of the program, so it stays in L2).
Knows an item of `mla_plan`, nothing else of the batch. Invariant: the bits of a row are those of `reference_mla`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

__all__ = ["wgmma_kernel"]

# Barriers, by place: what a page's left half, its right half with rope, p, and q wait for.
_LEFT_FULL = gl.constexpr(0)
_RIGHT_FULL = gl.constexpr(2)
_LEFT_FREE = gl.constexpr(4)
_RIGHT_FREE = gl.constexpr(6)
_P_FULL = gl.constexpr(8)
_Q_FULL = gl.constexpr(10)
_Q_FREE = gl.constexpr(11)
_NUM_BARRIERS = gl.constexpr(12)


@gluon.jit
def _item(items, query_starts, start_positions, index, num_heads, per_split, PAGE: gl.constexpr):
    """(request, row of q, first row, rows, start position, first block, end block, partial) of an item."""
    item = items + 6 * index
    request = gl.load(item)
    first_row = gl.load(item + 1)
    start = gl.load(query_starts + request)
    rows = (gl.load(query_starts + request + 1) - start) * num_heads
    position = gl.load(start_positions + request)
    last = position + (gl.minimum(first_row + 64, rows) - 1) // num_heads
    first_block = gl.load(item + 2) * per_split
    end_block = gl.minimum(gl.load(item + 3) * per_split, last // PAGE + 1)
    return request, start * num_heads, first_row, rows, position, first_block, end_block, gl.load(item + 4)


@gluon.jit
def _fetch(batch, q_half, q_rope, page_half, page_rope, q_buffers, k_buffers, barriers,
           per_split, PAGE: gl.constexpr):  # fmt: skip
    """The warp that brings q tiles and pages, each as soon as its place is free."""
    items, programs, query_starts, start_positions, page_tables, table_width, num_heads = batch
    q_left, q_right, q_tail = q_buffers
    k_left, k_right, k_tail = k_buffers
    HALF: gl.constexpr = k_left.shape[2]
    ROPE: gl.constexpr = k_tail.shape[2]
    fills = 0  # of place 0
    odd_fills = 0  # of place 1, which an item with an odd number of blocks leaves out at its end
    begin = gl.load(programs + gl.program_id(0))
    for index in range(begin, gl.load(programs + gl.program_id(0) + 1)):
        request, q_row, first_row, _, _, first, end, _ = _item(
            items, query_starts, start_positions, index, num_heads, per_split, PAGE)  # fmt: skip
        table = page_tables + request.to(gl.int64) * table_width
        page = gl.load(table + first)
        mbarrier.wait(barriers.index(_Q_FREE), ((index - begin) & 1) ^ 1)
        full = barriers.index(_Q_FULL)
        mbarrier.expect(full, 64 * (2 * HALF + ROPE) * 2)
        tma.async_copy_global_to_shared(q_half, [q_row + first_row, 0], full, q_left.index(0))
        tma.async_copy_global_to_shared(q_half, [q_row + first_row, HALF], full, q_right.index(0))
        tma.async_copy_global_to_shared(q_rope, [q_row + first_row, 2 * HALF], full, q_tail.index(0))
        for block in range(first, end):
            place = (block - first) & 1
            fill = gl.where(place == 0, fills, odd_fills)
            phase = (fill & 1) ^ 1
            row = page * PAGE
            page = gl.load(table + gl.minimum(block + 1, end - 1))
            mbarrier.wait(barriers.index(_LEFT_FREE + place), phase)
            full = barriers.index(_LEFT_FULL + place)
            mbarrier.expect(full, PAGE * HALF * 2)
            tma.async_copy_global_to_shared(page_half, [row, 0], full, k_left.index(place))
            mbarrier.wait(barriers.index(_RIGHT_FREE + place), phase)
            full = barriers.index(_RIGHT_FULL + place)
            mbarrier.expect(full, PAGE * (HALF + ROPE) * 2)
            tma.async_copy_global_to_shared(page_half, [row, HALF], full, k_right.index(place))
            tma.async_copy_global_to_shared(page_rope, [row, 2 * HALF], full, k_tail.index(place))
            fills += 1 - place
            odd_fills += place


@gluon.jit
def _scores(q_buffers, k_buffers, barriers, WHO: gl.constexpr, phase, zero, S: gl.constexpr):
    """q @ k of the page in place WHO, one accumulator: latent features ascending, then rope."""
    q_left, q_right, q_tail = q_buffers
    k_left, k_right, k_tail = k_buffers
    KEYS: gl.constexpr = k_left.shape[1]
    s = gl.zeros([64, KEYS], gl.float32, S)
    mbarrier.wait(barriers.index(_LEFT_FULL + WHO), phase)
    s = warpgroup_mma(q_left.index(zero), k_left.index(WHO + zero).permute((1, 0)), s, use_acc=False, is_async=True)
    mbarrier.wait(barriers.index(_RIGHT_FULL + WHO), phase)
    s = warpgroup_mma(q_right.index(zero), k_right.index(WHO + zero).permute((1, 0)), s, is_async=True)
    s = warpgroup_mma(q_tail.index(zero), k_tail.index(WHO + zero).permute((1, 0)), s, is_async=True)
    return warpgroup_mma_wait(0, [s])


@gluon.jit
def _softmax(s, m, first_key, scale, limits, open_end, S: gl.constexpr):
    """(m', alpha, p) of a block whose rows see keys up to `limits`; all rows see the keys before `open_end`."""
    s = s * scale
    if first_key + s.shape[1] > open_end:
        keys = first_key + gl.arange(0, s.shape[1], gl.SliceLayout(0, S))
        s = gl.where(gl.expand_dims(keys, 0) <= gl.expand_dims(limits, 1), s, float("-inf"))
    m_new = gl.maximum(m, gl.max(s, 1))
    shift = gl.where(m_new == float("-inf"), 0.0, m_new)
    return m_new, gl.exp2(m - shift), gl.exp2(s - gl.expand_dims(shift, 1))


@gluon.jit
def _publish(p, m, alpha, k_tail, stats, barriers, WHO: gl.constexpr):
    """p (over the rope features of its page), m and alpha of block WHO, for both warpgroups."""
    k_tail.index(WHO).store(p.to(k_tail.dtype))
    stats.index(WHO).store(m)
    stats.index(2 + WHO).store(alpha)
    fence_async_shared()
    mbarrier.arrive(barriers.index(_P_FULL + WHO), count=1)


@gluon.jit
def _clear_unseen(values, seen):
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
def _accumulate(alpha, l, o, k_tail, k_half, ones, seen, place):
    """(l, o), still being computed: the row sum and this warpgroup's half of the values."""
    values = k_half.index(place)
    if seen < values.shape[0]:
        _clear_unseen(values, seen)
    L: gl.constexpr = l.type.layout
    O: gl.constexpr = o.type.layout
    l = l * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, L)), 1)
    o = o * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, O)), 1)
    p = k_tail.index(place)
    l = warpgroup_mma(p, ones, l, is_async=True)
    o = warpgroup_mma(p, values, o, is_async=True)
    return l, o


@gluon.jit
def _pair_even(q_buffers, k_buffers, barriers, stats, ones, m, l, o, first_key, scale, limits, open_end, end_key,
               uses, odd_uses, BOTH: gl.constexpr, S: gl.constexpr):  # fmt: skip
    """Warpgroup 0: block 0's p, then both blocks on the left half."""
    k_left, _, k_tail = k_buffers
    V: gl.constexpr = gl.SliceLayout(1, S)
    s = _scores(q_buffers, k_buffers, barriers, 0, uses & 1, uses >> 30, S)
    m, alpha, p = _softmax(s, m, first_key, scale, limits, open_end, S)
    _publish(p, m, alpha, k_tail, stats, barriers, 0)
    l, o = _accumulate(alpha, l, o, k_tail, k_left, ones, end_key - first_key, uses >> 30)
    l, o = warpgroup_mma_wait(0, [l, o])
    mbarrier.arrive(barriers.index(_LEFT_FREE), count=1)
    if BOTH:
        mbarrier.wait(barriers.index(_P_FULL + 1), odd_uses & 1)
        m = stats.index(1).load(V)
        alpha = stats.index(3).load(V)
        l, o = _accumulate(alpha, l, o, k_tail, k_left, ones, end_key - first_key - 64, 1 + (odd_uses >> 30))
        l, o = warpgroup_mma_wait(0, [l, o])
        mbarrier.arrive(barriers.index(_LEFT_FREE + 1), count=1)
    return m, l, o


@gluon.jit
def _pair_odd(q_buffers, k_buffers, barriers, stats, ones, m, l, o, first_key, scale, limits, open_end, end_key,
              uses, odd_uses, BOTH: gl.constexpr, S: gl.constexpr):  # fmt: skip
    """Warpgroup 1: block 1's p, and both blocks on the right half."""
    _, k_right, k_tail = k_buffers
    V: gl.constexpr = gl.SliceLayout(1, S)
    mbarrier.wait(barriers.index(_P_FULL), uses & 1)
    m = stats.index(0).load(V)
    alpha = stats.index(2).load(V)
    # before this warpgroup's own scores: page 1 is still on its way then, and page 0 is free the sooner
    l, o = _accumulate(alpha, l, o, k_tail, k_right, ones, end_key - first_key, uses >> 30)
    l, o = warpgroup_mma_wait(0, [l, o])
    mbarrier.arrive(barriers.index(_RIGHT_FREE), count=1)
    if BOTH:
        s = _scores(q_buffers, k_buffers, barriers, 1, odd_uses & 1, odd_uses >> 30, S)
        m, alpha, p = _softmax(s, m, first_key + 64, scale, limits, open_end, S)
        _publish(p, m, alpha, k_tail, stats, barriers, 1)
        l, o = _accumulate(alpha, l, o, k_tail, k_right, ones, end_key - first_key - 64, 1 + (odd_uses >> 30))
        l, o = warpgroup_mma_wait(0, [l, o])
        mbarrier.arrive(barriers.index(_RIGHT_FREE + 1), count=1)
    return m, l, o


@gluon.jit
def _flat(o):
    """[64, N] of an accumulator as a vector, in the order in which its threads hold it: 16 bytes each, side by side.

    Registers hold columns c, c + 1 of rows r and r + 8, lanes 4 pairs of columns of 8 rows, warps 16 rows.
    """
    N: gl.constexpr = o.shape[1]
    o = gl.permute(gl.reshape(o, [4, 2, 8, N // 8, 4, 2]), [0, 3, 2, 4, 1, 5])
    return gl.reshape(o, [64 * N])


@gluon.jit
def _tall(x, layout: gl.constexpr):
    """The inverse of `_flat`."""
    N: gl.constexpr = x.shape[0] // 64
    x = gl.permute(gl.reshape(x, [4, N // 8, 8, 4, 2, 2]), [0, 4, 2, 1, 3, 5])
    return gl.convert_layout(gl.reshape(x, [64, N]), layout, assert_trivial=True)


@gluon.jit
def _attend(WHO: gl.constexpr, batch, outputs, scale, q_buffers, k_buffers, barriers, stats, ones,
            per_split, PAGE: gl.constexpr):  # fmt: skip
    """Warpgroup WHO: its half of the features of every item of the program."""
    items, programs, query_starts, start_positions, _, _, num_heads = batch
    out, folded, partial_ml, partial_o = outputs
    HALF: gl.constexpr = k_buffers[0].shape[2]
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PAGE, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    V: gl.constexpr = gl.SliceLayout(1, S)
    W: gl.constexpr = gl.SliceLayout(1, O)
    column = WHO * HALF + gl.arange(0, HALF, gl.SliceLayout(0, O))
    tile_row = gl.arange(0, 64, W)
    FLAT: gl.constexpr = _flat(gl.zeros([64, HALF], gl.float32, O)).type.layout
    fold = folded + (2 * gl.program_id(0) + WHO) * (64 * HALF) + gl.arange(0, 64 * HALF, FLAT)
    uses = 0
    odd_uses = 0
    begin = gl.load(programs + gl.program_id(0))
    for index in range(begin, gl.load(programs + gl.program_id(0) + 1)):
        _, q_row, first_row, rows, position, first, end, partial = _item(
            items, query_starts, start_positions, index, num_heads, per_split, PAGE)  # fmt: skip
        limits = position + gl.minimum(first_row + gl.arange(0, 64, V), rows - 1) // num_heads
        open_end = position + first_row // num_heads + 1
        end_key = position + (gl.minimum(first_row + 64, rows) - 1) // num_heads + 1
        m_left = gl.full([64], float("-inf"), gl.float32, V)
        l_left = gl.zeros([64], gl.float32, V)
        o = gl.zeros([64, HALF], gl.float32, O)
        mbarrier.wait(barriers.index(_Q_FULL), (index - begin) & 1)
        # REDUCTION ORDER: see MmaAttentionOrder
        for start in range(first, end, per_split):
            stop = gl.minimum(start + per_split, end)
            m = gl.full([64], float("-inf"), gl.float32, V)
            l8 = gl.zeros([64, 8], gl.float32, L)
            o = gl.zeros([64, HALF], gl.float32, O)
            # REDUCTION ORDER: see MmaAttentionOrder
            for block in range(start, stop - 1, 2):
                if WHO == 0:
                    m, l8, o = _pair_even(q_buffers, k_buffers, barriers, stats, ones, m, l8, o, block * PAGE, scale,
                                          limits, open_end, end_key, uses, odd_uses, True, S)  # fmt: skip
                else:
                    m, l8, o = _pair_odd(q_buffers, k_buffers, barriers, stats, ones, m, l8, o, block * PAGE, scale,
                                         limits, open_end, end_key, uses, odd_uses, True, S)  # fmt: skip
                uses += 1
                odd_uses += 1
            if (stop - start) & 1 == 1:
                if WHO == 0:
                    m, l8, o = _pair_even(q_buffers, k_buffers, barriers, stats, ones, m, l8, o, (stop - 1) * PAGE,
                                          scale, limits, open_end, end_key, uses, odd_uses, False, S)  # fmt: skip
                else:
                    m, l8, o = _pair_odd(q_buffers, k_buffers, barriers, stats, ones, m, l8, o, (stop - 1) * PAGE,
                                         scale, limits, open_end, end_key, uses, odd_uses, False, S)  # fmt: skip
                uses += 1
            l = gl.convert_layout(gl.max(l8, 1), V)  # the columns of l8 are equal
            if start > first:
                m_new = gl.maximum(m_left, m)
                alpha = gl.exp2(m_left - m_new)
                beta = gl.exp2(m - m_new)
                l = l_left * alpha + l * beta
                m = m_new
                alpha = gl.expand_dims(gl.convert_layout(alpha, W), 1)
                beta = gl.expand_dims(gl.convert_layout(beta, W), 1)
                o = _tall(gl.load(fold), O) * alpha + o * beta
            m_left = m
            l_left = l
            if stop < end:
                gl.store(fold, _flat(o))
        mbarrier.arrive(barriers.index(_Q_FREE), count=1)
        row = first_row + tile_row
        valid = gl.expand_dims(row < rows, 1)
        if partial < 0:
            l = gl.expand_dims(gl.convert_layout(l_left, W), 1)
            at = gl.expand_dims((q_row + row).to(gl.int64) * (2 * HALF), 1) + gl.expand_dims(column, 0)
            o = gl.div_rn(o, gl.broadcast(l, o)[0])
            gl.store(out + at, o.to(out.dtype.element_ty), mask=valid)
        else:
            slot = partial + tile_row
            at = gl.expand_dims(slot.to(gl.int64) * (2 * HALF), 1) + gl.expand_dims(column, 0)
            gl.store(partial_o + at, o, mask=valid)
            if WHO == 0:
                slot = partial + gl.arange(0, 64, V)
                inside = first_row + gl.arange(0, 64, V) < rows
                gl.store(partial_ml + 2 * slot, m_left, mask=inside)
                gl.store(partial_ml + 2 * slot + 1, l_left, mask=inside)


@gluon.jit(do_not_specialize=["table_width", "num_heads", "per_split"])
def wgmma_kernel(q_half, q_rope, page_half, page_rope, out, folded, partial_ml, partial_o, items, programs,
                 query_starts, start_positions, page_tables, table_width, num_heads, scale, per_split,
                 PAGE: gl.constexpr):  # fmt: skip
    """Program p attends the items programs[p] .. programs[p + 1] of `mla_plan`. Four warps, and five more."""
    HALF: gl.constexpr = q_half.block_type.shape[1]
    ROPE: gl.constexpr = q_rope.block_type.shape[1]
    dtype: gl.constexpr = q_half.dtype
    q_left = gl.allocate_shared_memory(dtype, [1, 64, HALF], q_half.layout)
    q_right = gl.allocate_shared_memory(dtype, [1, 64, HALF], q_half.layout)
    q_tail = gl.allocate_shared_memory(dtype, [1, 64, ROPE], q_rope.layout)
    k_left = gl.allocate_shared_memory(dtype, [2, PAGE, HALF], page_half.layout)
    k_right = gl.allocate_shared_memory(dtype, [2, PAGE, HALF], page_half.layout)
    k_tail = gl.allocate_shared_memory(dtype, [2, PAGE, ROPE], page_rope.layout)
    stats = gl.allocate_shared_memory(gl.float32, [4, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    fill_layout: gl.constexpr = gl.BlockedLayout([1, 8], [32, 1], [4, 1], [1, 0])
    ones_layout: gl.constexpr = gl.NVMMASharedLayout(0, 16, 2)
    ones = gl.allocate_shared_memory(dtype, [PAGE, 8], ones_layout, gl.full([PAGE, 8], 1.0, dtype, fill_layout))
    barriers = gl.allocate_shared_memory(gl.int64, [_NUM_BARRIERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(_NUM_BARRIERS):
        mbarrier.init(barriers.index(i), count=2 if i == _Q_FREE else 1)
    fence_async_shared()
    batch = (items, programs, query_starts, start_positions, page_tables, table_width, num_heads)
    outputs = (out, folded, partial_ml, partial_o)
    q_buffers = (q_left, q_right, q_tail)
    k_buffers = (k_left, k_right, k_tail)
    gl.warp_specialize([
        (_attend, (0, batch, outputs, scale, q_buffers, k_buffers, barriers, stats, ones, per_split, PAGE)),
        (_attend, (1, batch, outputs, scale, q_buffers, k_buffers, barriers, stats, ones, per_split, PAGE)),
        (_fetch, (batch, q_half, q_rope, page_half, page_rope, q_buffers, k_buffers, barriers, per_split, PAGE)),
    ], [4, 1], [232, 40])  # fmt: skip
