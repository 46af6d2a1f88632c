"""Where top_k and top_p cut a row, on NVIDIA GPUs: a search over values by exact integer sums, without sorting.

A token is kept while the sum before it (of ones for top_k, of int64 weights for top_p) is below a limit. Sums of
integers have no order, so the last kept value is found four bits of its key a pass, from the top: every pass adds, over
all tokens whose key begins as the one sought, the weights by the next four bits. The first two passes read the row, the
second lists the few tokens that are left, the others read the list. Ties are told apart by rank when tokens are drawn.
Does not know noise. Invariant: exact, so equal to summing in sorted order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from isobit.kernels.triton.math import exp32, sortable
from isobit.kernels.triton.vocabulary import row_maximum

__all__ = ["BLOCK", "SETTINGS", "Rows", "Threshold", "find_threshold"]

BLOCK = 4096  # tokens of one program
# int64 of a row: its index, temperature, top_k (V if unlimited), top_p, min_p, seed, position; float64 as their bits
SETTINGS = 8
WIDTH: tl.constexpr = tl.constexpr(SETTINGS)
_PASSES = 10
_TILE, _WARPS = 256, 4  # tokens looked at together
_STATE = 4  # of a row, after a pass: value found so far, sum above it, bits of the limit, sum of the value's ties


@dataclass(frozen=True)
class Rows:
    """Some rows of logits with their settings, int64 [rows, 8], and block maxima of all rows."""

    logits: torch.Tensor
    maxima: torch.Tensor
    settings: torch.Tensor

    @property
    def grid(self) -> tuple[int, int]:
        return self.maxima.shape[1], self.settings.shape[0]


@dataclass(frozen=True)
class Threshold:
    """What a search found: int64 `state` [rows, 4], and `sums` [rows, blocks, 16] by the last four bits."""

    state: torch.Tensor
    sums: torch.Tensor


@triton.jit
def setting(settings, slot, column: tl.constexpr):
    return tl.load(settings + slot * WIDTH + column)


@triton.jit
def setting64(settings, slot, column: tl.constexpr):
    return tl.load(settings + slot * WIDTH + column).to(tl.float64, bitcast=True)


@triton.jit
def value_keys(x, most, temperature):
    """int64 that sort as the values of a row do: 40 bits.

    The upper 8 are (most - x) / T in steps of 28/256, reversed; further down a weight counts as 0. They part the tokens
    better than a float's exponent would. Subtracting, scaling and cutting are monotone, so no order is changed.
    """
    scale = tl.minimum((256.0 / 28.0 / temperature).to(tl.float32), 1e30)
    steps = (most - x) * scale
    steps = tl.where(steps < 255.0, steps, 255.0)  # NaN too
    low = sortable(x).to(tl.uint32, bitcast=True) ^ 0x80000000
    return ((255 - steps.to(tl.int32)).to(tl.int64) << 32) | low.to(tl.int64)


@triton.jit
def _value_of(key):
    bits = ((key & 0xFFFFFFFF).to(tl.uint32) ^ 0x80000000).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def soft_weights(x, most, temperature):
    """exp32(float32((x - most) / temperature)), and that as a whole number of 2^-40, int64 (0 for NaN)."""
    weight = exp32(((x.to(tl.float64) - most.to(tl.float64)) / temperature).to(tl.float32))
    return weight, tl.where(weight == weight, weight * 1099511627776.0, 0.0).to(tl.int64)


@triton.jit
def key_weight(key, most, temperature):
    """The int64 weight of a token whose value has this key."""
    return soft_weights(_value_of(key), most, temperature)[1]


@triton.jit
def _narrow(
    state, sums, slot, num_blocks, is_first, start_limit, excess, BLOCKS: tl.constexpr, BY_WEIGHT: tl.constexpr,
):  # fmt: skip
    """(value, sum above, limit, sum of ties) after the pass that wrote `sums`, from the state before it."""
    digit = tl.arange(0, 16)
    index = tl.arange(0, BLOCKS)[:, None]
    by_block = tl.load(sums + (slot * num_blocks + index) * 16 + digit[None, :], mask=index < num_blocks, other=0)
    by_digit = tl.sum(by_block, axis=0)  # REDUCTION ORDER: see SamplingOrder (integers: it has none)
    total = tl.sum(by_digit, axis=0)
    value, above = tl.load(state + slot * 4), tl.load(state + slot * 4 + 1)
    limit = start_limit
    if BY_WEIGHT:
        earlier = tl.load(state + slot * 4 + 2).to(tl.float64, bitcast=True)
        limit = tl.where(is_first, start_limit * (total - excess).to(tl.float64), earlier)
    before = above + total - tl.cumsum(by_digit, axis=0)
    reached = (by_digit > 0) & (before.to(tl.float64) < limit)
    last = tl.min(tl.where(reached, digit, 15), axis=0)
    above = tl.sum(tl.where(digit == last, before, 0), axis=0)
    return value * 16 + last, above, limit, tl.sum(tl.where(digit == last, by_digit, 0), axis=0)


@triton.jit
def _sum_block(
    source, count, value, floor, most, temperature, step, listed,
    TILE: tl.constexpr, BY_WEIGHT: tl.constexpr,
):  # fmt: skip
    """(sums of the sought among `count` tokens by the next four bits [16], how many were listed: pass 1 lists them)."""
    shift = (36 - 4 * step).to(tl.int64)
    digits = tl.arange(0, 16)[:, None]
    by_digit = tl.zeros([16, TILE], tl.int64)
    num_listed = 0
    for start in range(0, count, TILE):  # REDUCTION ORDER: see SamplingOrder (integers: it has none)
        index = start + tl.arange(0, TILE)
        x = tl.load(source + index, mask=index < count, other=0.0)
        key = value_keys(x, most, temperature)
        sought = (index < count) & ((key >> (shift + 4)) == value) & (key >= floor)
        weight = sought.to(tl.int64)
        if BY_WEIGHT:
            weight = tl.where(sought, soft_weights(x, most, temperature)[1], 0)
        digit = ((key >> shift) & 15).to(tl.int32)
        by_digit += tl.where(digit[None, :] == digits, weight[None, :], 0)
        if step == 1:
            place = num_listed + tl.cumsum(sought.to(tl.int32), axis=0) - 1
            tl.store(listed + place, x, mask=sought)
            num_listed += tl.sum(sought.to(tl.int32), axis=0)
    return tl.sum(by_digit, axis=1), num_listed


@triton.jit
def _store_state(state, value, above, limit, ties):
    tl.store(state, value)
    tl.store(state + 1, above)
    tl.store(state + 2, limit.to(tl.int64, bitcast=True))
    tl.store(state + 3, ties)


@triton.jit(do_not_specialize=["num_rows", "num_blocks", "step"])
def _search_kernel(
    logits, maxima, settings, state, sums, counted, listed, counts, row_stride, vocab_size, num_rows, num_blocks, step,
    BLOCK: tl.constexpr, TILE: tl.constexpr, BLOCKS: tl.constexpr,
    BY_WEIGHT: tl.constexpr, TOP_K: tl.constexpr, IS_LAST: tl.constexpr,
):  # fmt: skip
    """Pass `step`: settle what the pass before it found, then sum by the next four bits. IS_LAST only settles."""
    block = tl.program_id(0)
    slot = tl.program_id(1).to(tl.int64)
    temperature = setting64(settings, slot, 1)
    most = row_maximum(maxima, setting(settings, slot, 0), num_blocks, BLOCKS)
    floor = slot * 0  # least value that top_k keeps
    excess = slot * 0  # weight of those of its ties that top_k drops
    start_limit = setting(settings, slot, 2).to(tl.float64)
    if BY_WEIGHT:
        start_limit = setting64(settings, slot, 3)
        if TOP_K:
            floor = tl.load(counted + slot * 4)
            dropped = tl.load(counted + slot * 4 + 1) + tl.load(counted + slot * 4 + 3) - setting(settings, slot, 2)
            excess = dropped * key_weight(floor, most, temperature)
    value, above, ties, limit = slot * 0, slot * 0, slot * 0, start_limit
    if step > 0:
        value, above, limit, ties = _narrow(
            state + (step - 1) * num_rows * 4, sums + (step - 1) * num_rows * num_blocks * 16, slot, num_blocks,
            step == 1, start_limit, excess, BLOCKS, BY_WEIGHT,
        )  # fmt: skip
    if block == 0:
        _store_state(state + (step * num_rows + slot) * 4, value, above, limit, ties)
    if not IS_LAST:
        listed += (slot * num_blocks + block) * BLOCK
        counts += slot * num_blocks + block
        source = logits + setting(settings, slot, 0) * row_stride + block * BLOCK
        count = tl.minimum(vocab_size - block * BLOCK, BLOCK)
        if step > 1:
            source, count = listed, tl.load(counts)
        by_digit, num_listed = _sum_block(
            source, count, value, floor, most, temperature, step, listed, TILE, BY_WEIGHT
        )
        if step == 1:
            tl.store(counts, num_listed)
        tl.store(sums + ((step * num_rows + slot) * num_blocks + block) * 16 + tl.arange(0, 16), by_digit)


def find_threshold(rows: Rows, by_weight: bool, counted: Threshold | None) -> Threshold:
    """Where top_k (`by_weight` False), or top_p among what `counted` keeps, cuts each of `rows`."""
    logits, device = rows.logits, rows.logits.device
    num_blocks, num_rows = rows.grid
    state = torch.empty((_PASSES + 1, num_rows, _STATE), dtype=torch.int64, device=device)
    listed = torch.empty((num_rows, num_blocks, BLOCK), dtype=torch.float32, device=device)
    counts = torch.empty((num_rows, num_blocks), dtype=torch.int32, device=device)
    sums = torch.empty((_PASSES, num_rows, num_blocks, 16), dtype=torch.int64, device=device)
    for step in range(_PASSES + 1):
        is_last = step == _PASSES
        _search_kernel[(1 if is_last else num_blocks, num_rows)](
            logits, rows.maxima, rows.settings, state, sums, counted.state if counted else state,
            listed, counts, logits.stride(0), logits.shape[1], num_rows, num_blocks, step,
            BLOCK=BLOCK, TILE=_TILE, BLOCKS=triton.next_power_of_2(num_blocks),
            BY_WEIGHT=by_weight, TOP_K=counted is not None, IS_LAST=is_last, num_warps=_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return Threshold(state[_PASSES], sums[_PASSES - 1])
