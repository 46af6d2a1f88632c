"""The kernels of a mixture's linears in Triton: out[p] = weights[expert of p] . x[row of p], MmaLinearOrder per output.

A pair p = token * top_k + slot is one row of one expert. A tile is up to ROWS pairs of one expert (`moe_routing`); it
gathers their rows of x and scatters its results to where the pairs belong. Knows tiles, not why they were cut so.
Invariant: an output element meets its products in the Order's sequence whatever tile its pair fell into and whichever
pairs lie beside it; rows without a pair, columns past n and a tail of K are zeros added or results not written.
"""

# jit functions carry no types
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["copy_rows_kernel", "experts_kernel", "reference_kernel", "stream_kernel"]

TILE_FIELDS = tl.constexpr(4)  # (expert, first, count, 0): its pairs are pairs[first : first + count]


@triton.jit
def _write(acc, pair, column, inside, n, out):
    """One rounding. `pair`, `column` and `inside` broadcast to acc's shape, whichever way it lies."""
    tl.store(out + pair.to(tl.int64) * n + column, acc.to(out.dtype.element_ty), mask=inside & (column < n))


@triton.jit
def _stream_slice(x_at, w_at, used, slice_k, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
                  EVEN: tl.constexpr):  # fmt: skip
    depth = tl.arange(0, DEPTH)
    acc = tl.zeros([COLUMNS, ROWS], tl.float32)
    for start in range(0, slice_k, DEPTH):  # REDUCTION ORDER: see MmaLinearOrder
        if EVEN:
            w = tl.load(w_at)
            a = tl.load(x_at, mask=used, other=0.0)
        else:
            inside = (start + depth < slice_k)[None, :]
            w = tl.load(w_at, mask=inside, other=0.0)
            a = tl.load(x_at, mask=used & inside, other=0.0)
        acc = tl.dot(w, a.T, acc)
        x_at += DEPTH
        w_at += DEPTH
    return acc


