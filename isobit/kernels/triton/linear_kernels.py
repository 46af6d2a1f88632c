"""The kernels of MmaLinearOrder in Triton: y[M, N] = x[M, K] . weight[N, K]^T on tensor cores.

One accumulator per slice of K, from +0, k ascending; slices are added in slice order. `pointer_kernel` reads through
pointers (any N, any K), the `tma_*` kernels through tensor descriptors (rows of 16-byte multiples). They know tiles and
sizes, not why a tile was chosen. Invariant: an output element meets its products in the Order's sequence whatever the
tile; rows, columns and a K tail outside the matrices are zeros that are added or results that are not written.
"""

# jit functions carry no types
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["pointer_kernel", "reference_kernel", "tma_persistent_kernel", "tma_slice_kernel"]


@triton.jit
def _write(acc, row, column, num_rows, n, bias, addend, out):
    """Bias, addend, one rounding. `row` and `column` broadcast to acc's shape, whichever way it lies."""
    inside = (row < num_rows) & (column < n)
    if bias is not None:
        acc = acc + tl.load(bias + column, mask=column < n, other=0.0)
    at = row.to(tl.int64) * n + column
    if addend is not None:
        acc = tl.load(addend + at, mask=inside, other=0.0) + acc
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _finish(acc, row, column, num_rows, n, bias, addend, out, partials, counters, tile, SLICES: tl.constexpr):
    """Write a tile's only slice, or leave it in `partials`; the last of a tile to arrive adds all slices in order.

    Which program that is moves no bit. It leaves the counter at zero for the next launch.
    """
    if SLICES == 1:
        _write(acc, row, column, num_rows, n, bias, addend, out)
    else:
        SIZE: tl.constexpr = acc.shape[0] * acc.shape[1]
        at = tl.arange(0, acc.shape[0])[:, None] * acc.shape[1] + tl.arange(0, acc.shape[1])[None, :]
        of_tile = partials + tile.to(tl.int64) * (SLICES * SIZE) + at
        tl.store(of_tile + tl.program_id(1) * SIZE, acc)
        tl.debug_barrier()  # every thread's part is written before one thread says so
        arrived = tl.atomic_add(counters + tile, 1, sem="acq_rel")
        if arrived == SLICES - 1:
            total = tl.load(of_tile, cache_modifier=".cg")
            for i in tl.static_range(1, SLICES):  # REDUCTION ORDER: see MmaLinearOrder
                total = total + tl.load(of_tile + i * SIZE, cache_modifier=".cg")
            _write(total, row, column, num_rows, n, bias, addend, out)
            tl.store(counters + tile, 0)


