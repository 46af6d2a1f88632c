"""The kernels of a mixture's linears in Triton: out[p] = weights[expert of p] . x[row of p], MmaLinearOrder per output.

A pair p = token * top_k + slot is one row of one expert. A tile is up to ROWS pairs of one expert (`moe_routing`); it
gathers their rows of x and scatters its results to where the pairs belong. Knows tiles, not why they were cut so.
Invariant: an output element meets its products in the Order's sequence whatever tile its pair fell into and whichever
pairs lie beside it; rows without a pair, columns past n and a tail of K are zeros added or results not written.
"""

# jit functions carry no types
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["experts_kernel", "reference_kernel", "stream_kernel"]

TILE_FIELDS = tl.constexpr(4)  # (expert, first, count, 0): its pairs are pairs[first : first + count]


@triton.jit
def _write(acc, pair, column, inside, n, out):
    """One rounding. `pair`, `column` and `inside` broadcast to acc's shape, whichever way it lies."""
    tl.store(out + pair.to(tl.int64) * n + column, acc.to(out.dtype.element_ty), mask=inside & (column < n))


@triton.jit
def _stream_slice(x_at, w_at, used, slice_k, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
                  EVEN: tl.constexpr, ONCE: tl.constexpr):  # fmt: skip
    POLICY: tl.constexpr = "evict_first" if ONCE else ""
    depth = tl.arange(0, DEPTH)
    acc = tl.zeros([COLUMNS, ROWS], tl.float32)
    for start in range(0, slice_k, DEPTH):  # REDUCTION ORDER: see MmaLinearOrder
        if EVEN:
            w = tl.load(w_at, eviction_policy=POLICY)
            a = tl.load(x_at, mask=used, other=0.0)
        else:
            inside = (start + depth < slice_k)[None, :]
            w = tl.load(w_at, mask=inside, other=0.0, eviction_policy=POLICY)
            a = tl.load(x_at, mask=used & inside, other=0.0)
        acc = tl.dot(w, a.T, acc)
        x_at += DEPTH
        w_at += DEPTH
    return acc


@triton.jit
def _stream_tile(x, weights, out, pair, used, expert, first_column, n, k, pairs_per_row, ROWS: tl.constexpr,
                 COLUMNS: tl.constexpr, DEPTH: tl.constexpr, SLICES: tl.constexpr, EVEN: tl.constexpr,
                 ONCE: tl.constexpr):  # fmt: skip
    column = first_column + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    slice_k = k // SLICES
    x_at = x + (pair // pairs_per_row).to(tl.int64)[:, None] * k + depth[None, :]
    weight_row = expert.to(tl.int64) * n + tl.where(column < n, column, 0)
    w_at = weights + weight_row[:, None] * k + depth[None, :]
    total = _stream_slice(x_at, w_at, used[:, None], slice_k, ROWS, COLUMNS, DEPTH, EVEN, ONCE)
    for i in tl.static_range(1, SLICES):  # REDUCTION ORDER: see MmaLinearOrder
        at = i * slice_k
        total = total + _stream_slice(x_at + at, w_at + at, used[:, None], slice_k, ROWS, COLUMNS, DEPTH, EVEN, ONCE)
    _write(total, pair[None, :], column[:, None], used[None, :], n, out)


@triton.jit(do_not_specialize=("n_units", "k_units", "pairs_per_row", "num_experts"))
def stream_kernel(
    x, weights, out, ids, pairs, tiles, n_units, k_units, pairs_per_row, num_experts,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, SLICES: tl.constexpr, N_UNIT: tl.constexpr,
    K_UNIT: tl.constexpr, EVEN: tl.constexpr, ONCE: tl.constexpr,
):  # fmt: skip
    """Few rows: weights are the left operand and stream past, programs side by side share an expert. Grid: tiles x
    columns. Without `tiles` every pair is a tile of its own, and nothing needs sorting. n and k come in
    units of 8 where they are multiples of 8: loads and stores of 16 bytes at any n and k. `ONCE`: the weight is read
    by one tile only and need not stay in L2."""
    n = n_units * N_UNIT
    k = k_units * K_UNIT
    column_tiles = tl.cdiv(n, COLUMNS)
    index = tl.program_id(0) // column_tiles
    first_column = tl.program_id(0) % column_tiles * COLUMNS
    row = tl.arange(0, ROWS)
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
            ROWS, COLUMNS, DEPTH, SLICES, EVEN, ONCE,
        )  # fmt: skip


