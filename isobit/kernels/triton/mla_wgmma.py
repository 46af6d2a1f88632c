"""Absorbed MLA on sm90, in Gluon: three warpgroups and one fetching warp share a tile of 64 rows; persistent programs.

The accumulator [64, latent] is too tall for one warpgroup, so two hold half of the features each. A third computes
scores and p, a block ahead of them, so the tensor cores have work while a softmax is taken. A page in shared memory is
keys and values at once; p takes the place of its rope features, which are done with by then. A split that ends is
folded into float32 in global memory (one tile a program, so it stays in L2). Knows an item of `mla_plan`, nothing else
of the batch. Invariant: the bits of a row are those of `reference_mla`.
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

# Barriers by place; FULL and FREE of a page: + 2 * half + slot, the rope features come and go with half 1.
_FULL = gl.constexpr(0)
_FREE = gl.constexpr(4)
_P_FULL = gl.constexpr(8)  # + slot
_Q_FULL = gl.constexpr(10)
_Q_FREE = gl.constexpr(11)
_FOLD_FULL = gl.constexpr(12)
_FOLD_FREE = gl.constexpr(13)
_NUM_BARRIERS = gl.constexpr(14)

# Rows of `stats`: alpha of the block in each slot; what a finished split is folded with.
_ALPHA = gl.constexpr(0)
_FOLD_LEFT = gl.constexpr(2)
_FOLD_RIGHT = gl.constexpr(3)
_FOLD_SUM = gl.constexpr(4)


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
    """The warp that brings q tiles and pages, each as soon as its slot is free."""
    items, programs, query_starts, start_positions, page_tables, table_width, num_heads = batch
    q_left, q_right, q_tail = q_buffers
    k_left, k_right, k_tail = k_buffers
    HALF: gl.constexpr = k_left.shape[2]
    ROPE: gl.constexpr = k_tail.shape[2]
    fill = 0
    begin = gl.load(programs + gl.program_id(0))
    for index in range(begin, gl.load(programs + gl.program_id(0) + 1)):
        request, q_row, first_row, _, _, first, end, _ = _item(
            items, query_starts, start_positions, index, num_heads, per_split, PAGE)  # fmt: skip
        table = page_tables + request.to(gl.int64) * table_width
        page = gl.load(table + first)
        mbarrier.wait(barriers.index(_Q_FREE), ((index - begin) & 1) ^ 1)
        full = barriers.index(_Q_FULL)
        mbarrier.expect(full, 64 * (2 * HALF + ROPE) * 2)
        tma.async_copy_global_to_shared(q_half, [q_row + first_row, 0], full, q_left)
        tma.async_copy_global_to_shared(q_half, [q_row + first_row, HALF], full, q_right)
        tma.async_copy_global_to_shared(q_rope, [q_row + first_row, 2 * HALF], full, q_tail)
        for block in range(first, end):
            slot = fill & 1
            phase = ((fill >> 1) & 1) ^ 1
            row = page * PAGE
            page = gl.load(table + gl.minimum(block + 1, end - 1))
            mbarrier.wait(barriers.index(_FREE + slot), phase)
            full = barriers.index(_FULL + slot)
            mbarrier.expect(full, PAGE * HALF * 2)
            tma.async_copy_global_to_shared(page_half, [row, 0], full, k_left.index(slot))
            mbarrier.wait(barriers.index(_FREE + 2 + slot), phase)
            full = barriers.index(_FULL + 2 + slot)
            mbarrier.expect(full, PAGE * (HALF + ROPE) * 2)
            tma.async_copy_global_to_shared(page_half, [row, HALF], full, k_right.index(slot))
            tma.async_copy_global_to_shared(page_rope, [row, 2 * HALF], full, k_tail.index(slot))
            fill += 1


@gluon.jit
def _scores(q_buffers, k_buffers, barriers, slot, phase, S: gl.constexpr):
    """q @ k of the page in a slot, one accumulator: latent features ascending, then rope."""
    q_left, q_right, q_tail = q_buffers
    k_left, k_right, k_tail = k_buffers
    KEYS: gl.constexpr = k_left.shape[1]
    s = gl.zeros([64, KEYS], gl.float32, S)
    mbarrier.wait(barriers.index(_FULL + slot), phase)
    s = warpgroup_mma(q_left, k_left.index(slot).permute((1, 0)), s, use_acc=False, is_async=True)
    mbarrier.wait(barriers.index(_FULL + 2 + slot), phase)
    s = warpgroup_mma(q_right, k_right.index(slot).permute((1, 0)), s, is_async=True)
    s = warpgroup_mma(q_tail, k_tail.index(slot).permute((1, 0)), s, is_async=True)
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
def _weigh(batch, partial_ml, scale, q_buffers, k_buffers, barriers, stats, ones, per_split, PAGE: gl.constexpr):
    """The warpgroup of scores: p and alpha of every block, and with what each split is folded."""
    items, programs, query_starts, start_positions, _, _, num_heads = batch
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PAGE, 16])
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    V: gl.constexpr = gl.SliceLayout(1, S)
    k_tail = k_buffers[2]
    fill = 0
    splits = 0
    begin = gl.load(programs + gl.program_id(0))
    for index in range(begin, gl.load(programs + gl.program_id(0) + 1)):
        _, _, first_row, rows, position, first, end, partial = _item(
            items, query_starts, start_positions, index, num_heads, per_split, PAGE)  # fmt: skip
        row = first_row + gl.arange(0, 64, V)
        limits = position + gl.minimum(row, rows - 1) // num_heads
        open_end = position + first_row // num_heads + 1
        m_left = gl.full([64], float("-inf"), gl.float32, V)
        l_left = gl.zeros([64], gl.float32, V)
        mbarrier.wait(barriers.index(_Q_FULL), (index - begin) & 1)
        # REDUCTION ORDER: see MmaAttentionOrder
        for start in range(first, end, per_split):
            m = gl.full([64], float("-inf"), gl.float32, V)
            l8 = gl.zeros([64, 8], gl.float32, L)
            # REDUCTION ORDER: see MmaAttentionOrder
            for block in range(start, gl.minimum(start + per_split, end)):
                slot = fill & 1
                s = _scores(q_buffers, k_buffers, barriers, slot, (fill >> 1) & 1, S)
                m, alpha, p = _softmax(s, m, block * PAGE, scale, limits, open_end, S)
                p = p.to(k_tail.dtype)
                k_tail.index(slot).store(p)
                stats.index(_ALPHA + slot).store(alpha)
                fence_async_shared()
                mbarrier.arrive(barriers.index(_P_FULL + slot), count=1)
                l8 = l8 * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, L)), 1)
                p = gl.convert_layout(p, gl.DotOperandLayout(0, L, 2))
                l8 = warpgroup_mma_wait(0, [warpgroup_mma(p, ones, l8, is_async=True)])
                fill += 1
            l = gl.convert_layout(gl.max(l8, 1), V)  # the columns of l8 are equal
            m_new = gl.maximum(m_left, m)
            alpha = gl.exp2(m_left - m_new)
            beta = gl.exp2(m - m_new)
            if start > first:
                l_left = l_left * alpha + l * beta
                m_left = m_new
            else:
                l_left = l
                m_left = m
            mbarrier.wait(barriers.index(_FOLD_FREE), (splits & 1) ^ 1)
            stats.index(_FOLD_LEFT).store(alpha)
            stats.index(_FOLD_RIGHT).store(beta)
            stats.index(_FOLD_SUM).store(l_left)
            mbarrier.arrive(barriers.index(_FOLD_FULL), count=1)
            splits += 1
        mbarrier.arrive(barriers.index(_Q_FREE), count=1)
        if partial >= 0:
            slot = partial + gl.arange(0, 64, V)
            gl.store(partial_ml + 2 * slot, m_left, mask=row < rows)
            gl.store(partial_ml + 2 * slot + 1, l_left, mask=row < rows)


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
def _accumulate(o, k_half, k_tail, stats, barriers, slot, seen, WHO: gl.constexpr):
    """o after the block in a slot: p of the scores' warpgroup times this one's half of the values."""
    values = k_half.index(slot)
    W: gl.constexpr = gl.SliceLayout(1, o.type.layout)
    if seen < values.shape[0]:
        _clear_unseen(values, seen)
    o = o * gl.expand_dims(stats.index(_ALPHA + slot).load(W), 1)
    o = warpgroup_mma_wait(0, [warpgroup_mma(k_tail.index(slot), values, o, is_async=True)])
    mbarrier.arrive(barriers.index(_FREE + 2 * WHO + slot), count=1)
    return o


@gluon.jit
def _accumulate_item(item, fold, k_half, k_tail, barriers, stats, fill, splits, per_split,
                     WHO: gl.constexpr, PAGE: gl.constexpr, O: gl.constexpr):  # fmt: skip
    """(o, row sums, fill, splits) of the blocks of an item, its splits folded left to right."""
    first, end, end_key = item
    HALF: gl.constexpr = k_half.shape[2]
    W: gl.constexpr = gl.SliceLayout(1, O)
    o = gl.zeros([64, HALF], gl.float32, O)
    l = gl.zeros([64], gl.float32, W)
    # REDUCTION ORDER: see MmaAttentionOrder
    for start in range(first, end, per_split):
        stop = gl.minimum(start + per_split, end)
        o = gl.zeros([64, HALF], gl.float32, O)
        # REDUCTION ORDER: see MmaAttentionOrder
        for block in range(start, stop):
            slot = fill & 1
            phase = (fill >> 1) & 1
            mbarrier.wait(barriers.index(_FULL + 2 * WHO + slot), phase)
            mbarrier.wait(barriers.index(_P_FULL + slot), phase)
            o = _accumulate(o, k_half, k_tail, stats, barriers, slot, end_key - block * PAGE, WHO)
            fill += 1
        mbarrier.wait(barriers.index(_FOLD_FULL), splits & 1)
        alpha = gl.expand_dims(stats.index(_FOLD_LEFT).load(W), 1)
        beta = gl.expand_dims(stats.index(_FOLD_RIGHT).load(W), 1)
        l = stats.index(_FOLD_SUM).load(W)
        mbarrier.arrive(barriers.index(_FOLD_FREE), count=1)
        splits += 1
        if start > first:
            o = _tall(gl.load(fold), O) * alpha + o * beta
        if stop < end:
            gl.store(fold, _flat(o))
    return o, l, fill, splits


@gluon.jit
def _attend(WHO: gl.constexpr, batch, outputs, k_half, k_tail, barriers, stats, per_split, PAGE: gl.constexpr):
    """A warpgroup of values, half WHO of the features of every item of the program."""
    items, programs, query_starts, start_positions, _, _, num_heads = batch
    out, folded, partial_o = outputs
    HALF: gl.constexpr = k_half.shape[2]
    COLUMNS: gl.constexpr = 128 if HALF > 128 else HALF  # with 512 threads ptxas takes no instruction of 256
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    column = gl.expand_dims(WHO * HALF + gl.arange(0, HALF, gl.SliceLayout(0, O)), 0)
    tile_row = gl.arange(0, 64, gl.SliceLayout(1, O))
    FLAT: gl.constexpr = _flat(gl.zeros([64, HALF], gl.float32, O)).type.layout
    fold = folded + (2 * gl.program_id(0) + WHO) * (64 * HALF) + gl.arange(0, 64 * HALF, FLAT)
    fill = 0
    splits = 0
    begin = gl.load(programs + gl.program_id(0))
    for index in range(begin, gl.load(programs + gl.program_id(0) + 1)):
        _, q_row, first_row, rows, position, first, end, partial = _item(
            items, query_starts, start_positions, index, num_heads, per_split, PAGE)  # fmt: skip
        end_key = position + (gl.minimum(first_row + 64, rows) - 1) // num_heads + 1
        o, l, fill, splits = _accumulate_item((first, end, end_key), fold, k_half, k_tail, barriers, stats, fill, splits,
                                              per_split, WHO, PAGE, O)  # fmt: skip
        row = first_row + tile_row
        valid = gl.expand_dims(row < rows, 1)
        if partial < 0:
            at = gl.expand_dims((q_row + row).to(gl.int64) * (2 * HALF), 1) + column
            o = gl.div_rn(o, gl.broadcast(gl.expand_dims(l, 1), o)[0])
            gl.store(out + at, o.to(out.dtype.element_ty), mask=valid)
        else:
            at = gl.expand_dims((partial + tile_row).to(gl.int64) * (2 * HALF), 1) + column
            gl.store(partial_o + at, o, mask=valid)


@gluon.jit(do_not_specialize=["table_width", "num_heads", "per_split"])
def wgmma_kernel(q_half, q_rope, page_half, page_rope, out, folded, partial_ml, partial_o, items, programs,
                 query_starts, start_positions, page_tables, table_width, num_heads, scale, per_split,
                 PAGE: gl.constexpr):  # fmt: skip
    """Program p attends the items programs[p] .. programs[p + 1] of `mla_plan`. Launched with four warps."""
    HALF: gl.constexpr = q_half.block_type.shape[1]
    ROPE: gl.constexpr = q_rope.block_type.shape[1]
    dtype: gl.constexpr = q_half.dtype
    q_left = gl.allocate_shared_memory(dtype, [64, HALF], q_half.layout)
    q_right = gl.allocate_shared_memory(dtype, [64, HALF], q_half.layout)
    q_tail = gl.allocate_shared_memory(dtype, [64, ROPE], q_rope.layout)
    k_left = gl.allocate_shared_memory(dtype, [2, PAGE, HALF], page_half.layout)
    k_right = gl.allocate_shared_memory(dtype, [2, PAGE, HALF], page_half.layout)
    k_tail = gl.allocate_shared_memory(dtype, [2, PAGE, ROPE], page_rope.layout)
    stats = gl.allocate_shared_memory(gl.float32, [5, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    fill_layout: gl.constexpr = gl.BlockedLayout([1, 8], [32, 1], [4, 1], [1, 0])
    ones_layout: gl.constexpr = gl.NVMMASharedLayout(0, 16, 2)
    ones = gl.allocate_shared_memory(dtype, [PAGE, 8], ones_layout, gl.full([PAGE, 8], 1.0, dtype, fill_layout))
    barriers = gl.allocate_shared_memory(gl.int64, [_NUM_BARRIERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(_NUM_BARRIERS):
        mbarrier.init(barriers.index(i), count=2 if i == _FOLD_FREE else 1)
    fence_async_shared()
    batch = (items, programs, query_starts, start_positions, page_tables, table_width, num_heads)
    outputs = (out, folded, partial_o)
    q_buffers = (q_left, q_right, q_tail)
    k_buffers = (k_left, k_right, k_tail)
    gl.warp_specialize([
        (_attend, (0, batch, outputs, k_left, k_tail, barriers, stats, per_split, PAGE)),
        (_attend, (1, batch, outputs, k_right, k_tail, barriers, stats, per_split, PAGE)),
        (_weigh, (batch, partial_ml, scale, q_buffers, k_buffers, barriers, stats, ones, per_split, PAGE)),
        (_fetch, (batch, q_half, q_rope, page_half, page_rope, q_buffers, k_buffers, barriers, per_split, PAGE)),
    ], [4, 4, 1], [184, 120, 24])  # fmt: skip
