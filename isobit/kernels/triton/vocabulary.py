"""Reading rows of logits on NVIDIA GPUs: log-probs and argmax (`top.py` has the largest entries).

A row is cut into blocks of `LogprobsOrder.block` entries, one program each, so that few rows fill the chip too; what
the programs of a row found is joined by one more. Sums follow LogprobsOrder; everything else is a maximum or a move of
data, which has no order. Does not know tokens' meaning. Invariant: a row's results depend on that row alone.
"""

# jit functions carry no types
# mypy: disable-error-code="assignment,attr-defined"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from isobit.kernels.triton.math import add_halves, exp32, log64, sortable
from isobit.order import LogprobsOrder

__all__ = ["argmax", "logprobs", "row_maxima", "row_maximum"]

_BLOCK, _WARPS = 4096, 8


@triton.jit
def _block_maxima_kernel(
    logits, maxima, row_stride, vocab_size, num_blocks, BLOCK: tl.constexpr, KEEP_NAN: tl.constexpr
):
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    column = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * row_stride + column, mask=column < vocab_size, other=float("-inf"))
    most = tl.max(tl.where(x == x, x, float("-inf")), axis=0)
    if KEEP_NAN:
        most = tl.where(tl.max((x != x).to(tl.int32), axis=0) > 0, float("nan"), most)
    tl.store(maxima + row * num_blocks + block, most)


@triton.jit
def row_maximum(maxima, row, num_blocks, BLOCKS: tl.constexpr):
    """Maximum of a row of `maxima`, its zero positive; NaN if one of them is."""
    index = tl.arange(0, BLOCKS)
    found = tl.load(maxima + row * num_blocks + index, mask=index < num_blocks, other=float("-inf"))
    most = tl.max(tl.where(found == found, found, float("-inf")), axis=0)
    return tl.where(tl.max((found != found).to(tl.int32), axis=0) > 0, float("nan"), most) + 0.0


