"""Attention for long queries on sm90, in Gluon: warpgroups of 64 rows each, and one warp that fetches pages.

A tile is 64 rows a consumer (see `attention_tiles`). The producer brings pages into a ring in shared memory. A consumer
takes the softmax of a block while the others keep the tensor core busy: with three of them, nobody needs to overlap
its own steps. Registers hold the split at hand; what earlier splits came to is held in shared memory. Knows nothing of
what else is in the batch. Invariant: the bits of a row are those of `MmaAttentionOrder`.
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

from isobit.kernels.triton import attention_math

__all__ = ["row_maximum", "row_sum", "softmax_block", "tile_rows", "weigh", "wgmma_kernel"]

weigh = gluon.jit(attention_math.weigh.fn)  # the same text, compiled as Gluon


@gluon.jit
def row_sum(p):
    """As `attention_math.row_sum`, whose tree this is: see MmaAttentionOrder."""
    rows: gl.constexpr = p.shape[0]
    layout: gl.constexpr = gl.SliceLayout(1, p.type.layout)
    p = gl.sum(gl.reshape(p, (rows, 2, 32)), 1)
    p = gl.sum(gl.reshape(p, (rows, 2, 16)), 1)
    p = gl.sum(gl.reshape(p, (rows, 2, 8)), 1)
    p = gl.sum(gl.reshape(p, (rows, 4, 2)), 2)
    p = gl.sum(gl.reshape(p, (rows, 2, 2)), 1)
    return gl.convert_layout(gl.sum(p, 1), layout, assert_trivial=True)


@gluon.jit
def row_maximum(s):
    """Maximum of the columns of s, by halves for the sake of short chains: exact in any order."""
    rows: gl.constexpr = s.shape[0]
    layout: gl.constexpr = gl.SliceLayout(1, s.type.layout)
    s = gl.max(gl.reshape(s, (rows, 2, 32)), 1)
    s = gl.max(gl.reshape(s, (rows, 2, 16)), 1)
    s = gl.max(gl.reshape(s, (rows, 2, 8)), 1)
    s = gl.max(gl.reshape(s, (rows, 4, 2)), 2)
    return gl.convert_layout(gl.max(s, 1), layout, assert_trivial=True)


@gluon.jit
def softmax_block(s, scale, m, limits, first_key, MASKED: gl.constexpr):
    """Products of a block -> (m', alpha, p)."""
    if MASKED:
        keys = first_key + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
        s = gl.where(keys[None, :] <= limits[:, None], s, float("-inf"))
    return weigh(s, row_maximum(s), m, scale, MASKED)


@gluon.jit
def tile_rows(query_starts, start_positions, request, first_row, group, ROWS: gl.constexpr, layout: gl.constexpr):
    """(valid, token, head, position) of rows of a tile; rows past the request's end repeat its last one."""
    start = gl.load(query_starts + request)
    count = gl.load(query_starts + request + 1) - start
    row = first_row + gl.arange(0, ROWS, layout)
    valid = row < count * group
    row = gl.minimum(row, count * group - 1)
    return valid, start + row // group, row % group, gl.load(start_positions + request) + row // group


@gluon.jit
def _column(x, o):
    """x [rows], as it lies beside scores, as a column beside o: no value moves."""
    return gl.convert_layout(x, gl.SliceLayout(1, o.type.layout), assert_trivial=True)[:, None]


@gluon.jit
def _produce(desc, table, blocks, kv_head, num_kv_heads, v_plane, k_first, first_full, rings):
    """K of block 0, then V of each block with K of the next, a pair as soon as every consumer has left its place."""
    k_ring, v_ring, full, free = rings
    STAGES: gl.constexpr = k_ring.shape[0]
    PAGE: gl.constexpr = k_ring.shape[1]
    BYTES: gl.constexpr = PAGE * k_ring.shape[2] * 2
    row = (gl.load(table) * num_kv_heads + kv_head) * PAGE
    mbarrier.expect(first_full, BYTES)
    tma.async_copy_global_to_shared(desc, [row, 0], first_full, k_first)
    for block in range(blocks - 1):
        next_row = (gl.load(table + block + 1) * num_kv_heads + kv_head) * PAGE
        stage = block % STAGES
        mbarrier.wait(free.index(stage), ((block // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(stage), 2 * BYTES)
        tma.async_copy_global_to_shared(desc, [row + v_plane, 0], full.index(stage), v_ring.index(stage))
        tma.async_copy_global_to_shared(desc, [next_row, 0], full.index(stage), k_ring.index(stage))
        row = next_row
    stage = (blocks - 1) % STAGES
    mbarrier.wait(free.index(stage), (((blocks - 1) // STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(stage), BYTES)
    tma.async_copy_global_to_shared(desc, [row + v_plane, 0], full.index(stage), v_ring.index(stage))


@gluon.jit
def _zero_unseen(v, block, last):
    """Set the rows of V after position `last` to zero: the cache may hold NaN there. All consumers write the same."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    keys = block * v.shape[0] + gl.arange(0, v.shape[0], gl.SliceLayout(1, layout))
    values = v.load(layout)
    v.store(gl.where((keys <= last)[:, None], values, gl.zeros_like(values)))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _merge(held, m_left, l_left, m, l, o, is_first):
    """Merge the split (m, l, o) into (m_left, l_left, held); the first one is copied."""
    if is_first:
        held.store(o)
    else:
        m_new = gl.maximum(m_left, m)
        alpha = gl.exp2(m_left - m_new)
        beta = gl.exp2(m - m_new)
        held.store(held.load(o.type.layout) * _column(alpha, o) + o * _column(beta, o))
        l = l_left * alpha + l * beta
        m = m_new
    return m, l


@gluon.jit
def _weigh(held, state, s, block, scale, limits, PER_SPLIT: gl.constexpr, PAGE: gl.constexpr, MASKED: gl.constexpr):
    """Scores of `block` -> (state, p), o scaled and ready for P V. A block that opens a split closes the one before."""
    m, l, o, m_left, l_left = state
    if (block % PER_SPLIT == 0) & (block > 0):
        m_left, l_left = _merge(held, m_left, l_left, m, l, o, block == PER_SPLIT)
        m = gl.full_like(m, float("-inf"))
        l = gl.zeros_like(l)
        o = gl.zeros_like(o)
    m, alpha, p = softmax_block(s, scale, m, limits, block * PAGE, MASKED)
    l = l * alpha + row_sum(p)
    o = o * _column(alpha, o)
    return (m, l, o, m_left, l_left), p


@gluon.jit
def _step(q, held, rings, state, s, block, scale, limits, PER_SPLIT: gl.constexpr, MASKED: gl.constexpr):
    """From the scores of `block` to those of the next one, with P V of this one."""
    k_ring, v_ring, full, free = rings
    STAGES: gl.constexpr = k_ring.shape[0]
    stage = block % STAGES
    state, p = _weigh(held, state, s, block, scale, limits, PER_SPLIT, k_ring.shape[1], MASKED)
    m, l, o, m_left, l_left = state
    p = gl.convert_layout(p.to(k_ring.dtype), gl.DotOperandLayout(0, o.type.layout, 2))
    mbarrier.wait(full.index(stage), (block // STAGES) & 1)
    o = warpgroup_mma(p, v_ring.index(stage), o, is_async=True)
    s = warpgroup_mma(q, k_ring.index(stage).permute((1, 0)), gl.zeros_like(s), use_acc=False, is_async=True)
    o, s, p = warpgroup_mma_wait(0, deps=[o, s, p])
    mbarrier.arrive(free.index(stage))
    return (m, l, o, m_left, l_left), s


@gluon.jit
def _last_step(held, rings, state, s, block, scale, limits, last, PER_SPLIT: gl.constexpr):
    """The last block: nothing follows, and what follows the last position in V is not to be seen. Returns (o, l)."""
    k_ring, v_ring, full, _ = rings
    STAGES: gl.constexpr = k_ring.shape[0]
    PAGE: gl.constexpr = k_ring.shape[1]
    stage = block % STAGES
    state, p = _weigh(held, state, s, block, scale, limits, PER_SPLIT, PAGE, True)
    m, l, o, m_left, l_left = state
    p = gl.convert_layout(p.to(k_ring.dtype), gl.DotOperandLayout(0, o.type.layout, 2))
    mbarrier.wait(full.index(stage), (block // STAGES) & 1)
    if last + 1 < (block + 1) * PAGE:
        _zero_unseen(v_ring.index(stage), block, last)
    o = warpgroup_mma(p, v_ring.index(stage), o, is_async=True)
    o, p = warpgroup_mma_wait(0, deps=[o, p])
    if block >= PER_SPLIT:
        m, l = _merge(held, m_left, l_left, m, l, o, False)
        o = held.load(o.type.layout)
    return o, l


@gluon.jit
def _rows_of(pointer, where, WHICH: gl.constexpr, DIM: gl.constexpr, layout: gl.constexpr):
    """(pointers [64, DIM], features there are, rows that are the tile's) of a consumer's rows of q or out."""
    query_starts, start_positions, request, first_row, kv_head, num_kv_heads, group, dim = where
    valid, token, head, _ = tile_rows(query_starts, start_positions, request, first_row + 64 * WHICH, group, 64,
                                      gl.SliceLayout(1, layout))  # fmt: skip
    d = gl.arange(0, DIM, gl.SliceLayout(0, layout))
    row = (token.to(gl.int64) * num_kv_heads * group + kv_head * group + head) * dim
    return pointer + row[:, None] + d[None, :], (d < dim)[None, :], valid[:, None]


@gluon.jit
def _consume(WHICH: gl.constexpr, q_pointer, out, buffers, rings, where, walk, PER_SPLIT: gl.constexpr):
    """The 64 rows of one consumer warpgroup."""
    q_all, held_all, k_first, first_full = buffers
    scale, open_blocks, blocks, last = walk
    PAGE: gl.constexpr = k_first.shape[0]
    DIM: gl.constexpr = k_first.shape[1]
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PAGE, 16])
    ROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    q = q_all.index(WHICH)
    held = held_all.index(WHICH)
    at, features, _ = _rows_of(q_pointer, where, WHICH, DIM, ROW)
    q.store(gl.load(at, mask=features, other=0.0))
    fence_async_shared()
    gl.thread_barrier()
    query_starts, start_positions, request, first_row, _, _, group, _ = where
    _, _, _, limits = tile_rows(query_starts, start_positions, request, first_row + 64 * WHICH, group, 64,
                                gl.SliceLayout(1, S))  # fmt: skip
    m = gl.full((64,), float("-inf"), gl.float32, gl.SliceLayout(1, S))
    l = gl.zeros((64,), gl.float32, gl.SliceLayout(1, S))
    o = gl.zeros((64, DIM), gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16]))
    state = (m, l, o, m, l)
    mbarrier.wait(first_full, 0)
    s = gl.zeros((64, PAGE), gl.float32, S)
    s = warpgroup_mma_wait(0, deps=[warpgroup_mma(q, k_first.permute((1, 0)), s, use_acc=False, is_async=True)])
    middle = gl.minimum(open_blocks, blocks - 1)
    # REDUCTION ORDER: see MmaAttentionOrder
    for block in range(middle):
        state, s = _step(q, held, rings, state, s, block, scale, limits, PER_SPLIT, False)
    # REDUCTION ORDER: see MmaAttentionOrder
    for block in range(middle, blocks - 1):
        state, s = _step(q, held, rings, state, s, block, scale, limits, PER_SPLIT, True)
    o, l = _last_step(held, rings, state, s, blocks - 1, scale, limits, last, PER_SPLIT)
    q.store(gl.div_rn(o, gl.zeros_like(o) + _column(l, o)).to(q.dtype))
    gl.thread_barrier()
    at, features, valid = _rows_of(out, where, WHICH, DIM, ROW)
    gl.store(at, q.load(ROW), mask=features & valid)


@gluon.jit
def _consume_0(q, out, buffers, rings, where, walk, PER_SPLIT: gl.constexpr):
    _consume(0, q, out, buffers, rings, where, walk, PER_SPLIT)


@gluon.jit
def _consume_1(q, out, buffers, rings, where, walk, PER_SPLIT: gl.constexpr):
    _consume(1, q, out, buffers, rings, where, walk, PER_SPLIT)


@gluon.jit
def _consume_2(q, out, buffers, rings, where, walk, PER_SPLIT: gl.constexpr):
    _consume(2, q, out, buffers, rings, where, walk, PER_SPLIT)


@gluon.jit
def _attend_tile(q, desc, out, table, where, walk, v_plane, PAGE: gl.constexpr, DIM: gl.constexpr,
                 PER_SPLIT: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr):  # fmt: skip
    """Shared memory, barriers, and the warps' parts."""
    dtype: gl.constexpr = desc.dtype
    rows: gl.constexpr = gl.NVMMASharedLayout.get_default_for((64, DIM), dtype)
    q_all = gl.allocate_shared_memory(dtype, (CONSUMERS, 64, DIM), rows)
    held_all = gl.allocate_shared_memory(gl.float32, (CONSUMERS, 64, DIM), gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
    k_ring = gl.allocate_shared_memory(dtype, (STAGES, PAGE, DIM), desc.layout)
    v_ring = gl.allocate_shared_memory(dtype, (STAGES, PAGE, DIM), desc.layout)
    full = gl.allocate_shared_memory(gl.int64, (STAGES, 1), mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, (STAGES, 1), mbarrier.MBarrierLayout())
    first_full = gl.allocate_shared_memory(gl.int64, (1,), mbarrier.MBarrierLayout())
    mbarrier.init(first_full, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=CONSUMERS)
    fence_async_shared()
    gl.thread_barrier()
    # K of block 0 lies where results of splits will: none is held before PER_SPLIT > STAGES blocks are done, and no
    # consumer is STAGES blocks ahead of another
    k_first = held_all._reinterpret(dtype, (PAGE, DIM), desc.layout)
    buffers = (q_all, held_all, k_first, first_full)
    rings = (k_ring, v_ring, full, free)
    _, _, _, _, kv_head, num_kv_heads, _, _ = where
    produce = (desc, table, walk[2], kv_head, num_kv_heads, v_plane, k_first, first_full, rings)
    if CONSUMERS == 3:
        gl.warp_specialize([
            (_consume_0, (q, out, buffers, rings, where, walk, PER_SPLIT)),
            (_consume_1, (q, out, buffers, rings, where, walk, PER_SPLIT)),
            (_consume_2, (q, out, buffers, rings, where, walk, PER_SPLIT)),
            (_produce, produce),
        ], [4, 4, 1], [160, 160, 24])  # fmt: skip
    else:
        gl.static_assert(CONSUMERS == 1)
        gl.warp_specialize([
            (_consume_0, (q, out, buffers, rings, where, walk, PER_SPLIT)),
            (_produce, produce),
        ], [1], [24])  # fmt: skip


@gluon.jit(do_not_specialize=["num_kv_heads", "group", "table_width"],
           do_not_specialize_on_alignment=["tiles", "query_starts", "start_positions", "page_tables"])  # fmt: skip
def wgmma_kernel(q, desc, out, tiles, query_starts, start_positions, page_tables, table_width, v_plane,
                 num_kv_heads, group, dim, scale, PAGE: gl.constexpr, DIM: gl.constexpr, SPLIT: gl.constexpr,
                 STAGES: gl.constexpr, CONSUMERS: gl.constexpr):  # fmt: skip
    """tiles int32 [T, 2]: (request, first row) -> out; a request below 0 is an entry to skip. Grid (T, KV heads)."""
    kv_head = gl.program_id(1)
    request = gl.load(tiles + 2 * gl.program_id(0))
    first_row = gl.load(tiles + 2 * gl.program_id(0) + 1)
    if request >= 0:
        count = (gl.load(query_starts + request + 1) - gl.load(query_starts + request)) * group
        start = gl.load(start_positions + request)
        last = start + gl.minimum(first_row + (64 * CONSUMERS - 1), count - 1) // group
        where = (query_starts, start_positions, request, first_row, kv_head, num_kv_heads, group, dim)
        walk = (scale, (start + first_row // group + 1) // PAGE, last // PAGE + 1, last)
        table = page_tables + request.to(gl.int64) * table_width
        _attend_tile(q, desc, out, table, where, walk, v_plane, PAGE, DIM, SPLIT // PAGE, STAGES, CONSUMERS)
