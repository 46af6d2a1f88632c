"""Drawing tokens from rows of logits on NVIDIA GPUs: SamplingOrder, with sums that are exact integers.

The host knows every row's settings, so it says which of three ways a row takes; nothing comes back from the device:
`free` rows have no filter but min_p and are read once; `short` rows keep at most 64 tokens by top_k and need no others;
`long` rows find the last kept value by a search (`threshold.py`), never by a sort. Does not know penalties or requests.
Invariant: a row's token is a function of the row and its settings; the way it takes cannot move it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from isobit.kernels.interface import Draws
from isobit.kernels.triton.math import gumbel, noise_key
from isobit.kernels.triton.threshold import (
    BLOCK,
    SETTINGS,
    Rows,
    Threshold,
    find_threshold,
    key_weight,
    setting,
    setting64,
    soft_weights,
    value_keys,
)
from isobit.kernels.triton.top import SHORT_LIST, top_logits
from isobit.kernels.triton.vocabulary import row_maxima, row_maximum
from isobit.order import SamplingOrder

__all__ = ["DrawPlan", "plan_draws", "sample", "sample_planned"]

_TILE = 1024  # tokens whose noise is made together; where none is kept, none is made


@dataclass(frozen=True)
class DrawPlan:
    """Which way each row takes: `settings` int64 [R, 8] on the device (`threshold.py`), free rows first, then short,
    then long. The other fields are the host's; a captured step can be replayed with other settings of the same fields.
    """

    settings: torch.Tensor
    num_free: int
    num_short: int
    any_top_k: bool  # among the long
    any_top_p: bool
    short_k: int  # most that a short row keeps


def plan_draws(draws: Draws, vocab_size: int, device: torch.device) -> DrawPlan:
    """Sort the rows of `draws` by way and upload their settings: the only copy, and it is to the device."""
    limited = (draws.top_k > 0) & (draws.top_k < vocab_size)
    nucleus = draws.top_p < 1.0
    is_short = limited & (draws.top_k <= SHORT_LIST)
    is_long = (limited | nucleus) & ~is_short
    # A subnormal temperature has long become the greedy choice.
    temperature = np.maximum(draws.temperature, np.finfo(np.float64).tiny)
    columns: tuple[npt.NDArray[Any], ...] = (
        np.arange(limited.size), temperature, np.where(limited, draws.top_k, vocab_size), draws.top_p, draws.min_p,
        draws.seed, draws.position,
    )  # fmt: skip
    settings = np.zeros((limited.size, SETTINGS), np.int64)
    for i, column in enumerate(columns):
        settings[:, i] = np.ascontiguousarray(column).view(np.int64)
    ways = np.argsort(is_short + 2 * is_long, kind="stable")
    return DrawPlan(
        torch.from_numpy(settings[ways]).to(device, non_blocking=True),
        int((~is_short & ~is_long).sum()), int(is_short.sum()),
        bool((limited & is_long).any()), bool((nucleus & is_long).any()),
        int(draws.top_k[is_short].max(initial=1)),
    )  # fmt: skip


@triton.jit
def _row_key(settings, slot):
    seed, position = setting(settings, slot, 5), setting(settings, slot, 6)
    return noise_key(seed.to(tl.uint64, bitcast=True), position.to(tl.uint64, bitcast=True))


@triton.jit
def _scores(x, ids, kept, most, temperature, key):
    """z + noise of kept tokens, else -inf. Where the maximum is not finite, the values: their argmax is the answer."""
    z = (x.to(tl.float64) - most.to(tl.float64)) / temperature
    score = tl.where(most - most == 0.0, z + gumbel(key, ids), x.to(tl.float64))
    return tl.where(kept & (score == score), score, float("-inf"))


@triton.jit
def _best(scores, ids):
    """(largest score, lowest id that has it)."""
    most = tl.max(scores, axis=0)
    return most, tl.min(tl.where(scores == most, ids, 2147483647), axis=0)


@triton.jit
def _sum_before(state, sums, slot, block, num_blocks, BLOCKS: tl.constexpr):
    """(threshold's value, its limit, sum before its first tie in this block)."""
    value = tl.load(state + slot * 4)
    limit = tl.load(state + slot * 4 + 2).to(tl.float64, bitcast=True)
    index = tl.arange(0, BLOCKS)
    ties = tl.load(sums + (slot * num_blocks + index) * 16 + (value & 15), mask=index < block, other=0)
    return value, limit, tl.load(state + slot * 4 + 1) + tl.sum(ties, axis=0)


@triton.jit
def _within(key, inside, value, limit, before, weight):
    """(which tokens a threshold keeps, sum before the next tie); `before` is that before the first tie of these."""
    tie = inside & (key == value)
    ranks = tl.cumsum(tie.to(tl.int64), axis=0)
    kept = (before + (ranks - 1) * weight).to(tl.float64) < limit
    return inside & ((key > value) | (tie & kept)), before + tl.sum(tie.to(tl.int64), axis=0) * weight


@triton.jit(do_not_specialize=["num_blocks"])
def _draw_blocks_kernel(
    logits, maxima, settings, count_state, count_sums, weight_state, weight_sums, best_scores, best_ids,
    row_stride, vocab_size, num_blocks,
    BLOCK: tl.constexpr, TILE: tl.constexpr, BLOCKS: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr,
):  # fmt: skip
    """Best kept token of every block."""
    block = tl.program_id(0)
    slot = tl.program_id(1).to(tl.int64)
    row = setting(settings, slot, 0)
    logits += row * row_stride
    temperature, min_p = setting64(settings, slot, 1), setting64(settings, slot, 4)
    most = row_maximum(maxima, row, num_blocks, BLOCKS)
    noise = _row_key(settings, slot)
    if TOP_K:
        value_k, limit_k, before_k = _sum_before(count_state, count_sums, slot, block, num_blocks, BLOCKS)
    if TOP_P:
        no_top_p = setting64(settings, slot, 3) >= 1.0
        value_p, limit_p, before_p = _sum_before(weight_state, weight_sums, slot, block, num_blocks, BLOCKS)
        weight_p = key_weight(value_p, most, temperature)
    best_score, best_id = tl.full([], float("-inf"), tl.float64), block * BLOCK
    for start in range(0, BLOCK, TILE):
        ids = block * BLOCK + start + tl.arange(0, TILE)
        inside = ids < vocab_size
        x = tl.load(logits + ids, mask=inside, other=float("-inf"))
        kept = inside
        if TOP_K:
            chosen, before_k = _within(value_keys(x, most, temperature), inside, value_k, limit_k, before_k, 1)
            kept = kept & chosen
        if TOP_P:
            chosen, before_p = _within(value_keys(x, most, temperature), inside, value_p, limit_p, before_p, weight_p)
            kept = kept & (chosen | no_top_p)
        if min_p > 0.0:
            kept = kept & (soft_weights(x, most, temperature)[0].to(tl.float64) >= min_p)
        kept = kept | (inside & (most - most != 0.0))
        if tl.max(kept.to(tl.int32), axis=0) > 0:
            score, first = _best(_scores(x, ids, kept, most, temperature, noise), ids)
            best_id = tl.where(score > best_score, first, best_id)
            best_score = tl.where(score > best_score, score, best_score)
    tl.store(best_scores + slot * num_blocks + block, best_score)
    tl.store(best_ids + slot * num_blocks + block, best_id)


@triton.jit(do_not_specialize=["num_blocks"])
def _best_block_kernel(best_scores, best_ids, settings, tokens, num_blocks, BLOCKS: tl.constexpr):
    slot = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCKS)
    inside = index < num_blocks
    scores = tl.load(best_scores + slot * num_blocks + index, mask=inside, other=float("-inf"))
    ids = tl.load(best_ids + slot * num_blocks + index, mask=inside, other=2147483647)
    tl.store(tokens + setting(settings, slot, 0), _best(scores, ids)[1])


