"""Absorbed MLA on sm90, in Gluon: three warpgroups and one fetching warp share a tile of 64 rows; persistent programs.

The accumulator [64, latent] is too tall for one warpgroup, so two hold half of the features each. A third computes
scores and p, a block ahead of them, so the tensor cores have work while a softmax is taken. A page in shared memory is
keys and values at once; p takes the place of its rope features, which are done with by then. A split that ends is
folded into float32 in global memory (one tile a program, so it stays in L2). Knows an item of `mla_plan`, nothing else
of the batch. Invariant: the bits of a row are those of `reference_mla`.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from isobit.kernels.triton.mla_parts import clear_unseen, flat, softmax, tall

__all__ = ["wgmma_kernel"]

# Barriers by place; FULL and FREE of a page: + 2 * quarter + slot, the rope features come and go with quarter 3.
_FULL = gl.constexpr(0)
_FREE = gl.constexpr(8)
_P_FULL = gl.constexpr(16)  # + slot
_Q_FULL = gl.constexpr(18)
_Q_FREE = gl.constexpr(19)
_FOLD_FULL = gl.constexpr(20)
_FOLD_FREE = gl.constexpr(21)
_NUM_BARRIERS = gl.constexpr(22)

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
def _fetch(batch, q_quarter, q_rope, page_quarter, page_rope, q_buffers, k_buffers, barriers,
           per_split, PAGE: gl.constexpr):  # fmt: skip
    """The warp that brings q tiles and pages, each quarter as soon as its slot is free."""
    items, programs, query_starts, start_positions, page_tables, table_width, num_heads = batch
    QUARTER: gl.constexpr = k_buffers[0].shape[2]
    ROPE: gl.constexpr = k_buffers[4].shape[2]
    fill = 0
    begin = gl.load(programs + gl.program_id(0))
    for index in range(begin, gl.load(programs + gl.program_id(0) + 1)):
        request, q_row, first_row, _, _, first, end, _ = _item(
            items, query_starts, start_positions, index, num_heads, per_split, PAGE)  # fmt: skip
        table = page_tables + request.to(gl.int64) * table_width
        page = gl.load(table + first)
        mbarrier.wait(barriers.index(_Q_FREE), ((index - begin) & 1) ^ 1)
        full = barriers.index(_Q_FULL)
        mbarrier.expect(full, 64 * (4 * QUARTER + ROPE) * 2)
        for i in gl.static_range(4):
            tma.async_copy_global_to_shared(q_quarter, [q_row + first_row, i * QUARTER], full, q_buffers[i])
        tma.async_copy_global_to_shared(q_rope, [q_row + first_row, 4 * QUARTER], full, q_buffers[4])
        for block in range(first, end):
            slot = fill & 1
            phase = ((fill >> 1) & 1) ^ 1
            row = page * PAGE
            page = gl.load(table + gl.minimum(block + 1, end - 1))
            for i in gl.static_range(4):
                mbarrier.wait(barriers.index(_FREE + 2 * i + slot), phase)
                full = barriers.index(_FULL + 2 * i + slot)
                mbarrier.expect(full, PAGE * (QUARTER + (ROPE if i == 3 else 0)) * 2)
                tma.async_copy_global_to_shared(page_quarter, [row, i * QUARTER], full, k_buffers[i].index(slot))
                if i == 3:
                    tma.async_copy_global_to_shared(page_rope, [row, 4 * QUARTER], full, k_buffers[4].index(slot))
            fill += 1


@gluon.jit
def _scores(q_buffers, k_buffers, barriers, slot, phase, S: gl.constexpr):
    """q @ k of the page in a slot, one accumulator: latent features ascending, then rope."""
    KEYS: gl.constexpr = k_buffers[0].shape[1]
    s = gl.zeros([64, KEYS], gl.float32, S)
    for i in gl.static_range(4):
        mbarrier.wait(barriers.index(_FULL + 2 * i + slot), phase)
        s = warpgroup_mma(q_buffers[i], k_buffers[i].index(slot).permute((1, 0)), s, use_acc=i > 0, is_async=True)
    s = warpgroup_mma(q_buffers[4], k_buffers[4].index(slot).permute((1, 0)), s, is_async=True)
    return warpgroup_mma_wait(0, [s])


@gluon.jit
def _weigh(batch, partial_ml, scale, q_buffers, k_buffers, barriers, stats, ones, per_split, PAGE: gl.constexpr):
    """The warpgroup of scores: p and alpha of every block, and with what each split is folded."""
    items, programs, query_starts, start_positions, _, _, num_heads = batch
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PAGE, 16])
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    V: gl.constexpr = gl.SliceLayout(1, S)
    k_tail = k_buffers[4]
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
                m, alpha, p = softmax(s, m, block * PAGE, scale, limits, open_end, S)
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
def _accumulate(oa, ob, ka, kb, k_tail, stats, barriers, slot, phase, seen, WHO: gl.constexpr):
    """Both quarters of o after the block in a slot: p of the scores' warpgroup times this one's half of the values."""
    W: gl.constexpr = gl.SliceLayout(1, oa.type.layout)
    mbarrier.wait(barriers.index(_FULL + 4 * WHO + slot), phase)
    mbarrier.wait(barriers.index(_FULL + 4 * WHO + 2 + slot), phase)
    mbarrier.wait(barriers.index(_P_FULL + slot), phase)
    if seen < ka.shape[1]:
        clear_unseen(ka.index(slot), seen)
        clear_unseen(kb.index(slot), seen)
        gl.thread_barrier()
    p = k_tail.index(slot)
    alpha = gl.expand_dims(stats.index(_ALPHA + slot).load(W), 1)
    oa = oa * alpha
    ob = ob * alpha
    oa = warpgroup_mma(p, ka.index(slot), oa, is_async=True)
    ob = warpgroup_mma(p, kb.index(slot), ob, is_async=True)
    oa = warpgroup_mma_wait(1, [oa])
    mbarrier.arrive(barriers.index(_FREE + 4 * WHO + slot), count=1)
    ob = warpgroup_mma_wait(0, [ob])
    mbarrier.arrive(barriers.index(_FREE + 4 * WHO + 2 + slot), count=1)
    return oa, ob


@gluon.jit
def _accumulate_item(item, fold, ka, kb, k_tail, barriers, stats, fill, splits, per_split,
                     WHO: gl.constexpr, PAGE: gl.constexpr, O: gl.constexpr):  # fmt: skip
    """(both quarters of o, row sums, fill, splits) of the blocks of an item, its splits folded left to right."""
    first, end, end_key = item
    QUARTER: gl.constexpr = ka.shape[2]
    W: gl.constexpr = gl.SliceLayout(1, O)
    oa = gl.zeros([64, QUARTER], gl.float32, O)
    ob = gl.zeros([64, QUARTER], gl.float32, O)
    l = gl.zeros([64], gl.float32, W)
    # REDUCTION ORDER: see MmaAttentionOrder
    for start in range(first, end, per_split):
        stop = gl.minimum(start + per_split, end)
        oa = gl.zeros([64, QUARTER], gl.float32, O)
        ob = gl.zeros([64, QUARTER], gl.float32, O)
        # REDUCTION ORDER: see MmaAttentionOrder
        for block in range(start, stop):
            oa, ob = _accumulate(oa, ob, ka, kb, k_tail, stats, barriers, fill & 1, (fill >> 1) & 1,
                                 end_key - block * PAGE, WHO)  # fmt: skip
            fill += 1
        mbarrier.wait(barriers.index(_FOLD_FULL), splits & 1)
        alpha = gl.expand_dims(stats.index(_FOLD_LEFT).load(W), 1)
        beta = gl.expand_dims(stats.index(_FOLD_RIGHT).load(W), 1)
        l = stats.index(_FOLD_SUM).load(W)
        mbarrier.arrive(barriers.index(_FOLD_FREE), count=1)
        splits += 1
        if start > first:
            oa = tall(gl.load(fold), O) * alpha + oa * beta
            ob = tall(gl.load(fold + 64 * QUARTER), O) * alpha + ob * beta
        if stop < end:
            gl.store(fold, flat(oa))
            gl.store(fold + 64 * QUARTER, flat(ob))
    return oa, ob, l, fill, splits


@gluon.jit
def _attend(WHO: gl.constexpr, batch, outputs, ka, kb, k_tail, barriers, stats, per_split, PAGE: gl.constexpr):
    """A warpgroup of values, quarters 2 * WHO and 2 * WHO + 1 of the features of every item of the program."""
    items, programs, query_starts, start_positions, _, _, num_heads = batch
    out, folded, partial_o = outputs
    QUARTER: gl.constexpr = ka.shape[2]
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUARTER, 16])
    column = gl.expand_dims(2 * WHO * QUARTER + gl.arange(0, QUARTER, gl.SliceLayout(0, O)), 0)
    tile_row = gl.arange(0, 64, gl.SliceLayout(1, O))
    FLAT: gl.constexpr = flat(gl.zeros([64, QUARTER], gl.float32, O)).type.layout
    fold = folded + (2 * gl.program_id(0) + WHO) * (128 * QUARTER) + gl.arange(0, 64 * QUARTER, FLAT)
    fill = 0
    splits = 0
    begin = gl.load(programs + gl.program_id(0))
    for index in range(begin, gl.load(programs + gl.program_id(0) + 1)):
        _, q_row, first_row, rows, position, first, end, partial = _item(
            items, query_starts, start_positions, index, num_heads, per_split, PAGE)  # fmt: skip
        end_key = position + (gl.minimum(first_row + 64, rows) - 1) // num_heads + 1
        oa, ob, l, fill, splits = _accumulate_item((first, end, end_key), fold, ka, kb, k_tail, barriers, stats, fill,
                                                   splits, per_split, WHO, PAGE, O)  # fmt: skip
        row = first_row + tile_row
        valid = gl.expand_dims(row < rows, 1)
        if partial < 0:
            at = out + gl.expand_dims((q_row + row).to(gl.int64) * (4 * QUARTER), 1) + column
            total = gl.broadcast(gl.expand_dims(l, 1), oa)[0]
            gl.store(at, gl.div_rn(oa, total).to(out.dtype.element_ty), mask=valid)
            gl.store(at + QUARTER, gl.div_rn(ob, total).to(out.dtype.element_ty), mask=valid)
        else:
            slot = gl.expand_dims((partial + tile_row).to(gl.int64) * (4 * QUARTER), 1)
            gl.store(partial_o + slot + column, oa, mask=valid)
            gl.store(partial_o + QUARTER + slot + column, ob, mask=valid)


@gluon.jit(do_not_specialize=["table_width", "num_heads", "per_split"])
def wgmma_kernel(q_quarter, q_rope, page_quarter, page_rope, out, folded, partial_ml, partial_o, items, programs,
                 query_starts, start_positions, page_tables, table_width, num_heads, scale, per_split,
                 PAGE: gl.constexpr):  # fmt: skip
    """Program p attends the items programs[p] .. programs[p + 1] of `mla_plan`. Launched with four warps."""
    QUARTER: gl.constexpr = q_quarter.block_type.shape[1]
    ROPE: gl.constexpr = q_rope.block_type.shape[1]
    dtype: gl.constexpr = q_quarter.dtype
    q0 = gl.allocate_shared_memory(dtype, [64, QUARTER], q_quarter.layout)
    q1 = gl.allocate_shared_memory(dtype, [64, QUARTER], q_quarter.layout)
    q2 = gl.allocate_shared_memory(dtype, [64, QUARTER], q_quarter.layout)
    q3 = gl.allocate_shared_memory(dtype, [64, QUARTER], q_quarter.layout)
    q_tail = gl.allocate_shared_memory(dtype, [64, ROPE], q_rope.layout)
    k0 = gl.allocate_shared_memory(dtype, [2, PAGE, QUARTER], page_quarter.layout)
    k1 = gl.allocate_shared_memory(dtype, [2, PAGE, QUARTER], page_quarter.layout)
    k2 = gl.allocate_shared_memory(dtype, [2, PAGE, QUARTER], page_quarter.layout)
    k3 = gl.allocate_shared_memory(dtype, [2, PAGE, QUARTER], page_quarter.layout)
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
    q_buffers = (q0, q1, q2, q3, q_tail)
    k_buffers = (k0, k1, k2, k3, k_tail)
    gl.warp_specialize([
        (_attend, (0, batch, outputs, k0, k1, k_tail, barriers, stats, per_split, PAGE)),
        (_attend, (1, batch, outputs, k2, k3, k_tail, barriers, stats, per_split, PAGE)),
        (_weigh, (batch, partial_ml, scale, q_buffers, k_buffers, barriers, stats, ones, per_split, PAGE)),
        (_fetch, (batch, q_quarter, q_rope, page_quarter, page_rope, q_buffers, k_buffers, barriers, per_split, PAGE)),
    ], [4, 4, 1], [184, 120, 24])  # fmt: skip
