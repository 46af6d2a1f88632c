"""Attention for few rows on sm90: one small program a split, pages through the copy engine, `mma.sync`, in Gluon.

A tile is 16 rows (see `attention_tiles`); its programs are as many as its request has splits, times the KV heads, so
that one long request fills the card. A program is one warp, or two or four that share the keys of a block. Knows
nothing of what else is in the batch. Invariant: the bits of a row are those of `MmaAttentionOrder`.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, mma_v2, tma

from isobit.kernels.triton.attention_wgmma import row_sum, softmax_block, tile_rows

__all__ = ["decode_kernel"]


@gluon.jit
def _fetch(desc, source, block, end, rings, stage):
    """Ask for K and V of `block`, if there is such a block."""
    table, kv_head, num_kv_heads, v_plane = source
    k_ring, v_ring, full = rings
    PAGE: gl.constexpr = k_ring.shape[1]
    if block < end:
        row = (gl.load(table + block) * num_kv_heads + kv_head) * PAGE
        mbarrier.expect(full.index(stage), 2 * PAGE * k_ring.shape[2] * 2)
        tma.async_copy_global_to_shared(desc, [row, 0], full.index(stage), k_ring.index(stage))
        tma.async_copy_global_to_shared(desc, [row + v_plane, 0], full.index(stage), v_ring.index(stage))


@gluon.jit
def _attend(q, k, v, m, l, o, scale, limits, first_key, last, MASKED: gl.constexpr):
    """One block of keys: the next (m, l, o); features in chunks of 64, ascending, to spare registers."""
    PAGE: gl.constexpr = k.shape[0]
    CHUNK: gl.constexpr = 64
    layout: gl.constexpr = o.type.layout
    v_layout: gl.constexpr = gl.DotOperandLayout(1, layout, 2)
    s = gl.zeros((16, PAGE), gl.float32, layout)
    for c in gl.static_range(k.shape[1] // CHUNK):
        q_part = q.slice(c * CHUNK, CHUNK, 1).load(gl.DotOperandLayout(0, layout, 2))
        k_part = k.slice(c * CHUNK, CHUNK, 1).permute((1, 0)).load(v_layout)
        s = mma_v2(q_part, k_part, s)
    m, alpha, weights = softmax_block(s, scale, m, limits, first_key, MASKED)
    l = l * alpha + row_sum(weights)
    p = gl.convert_layout(weights.to(k.dtype), gl.DotOperandLayout(0, layout, 2))
    values = v.load(v_layout)
    if MASKED:
        keys = first_key + gl.arange(0, PAGE, gl.SliceLayout(1, v_layout))
        values = gl.where((keys <= last)[:, None], values, gl.zeros_like(values))
    o = mma_v2(p, values, o * alpha[:, None])
    return m, l, o


@gluon.jit
def _walk(desc, source, rings, q, span, scale, limits, layout: gl.constexpr):
    """(m, l, o) of blocks first .. end - 1, the first STAGES of which are under way; from `middle` on, masked."""
    first, middle, end, last = span
    k_ring, v_ring, full = rings
    STAGES: gl.constexpr = k_ring.shape[0]
    PAGE: gl.constexpr = k_ring.shape[1]
    DIM: gl.constexpr = k_ring.shape[2]
    m = gl.full((16,), float("-inf"), gl.float32, gl.SliceLayout(1, layout))
    l = gl.zeros((16,), gl.float32, gl.SliceLayout(1, layout))
    o = gl.zeros((16, DIM), gl.float32, layout)
    # REDUCTION ORDER: see MmaAttentionOrder
    for block in range(first, middle):
        stage = (block - first) % STAGES
        mbarrier.wait(full.index(stage), ((block - first) // STAGES) & 1)
        m, l, o = _attend(q, k_ring.index(stage), v_ring.index(stage), m, l, o, scale, limits, block * PAGE, last,
                          False)  # fmt: skip
        gl.thread_barrier()
        _fetch(desc, source, block + STAGES, end, rings, stage)
    # REDUCTION ORDER: see MmaAttentionOrder
    for block in range(middle, end):
        stage = (block - first) % STAGES
        mbarrier.wait(full.index(stage), ((block - first) // STAGES) & 1)
        m, l, o = _attend(q, k_ring.index(stage), v_ring.index(stage), m, l, o, scale, limits, block * PAGE, last,
                          True)  # fmt: skip
        gl.thread_barrier()
        _fetch(desc, source, block + STAGES, end, rings, stage)
    return m, l, o


@gluon.jit
def _start(desc, source, first, end, PAGE: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr):
    """The ring, with the first STAGES blocks under way."""
    k_ring = gl.allocate_shared_memory(desc.dtype, (STAGES, PAGE, DIM), desc.layout)
    v_ring = gl.allocate_shared_memory(desc.dtype, (STAGES, PAGE, DIM), desc.layout)
    full = gl.allocate_shared_memory(gl.int64, (STAGES, 1), mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()
    rings = (k_ring, v_ring, full)
    for i in gl.static_range(STAGES):
        _fetch(desc, source, first + i, end, rings, i)
    return rings


@gluon.jit
def _load_rows(q, where, kv_head, num_kv_heads, dim, DIM: gl.constexpr, WARPS: gl.constexpr):
    """The tile's rows of q, in shared memory."""
    query_starts, start_positions, request, first_row, group = where
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (DIM // 8), DIM // 8], [WARPS, 1], [1, 0])
    dtype: gl.constexpr = q.dtype.element_ty
    d = gl.arange(0, DIM, gl.SliceLayout(0, layout))
    _, token, head, _ = tile_rows(query_starts, start_positions, request, first_row, group, 16,
                                  gl.SliceLayout(1, layout))  # fmt: skip
    at = (token.to(gl.int64) * num_kv_heads * group + kv_head * group + head) * dim
    rows = gl.load(q + at[:, None] + d[None, :], mask=(d < dim)[None, :], other=0.0)
    return gl.allocate_shared_memory(dtype, (16, DIM), gl.NVMMASharedLayout.get_default_for((16, DIM), dtype), rows)


@gluon.jit(do_not_specialize=["num_kv_heads", "group", "table_width", "partial_rows"],
           do_not_specialize_on_alignment=["items", "query_starts", "start_positions", "page_tables"])  # fmt: skip
def decode_kernel(q, desc, out, items, partial_ml, partial_o, query_starts, start_positions, page_tables, table_width,
                  v_plane, num_kv_heads, group, dim, scale, partial_rows,
                  PAGE: gl.constexpr, DIM: gl.constexpr, SPLIT: gl.constexpr, STAGES: gl.constexpr,
                  WARPS: gl.constexpr):  # fmt: skip
    """As `attention_tiles.split_kernel`, with ROWS = 16. The combining kernel may start at once: it waits by itself."""
    kv_head = gl.program_id(0)
    item = items + 4 * gl.program_id(1)
    request = gl.load(item)
    if request >= 0:
        layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, WARPS], [16, 8])
        first_row = gl.load(item + 1)
        partial = gl.load(item + 3)
        count = (gl.load(query_starts + request + 1) - gl.load(query_starts + request)) * group
        start = gl.load(start_positions + request)
        last = start + gl.minimum(first_row + 15, count - 1) // group
        first = gl.load(item + 2) * (SPLIT // PAGE)
        end = gl.minimum(last // PAGE + 1, first + SPLIT // PAGE)
        span = (first, gl.maximum(first, gl.minimum((start + first_row // group + 1) // PAGE, end)), end, last)
        source = (page_tables + request.to(gl.int64) * table_width, kv_head, num_kv_heads, v_plane)
        rings = _start(desc, source, first, end, PAGE, DIM, STAGES)
        tl.extra.cuda.gdc_launch_dependents()
        where = (query_starts, start_positions, request, first_row, group)
        q_rows = _load_rows(q, where, kv_head, num_kv_heads, dim, DIM, WARPS)
        valid, token, head, limits = tile_rows(query_starts, start_positions, request, first_row, group, 16,
                                               gl.SliceLayout(1, layout))  # fmt: skip
        m, l, o = _walk(desc, source, rings, q_rows, span, scale, limits, layout)
        d = gl.arange(0, DIM, gl.SliceLayout(0, layout))
        if partial < 0:
            o = gl.div_rn(o, gl.zeros_like(o) + l[:, None])
            at = (token.to(gl.int64) * num_kv_heads * group + kv_head * group + head) * dim
            gl.store(out + at[:, None] + d[None, :], o.to(desc.dtype), mask=valid[:, None] & (d < dim)[None, :])
        else:
            row = kv_head.to(gl.int64) * partial_rows + partial + gl.arange(0, 16, gl.SliceLayout(1, layout))
            gl.store(partial_ml + 2 * row, m, mask=valid)
            gl.store(partial_ml + 2 * row + 1, l, mask=valid)
            gl.store(partial_o + row[:, None] * DIM + d[None, :], o, mask=valid[:, None])