@triton.jit(do_not_specialize=["count"])
def _draw_short_kernel(logits, top, settings, tokens, row_stride, count, TOP: tl.constexpr):
    """Token of a row that keeps at most `count` tokens, listed in `top` by (value descending, id ascending)."""
    slot = tl.program_id(0).to(tl.int64)
    row = setting(settings, slot, 0)
    temperature = setting64(settings, slot, 1)
    rank = tl.arange(0, TOP)
    listed = rank < count
    ids = tl.load(top + slot * count + rank, mask=listed, other=0)
    x = tl.load(logits + row * row_stride + ids, mask=listed, other=float("-inf"))
    kept = listed & (rank < setting(settings, slot, 2))
    most = tl.max(tl.where(x == x, x, float("-inf")), axis=0)
    weight, whole = soft_weights(x, most, temperature)
    whole = tl.where(kept, whole, 0)
    before = tl.cumsum(whole, axis=0) - whole  # REDUCTION ORDER: see SamplingOrder (integers: it has none)
    top_p = setting64(settings, slot, 3)
    limit = top_p * tl.sum(whole, axis=0).to(tl.float64)
    no_top_p = top_p >= 1.0
    kept = kept & (no_top_p | (before.to(tl.float64) < limit))
    kept = kept & (weight.to(tl.float64) >= setting64(settings, slot, 4))
    kept = kept | (listed & (most - most != 0.0))
    scores = _scores(x, ids, kept, most, temperature, _row_key(settings, slot))
    tl.store(tokens + row, _best(scores, tl.where(listed, ids, 2147483647))[1])


