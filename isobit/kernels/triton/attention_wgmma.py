"""Attention for long queries on sm90: two consumer warpgroups of 64 rows and one warp that fetches pages, in Gluon.

A tile is 128 rows (see `attention_tiles`). The producer brings K and V pages into a ring of shared memory; a consumer
has the next block's scores computed while it takes the softmax of this one. What a split has summed is merged into an
accumulator in shared memory, for registers hold only the split at hand. Knows nothing of what else is in the batch.
Invariant: the bits of a row are those of `MmaAttentionOrder`, as `reference_attention` gives them.
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


@gluon.jit
def _row_sum(p):
    """As `attention_math.row_sum`, whose REDUCTION ORDER this is."""
    rows: gl.constexpr = p.shape[0]
    layout: gl.constexpr = gl.SliceLayout(1, p.type.layout)
    if p.shape[1] == 128:
        p = gl.sum(gl.reshape(p, (rows, 2, 64)), 1)
    p = gl.sum(gl.reshape(p, (rows, 2, 32)), 1)
    p = gl.sum(gl.reshape(p, (rows, 2, 16)), 1)
    p = gl.sum(gl.reshape(p, (rows, 2, 8)), 1)
    p = gl.sum(gl.reshape(p, (rows, 4, 2)), 2)
    p = gl.sum(gl.reshape(p, (rows, 2, 2)), 1)
    return gl.convert_layout(gl.sum(p, 1), layout, assert_trivial=True)


@gluon.jit
def _row_max(s):
    """Maximum of the columns of s, by halves for the sake of short chains: exact in any order."""
    rows: gl.constexpr = s.shape[0]
    layout: gl.constexpr = gl.SliceLayout(1, s.type.layout)
    if s.shape[1] == 128:
        s = gl.max(gl.reshape(s, (rows, 2, 64)), 1)
    s = gl.max(gl.reshape(s, (rows, 2, 32)), 1)
    s = gl.max(gl.reshape(s, (rows, 2, 16)), 1)
    s = gl.max(gl.reshape(s, (rows, 2, 8)), 1)
    s = gl.max(gl.reshape(s, (rows, 4, 2)), 2)
    return gl.convert_layout(gl.max(s, 1), layout, assert_trivial=True)


@gluon.jit
def _produce(desc, table, blocks, kv_head, num_kv_heads, v_plane, k_first, first_full, rings):
    """Fetch K of block 0, then V of block i with K of block i + 1, each pair as soon as every consumer has left its place."""
    k_ring, v_ring, full, free = rings
    STAGES: gl.constexpr = k_ring.shape[0]
    PAGE: gl.constexpr = k_ring.shape[1]
    DIM: gl.constexpr = k_ring.shape[2]
    row = (gl.load(table) * num_kv_heads + kv_head) * PAGE
    mbarrier.expect(first_full, PAGE * DIM * 2)
    tma.async_copy_global_to_shared(desc, [row, 0], first_full, k_first)
    for block in range(blocks - 1):
        next_row = (gl.load(table + block + 1) * num_kv_heads + kv_head) * PAGE
        stage = block % STAGES
        mbarrier.wait(free.index(stage), ((block // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(stage), 2 * PAGE * DIM * 2)
        tma.async_copy_global_to_shared(desc, [row + v_plane, 0], full.index(stage), v_ring.index(stage))
        tma.async_copy_global_to_shared(desc, [next_row, 0], full.index(stage), k_ring.index(stage))
        row = next_row
    stage = (blocks - 1) % STAGES
    mbarrier.wait(free.index(stage), (((blocks - 1) // STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(stage), PAGE * DIM * 2)
    tma.async_copy_global_to_shared(desc, [row + v_plane, 0], full.index(stage), v_ring.index(stage))


@gluon.jit
def _rows(query_starts, start_positions, request, first_row, group, ROWS: gl.constexpr, layout: gl.constexpr):
    """(valid, token, head, position) of rows of a tile; rows past the request's end repeat its last one."""
    start = gl.load(query_starts + request)
    count = gl.load(query_starts + request + 1) - start
    row = first_row + gl.arange(0, ROWS, layout)
    valid = row < count * group
    row = gl.minimum(row, count * group - 1)
    return valid, start + row // group, row % group, gl.load(start_positions + request) + row // group


