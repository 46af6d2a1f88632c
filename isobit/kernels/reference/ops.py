"""One function per op: what its Order's docstring says, in that order, on numpy arrays. No torch, no speed.

Vectorised over outputs only: every reduction is a Python loop over the reduced index, so the order of additions can be
read off the code. Does not know tiles, threads or pages of memory. Shapes: M rows, K inputs, N outputs, T keys,
H query heads, KV key/value heads, D head width, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from isobit.kernels.reference.math import (
    Float32,
    Float64,
    add32,
    div32,
    exp32,
    flush,
    fma32,
    gumbel,
    log64,
    mul32,
    round_bf16,
    sqrt32,
    sub32,
)
from isobit.order import AttentionOrder, LinearOrder, LogprobsOrder, NormOrder, SamplingOrder

__all__ = [
    "argmax", "attention", "gumbel", "linear", "logprobs", "rms_norm", "rope", "round_to", "sample", "silu_mul",
    "token_logprobs", "top_logits",
]  # fmt: skip


def round_to(dtype: str, x: Float32) -> Float32:
    """`x` as stored in `dtype`: unchanged for "float32", `round_bf16` for "bfloat16"."""
    return round_bf16(x) if dtype == "bfloat16" else np.asarray(x, dtype=np.float32)


def linear(
    order: LinearOrder, x: Float32, w: Float32, bias: Float32 | None = None, addend: Float32 | None = None
) -> Float32:
    """x [M, K], w [N, K] (values of the Order's weight dtype), bias [N], addend [M, N] -> [M, N]."""
    assert np.array_equal(flush(w), flush(round_to(order.weight_dtype, w))), "w is not of the Order's weight dtype"
    k_total = x.shape[1]
    assert k_total % order.k_slices == 0, f"K={k_total} does not divide into {order.k_slices} slices"
    x = round_to(order.activation_dtype, x)
    width = k_total // order.k_slices
    y = None
    for start in range(0, k_total, width):  # REDUCTION ORDER: see LinearOrder
        part = _linear_slice(order, x[:, start : start + width], w[:, start : start + width])
        y = part if y is None else add32(y, part)
    assert y is not None, "K is 0"
    if bias is not None:
        y = add32(y, bias)
    return y if addend is None else add32(addend, y)


def _linear_slice(order: LinearOrder, x: Float32, w: Float32) -> Float32:
    if order.pairing == "odd-even" and x.shape[1] % 2:
        x, w = np.pad(x, ((0, 0), (0, 1))), np.pad(w, ((0, 0), (0, 1)))
    total = None
    for start in range(0, x.shape[1], order.k_block):  # REDUCTION ORDER: see LinearOrder
        stop = min(start + order.k_block, x.shape[1])
        chain = np.zeros((x.shape[0], w.shape[0]), np.float32)
        for k in _visits(order.pairing, start, stop):  # REDUCTION ORDER: see LinearOrder
            chain = fma32(x[:, k, None], w[None, :, k], chain)
        total = chain if total is None else add32(total, chain)
    assert total is not None, "K is 0"
    return total


def _visits(pairing: str, start: int, stop: int) -> list[int]:
    if pairing == "ascending":
        return list(range(start, stop))
    assert pairing == "odd-even", f"unknown pairing {pairing!r}"
    return [k for even in range(start, stop, 2) for k in (even + 1, even)]


def add_halves(lanes: Float32) -> Float32:
    """lanes [..., L], L a power of two -> [...]: a[i] += a[i + L/2], then a quarter, ... (the lane tree)."""
    while lanes.shape[-1] > 1:  # REDUCTION ORDER: see NormOrder
        half = lanes.shape[-1] // 2
        lanes = add32(lanes[..., :half], lanes[..., half:])
    return lanes[..., 0]


def attention(
    order: AttentionOrder,
    q: Float32,
    k: Float32,
    v: Float32,
    start_position: int,
    num_heads: int,
    scale: float,
) -> Float32:
    """q [M, H*D], k and v [T, KV, D] for positions 0..T-1 -> [M, H*D]; row i sits at start_position + i < T.

    Query head h reads key/value head h // (H / KV). Keys after a row's own position may hold anything.
    """
    num_rows, width = q.shape[0], order.head_dim
    num_keys = start_position + num_rows
    assert k.shape[0] >= num_keys, f"{k.shape[0]} keys for {num_keys} positions"
    heads = np.arange(num_heads) // (num_heads // k.shape[1])
    keys_HTD = round_to(order.kv_dtype, k[:num_keys]).transpose(1, 0, 2)[heads]
    values_HTD = round_to(order.kv_dtype, v[:num_keys]).transpose(1, 0, 2)[heads]
    query_MHD = mul32(q.reshape(num_rows, num_heads, width), np.float32(scale))
    visible_MT = np.arange(num_keys)[None, :] <= start_position + np.arange(num_rows)[:, None]
    scores = np.zeros((num_rows, num_heads, num_keys), np.float32)
    for d in range(width):  # REDUCTION ORDER: see AttentionOrder
        scores = fma32(query_MHD[:, :, d, None], keys_HTD[None, :, :, d], scores)
    scores = np.where(visible_MT[:, None, :], scores, np.float32(-np.inf))
    weights = exp32(sub32(scores, scores.max(axis=-1, keepdims=True)))  # a maximum has no order
    weights = np.where(visible_MT[:, None, :], weights, np.float32(0))
    out, denominator = _add_pages(order, weights, values_HTD, visible_MT)
    out = mul32(out, div32(np.float32(1), denominator)[:, :, None])
    return add32(out, np.float32(0)).reshape(num_rows, num_heads * width)


def _add_pages(
    order: AttentionOrder, weights_MHT: Float32, values_HTD: Float32, visible_MT: npt.NDArray[np.bool_]
) -> tuple[Float32, Float32]:
    """(O [M, H, D], l [M, H]): pages in order inside a split, splits in order."""
    num_keys = weights_MHT.shape[2]
    split_size = order.kv_split_size or num_keys
    assert order.kv_split_size % order.kv_block == 0, f"splits of {order.kv_split_size} keys cut a page"
    out = denominator = None
    for split in range(0, num_keys, split_size):  # REDUCTION ORDER: see AttentionOrder
        split_out = split_l = None
        end = min(split + split_size, num_keys)
        for page in range(split, end, order.kv_block):  # REDUCTION ORDER: see AttentionOrder
            keys = slice(page, min(page + order.kv_block, num_keys))
            page_out = _page_chain(weights_MHT[:, :, keys], values_HTD[:, keys], visible_MT[:, keys])
            page_l = _page_lanes(order, weights_MHT[:, :, keys])
            split_out, split_l = _add_if(visible_MT[:, page], split_out, page_out, split_l, page_l)
        assert split_out is not None and split_l is not None, "an empty split"
        out, denominator = _add_if(visible_MT[:, split], out, split_out, denominator, split_l)
    assert out is not None and denominator is not None, "no keys"
    return out, denominator


def _add_if(
    seen_M: npt.NDArray[np.bool_], out: Float32 | None, more: Float32, l: Float32 | None, more_l: Float32
) -> tuple[Float32, Float32]:
    """Add a page to (O, l) for the rows that see any key of it; the first page is taken as it is."""
    if out is None or l is None:
        return more, more_l
    return (
        np.where(seen_M[:, None, None], add32(out, more), out),
        np.where(seen_M[:, None], add32(l, more_l), l),
    )


def _page_chain(weights_MHT: Float32, values_HTD: Float32, visible_MT: npt.NDArray[np.bool_]) -> Float32:
    chain = np.zeros((*weights_MHT.shape[:2], values_HTD.shape[2]), np.float32)
    for j in range(weights_MHT.shape[2]):  # REDUCTION ORDER: see AttentionOrder
        added = fma32(weights_MHT[:, :, j, None], values_HTD[None, :, j, :], chain)
        chain = np.where(visible_MT[:, j, None, None], added, chain)
    return chain


def _page_lanes(order: AttentionOrder, weights_MHT: Float32) -> Float32:
    assert order.kv_block == 4 * order.lanes, f"the lane tree is for pages of 4 x lanes, got {order}"
    missing = order.kv_block - weights_MHT.shape[2]
    p = np.pad(weights_MHT, ((0, 0), (0, 0), (0, missing)))
    p = p.reshape(*p.shape[:2], 4, order.lanes)
    return add_halves(add32(add32(p[:, :, 0], p[:, :, 1]), add32(p[:, :, 2], p[:, :, 3])))


def rms_norm(order: NormOrder, x: Float32, w: Float32, eps: float) -> Float32:
    """x [..., width], w [width] -> [..., width]."""
    assert x.shape[-1] == order.width, f"width {x.shape[-1]} is not the Order's {order.width}"
    lanes = np.zeros((*x.shape[:-1], order.lanes), np.float32)
    for i in range(order.width):  # REDUCTION ORDER: see NormOrder
        lanes[..., i % order.lanes] = fma32(x[..., i], x[..., i], lanes[..., i % order.lanes])
    mean = div32(add_halves(lanes), np.float32(order.width))
    factor = div32(np.float32(1), sqrt32(add32(mean, np.float32(eps))))
    return mul32(mul32(x, factor[..., None]), w)


def rope(x: Float32, cos: Float32, sin: Float32, interleaved: bool) -> Float32:
    """x [M, heads, D]; cos, sin [M, R/2] of each row's position; rotates the first R of D, the rest is copied.

    Pairs are (i, i + R/2), or (2i, 2i + 1) when interleaved.
    """
    half = cos.shape[1]
    first, second = np.arange(half), np.arange(half) + half
    if interleaved:
        first, second = 2 * np.arange(half), 2 * np.arange(half) + 1
    x1, x2 = x[:, :, first], x[:, :, second]
    cos, sin = cos[:, None, :], sin[:, None, :]
    out = np.array(x, dtype=np.float32)
    out[:, :, first] = sub32(mul32(x1, cos), mul32(x2, sin))
    out[:, :, second] = add32(mul32(x2, cos), mul32(x1, sin))
    return out


def silu_mul(gate_up: Float32) -> Float32:
    """gate_up [M, 2F] (gate, then up) -> silu(gate) * up [M, F]."""
    gate, up = np.split(gate_up, 2, axis=1)
    exponential = exp32(sub32(np.float32(0), np.maximum(np.float32(-87), flush(gate))))
    return mul32(div32(gate, add32(np.float32(1), exponential)), up)


def logprobs(order: LogprobsOrder, logits: Float32) -> tuple[Float32, Float64]:
    """logits [R, V] -> (maximum float32 [R], log of the sum of exponentials float64 [R])."""
    logits = flush(logits)
    maxima = logits.max(axis=1)  # a maximum has no order
    weights = exp32(sub32(logits, maxima[:, None]))
    total = None
    for start in range(0, logits.shape[1], order.block):  # REDUCTION ORDER: see LogprobsOrder
        block = weights[:, start : start + order.block]
        missing = -block.shape[1] % order.lanes
        lanes = np.zeros((block.shape[0], order.lanes), np.float32)
        for part in np.split(np.pad(block, ((0, 0), (0, missing))), (block.shape[1] + missing) // order.lanes, axis=1):
            lanes = add32(lanes, part)  # REDUCTION ORDER: see LogprobsOrder
        total = add_halves(lanes) if total is None else add32(total, add_halves(lanes))
    assert total is not None, "an empty vocabulary"
    return maxima, maxima.astype(np.float64) + log64(total)


def token_logprobs(logits: Float32, lse: Float64) -> Float32:
    """float32(float64(logits) - lse) for every entry of [R, V]."""
    return (logits.astype(np.float64) - lse[:, None]).astype(np.float32)


def argmax(logits: Float32) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
    """logits [R, V] -> (lowest id of the largest value [R], all finite [R]); the id has no meaning beside a NaN."""
    finite: npt.NDArray[np.bool_] = np.asarray(np.isfinite(logits).all(axis=1))
    return flush(logits).argmax(axis=1).astype(np.int32), finite


def top_logits(row: Float32, n: int) -> npt.NDArray[np.int32]:
    """Ids of the n largest of a row [V] by (value descending, id ascending)."""
    row = flush(row)
    return np.lexsort((np.arange(row.size), -row))[:n].astype(np.int32)


def sample(
    order: SamplingOrder,
    row: Float32,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
    position: int,
) -> int:
    """Token drawn from a row [V] of adjusted logits for the absolute `position`; temperature > 0.

    top_k <= 0, top_p 1 and min_p 0 filter nothing.
    """
    assert row.shape == (order.vocab_size,), f"row {row.shape} is not the Order's {order}"
    ids = top_logits(row, top_k if 0 < top_k < row.size else row.size)
    values = flush(row)[ids].astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        z = (values - values[0]) / temperature
        weights = exp32(z.astype(np.float32))
    before, total = _weights_before(order, weights)
    kept = weights.astype(np.float64) >= min_p
    if top_p < 1.0:
        kept &= before < top_p * total
    scores = np.where(kept, z + gumbel(seed, position, ids), -np.inf)
    best = kept & (scores == scores.max())
    return int(ids[best].min())


def _weights_before(order: SamplingOrder, weights: Float32) -> tuple[Float64, float]:
    """(sum of the weights before each token, sum of all), by the Order's `weight_sum`."""
    assert order.weight_sum in ("float64-chain", "int64-2^40"), f"unknown weight_sum in {order}"
    if order.weight_sum == "float64-chain":
        before, total = np.zeros(weights.size), 0.0
        for i, weight in enumerate(weights.tolist()):  # REDUCTION ORDER: see SamplingOrder
            before[i] = total
            total = total + weight
        return before, total
    counts = np.where(np.isnan(weights), np.float32(0), weights * np.float32(2.0**40)).astype(np.int64)
    sums = np.cumsum(counts)  # REDUCTION ORDER: see SamplingOrder (integers: it has none)
    return (sums - counts).astype(np.float64), float(sums[-1])
