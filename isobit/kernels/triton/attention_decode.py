"""Attention for few rows on sm90: one small program a split, pages through the copy engine, `mma.sync`, in Gluon.

A tile is 16 rows (see `attention_tiles`); its programs are as many as its request has splits, times the KV heads, so
that one long request fills the card. A program is one warp, or two or four that share the keys of a block. Knows
nothing of what else is in the batch. Invariant: the bits of a row are those of `MmaAttentionOrder`.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, mma_v2, tma

from isobit.kernels.triton.attention_wgmma import _of_rows, _row_sum, _rows, _scores

__all__ = ["decode_kernel"]


@gluon.jit
def _fetch(desc, table, block, end, kv_head, num_kv_heads, v_plane, k_ring, v_ring, full, stage):
    """Ask for K and V of `block`, if there is such a block."""
    PAGE: gl.constexpr = k_ring.shape[1]
    DIM: gl.constexpr = k_ring.shape[2]
    if block < end:
        row = (gl.load(table + block) * num_kv_heads + kv_head) * PAGE
        mbarrier.expect(full.index(stage), 2 * PAGE * DIM * 2)
        tma.async_copy_global_to_shared(desc, [row, 0], full.index(stage), k_ring.index(stage))
        tma.async_copy_global_to_shared(desc, [row + v_plane, 0], full.index(stage), v_ring.index(stage))


@gluon.jit
def _attend(q_smem, k, v, m, l, o, scale, limits, first_key, last, MASKED: gl.constexpr):
    """One block of keys: the next (m, l, o); features in chunks of 64, ascending, to spare registers."""
    PAGE: gl.constexpr = k.shape[0]
    DIM: gl.constexpr = k.shape[1]
    layout: gl.constexpr = o.type.layout
    CHUNK: gl.constexpr = 64
    s = gl.zeros((16, PAGE), gl.float32, layout)
    for c in gl.static_range(DIM // CHUNK):
        q_part = q_smem.slice(c * CHUNK, CHUNK, 1).load(gl.DotOperandLayout(0, layout, 2))
        k_part = k.slice(c * CHUNK, CHUNK, 1).permute((1, 0)).load(gl.DotOperandLayout(1, layout, 2))
        s = mma_v2(q_part, k_part, s)
    m, alpha, weights = _scores(s, scale, m, limits, first_key, MASKED)
    l = l * alpha + _row_sum(weights)
    p = gl.convert_layout(weights.to(k.dtype), gl.DotOperandLayout(0, layout, 2))
    v_layout: gl.constexpr = gl.DotOperandLayout(1, layout, 2)
    values = v.load(v_layout)
    if MASKED:
        keys = first_key + gl.arange(0, PAGE, gl.SliceLayout(1, v_layout))
        values = gl.where((keys <= last)[:, None], values, gl.zeros_like(values))
    o = mma_v2(p, values, o * alpha[:, None])
    return m, l, o


@gluon.jit
def decode_kernel(q, desc, out, items, partial_ml, partial_o, query_starts, start_positions, page_tables, table_width,
                  v_plane, num_kv_heads, group, dim, scale, partial_rows,
                  PAGE: gl.constexpr, DIM: gl.constexpr, SPLIT: gl.constexpr, STAGES: gl.constexpr,
                  WARPS: gl.constexpr):  # fmt: skip
    """As `attention_tiles.split_kernel`, with ROWS = 16."""
    kv_head = gl.program_id(0)
    item = items + 4 * gl.program_id(1)
    request = gl.load(item)
    if request >= 0:
        layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, WARPS], [16, 8])
        row_layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (DIM // 8), DIM // 8], [WARPS, 1], [1, 0])
        first_row = gl.load(item + 1)
        split = gl.load(item + 2)
        partial = gl.load(item + 3)
        count = (gl.load(query_starts + request + 1) - gl.load(query_starts + request)) * group
        start = gl.load(start_positions + request)
        last = start + gl.minimum(first_row + 15, count - 1) // group
        per_split: gl.constexpr = SPLIT // PAGE
        first = split * per_split
        end = gl.minimum(last // PAGE + 1, first + per_split)
        middle = gl.maximum(first, gl.minimum((start + first_row // group + 1) // PAGE, end))
        table = page_tables + request.to(gl.int64) * table_width

        dtype: gl.constexpr = desc.dtype
        k_ring = gl.allocate_shared_memory(dtype, (STAGES, PAGE, DIM), desc.layout)
        v_ring = gl.allocate_shared_memory(dtype, (STAGES, PAGE, DIM), desc.layout)
        full = gl.allocate_shared_memory(gl.int64, (STAGES, 1), mbarrier.MBarrierLayout())
        for i in gl.static_range(STAGES):
            mbarrier.init(full.index(i), count=1)
        fence_async_shared()
        gl.thread_barrier()
        for i in gl.static_range(STAGES):
            _fetch(desc, table, first + i, end, kv_head, num_kv_heads, v_plane, k_ring, v_ring, full, i)
        tl.extra.cuda.gdc_launch_dependents()

        d = gl.arange(0, DIM, gl.SliceLayout(0, row_layout))
        valid, token, head, _ = _rows(query_starts, start_positions, request, first_row, group, 16,
                                      gl.SliceLayout(1, row_layout))  # fmt: skip
        at = (token.to(gl.int64) * num_kv_heads * group + kv_head * group + head) * dim
        q_rows = gl.load(q + at[:, None] + d[None, :], mask=(d < dim)[None, :], other=0.0)
        q_smem = gl.allocate_shared_memory(dtype, (16, DIM), gl.NVMMASharedLayout.get_default_for((16, DIM), dtype), q_rows)
        valid, token, head, limits = _rows(query_starts, start_positions, request, first_row, group, 16,
                                           gl.SliceLayout(1, layout))  # fmt: skip
        m = gl.full((16,), float("-inf"), gl.float32, gl.SliceLayout(1, layout))
        l = gl.zeros((16,), gl.float32, gl.SliceLayout(1, layout))
        o = gl.zeros((16, DIM), gl.float32, layout)
        # REDUCTION ORDER: see MmaAttentionOrder
        for block in range(first, middle):
            stage = (block - first) % STAGES
            mbarrier.wait(full.index(stage), ((block - first) // STAGES) & 1)
            m, l, o = _attend(q_smem, k_ring.index(stage), v_ring.index(stage), m, l, o, scale, limits, block * PAGE,
                              last, False)  # fmt: skip
            gl.thread_barrier()
            _fetch(desc, table, block + STAGES, end, kv_head, num_kv_heads, v_plane, k_ring, v_ring, full, stage)
        # REDUCTION ORDER: see MmaAttentionOrder
        for block in range(middle, end):
            stage = (block - first) % STAGES
            mbarrier.wait(full.index(stage), ((block - first) // STAGES) & 1)
            m, l, o = _attend(q_smem, k_ring.index(stage), v_ring.index(stage), m, l, o, scale, limits, block * PAGE,
                              last, True)  # fmt: skip
            gl.thread_barrier()
            _fetch(desc, table, block + STAGES, end, kv_head, num_kv_heads, v_plane, k_ring, v_ring, full, stage)
        d = gl.arange(0, DIM, gl.SliceLayout(0, layout))
        if partial < 0:
            o = gl.div_rn(o, gl.zeros_like(o) + l[:, None])
            to = (token.to(gl.int64) * num_kv_heads * group + kv_head * group + head) * dim
            gl.store(out + to[:, None] + d[None, :], o.to(dtype), mask=valid[:, None] & (d < dim)[None, :])
        else:
            row = kv_head.to(gl.int64) * partial_rows + partial + gl.arange(0, 16, gl.SliceLayout(1, layout))
            gl.store(partial_ml + 2 * row, m, mask=valid)
            gl.store(partial_ml + 2 * row + 1, l, mask=valid)
            gl.store(partial_o + row[:, None] * DIM + d[None, :], o, mask=valid[:, None])