@gluon.jit
def _zero_unseen(v, block, last):
    """Set the rows of V after position `last` to zero: the cache may hold NaN there. Both consumers write the same."""
    PAGE: gl.constexpr = v.shape[0]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    keys = block * PAGE + gl.arange(0, PAGE, gl.SliceLayout(1, layout))
    values = v.load(layout)
    v.store(gl.where((keys <= last)[:, None], values, gl.zeros_like(values)))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _scores(s, scale, m, limits, first_key, MASKED: gl.constexpr):
    """Scaled (and masked) scores of a block -> (m', alpha, p)."""
    layout: gl.constexpr = s.type.layout
    s = s * scale
    if MASKED:
        keys = first_key + gl.arange(0, s.shape[1], gl.SliceLayout(0, layout))
        s = gl.where(keys[None, :] <= limits[:, None], s, float("-inf"))
    m_new = gl.maximum(m, _row_max(s))
    shift = m_new
    if MASKED:
        shift = gl.where(m_new == float("-inf"), 0.0, m_new)
    return m_new, gl.exp2(m - shift), gl.exp2(s - shift[:, None])


@gluon.jit
def _of_rows(x, o):
    """x [rows], as it lies beside scores, as a column beside o: no value moves."""
    return gl.convert_layout(x, gl.SliceLayout(1, o.type.layout), assert_trivial=True)[:, None]


@gluon.jit
def _merge(held, m_left, l_left, m, l, o, is_first):
    """Merge the split (m, l, o) into (m_left, l_left, held); the first one is copied."""
    if is_first:
        held.store(o)
    else:
        m_new = gl.maximum(m_left, m)
        alpha = gl.exp2(m_left - m_new)
        beta = gl.exp2(m - m_new)
        held.store(held.load(o.type.layout) * _of_rows(alpha, o) + o * _of_rows(beta, o))
        l = l_left * alpha + l * beta
        m = m_new
    return m, l


