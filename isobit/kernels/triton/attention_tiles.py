"""Attention kernels in plain Triton: one program walks all splits of a tile, or one split of it, plus the combine.

A tile is ROWS consecutive (token, head) pairs of one request and one KV head, in the order token * group + head. What
a tile is given: where its request lies (see `attention_plan`), never what else is in the batch. Invariant: the bits of
a row are those of `MmaAttentionOrder`, whatever ROWS, the warps, the stages, or how pages are fetched.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,assignment"

import triton
import triton.language as tl

from isobit.kernels.triton.attention_math import attend_block, merge_splits

__all__ = ["combine_kernel", "split_kernel", "walk_kernel"]


@triton.jit
def _load_block(k_desc, kv, table, block, kv_head, last, v_plane, num_kv_heads, dim,
                PAGE: tl.constexpr, DIM: tl.constexpr, TMA: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """K and V of one block. Masked: V rows after position `last` are zero, for a cache may hold NaN there."""
    page = tl.load(table + block).to(tl.int64) * num_kv_heads + kv_head
    offsets = tl.arange(0, PAGE)
    if TMA and not MASKED:
        row = (page * PAGE).to(tl.int32)
        k = k_desc.load([row, 0])
        v = k_desc.load([row + v_plane, 0])
    else:
        d = tl.arange(0, DIM)
        at = kv + (page * PAGE + offsets)[:, None] * dim + d[None, :]
        if MASKED:
            seen = (block * PAGE + offsets <= last)[:, None] & (d < dim)[None, :]
            k = tl.load(at, mask=seen, other=0.0)
            v = tl.load(at + v_plane.to(tl.int64) * dim, mask=seen, other=0.0)
        elif dim == DIM:
            k = tl.load(at)
            v = tl.load(at + v_plane.to(tl.int64) * dim)
        else:
            k = tl.load(at, mask=(d < dim)[None, :], other=0.0)
            v = tl.load(at + v_plane.to(tl.int64) * dim, mask=(d < dim)[None, :], other=0.0)
    return k, v


@triton.jit
def _walk_split(q, k_desc, kv, table, first, middle, end, kv_head, limits, last, scale, v_plane, num_kv_heads, dim,
                PAGE: tl.constexpr, DIM: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """(m, l, o) of blocks [first, end): up to `middle` every row sees every key, from there the mask decides."""
    rows: tl.constexpr = q.shape[0]
    m = tl.full((rows,), float("-inf"), tl.float32)
    l = tl.zeros((rows,), tl.float32)
    o = tl.zeros((rows, DIM), tl.float32)
    # REDUCTION ORDER: see MmaAttentionOrder
    for block in tl.range(first, middle):
        k, v = _load_block(k_desc, kv, table, block, kv_head, last, v_plane, num_kv_heads, dim, PAGE, DIM, TMA, False)
        m, l, o = attend_block(q, k, v, m, l, o, scale, limits, block * PAGE, False)
    # REDUCTION ORDER: see MmaAttentionOrder
    for block in tl.range(middle, end, num_stages=1):
        k, v = _load_block(k_desc, kv, table, block, kv_head, last, v_plane, num_kv_heads, dim, PAGE, DIM, TMA, True)
        m, l, o = attend_block(q, k, v, m, l, o, scale, limits, block * PAGE, True)
    return m, l, o


@triton.jit
def _tile(query_starts, start_positions, request, first_row, group, ROWS: tl.constexpr):
    """(valid, token, head, position) of the rows of a tile; rows past the request's end repeat its last one."""
    start = tl.load(query_starts + request)
    count = tl.load(query_starts + request + 1) - start
    row = first_row + tl.arange(0, ROWS)
    valid = row < count * group
    row = tl.minimum(row, count * group - 1)
    return valid, start + row // group, row % group, tl.load(start_positions + request) + row // group


@triton.jit(do_not_specialize=["num_kv_heads", "group", "table_width"],
            do_not_specialize_on_alignment=["tiles", "query_starts", "start_positions", "page_tables"])  # fmt: skip
def walk_kernel(q, kv, k_desc, out, tiles, query_starts, start_positions, page_tables, table_width, v_plane,
                num_kv_heads, group, dim, scale,
                ROWS: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, SPLIT: tl.constexpr,
                TMA: tl.constexpr):  # fmt: skip
    """tiles int32 [T, 2]: (request, first row) -> out; a request below 0 is an entry to skip. Grid (T, KV heads)."""
    kv_head = tl.program_id(1)
    request = tl.load(tiles + 2 * tl.program_id(0))
    first_row = tl.load(tiles + 2 * tl.program_id(0) + 1)
    if request < 0:
        return
    valid, token, head, limits = _tile(query_starts, start_positions, request, first_row, group, ROWS)
    d = tl.arange(0, DIM)
    at = (token.to(tl.int64) * num_kv_heads * group + kv_head * group + head)[:, None] * dim + d[None, :]
    q_tile = tl.load(q + at, mask=(d < dim)[None, :], other=0.0)
    last = tl.max(limits, 0)
    open_blocks = (tl.min(limits, 0) + 1) // PAGE
    blocks = last // PAGE + 1
    table = page_tables + request.to(tl.int64) * table_width
    per_split: tl.constexpr = SPLIT // PAGE
    m, l, o = _walk_split(q_tile, k_desc, kv, table, 0, tl.minimum(open_blocks, per_split),
                          tl.minimum(blocks, per_split), kv_head, limits, last, scale, v_plane, num_kv_heads, dim,
                          PAGE, DIM, TMA)  # fmt: skip
    # REDUCTION ORDER: see MmaAttentionOrder
    for first in tl.range(per_split, blocks, per_split):
        end = tl.minimum(blocks, first + per_split)
        middle = tl.maximum(first, tl.minimum(open_blocks, end))
        m_next, l_next, o_next = _walk_split(q_tile, k_desc, kv, table, first, middle, end, kv_head, limits, last,
                                             scale, v_plane, num_kv_heads, dim, PAGE, DIM, TMA)  # fmt: skip
        m, l, o = merge_splits(m, l, o, m_next, l_next, o_next)
    result = tl.div_rn(o, tl.broadcast_to(l[:, None], (ROWS, DIM)))
    tl.store(out + at, result.to(out.dtype.element_ty), mask=valid[:, None] & (d < dim)[None, :])