@triton.jit
def _block_sums_kernel(
    logits, maxima, sums, row_stride, vocab_size, num_blocks,
    BLOCK: tl.constexpr, LANES: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    lane = block * BLOCK + tl.arange(0, LANES)
    logits += row * row_stride
    values = ()
    for start in tl.static_range(0, BLOCK, LANES):
        inside = start + lane < vocab_size
        values = values + (tl.load(logits + start + lane, mask=inside, other=float("-inf")),)
    most = row_maximum(maxima, row, num_blocks, BLOCKS)
    lanes = tl.zeros([LANES], tl.float32)
    for i in tl.static_range(len(values)):  # REDUCTION ORDER: see LogprobsOrder
        weight = exp32(values[i] - most)
        lanes = lanes + tl.where(i * LANES + lane < vocab_size, weight, 0.0)
    total = tl.sum(add_halves(tl.reshape(lanes, [1, LANES]), 1, LANES), axis=0)
    tl.store(sums + row * num_blocks + block, total)


@triton.jit
def _add_blocks_kernel(maxima, sums, out_maxima, out_lse, num_blocks, BLOCKS: tl.constexpr, UNROLL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    most = row_maximum(maxima, row, num_blocks, BLOCKS)
    total = 0.0
    for start in range(0, num_blocks, UNROLL):  # REDUCTION ORDER: see LogprobsOrder
        for i in tl.static_range(UNROLL):
            block = tl.load(sums + row * num_blocks + start + i, mask=start + i < num_blocks, other=0.0)
            total = total + block  # no block sum is negative: past the last one, +0 moves no bit
    tl.store(out_maxima + row, most)
    tl.store(out_lse + row, most.to(tl.float64) + log64(total.to(tl.float64)))


def _checked(op: str, logits: torch.Tensor) -> tuple[int, int, int]:
    """(rows, vocabulary, stride of a row)."""
    if logits.dtype != torch.float32 or logits.ndim != 2 or logits.stride(1) != 1 or not logits.shape[1]:
        raise ValueError(
            f"{op} takes float32 [R, V] with contiguous rows and V >= 1, "
            f"got {logits.dtype} {tuple(logits.shape)} with strides {logits.stride()}"
        )
    return logits.shape[0], logits.shape[1], logits.stride(0)


def row_maxima(logits: torch.Tensor, block: int, keep_nan: bool) -> torch.Tensor:
    """Maxima of the blocks of each row, float32 [R, blocks]; a NaN is passed on, or counts as -inf."""
    num_rows, vocab_size, stride = _checked("row_maxima", logits)
    num_blocks = triton.cdiv(vocab_size, block)
    maxima = torch.empty((num_rows, num_blocks), dtype=torch.float32, device=logits.device)
    if num_rows:
        _block_maxima_kernel[(num_blocks, num_rows)](
            logits, maxima, stride, vocab_size, num_blocks, block, keep_nan, num_warps=_WARPS, enable_fp_fusion=False
        )
    return maxima


def logprobs(logits: torch.Tensor, order: LogprobsOrder) -> tuple[torch.Tensor, torch.Tensor]:
    """logits float32 [R, V] -> (maxima float32 [R], lse float64 [R]): logprob[i] = float32(float64(x[i]) - lse).

    Raises ValueError for another dtype, or a vocabulary that is not the Order's.
    """
    num_rows, vocab_size, stride = _checked("logprobs", logits)
    if vocab_size != order.vocab_size:
        raise ValueError(f"logprobs of {vocab_size} entries under {order}")
    maxima = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    lse = torch.empty(num_rows, dtype=torch.float64, device=logits.device)
    if not num_rows:
        return maxima, lse
    of_blocks = row_maxima(logits, order.block, keep_nan=True)
    num_blocks = of_blocks.shape[1]
    sums = torch.empty_like(of_blocks)
    blocks = triton.next_power_of_2(num_blocks)
    _block_sums_kernel[(num_blocks, num_rows)](
        logits, of_blocks, sums, stride, vocab_size, num_blocks, order.block, order.lanes, blocks,
        num_warps=_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    _add_blocks_kernel[(num_rows,)](
        of_blocks, sums, maxima, lse, num_blocks, blocks, 32, num_warps=1, enable_fp_fusion=False
    )
    return maxima, lse


@triton.jit
def _block_best_kernel(logits, best, broken, row_stride, vocab_size, num_blocks, BLOCK: tl.constexpr):
    """Best entry of a block as (value, -id) in an int64, and whether any is NaN or infinite."""
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab_size
    x = tl.load(logits + row * row_stride + column, mask=inside, other=0.0)
    is_broken = (x.to(tl.int32, bitcast=True) & 0x7F800000) == 0x7F800000
    key = tl.where(inside, sortable(x), -2147483648)
    most = tl.max(key, axis=0)
    first = tl.min(tl.where(key == most, column, 2147483647), axis=0)
    tl.store(best + row * num_blocks + block, (most.to(tl.int64) << 32) | (2147483647 - first))
    tl.store(broken + row * num_blocks + block, tl.max(is_broken.to(tl.int32), axis=0))


@triton.jit
def _best_of_blocks_kernel(best, broken, ids, finite, num_blocks, BLOCKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCKS)
    inside = index < num_blocks
    least: tl.constexpr = -9223372036854775808
    most = tl.max(tl.load(best + row * num_blocks + index, mask=inside, other=least), axis=0)
    is_broken = tl.max(tl.load(broken + row * num_blocks + index, mask=inside, other=0), axis=0)
    tl.store(ids + row, 2147483647 - (most & 0xFFFFFFFF).to(tl.int32))
    tl.store(finite + row, is_broken == 0)


def argmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """logits float32 [R, V] -> (lowest id of the largest value int32 [R], bool [R]: no NaN or infinity in the row).

    -0 equals +0; NaN counts as less than -inf.
    """
    num_rows, vocab_size, stride = _checked("argmax", logits)
    ids = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    finite = torch.empty(num_rows, dtype=torch.bool, device=logits.device)
    if not num_rows:
        return ids, finite
    num_blocks = triton.cdiv(vocab_size, _BLOCK)
    best = torch.empty((num_rows, num_blocks), dtype=torch.int64, device=logits.device)
    broken = torch.empty((num_rows, num_blocks), dtype=torch.int32, device=logits.device)
    _block_best_kernel[(num_blocks, num_rows)](
        logits, best, broken, stride, vocab_size, num_blocks, _BLOCK, num_warps=_WARPS, enable_fp_fusion=False
    )
    _best_of_blocks_kernel[(num_rows,)](
        best, broken, ids, finite, num_blocks, triton.next_power_of_2(num_blocks), num_warps=1, enable_fp_fusion=False
    )
    return ids, finite