@gluon.jit
def _step(q, held, rings, block, scale, limits, s, m, l, o, m_left, l_left, PER_SPLIT: gl.constexpr,
          MASKED: gl.constexpr):  # fmt: skip
    """From the scores of `block` to those of the next one, with P V of this one."""
    k_ring, v_ring, full, free = rings
    STAGES: gl.constexpr = k_ring.shape[0]
    stage = block % STAGES
    if (block % PER_SPLIT == 0) & (block > 0):
        m_left, l_left = _merge(held, m_left, l_left, m, l, o, block == PER_SPLIT)
        m = gl.full_like(m, float("-inf"))
        l = gl.zeros_like(l)
        o = gl.zeros_like(o)
    m, alpha, p = _scores(s, scale, m, limits, block * k_ring.shape[1], MASKED)
    l = l * alpha + _row_sum(p)
    o = o * _of_rows(alpha, o)
    p = gl.convert_layout(p.to(k_ring.dtype), gl.DotOperandLayout(0, o.type.layout, 2))
    mbarrier.wait(full.index(stage), (block // STAGES) & 1)
    o = warpgroup_mma(p, v_ring.index(stage), o, is_async=True)
    s = warpgroup_mma(q, k_ring.index(stage).permute((1, 0)), gl.zeros_like(s), use_acc=False, is_async=True)
    o, s, p = warpgroup_mma_wait(0, deps=[o, s, p])
    mbarrier.arrive(free.index(stage))
    return s, m, l, o, m_left, l_left


@gluon.jit
def _consume(WHICH: gl.constexpr, q_ptr, out, q_all, held_all, k_first, first_full, rings, where,
             PER_SPLIT: gl.constexpr):  # fmt: skip
    """The 64 rows of one consumer warpgroup."""
    k_ring, v_ring, full, free = rings
    query_starts, start_positions, request, first_row, kv_head, num_kv_heads, group, dim, scale, open_blocks, blocks, last = where
    STAGES: gl.constexpr = k_ring.shape[0]
    PAGE: gl.constexpr = k_ring.shape[1]
    DIM: gl.constexpr = k_ring.shape[2]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PAGE, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    row_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    q = q_all.index(WHICH)
    held = held_all.index(WHICH)
    d = gl.arange(0, DIM, gl.SliceLayout(0, row_layout))
    _, token, head, _ = _rows(query_starts, start_positions, request, first_row + 64 * WHICH, group, 64,
                              gl.SliceLayout(1, row_layout))  # fmt: skip
    row_at = (token.to(gl.int64) * num_kv_heads * group + kv_head * group + head) * dim
    q.store(gl.load(q_ptr + row_at[:, None] + d[None, :], mask=(d < dim)[None, :], other=0.0))
    fence_async_shared()
    gl.thread_barrier()
    _, _, _, limits = _rows(query_starts, start_positions, request, first_row + 64 * WHICH, group, 64,
                            gl.SliceLayout(1, s_layout))  # fmt: skip
    m = gl.full((64,), float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))
    l = gl.zeros((64,), gl.float32, gl.SliceLayout(1, s_layout))
    o = gl.zeros((64, DIM), gl.float32, o_layout)
    m_left = m
    l_left = l

    mbarrier.wait(first_full, 0)
    zeros = gl.zeros((64, PAGE), gl.float32, s_layout)
    s = warpgroup_mma(q, k_first.permute((1, 0)), zeros, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    # REDUCTION ORDER: see MmaAttentionOrder
    for block in range(0, gl.minimum(open_blocks, blocks - 1)):
        s, m, l, o, m_left, l_left = _step(q, held, rings, block, scale, limits, s, m, l, o, m_left, l_left, PER_SPLIT, False)
    # REDUCTION ORDER: see MmaAttentionOrder
    for block in range(gl.minimum(open_blocks, blocks - 1), blocks - 1):
        s, m, l, o, m_left, l_left = _step(q, held, rings, block, scale, limits, s, m, l, o, m_left, l_left, PER_SPLIT, True)

    block = blocks - 1
    stage = block % STAGES
    if (block % PER_SPLIT == 0) & (block > 0):
        m_left, l_left = _merge(held, m_left, l_left, m, l, o, block == PER_SPLIT)
        m = gl.full_like(m, float("-inf"))
        l = gl.zeros_like(l)
        o = gl.zeros_like(o)
    m, alpha, p = _scores(s, scale, m, limits, block * PAGE, True)
    l = l * alpha + _row_sum(p)
    o = o * _of_rows(alpha, o)
    p = gl.convert_layout(p.to(k_ring.dtype), gl.DotOperandLayout(0, o_layout, 2))
    mbarrier.wait(full.index(stage), (block // STAGES) & 1)
    if last + 1 < blocks * PAGE:
        _zero_unseen(v_ring.index(stage), block, last)
    o = warpgroup_mma(p, v_ring.index(stage), o, is_async=True)
    o, p = warpgroup_mma_wait(0, deps=[o, p])
    if blocks > PER_SPLIT:
        m, l = _merge(held, m_left, l_left, m, l, o, False)
        o = held.load(o_layout)
    o = gl.div_rn(o, gl.zeros_like(o) + _of_rows(l, o))
    q.store(o.to(q.dtype))
    gl.thread_barrier()
    valid, token, head, _ = _rows(query_starts, start_positions, request, first_row + 64 * WHICH, group, 64,
                                  gl.SliceLayout(1, row_layout))  # fmt: skip
    row_at = (token.to(gl.int64) * num_kv_heads * group + kv_head * group + head) * dim
    gl.store(out + row_at[:, None] + d[None, :], q.load(row_layout), mask=valid[:, None] & (d < dim)[None, :])


@gluon.jit
def _consume_first(q_ptr, out, q_all, held_all, k_first, first_full, rings, where, PER_SPLIT: gl.constexpr):
    _consume(0, q_ptr, out, q_all, held_all, k_first, first_full, rings, where, PER_SPLIT)


@gluon.jit
def _consume_second(q_ptr, out, q_all, held_all, k_first, first_full, rings, where, PER_SPLIT: gl.constexpr):
    _consume(1, q_ptr, out, q_all, held_all, k_first, first_full, rings, where, PER_SPLIT)


@gluon.jit
def _consume_third(q_ptr, out, q_all, held_all, k_first, first_full, rings, where, PER_SPLIT: gl.constexpr):
    _consume(2, q_ptr, out, q_all, held_all, k_first, first_full, rings, where, PER_SPLIT)


@gluon.jit
def wgmma_kernel(q, desc, out, tiles, query_starts, start_positions, page_tables, table_width, v_plane,
                 num_kv_heads, group, dim, scale, PAGE: gl.constexpr, DIM: gl.constexpr, SPLIT: gl.constexpr,
                 STAGES: gl.constexpr, CONSUMERS: gl.constexpr):  # fmt: skip
    """tiles int32 [T, 2]: (request, first row) -> out; a request below 0 is an entry to skip. Grid (T, KV heads)."""
    tile = tiles + 2 * gl.program_id(0)
    kv_head = gl.program_id(1)
    request = gl.load(tile)
    first_row = gl.load(tile + 1)
    if request >= 0:
        count = (gl.load(query_starts + request + 1) - gl.load(query_starts + request)) * group
        start = gl.load(start_positions + request)
        last = start + gl.minimum(first_row + (64 * CONSUMERS - 1), count - 1) // group
        open_blocks = (start + first_row // group + 1) // PAGE
        blocks = last // PAGE + 1
        dtype: gl.constexpr = desc.dtype
        q_all = gl.allocate_shared_memory(dtype, (CONSUMERS, 64, DIM), gl.NVMMASharedLayout.get_default_for((64, DIM), dtype))
        held_all = gl.allocate_shared_memory(gl.float32, (CONSUMERS, 64, DIM), gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
        k_ring = gl.allocate_shared_memory(dtype, (STAGES, PAGE, DIM), desc.layout)
        v_ring = gl.allocate_shared_memory(dtype, (STAGES, PAGE, DIM), desc.layout)
        # nothing is held before a split has ended, and no consumer is STAGES blocks behind another
        k_first = held_all._reinterpret(dtype, (PAGE, DIM), desc.layout)
        full = gl.allocate_shared_memory(gl.int64, (STAGES, 1), mbarrier.MBarrierLayout())
        free = gl.allocate_shared_memory(gl.int64, (STAGES, 1), mbarrier.MBarrierLayout())
        first_full = gl.allocate_shared_memory(gl.int64, (1,), mbarrier.MBarrierLayout())
        mbarrier.init(first_full, count=1)
        for i in gl.static_range(STAGES):
            mbarrier.init(full.index(i), count=1)
            mbarrier.init(free.index(i), count=CONSUMERS)
        fence_async_shared()
        gl.thread_barrier()
        table = page_tables + request.to(gl.int64) * table_width
        rings = (k_ring, v_ring, full, free)
        where = (query_starts, start_positions, request, first_row, kv_head, num_kv_heads, group, dim, scale,
                 open_blocks, blocks, last)  # fmt: skip
        producer = (desc, table, blocks, kv_head, num_kv_heads, v_plane, k_first, first_full, rings)
        if CONSUMERS == 3:
            gl.warp_specialize(
                [
                    (_consume_first, (q, out, q_all, held_all, k_first, first_full, rings, where, SPLIT // PAGE)),
                    (_consume_second, (q, out, q_all, held_all, k_first, first_full, rings, where, SPLIT // PAGE)),
                    (_consume_third, (q, out, q_all, held_all, k_first, first_full, rings, where, SPLIT // PAGE)),
                    (_produce, producer),
                ],
                [4, 4, 1],
                [160, 160, 24],
            )
        elif CONSUMERS == 2:
            gl.warp_specialize(
                [
                    (_consume_first, (q, out, q_all, held_all, k_first, first_full, rings, where, SPLIT // PAGE)),
                    (_consume_second, (q, out, q_all, held_all, k_first, first_full, rings, where, SPLIT // PAGE)),
                    (_produce, producer),
                ],
                [4, 1],
                [240, 24],
            )
        else:
            gl.warp_specialize(
                [
                    (_consume_first, (q, out, q_all, held_all, k_first, first_full, rings, where, SPLIT // PAGE)),
                    (_produce, producer),
                ],
                [1],
                [24],
            )