@triton.jit
def _rows_of(x, pairs, first, count, k, pairs_per_row, ROWS: tl.constexpr, DEPTH: tl.constexpr):
    """Where the rows of `count` pairs from `first` on begin, and which of ROWS there are."""
    row = tl.arange(0, ROWS)
    pair = tl.load(pairs + first + row, mask=row < count, other=0)
    at = (pair // pairs_per_row).to(tl.int64)[:, None] * k + tl.arange(0, DEPTH)[None, :]
    return x + at, (row < count)[:, None]


@triton.jit
def _gather(x_at, used, at, inside, EVEN: tl.constexpr):
    mask = used
    if not EVEN:
        mask = used & inside
    return tl.load(x_at + at, mask=mask, other=0.0)


@triton.jit
def _experts_slice(x_at, used, more_at, more_used, w_tiles, w_row, start, slice_k, ROWS: tl.constexpr,
                   MORE: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr,
                   SWAP: tl.constexpr):  # fmt: skip
    """The accumulator of ROWS rows, and that of MORE rows past them: they share what is read of the weight."""
    if SWAP:
        acc = tl.zeros([COLUMNS, ROWS], tl.float32)
    else:
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    if MORE > 0:
        more = tl.zeros([COLUMNS, MORE], tl.float32)
    for step in range(tl.cdiv(slice_k, DEPTH)):  # REDUCTION ORDER: see MmaLinearOrder
        at = start + step * DEPTH
        inside = (step * DEPTH + tl.arange(0, DEPTH) < slice_k)[None, :]
        w = w_tiles.load([w_row, at])
        a = _gather(x_at, used, at, inside, EVEN)
        if SWAP:
            acc = tl.dot(w, a.T, acc)
        else:
            acc = tl.dot(a, w.T, acc)
        if MORE > 0:
            more = tl.dot(w, _gather(more_at, more_used, at, inside, EVEN).T, more)
    if MORE > 0:
        return acc, more
    else:
        return acc, acc


@triton.jit
def _halves(tile):
    """The left and the right half of the columns of a tile."""
    return tl.split(tl.permute(tl.reshape(tile, [tile.shape[0], 2, tile.shape[1] // 2]), [0, 2, 1]))


@triton.jit
def _write_tile(acc, pairs, first, count, first_column, n, out, SWAP: tl.constexpr, PARTS: tl.constexpr):
    """In 1, 2 or 4 parts along acc's second axis: a whole tile would not fit beside the pipeline in shared memory."""
    if PARTS == 1:
        parts = (acc,)
    elif PARTS == 2:
        parts = _halves(acc)
    else:
        left, right = _halves(acc)
        parts = _halves(left) + _halves(right)
    HEIGHT: tl.constexpr = acc.shape[0]
    WIDTH: tl.constexpr = acc.shape[1] // PARTS
    for i in tl.static_range(PARTS):
        if SWAP:
            row = i * WIDTH + tl.arange(0, WIDTH)
            pair = tl.load(pairs + first + row, mask=row < count, other=0)[None, :]
            column = (first_column + tl.arange(0, HEIGHT))[:, None]
            _write(parts[i], pair, column, (row < count)[None, :], n, out)
        else:
            row = tl.arange(0, HEIGHT)
            pair = tl.load(pairs + first + row, mask=row < count, other=0)[:, None]
            column = (first_column + i * WIDTH + tl.arange(0, WIDTH))[None, :]
            _write(parts[i], pair, column, (row < count)[:, None], n, out)


@triton.jit
def _experts_tile(x, w_tiles, out, pairs, expert, first, count, first_column, n, k, pairs_per_row,
                  ROWS: tl.constexpr, MORE: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
                  SLICES: tl.constexpr, EVEN: tl.constexpr, SWAP: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    x_at, used = _rows_of(x, pairs, first, count, k, pairs_per_row, ROWS, DEPTH)
    more_at, more_used = x_at, used
    if MORE > 0:
        more_at, more_used = _rows_of(x, pairs, first + ROWS, count - ROWS, k, pairs_per_row, MORE, DEPTH)
    w_row = expert * n + first_column
    slice_k = k // SLICES
    total, more_total = _experts_slice(
        x_at, used, more_at, more_used, w_tiles, w_row, 0, slice_k, ROWS, MORE, COLUMNS, DEPTH, EVEN, SWAP
    )
    for i in tl.static_range(1, SLICES):  # REDUCTION ORDER: see MmaLinearOrder
        acc, more = _experts_slice(
            x_at, used, more_at, more_used, w_tiles, w_row, i * slice_k, slice_k, ROWS, MORE, COLUMNS, DEPTH, EVEN, SWAP
        )
        total = total + acc
        more_total = more_total + more
    _write_tile(total, pairs, first, count, first_column, n, out, SWAP, PARTS)
    if MORE > 0:
        _write_tile(more_total, pairs, first + ROWS, count - ROWS, first_column, n, out, True, 1)


@triton.jit(do_not_specialize=("n_units", "k_units", "pairs_per_row"))
def experts_kernel(
    x, w_tiles, out, pairs, tiles, num_tiles, n_units, k_units, pairs_per_row,
    ROWS: tl.constexpr, SHORT: tl.constexpr, MORE: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    SLICES: tl.constexpr, N_UNIT: tl.constexpr, EVEN: tl.constexpr, SWAP: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Many rows: programs walk the tiles that exist. Weights, as [experts * n, k], come through a tensor descriptor,
    rows of x through pointers. All columns of a tile run side by side: its rows and its expert's weight stay in L2.

    A tile of at most SHORT pairs runs at that height. One of up to ROWS + MORE has a second, low accumulator for the
    rows past ROWS: cheaper than another tile, which would fetch the weight again."""
    n = n_units * N_UNIT
    k = k_units * 8
    column_tiles = tl.cdiv(n, COLUMNS)
    for index in tl.range(tl.program_id(0), tl.load(num_tiles) * column_tiles, tl.num_programs(0)):
        entry = tiles + index // column_tiles * TILE_FIELDS
        first_column = index % column_tiles * COLUMNS
        expert, first, count = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
        if count <= SHORT:
            if SHORT > 0:
                _experts_tile(
                    x, w_tiles, out, pairs, expert, first, count, first_column, n, k, pairs_per_row,
                    SHORT, 0, COLUMNS, DEPTH, SLICES, EVEN, SWAP, PARTS,
                )  # fmt: skip
        elif count <= ROWS:
            _experts_tile(
                x, w_tiles, out, pairs, expert, first, count, first_column, n, k, pairs_per_row,
                ROWS, 0, COLUMNS, DEPTH, SLICES, EVEN, SWAP, PARTS,
            )  # fmt: skip
        elif MORE > 0:
            _experts_tile(
                x, w_tiles, out, pairs, expert, first, count, first_column, n, k, pairs_per_row,
                ROWS, MORE, COLUMNS, DEPTH, SLICES, EVEN, SWAP, PARTS,
            )  # fmt: skip


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