@triton.jit
def _stream_tile(x, weights, out, pair, used, expert, first_column, n, k, pairs_per_row, ROWS: tl.constexpr,
                 COLUMNS: tl.constexpr, DEPTH: tl.constexpr, SLICES: tl.constexpr, EVEN: tl.constexpr):  # fmt: skip
    column = first_column + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    slice_k = k // SLICES
    x_at = x + (pair // pairs_per_row).to(tl.int64)[:, None] * k + depth[None, :]
    weight_row = expert.to(tl.int64) * n + tl.where(column < n, column, 0)
    w_at = weights + weight_row[:, None] * k + depth[None, :]
    total = _stream_slice(x_at, w_at, used[:, None], slice_k, ROWS, COLUMNS, DEPTH, EVEN)
    for i in tl.static_range(1, SLICES):  # REDUCTION ORDER: see MmaLinearOrder
        at = i * slice_k
        total = total + _stream_slice(x_at + at, w_at + at, used[:, None], slice_k, ROWS, COLUMNS, DEPTH, EVEN)
    _write(total, pair[None, :], column[:, None], used[None, :], n, out)


@triton.jit(do_not_specialize=("n", "k_units", "pairs_per_row", "num_experts"))
def stream_kernel(
    x, weights, out, ids, pairs, tiles, n, k_units, pairs_per_row, num_experts,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, SLICES: tl.constexpr, UNIT: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Few rows: weights are the left operand and stream past, programs side by side share an expert. Grid: tiles x
    columns. Without `tiles` every pair is a tile of its own, and nothing needs sorting. K in units of 8 elements where
    it is a multiple of 8: 16-byte loads at any K."""
    column_tiles = tl.cdiv(n, COLUMNS)
    index = tl.program_id(0) // column_tiles
    first_column = tl.program_id(0) % column_tiles * COLUMNS
    row = tl.arange(0, ROWS)
    k = k_units * UNIT
    if tiles is None:
        expert = tl.load(ids + index)
        pair = index + row
        used = row < 1
        if (expert < 0) | (expert >= num_experts):
            expert = -1
    else:
        expert = tl.load(tiles + index * TILE_FIELDS)
        first = tl.load(tiles + index * TILE_FIELDS + 1)
        used = row < tl.load(tiles + index * TILE_FIELDS + 2)
        pair = row
    if expert >= 0:
        if tiles is not None:
            pair = tl.load(pairs + first + row, mask=used, other=0)
        _stream_tile(
            x, weights, out, pair, used, expert, first_column, n, k, pairs_per_row,
            ROWS, COLUMNS, DEPTH, SLICES, EVEN,
        )  # fmt: skip


@triton.jit
def _experts_slice(x_at, x_tiles, w_tiles, used, first, w_row, start, steps, slice_k, ROWS: tl.constexpr,
                   COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr, SWAP: tl.constexpr):  # fmt: skip
    depth = tl.arange(0, DEPTH)
    if SWAP:
        acc = tl.zeros([COLUMNS, ROWS], tl.float32)
    else:
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for step in range(steps):  # REDUCTION ORDER: see MmaLinearOrder
        w = w_tiles.load([w_row, start + step * DEPTH])
        if x_tiles is not None:
            a = x_tiles.load([first, start + step * DEPTH])
        elif EVEN:
            a = tl.load(x_at + (start + step * DEPTH), mask=used, other=0.0)
        else:
            inside = used & (step * DEPTH + depth < slice_k)[None, :]
            a = tl.load(x_at + (start + step * DEPTH), mask=inside, other=0.0)
        if SWAP:
            acc = tl.dot(w, a.T, acc)
        else:
            acc = tl.dot(a, w.T, acc)
    return acc


@triton.jit
def _halves(tile):
    """The left and the right half of the columns of [rows, columns]."""
    return tl.split(tl.permute(tl.reshape(tile, [tile.shape[0], 2, tile.shape[1] // 2]), [0, 2, 1]))


@triton.jit
def _write_parts(acc, pair, used, first_column, n, out, PARTS: tl.constexpr):
    """By columns in 1, 2 or 4 parts: a whole tile would not fit beside the pipeline in shared memory."""
    if PARTS == 1:
        parts = (acc,)
    elif PARTS == 2:
        parts = _halves(acc)
    else:
        left, right = _halves(acc)
        parts = _halves(left) + _halves(right)
    WIDTH: tl.constexpr = acc.shape[1] // PARTS
    for i in tl.static_range(PARTS):
        column = first_column + i * WIDTH + tl.arange(0, WIDTH)
        _write(parts[i], pair[:, None], column[None, :], used[:, None], n, out)


@triton.jit
def _experts_tile(x, x_tiles, w_tiles, out, pairs, expert, first, count, first_column, n, k, pairs_per_row,
                  ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, SLICES: tl.constexpr,
                  EVEN: tl.constexpr, SWAP: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    row = tl.arange(0, ROWS)
    used = row < count
    pair = tl.load(pairs + first + row, mask=used, other=0)
    x_at = x + (pair // pairs_per_row).to(tl.int64)[:, None] * k + tl.arange(0, DEPTH)[None, :]
    w_row = expert * n + first_column
    slice_k = k // SLICES
    steps = tl.cdiv(slice_k, DEPTH)
    total = _experts_slice(
        x_at, x_tiles, w_tiles, used[:, None], first, w_row, 0, steps, slice_k, ROWS, COLUMNS, DEPTH, EVEN, SWAP
    )
    for i in tl.static_range(1, SLICES):  # REDUCTION ORDER: see MmaLinearOrder
        start = i * slice_k
        total = total + _experts_slice(
            x_at, x_tiles, w_tiles, used[:, None], first, w_row, start, steps, slice_k, ROWS, COLUMNS, DEPTH, EVEN, SWAP
        )
    if SWAP:
        column = first_column + tl.arange(0, COLUMNS)
        _write(total, pair[None, :], column[:, None], used[None, :], n, out)
    else:
        _write_parts(total, pair, used, first_column, n, out, PARTS)


@triton.jit(do_not_specialize=("n", "k_units", "pairs_per_row"))
def experts_kernel(
    x, x_tiles, w_tiles, out, pairs, tiles, num_tiles, n, k_units, pairs_per_row,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, SLICES: tl.constexpr, EVEN: tl.constexpr,
    SWAP: tl.constexpr, PARTS: tl.constexpr, TAIL: tl.constexpr, FLATTEN: tl.constexpr = False, WS: tl.constexpr = False,
):  # fmt: skip
    """Programs walk the tiles that exist; weights, as [experts * n, k], come through a tensor descriptor. Rows of x are
    gathered through pointers, or come through `x_tiles` from a copy that lies in the order of `pairs`. All columns of a
    tile run side by side: its rows and its expert's weight stay in L2. An expert's last tile may be mostly empty: with
    `TAIL` rows or fewer it runs as a tile of that height."""
    k = k_units * 8
    column_tiles = tl.cdiv(n, COLUMNS)
    for index in tl.range(tl.program_id(0), tl.load(num_tiles) * column_tiles, tl.num_programs(0), flatten=FLATTEN, warp_specialize=WS):
        entry = tiles + index // column_tiles * TILE_FIELDS
        first_column = index % column_tiles * COLUMNS
        expert, first, count = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
        if TAIL > 0:
            if count <= TAIL:
                _experts_tile(
                    x, None, w_tiles, out, pairs, expert, first, count, first_column, n, k, pairs_per_row,
                    TAIL, COLUMNS, DEPTH, SLICES, EVEN, SWAP, PARTS,
                )  # fmt: skip
            else:
                _experts_tile(
                    x, x_tiles, w_tiles, out, pairs, expert, first, count, first_column, n, k, pairs_per_row,
                    ROWS, COLUMNS, DEPTH, SLICES, EVEN, SWAP, PARTS,
                )  # fmt: skip
        else:
            _experts_tile(
                x, x_tiles, w_tiles, out, pairs, expert, first, count, first_column, n, k, pairs_per_row,
                ROWS, COLUMNS, DEPTH, SLICES, EVEN, SWAP, PARTS,
            )  # fmt: skip


@triton.jit(do_not_specialize=("num_pairs", "k_units", "pairs_per_row"))
def copy_rows_kernel(x, pairs, copied, num_pairs, k_units, pairs_per_row, WIDTH: tl.constexpr):
    """copied[i] = x[row of pairs[i]]. Grid (pairs, parts of K)."""
    k = k_units * 8
    i = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    row = tl.load(pairs + i) // pairs_per_row
    tl.store(copied + i * k + column, tl.load(x + row.to(tl.int64) * k + column, mask=column < k), mask=column < k)


@triton.jit(do_not_specialize=("n", "k", "pairs_per_row", "num_experts"))
def reference_kernel(x, weights, out, ids, n, k, pairs_per_row, num_experts, SLICES: tl.constexpr,
                     COLUMNS: tl.constexpr):  # fmt: skip
    """MmaLinearOrder as plainly as it can be written: a program has one pair, its row first of 16, 16 products at a
    time. It has never heard of sorting. Grid (pairs, columns)."""
    pair = tl.program_id(0)
    expert = tl.load(ids + pair)
    row = tl.arange(0, 16)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, 16)
    slice_k = k // SLICES
    if (expert >= 0) & (expert < num_experts):
        x_at = x + (pair // pairs_per_row).to(tl.int64) * k + row[:, None] * 0 + depth[None, :]
        w_at = weights + (expert.to(tl.int64) * n + column)[:, None] * k + depth[None, :]
        total = tl.zeros([16, COLUMNS], tl.float32)
        for i in tl.static_range(SLICES):
            acc = tl.zeros([16, COLUMNS], tl.float32)
            for start in range(0, slice_k, 16):  # REDUCTION ORDER: see MmaLinearOrder
                inside = (start + depth < slice_k)[None, :]
                a = tl.load(x_at + (i * slice_k + start), mask=(row < 1)[:, None] & inside, other=0.0)
                w = tl.load(w_at + (i * slice_k + start), mask=(column < n)[:, None] & inside, other=0.0)
                acc = tl.dot(a, w.T, acc)
            total = acc if i == 0 else total + acc
        _write(total, pair + row[:, None] * 0, column[None, :], (row < 1)[:, None], n, out)
