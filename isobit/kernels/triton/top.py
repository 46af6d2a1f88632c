"""The n largest entries of rows of logits on NVIDIA GPUs, by (value descending, id ascending): data movement only.

For n <= 64 a row is read once: of its chunks, the n with the largest maxima (ties to the lower chunk) hold the n
largest entries, since each chunk ahead of a given one holds an entry ahead of all of that one's. For more, value and id
are packed into one int64, so that no two keys are equal and any sort gives one answer. Knows no tokens' meaning.
Invariant: ties go to the lower id; NaN comes last.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from isobit.kernels.triton.math import sortable

__all__ = ["SHORT_LIST", "top_logits"]

SHORT_LIST = 64  # largest n that needs no sort of the row
_BLOCK = 4096
_MAX_CHUNKS = 4096  # of a row: one program reads all their maxima
TAKEN: tl.constexpr = tl.constexpr(-2147483648)


@triton.jit
def _take_largest(left, ids):
    """(what is left without its largest entry, that entry's id), ties to the lower id, 2^31 - 1 if none is left.

    Two 32-bit reductions are faster than one over 64-bit keys.
    """
    most = tl.max(left, axis=0)
    first = tl.min(tl.where((left == most) & (left != TAKEN), ids, 2147483647), axis=0)
    return tl.where(ids == first, TAKEN, left), first


@triton.jit
def _chunk_maxima_kernel(logits, maxima, row_stride, vocab_size, num_chunks, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    chunk = tl.program_id(0) * CHUNKS + tl.arange(0, CHUNKS)
    column = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    x = tl.load(logits + row * row_stride + column, mask=column < vocab_size, other=float("nan"))
    tl.store(maxima + row * num_chunks + chunk, tl.max(sortable(x), axis=1), mask=chunk < num_chunks)


@triton.jit(do_not_specialize=["n"])
def _top_kernel(
    logits, maxima, ids, row_stride, vocab_size, num_chunks, n,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, TOP: tl.constexpr,
):  # fmt: skip
    """Takes the largest out n times: first chunks, then entries of these chunks. A sort would be no faster."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    index = tl.arange(0, CHUNKS)
    left = tl.load(maxima + row * num_chunks + index, mask=index < num_chunks, other=TAKEN)
    rank = tl.arange(0, TOP)
    chunks = tl.zeros([TOP], tl.int32) + num_chunks
    for i in range(n):
        left, chunk = _take_largest(left, index)
        chunks = tl.where(rank == i, tl.minimum(chunk, num_chunks), chunks)
    column = tl.reshape(chunks[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :], [TOP * CHUNK])
    inside = column < vocab_size
    left = tl.where(inside, sortable(tl.load(logits + column, mask=inside, other=0.0)), TAKEN)
    for i in range(n):
        left, token = _take_largest(left, column)
        tl.store(ids + row * n + i, token)


@triton.jit
def _keys_kernel(logits, keys, row_stride, vocab_size, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab_size
    x = tl.load(logits + row * row_stride + column, mask=inside, other=0.0)
    key = (sortable(x).to(tl.int64) << 32) | (2147483647 - column).to(tl.int64)
    tl.store(keys + row * vocab_size + column, key, mask=inside)


def top_logits(logits: torch.Tensor, n: int) -> torch.Tensor:
    """Ids int32 [R, n] of the n largest of each row of float32 [R, V], by (value descending, id ascending), NaN last.

    Raises ValueError unless 1 <= n <= V. Up to 64 without a sort of the row.
    """
    num_rows, vocab_size = logits.shape
    if not 1 <= n <= vocab_size or logits.dtype != torch.float32 or logits.stride(1) != 1:
        raise ValueError(
            f"top_logits of n={n} from {logits.dtype} {tuple(logits.shape)}, strides {logits.stride()}: "
            "it takes float32 [R, V] with contiguous rows and 1 <= n <= V"
        )
    if n > SHORT_LIST:
        return _top_by_sort(logits, n)
    ids = torch.empty((num_rows, n), dtype=torch.int32, device=logits.device)
    if not num_rows:
        return ids
    chunk = max(64, triton.next_power_of_2(triton.cdiv(vocab_size, _MAX_CHUNKS)))
    num_chunks = triton.cdiv(vocab_size, chunk)
    maxima = torch.empty((num_rows, num_chunks), dtype=torch.int32, device=logits.device)
    per_program = max(_BLOCK // chunk, 1)
    _chunk_maxima_kernel[(triton.cdiv(num_chunks, per_program), num_rows)](
        logits, maxima, logits.stride(0), vocab_size, num_chunks, chunk, per_program,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    _top_kernel[(num_rows,)](
        logits, maxima, ids, logits.stride(0), vocab_size, num_chunks, n,
        CHUNK=chunk, CHUNKS=triton.next_power_of_2(num_chunks), TOP=SHORT_LIST,
        num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    return ids


def _top_by_sort(logits: torch.Tensor, n: int) -> torch.Tensor:
    num_rows, vocab_size = logits.shape
    keys = torch.empty((num_rows, vocab_size), dtype=torch.int64, device=logits.device)
    if num_rows:
        _keys_kernel[(triton.cdiv(vocab_size, _BLOCK), num_rows)](
            logits, keys, logits.stride(0), vocab_size, _BLOCK, num_warps=4, enable_fp_fusion=False
        )
    top = torch.topk(keys, n, dim=1, sorted=True).values  # no two keys are equal
    return (2147483647 - (top & 0xFFFFFFFF)).to(torch.int32)