@triton.jit(do_not_specialize=("num_rows", "n", "k_units", "x_stride_units"))
def pointer_kernel(
    x, weight, bias, addend, out, partials, counters, num_rows, n, k_units, x_stride_units,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, SLICES: tl.constexpr,
    UNIT: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Weights as the left operand: the short side of x needs no padding to a tensor core's 16 rows. Grid (tiles,
    slices). K and strides come in units of 8 elements where they are multiples of it: 16-byte loads at any K."""
    tile = tl.program_id(0)
    row_tiles = tl.cdiv(num_rows, ROWS)
    row = tile % row_tiles * ROWS + tl.arange(0, ROWS)  # programs side by side share a tile of the weight
    column = tile // row_tiles * COLUMNS + tl.arange(0, COLUMNS)
    k = k_units * UNIT
    slice_k = k // SLICES
    depth = tl.arange(0, DEPTH)
    first = tl.program_id(1) * slice_k
    x_at = x + row.to(tl.int64)[:, None] * (x_stride_units * UNIT) + first + depth[None, :]
    w_at = weight + tl.where(column < n, column, 0).to(tl.int64)[:, None] * k + first + depth[None, :]
    row_inside = (row < num_rows)[:, None]
    acc = tl.zeros([COLUMNS, ROWS], tl.float32)
    for start in range(0, slice_k, DEPTH):  # REDUCTION ORDER: see MmaLinearOrder
        if EVEN:
            w = tl.load(w_at)
            a = tl.load(x_at, mask=row_inside, other=0.0)
        else:
            k_inside = (start + depth < slice_k)[None, :]
            w = tl.load(w_at, mask=k_inside, other=0.0)
            a = tl.load(x_at, mask=row_inside & k_inside, other=0.0)
        acc = tl.dot(w, a.T, acc)
        x_at += DEPTH
        w_at += DEPTH
    _finish(
        acc, row[None, :], column[:, None], num_rows, n, bias, addend, out, partials, counters, tile, SLICES
    )  # fmt: skip


@triton.jit(do_not_specialize=("num_rows", "n", "k"))
def tma_slice_kernel(
    x_tiles, w_tiles, bias, addend, out, partials, counters, num_rows, n, k,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, SLICES: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """One slice of one tile a program, grid (tiles, slices); `SWAP`: weights as the left operand."""
    tile = tl.program_id(0)
    row_tiles = tl.cdiv(num_rows, ROWS)
    first_row = tile % row_tiles * ROWS
    first_column = tile // row_tiles * COLUMNS
    slice_k = k // SLICES
    first = tl.program_id(1) * slice_k
    row = first_row + tl.arange(0, ROWS)
    column = first_column + tl.arange(0, COLUMNS)
    if SWAP:
        acc = tl.zeros([COLUMNS, ROWS], tl.float32)
    else:
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(first, first + slice_k, DEPTH):  # REDUCTION ORDER: see MmaLinearOrder
        a = x_tiles.load([first_row, start])
        w = w_tiles.load([first_column, start])
        if SWAP:
            acc = tl.dot(w, a.T, acc)
        else:
            acc = tl.dot(a, w.T, acc)
    if SWAP:
        _finish(
            acc, row[None, :], column[:, None], num_rows, n, bias, addend, out, partials, counters, tile, SLICES
        )  # fmt: skip
    else:
        _finish(
            acc, row[:, None], column[None, :], num_rows, n, bias, addend, out, partials, counters, tile, SLICES
        )  # fmt: skip


@triton.jit
def _column_parts(tile, PARTS: tl.constexpr):
    """The columns of [rows, columns] in 1, 2 or 4 parts: a whole tile would not fit in shared memory once more."""
    if PARTS == 1:
        parts = (tile,)
    else:
        pairs = tl.permute(tl.reshape(tile, [tile.shape[0], 2, tile.shape[1] // 2]), [0, 2, 1])
        left, right = tl.split(pairs)
        parts = _column_parts_of_half(left, PARTS // 2) + _column_parts_of_half(right, PARTS // 2)
    return parts


@triton.jit
def _column_parts_of_half(tile, PARTS: tl.constexpr):
    if PARTS == 1:
        parts = (tile,)
    else:
        parts = tl.split(tl.permute(tl.reshape(tile, [tile.shape[0], 2, tile.shape[1] // 2]), [0, 2, 1]))
    return parts


@triton.jit
def _keep(acc, kept, i, SLICES: tl.constexpr, PARTS: tl.constexpr):
    """kept = acc, or kept + acc: the sum of the slices so far, in memory that only this program sees."""
    parts = _column_parts(acc, PARTS)
    WIDTH: tl.constexpr = acc.shape[1] // PARTS
    at = tl.arange(0, acc.shape[0])[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    for p in tl.static_range(PARTS):
        part = parts[p]
        part_at = kept + p * acc.shape[0] * WIDTH + at
        if SLICES > 2:  # else this is the first
            if i > 0:
                part = tl.load(part_at, cache_modifier=".cg") + part
        tl.store(part_at, part)
    tl.debug_barrier()  # another thread may read what this one kept


@triton.jit
def _store_parts(acc, kept, first_row, first_column, num_rows, n, bias, addend, out_tiles, PARTS: tl.constexpr):
    """Sum of the slices before, bias, addend, one rounding, column part by column part."""
    parts = _column_parts(acc, PARTS)
    WIDTH: tl.constexpr = acc.shape[1] // PARTS
    tile_row = tl.arange(0, acc.shape[0])[:, None]
    row = first_row + tile_row
    for i in tl.static_range(PARTS):
        part = parts[i]
        column = (first_column + i * WIDTH + tl.arange(0, WIDTH))[None, :]
        if kept is not None:
            at = i * acc.shape[0] * WIDTH + tile_row * WIDTH + tl.arange(0, WIDTH)[None, :]
            part = tl.load(kept + at, cache_modifier=".cg") + part
        if bias is not None:
            part = part + tl.load(bias + column, mask=column < n, other=0.0)
        if addend is not None:
            inside = (row < num_rows) & (column < n)
            part = tl.load(addend + row.to(tl.int64) * n + column, mask=inside, other=0.0) + part
        out_tiles.store([first_row, first_column + i * WIDTH], part.to(out_tiles.dtype))


@triton.jit(do_not_specialize=("num_rows", "n", "k"))
def tma_persistent_kernel(
    x_tiles, w_tiles, out_tiles, bias, addend, partials, num_rows, n, k,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, SLICES: tl.constexpr, PARTS: tl.constexpr,
    GROUP: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """A program walks tiles. With more than one slice the sum of those before waits in `partials`: a second
    accumulator of this size would not fit in registers.

    Tiles go in groups of `GROUP` row tiles, so that programs at work together share weights and rows in L2.
    """
    row_tiles, column_tiles = tl.cdiv(num_rows, ROWS), tl.cdiv(n, COLUMNS)
    slice_k = k // SLICES
    in_group = GROUP * column_tiles
    own_tiles = tl.cdiv(row_tiles * column_tiles - tl.program_id(0), tl.num_programs(0))
    for turn in tl.range(0, own_tiles * SLICES, flatten=FLATTEN):  # REDUCTION ORDER: see MmaLinearOrder
        tile = tl.program_id(0) + turn // SLICES * tl.num_programs(0)
        group_row = tile // in_group * GROUP
        height = min(row_tiles - group_row, GROUP)
        first_row = (group_row + tile % in_group % height) * ROWS
        first_column = tile % in_group // height * COLUMNS
        i = turn % SLICES
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        for step in range(tl.cdiv(slice_k, DEPTH)):  # REDUCTION ORDER: see MmaLinearOrder
            a = x_tiles.load([first_row, i * slice_k + step * DEPTH])
            w = w_tiles.load([first_column, i * slice_k + step * DEPTH])
            acc = tl.dot(a, w.T, acc)
        if SLICES == 1:
            _store_parts(acc, None, first_row, first_column, num_rows, n, bias, addend, out_tiles, PARTS)
        else:
            kept = partials + tl.program_id(0) * (ROWS * COLUMNS)
            if i == SLICES - 1:
                _store_parts(acc, kept, first_row, first_column, num_rows, n, bias, addend, out_tiles, PARTS)
            else:
                _keep(acc, kept, i, SLICES, PARTS)


@triton.jit(do_not_specialize=("num_rows", "n", "k", "x_stride"))
def reference_kernel(
    x, weight, bias, addend, out, num_rows, n, k, x_stride, SLICES: tl.constexpr, COLUMNS: tl.constexpr
):
    """MmaLinearOrder as plainly as it can be written: 16 rows, 16 products of each at a time."""
    row = tl.program_id(0) * 16 + tl.arange(0, 16)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, 16)
    slice_k = k // SLICES
    x_at = x + row.to(tl.int64)[:, None] * x_stride + depth[None, :]
    w_at = weight + column.to(tl.int64)[:, None] * k + depth[None, :]
    total = tl.zeros([16, COLUMNS], tl.float32)
    for i in tl.static_range(SLICES):
        acc = tl.zeros([16, COLUMNS], tl.float32)
        for start in range(0, slice_k, 16):  # REDUCTION ORDER: see MmaLinearOrder
            inside = (start + depth < slice_k)[None, :]
            at = i * slice_k + start
            a = tl.load(x_at + at, mask=(row < num_rows)[:, None] & inside, other=0.0)
            w = tl.load(w_at + at, mask=(column < n)[:, None] & inside, other=0.0)
            acc = tl.dot(a, w.T, acc)
        total = acc if i == 0 else total + acc
    _write(total, row[:, None], column[None, :], num_rows, n, bias, addend, out)