@triton.jit(do_not_specialize=["num_kv_heads", "group", "table_width", "partial_rows"],
            do_not_specialize_on_alignment=["items", "query_starts", "start_positions", "page_tables"])  # fmt: skip
def split_kernel(q, kv, out, items, partial_ml, partial_o, query_starts, start_positions, page_tables,
                 table_width, v_plane, num_kv_heads, group, dim, scale, partial_rows,
                 ROWS: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, SPLIT: tl.constexpr):  # fmt: skip
    """items int32 [T, 4]: (request, first row, split, row of its partial result); a partial row below 0 means that
    the tile has this split only: the program writes `out`. Grid (KV heads, T)."""
    kv_head = tl.program_id(0)
    item = items + 4 * tl.program_id(1)
    request = tl.load(item)
    first_row = tl.load(item + 1)
    split = tl.load(item + 2)
    partial = tl.load(item + 3)
    if request < 0:
        return
    valid, token, head, limits = _tile(query_starts, start_positions, request, first_row, group, ROWS)
    d = tl.arange(0, DIM)
    at = (token.to(tl.int64) * num_kv_heads * group + kv_head * group + head)[:, None] * dim + d[None, :]
    q_tile = tl.load(q + at, mask=(d < dim)[None, :], other=0.0)
    last = tl.max(limits, 0)
    per_split: tl.constexpr = SPLIT // PAGE
    first = split * per_split
    end = tl.minimum(last // PAGE + 1, first + per_split)
    middle = tl.maximum(first, tl.minimum((tl.min(limits, 0) + 1) // PAGE, end))
    table = page_tables + request.to(tl.int64) * table_width
    m, l, o = _walk_split(q_tile, q, kv, table, first, middle, end, kv_head, limits, last, scale, v_plane,
                          num_kv_heads, dim, PAGE, DIM, False)  # fmt: skip
    if partial < 0:
        result = tl.div_rn(o, tl.broadcast_to(l[:, None], (ROWS, DIM)))
        tl.store(out + at, result.to(out.dtype.element_ty), mask=valid[:, None] & (d < dim)[None, :])
    else:
        row = kv_head.to(tl.int64) * partial_rows + partial + tl.arange(0, ROWS)
        tl.store(partial_ml + 2 * row, m, mask=valid)
        tl.store(partial_ml + 2 * row + 1, l, mask=valid)
        tl.store(partial_o + row[:, None] * DIM + d[None, :], o, mask=valid[:, None])


@triton.jit(do_not_specialize=["num_kv_heads", "group", "partial_rows"], do_not_specialize_on_alignment=["rows"])
def combine_kernel(out, rows, partial_ml, partial_o, num_kv_heads, group, dim, partial_rows,
                   DIM: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """rows int32 [R, 4]: (token * group + head, partial row of split 0, rows between splits, splits). Grid (KV, R).

    AHEAD splits are loaded before the first of them is merged; what lies past the last split is read as a split of
    which the row sees nothing. PDL: started before the splits are done, it waits for them here.
    """
    kv_head = tl.program_id(0)
    entry = rows + 4 * tl.program_id(1)
    row = tl.load(entry)
    first = tl.load(entry + 1)
    step = tl.load(entry + 2)
    splits = tl.load(entry + 3)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if row < 0:
        return
    d = tl.arange(0, DIM)
    at = kv_head.to(tl.int64) * partial_rows + first
    m = tl.load(partial_ml + 2 * at)
    l = tl.load(partial_ml + 2 * at + 1)
    o = tl.load(partial_o + at * DIM + d)
    # REDUCTION ORDER: see MmaAttentionOrder
    for done in tl.range(1, splits, AHEAD):
        ms = ()
        ls = ()
        os = ()
        for i in tl.static_range(AHEAD):
            there = done + i < splits
            at += step
            ms += (tl.load(partial_ml + 2 * at, mask=there, other=float("-inf")),)
            ls += (tl.load(partial_ml + 2 * at + 1, mask=there, other=0.0),)
            os += (tl.load(partial_o + at * DIM + d, mask=there, other=0.0),)
        for i in tl.static_range(AHEAD):
            m, l, o = merge_splits(m, l, o, ms[i], ls[i], os[i])
    result = tl.div_rn(o, tl.broadcast_to(l, (DIM,)))
    to = (row // group).to(tl.int64) * num_kv_heads * group + kv_head * group + row % group
    tl.store(out + to * dim + d, result.to(out.dtype.element_ty), mask=d < dim)
