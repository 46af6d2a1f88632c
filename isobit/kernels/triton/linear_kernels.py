"""The kernels of MmaLinearOrder in Triton: y[M, N] = x[M, K] . weight[N, K]^T on tensor cores.

One accumulator per slice of K, from +0, k ascending; slices are added in slice order. `pointer_kernel` reads through
pointers (any N, any K), the `tma_*` kernels through tensor descriptors (rows of 16-byte multiples). They know tiles and
sizes, not why a tile was chosen. Invariant: an output element meets its products in the Order's sequence whatever the
tile; rows, columns and a K tail outside the matrices are zeros that are added or results that are not written.
"""

# jit functions carry no types
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["pointer_kernel", "reference_kernel", "tma_persistent_kernel", "tma_slice_kernel"]


@triton.jit
def _write(acc, first_row, row, column, num_rows, n, bias, addend, out):
    """Bias, addend, one rounding. `row` of the tile and `column` broadcast to acc's shape, whichever way it lies."""
    inside = (first_row + row < num_rows) & (column < n)
    if bias is not None:
        acc = acc + tl.load(bias + column, mask=column < n, other=0.0)
    base = first_row.to(tl.int64) * n  # 64 bits once a tile, 32 bits for each element
    at = row * n + column
    if addend is not None:
        acc = tl.load(addend + base + at, mask=inside, other=0.0) + acc
    tl.store(out + base + at, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _finish(
    acc, first_row, row, column, num_rows, n, bias, addend, out, partials, counters, tile, SLICES: tl.constexpr
):
    """Write a tile's only slice, or leave it in `partials`; the last of a tile to arrive adds all slices in order.

    Which program that is moves no bit. It leaves the counter at zero for the next launch.
    """
    if SLICES == 1:
        _write(acc, first_row, row, column, num_rows, n, bias, addend, out)
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
            _write(total, first_row, row, column, num_rows, n, bias, addend, out)
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
    first_row = tile % row_tiles * ROWS  # programs side by side share a tile of the weight
    row = first_row + tl.arange(0, ROWS)
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
    row, column = tl.arange(0, ROWS)[None, :], column[:, None]
    _finish(acc, first_row, row, column, num_rows, n, bias, addend, out, partials, counters, tile, SLICES)


@triton.jit(do_not_specialize=("num_rows", "k"))
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
    row = tl.arange(0, ROWS)
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
        row, column = row[None, :], column[:, None]
    else:
        row, column = row[:, None], column[None, :]
    _finish(acc, first_row, row, column, num_rows, n, bias, addend, out, partials, counters, tile, SLICES)


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
def _store_parts(acc, first_row, first_column, num_rows, n, bias, addend, out_tiles, PARTS: tl.constexpr):
    """Bias, addend, one rounding, column part by column part."""
    parts = _column_parts(acc, PARTS)
    WIDTH: tl.constexpr = acc.shape[1] // PARTS
    row = tl.arange(0, acc.shape[0])[:, None]
    for i in tl.static_range(PARTS):
        part = parts[i]
        column = (first_column + i * WIDTH + tl.arange(0, WIDTH))[None, :]
        if bias is not None:
            part = part + tl.load(bias + column, mask=column < n, other=0.0)
        if addend is not None:
            inside = (first_row + row < num_rows) & (column < n)
            of_tile = addend + first_row.to(tl.int64) * n
            part = tl.load(of_tile + (row * n + column), mask=inside, other=0.0) + part
        out_tiles.store([first_row, first_column + i * WIDTH], part.to(out_tiles.dtype))


@triton.jit
def _slice_of_tile(x_tiles, w_tiles, first_row, first_column, first, steps, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                   DEPTH: tl.constexpr):  # fmt: skip
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for step in range(steps):  # REDUCTION ORDER: see MmaLinearOrder
        a = x_tiles.load([first_row, first + step * DEPTH])
        w = w_tiles.load([first_column, first + step * DEPTH])
        acc = tl.dot(a, w.T, acc)
    return acc


@triton.jit(do_not_specialize=("num_rows", "k"))
def tma_persistent_kernel(
    x_tiles, w_tiles, out_tiles, bias, addend, num_rows, n, k,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, SLICES: tl.constexpr, PARTS: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """A program walks tiles; it keeps the sum of the slices so far beside the accumulator of the present one.

    Tiles go in groups of `GROUP` row tiles, so that programs at work together share weights and rows in L2. With one
    slice the loops are flattened: a tile's first loads overlap the last tile's stores.
    """
    row_tiles, column_tiles = tl.cdiv(num_rows, ROWS), tl.cdiv(n, COLUMNS)
    steps = tl.cdiv(k // SLICES, DEPTH)
    in_group = GROUP * column_tiles
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0), flatten=SLICES == 1):
        group_row = tile // in_group * GROUP
        height = min(row_tiles - group_row, GROUP)
        first_row = (group_row + tile % in_group % height) * ROWS
        first_column = tile % in_group // height * COLUMNS
        total = _slice_of_tile(x_tiles, w_tiles, first_row, first_column, 0, steps, ROWS, COLUMNS, DEPTH)
        for i in tl.static_range(1, SLICES):  # REDUCTION ORDER: see MmaLinearOrder
            first = i * (k // SLICES)
            acc = _slice_of_tile(x_tiles, w_tiles, first_row, first_column, first, steps, ROWS, COLUMNS, DEPTH)
            total = total + acc
        _store_parts(total, first_row, first_column, num_rows, n, bias, addend, out_tiles, PARTS)


@triton.jit(do_not_specialize=("num_rows", "n", "k", "x_stride"))
def reference_kernel(
    x, weight, bias, addend, out, num_rows, n, k, x_stride, SLICES: tl.constexpr, COLUMNS: tl.constexpr
):
    """MmaLinearOrder as plainly as it can be written: 16 rows, 16 products of each at a time."""
    first_row = tl.program_id(0) * 16
    row = first_row + tl.arange(0, 16)
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
    _write(total, first_row, tl.arange(0, 16)[:, None], column[None, :], num_rows, n, bias, addend, out)