def sample(logits: torch.Tensor, draws: Draws, order: SamplingOrder) -> torch.Tensor:
    """`sample_planned` of `draws`, which has one entry a row, on the host."""
    return sample_planned(logits, plan_draws(draws, logits.shape[1], logits.device), order)


def sample_planned(logits: torch.Tensor, plan: DrawPlan, order: SamplingOrder) -> torch.Tensor:
    """Tokens int32 [R] drawn from adjusted logits float32 [R, V]; nothing is read back.

    top_k <= 0, top_p >= 1 and min_p 0 filter nothing. NaN and -inf are never drawn; where nothing can be drawn (the
    maximum is not finite) the answer is the argmax. Raises ValueError for another shape, dtype or Order.
    """
    num_rows, vocab_size = logits.shape
    if logits.dtype != torch.float32 or logits.stride(1) != 1 or vocab_size != order.vocab_size:
        raise ValueError(f"sample from {logits.dtype} {tuple(logits.shape)}, strides {logits.stride()}, under {order}")
    if order.weight_sum != "int64-2^40" or len(plan.settings) != num_rows:
        raise ValueError(f"{num_rows} rows, {len(plan.settings)} draws, {order}: weight_sum must be int64-2^40")
    tokens = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    free, short, long = plan.settings.tensor_split([plan.num_free, plan.num_free + plan.num_short])
    if len(short):
        chosen = logits if len(short) == num_rows else logits.index_select(0, short[:, 0])
        _draw_short(logits, top_logits(chosen, plan.short_k), short, tokens)
    if len(free) or len(long):
        maxima = row_maxima(logits, BLOCK, keep_nan=False)
        if len(free):
            _draw_blocks(Rows(logits, maxima, free), None, None, tokens)
        if len(long):
            rows = Rows(logits, maxima, long)
            counted = find_threshold(rows, by_weight=False, counted=None) if plan.any_top_k else None
            weighed = find_threshold(rows, by_weight=True, counted=counted) if plan.any_top_p else None
            _draw_blocks(rows, counted, weighed, tokens)
    return tokens


def _draw_short(logits: torch.Tensor, top: torch.Tensor, settings: torch.Tensor, tokens: torch.Tensor) -> None:
    _draw_short_kernel[(len(settings),)](
        logits, top, settings, tokens, logits.stride(0), top.shape[1], SHORT_LIST, num_warps=1, enable_fp_fusion=False
    )


def _draw_blocks(rows: Rows, counted: Threshold | None, weighed: Threshold | None, tokens: torch.Tensor) -> None:
    num_blocks, num_rows = rows.grid
    scores = torch.empty((num_rows, num_blocks), dtype=torch.float64, device=tokens.device)
    ids = torch.empty((num_rows, num_blocks), dtype=torch.int32, device=tokens.device)
    none = Threshold(rows.settings, rows.settings)  # a pointer that is not read
    by_count, by_weight = counted or none, weighed or none
    blocks = triton.next_power_of_2(num_blocks)
    _draw_blocks_kernel[rows.grid](
        rows.logits, rows.maxima, rows.settings, by_count.state, by_count.sums, by_weight.state, by_weight.sums,
        scores, ids, rows.logits.stride(0), rows.logits.shape[1], num_blocks,
        BLOCK=BLOCK, TILE=_TILE, BLOCKS=blocks, TOP_K=counted is not None, TOP_P=weighed is not None,
        num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    _best_block_kernel[(num_rows,)](
        scores, ids, rows.settings, tokens, num_blocks, blocks, num_warps=1, enable_fp_fusion=False
    )
