"""Absorbed MLA in plain Triton: one kernel that attends an item (see `mla_plan`), one that merges splits.

A key is `latent` features followed by `rope` features; its first `latent` features are also the value. Knows where its
tile's request lies, never what else is in the batch. Invariant: a row's bits are those of `MmaAttentionOrder` with
row_sum "mma", whatever ROWS, the warps and the stages; the tallest tile and the smallest agree by bytes. The row sum
goes through the tensor core, so no sum depends on how a tile lies in registers.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

import triton
import triton.language as tl

from isobit.kernels.triton.attention_math import merge_splits, weigh

__all__ = ["item_kernel", "merge_kernel"]


@triton.jit
def _attend_block(q_latent, q_rope, base, last, first_key, m, l, o, scale, limits, latent, rope,
                  LATENT: tl.constexpr, ROPE: tl.constexpr, PAGE: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """The next (m, l, o). Masked: keys after `last` are not read, for their place in the cache may hold NaN."""
    offsets = tl.arange(0, PAGE)
    d = tl.arange(0, LATENT)
    r = tl.arange(0, ROPE)
    at = base + offsets[:, None] * (latent + rope)
    if MASKED:
        seen = (first_key + offsets <= last)[:, None]
        keys = tl.load(at + d[None, :], mask=seen & (d < latent)[None, :], other=0.0)
        keys_rope = tl.load(at + latent + r[None, :], mask=seen & (r < rope)[None, :], other=0.0)
    else:
        keys = tl.load(at + d[None, :], mask=(d < latent)[None, :], other=0.0)
        keys_rope = tl.load(at + latent + r[None, :], mask=(r < rope)[None, :], other=0.0)
    # one accumulator: the latent features ascending, then the rope features, as they lie in q and k
    s = tl.dot(q_latent, tl.trans(keys))
    s = tl.dot(q_rope, tl.trans(keys_rope), s)
    if MASKED:
        s = tl.where((first_key + offsets)[None, :] <= limits[:, None], s, float("-inf"))
    m, alpha, p = weigh(s, tl.max(s, 1), m, scale, MASKED)
    p = p.to(keys.dtype)
    ones = tl.full((PAGE, 16), 1.0, keys.dtype)
    l = tl.dot(p, ones, l * alpha[:, None])
    o = tl.dot(p, keys, o * alpha[:, None])
    return m, l, o


@triton.jit
def _walk_split(q_latent, q_rope, latents, table, first, middle, end, last, scale, limits, latent, rope,
                LATENT: tl.constexpr, ROPE: tl.constexpr, PAGE: tl.constexpr):  # fmt: skip
    """(m, l, o) of blocks [first, end): up to `middle` every row sees every key, from there the mask decides."""
    rows: tl.constexpr = q_latent.shape[0]
    m = tl.full((rows,), float("-inf"), tl.float32)
    l = tl.zeros((rows, 16), tl.float32)
    o = tl.zeros((rows, LATENT), tl.float32)
    stride = tl.full((), PAGE, tl.int64) * (latent + rope)
    # REDUCTION ORDER: see MmaAttentionOrder
    for block in tl.range(first, middle):
        base = latents + tl.load(table + block) * stride
        m, l, o = _attend_block(q_latent, q_rope, base, last, block * PAGE, m, l, o, scale, limits, latent, rope,
                                LATENT, ROPE, PAGE, False)  # fmt: skip
    # REDUCTION ORDER: see MmaAttentionOrder
    for block in tl.range(middle, end, num_stages=1):
        base = latents + tl.load(table + block) * stride
        m, l, o = _attend_block(q_latent, q_rope, base, last, block * PAGE, m, l, o, scale, limits, latent, rope,
                                LATENT, ROPE, PAGE, True)  # fmt: skip
    return m, tl.max(l, 1), o  # the columns of l are equal


@triton.jit(do_not_specialize=["table_width", "num_heads"])
def item_kernel(q, latents, out, items, partial_ml, partial_o, query_starts, start_positions, page_tables,
                table_width, num_heads, scale, latent, rope,
                ROWS: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, PAGE: tl.constexpr,
                SPLIT: tl.constexpr):  # fmt: skip
    """One program an item of `MlaPlan.items`: writes `out`, or the (m, l, o) of its one split. Grid (T,)."""
    item = items + 6 * tl.program_id(0)
    request = tl.load(item)
    if request < 0:
        return
    first_row = tl.load(item + 1)
    split = tl.load(item + 2)
    end_split = tl.load(item + 3)
    partial = tl.load(item + 4)
    start = tl.load(query_starts + request)
    rows = (tl.load(query_starts + request + 1) - start) * num_heads
    row = first_row + tl.arange(0, ROWS)
    valid = row < rows
    row = tl.minimum(row, rows - 1)  # rows past the request's end repeat its last one
    limits = tl.load(start_positions + request) + row // num_heads
    row = start.to(tl.int64) * num_heads + row
    d = tl.arange(0, LATENT)
    r = tl.arange(0, ROPE)
    at = row[:, None] * (latent + rope)
    q_latent = tl.load(q + at + d[None, :], mask=(d < latent)[None, :], other=0.0)
    q_rope = tl.load(q + at + latent + r[None, :], mask=(r < rope)[None, :], other=0.0)
    last = tl.max(limits, 0)
    open_blocks = (tl.min(limits, 0) + 1) // PAGE
    blocks = last // PAGE + 1
    per_split: tl.constexpr = SPLIT // PAGE
    table = page_tables + request.to(tl.int64) * table_width
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    l = tl.zeros((ROWS,), tl.float32)
    o = tl.zeros((ROWS, LATENT), tl.float32)
    # REDUCTION ORDER: see MmaAttentionOrder
    for part in tl.range(split, end_split, num_stages=1):
        first = part * per_split
        end = tl.minimum(first + per_split, blocks)
        middle = tl.maximum(first, tl.minimum(open_blocks, end))
        m_next, l_next, o_next = _walk_split(q_latent, q_rope, latents, table, first, middle, end, last, scale, limits,
                                             latent, rope, LATENT, ROPE, PAGE)  # fmt: skip
        if part == split:
            m, l, o = m_next, l_next, o_next
        else:
            m, l, o = merge_splits(m, l, o, m_next, l_next, o_next)
    inside = valid[:, None] & (d < latent)[None, :]
    if partial < 0:
        result = tl.div_rn(o, tl.broadcast_to(l[:, None], (ROWS, LATENT)))
        tl.store(out + row[:, None] * latent + d[None, :], result.to(out.dtype.element_ty), mask=inside)
    else:
        slot = partial.to(tl.int64) + tl.arange(0, ROWS)
        tl.store(partial_ml + 2 * slot, m, mask=valid)
        tl.store(partial_ml + 2 * slot + 1, l, mask=valid)
        tl.store(partial_o + slot[:, None] * latent + d[None, :], o, mask=inside)


@triton.jit
def merge_kernel(out, merges, partial_ml, partial_o, latent, LATENT: tl.constexpr):
    """One program an entry of `MlaPlan.merges`; an entry whose row is below 0 is skipped. Grid (R,)."""
    entry = merges + 4 * tl.program_id(0)
    row = tl.load(entry)
    at = tl.load(entry + 1).to(tl.int64)
    step = tl.load(entry + 2)
    splits = tl.load(entry + 3)
    if row < 0:
        return
    d = tl.arange(0, LATENT)
    inside = d < latent
    m = tl.load(partial_ml + 2 * at)
    l = tl.load(partial_ml + 2 * at + 1)
    o = tl.load(partial_o + at * latent + d, mask=inside, other=0.0)
    # REDUCTION ORDER: see MmaAttentionOrder
    for _ in tl.range(1, splits, num_stages=4):
        at += step
        m_next = tl.load(partial_ml + 2 * at)
        l_next = tl.load(partial_ml + 2 * at + 1)
        o_next = tl.load(partial_o + at * latent + d, mask=inside, other=0.0)
        m, l, o = merge_splits(m, l, o, m_next, l_next, o_next)
    result = tl.div_rn(o, tl.broadcast_to(l, (LATENT,)))
    tl.store(out + row.to(tl.int64) * latent + d, result.to(out.dtype.element_ty), mask=inside)
