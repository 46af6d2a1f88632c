"""Where the reduction order of every output element is fixed.

An Order says in which sequence the products of ONE output element are added and where roundings happen, and nothing
else. It is chosen from (model dimensions, dtypes, device class). It does not know the words batch, rows or sequences:
`tests/test_order.py` inspects the signatures. A Schedule (tile, threads, instruction set) may look at the batch,
because admission proved that it cannot move a bit of the Order's reference (`kernels/reference`).

Arithmetic common to all Orders: IEEE fp32, round to nearest even, `fma(a, b, c)` rounds once. On "cpu" subnormal
operands read as zero and subnormal results are flushed to zero (FTZ/DAZ); on "sm90" they are kept, and `mma` is what
that class's tensor cores do with bf16 or fp16 operands and float32 accumulators: hardware, part of the Order. There,
an op's result that the next op reads as bf16 or fp16 is rounded (nearest even) when it is written.
`python -m isobit.order MODEL` prints the table of a model; no torch, no GPU.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from isobit.model_config import ModelConfig

__all__ = [
    "DEVICE_CLASSES", "KV_BLOCK", "NUMERICS_VERSION", "AttentionOrder", "LinearOrder", "LogprobsOrder",
    "MmaAttentionOrder", "MmaLinearOrder", "MoeCombineOrder", "NormOrder", "Order", "PointwiseOrder", "SamplingOrder",
    "attention_order", "fingerprint", "linear_order", "logprobs_order", "mma_attention_order", "mma_linear_order",
    "model_orders", "moe_combine_order", "norm_order", "pointwise_order", "sampling_order",
]  # fmt: skip

KV_BLOCK = 64  # keys in one attention block, anchored at position 0; a page of the KV cache holds exactly one block
NUMERICS_VERSION = 1  # raised whenever any Order, or the arithmetic it names, gives other bits


@dataclass(frozen=True)
class LinearOrder:
    """y[n] = ((block_0 + block_1) + ...) + bias[n], then addend[n] + y[n]; block_i is one FMA chain from +0 over its k.

    Inside a block of `k_block` products the chain visits k ascending ("ascending"), or pairwise with the odd k of each
    pair before the even one ("odd-even", what VDPBF16PS does; K is padded to even with +0 x +0). Activations are first
    rounded to `activation_dtype` (nearest even). With `k_slices` > 1 each slice of K/k_slices is such a sum, and the
    slices are added in order. The output is float32.
    """

    weight_dtype: str
    activation_dtype: str
    k_block: int
    pairing: str
    k_slices: int = 1


@dataclass(frozen=True)
class MmaLinearOrder:
    """y[n] = ((slice_0 + slice_1) + ...) + bias[n] in float32, then rounded to `output_dtype`, or addend[n] + y[n] in
    float32; a slice is K/`k_slices` products in one tensor-core accumulator: from +0, k ascending, acc += mma(x, w).

    Which operand is the left one, the instruction's shape and the tile do not enter: admission proves it by bytes.
    Experts of a mixture are such linears, one (n, k) for all of them.
    """

    n: int
    k: int
    weight_dtype: str
    output_dtype: str
    k_slices: int = 1
    has_bias: bool = False


@dataclass(frozen=True)
class AttentionOrder:
    """s_j = FMA chain over d of (q[d]*scale)*k_j[d]; m = max s; p_j = exp32(s_j - m); per page of `kv_block` keys
    anchored at position 0: O_page[d] = FMA chain over j ascending from +0, l_page = lane tree; O and l add the pages in
    order (inside a split of `kv_split_size` keys, 0 = one split); out[d] = O[d] * (1/l) + 0.

    Lane tree of a page of 64: a[i] = (p[i]+p[16+i]) + (p[32+i]+p[48+i]) for 16 lanes, keys after the query's own
    position count as +0; then halves are added: a[i] += a[i+8], a[i+4], a[i+2], a[i+1]. Keys after the query's own
    position do not enter O at all. K and V are rounded to `kv_dtype` when written; q, p and sums are float32.
    """

    head_dim: int
    kv_dtype: str
    kv_block: int = KV_BLOCK
    kv_split_size: int = 0
    lanes: int = 16


@dataclass(frozen=True)
class MmaAttentionOrder:
    """Keys in blocks of `kv_block`, blocks in splits of `kv_split_size` keys, both anchored at position 0. In a split,
    from m = -inf, l = 0, O = 0: s = mma(q, k), m' = max(m, max s * c), a = exp2(m - m'), p = exp2(fma(s, c, -m')),
    l = l * a + sum p, O = mma(round(p), v, O * a), c = float32(scale * log2 e) > 0. Splits are merged left to right:
    m' = max(M, m), L = L * exp2(M - m') + l * exp2(m - m'), O alike; out = O / L. Every other product and sum rounds,
    m' too; exp2 is the device's; s after the query's own position is -inf. q, k, v, round(p) have `kv_dtype`; v is
    the first `value_dim` features of k where there is one tensor for both (absorbed MLA). sum p: of p in float32 by
    halves (column j + N/2 to j, down to 8 columns, then neighbours, j + 4, j + 2), or, `row_sum` "mma", of round(p) by
    the tensor core, as one more column of v that is 1.
    """

    head_dim: int
    value_dim: int
    kv_dtype: str
    kv_block: int
    kv_split_size: int
    row_sum: str


@dataclass(frozen=True)
class MoeCombineOrder:
    """y = w_0 * e_0, then y = fma(w_j, e_j, y) over the token's expert slots j ascending, in float32."""

    top_k: int


@dataclass(frozen=True)
class NormOrder:
    """y[i] = (x[i] * (1 / sqrt(ss/width + eps))) * w[i]; ss: lane i%16 is one FMA chain over its x*x ascending from
    +0, then the 16 lanes are added by halves: a[i] += a[i+8], a[i+4], a[i+2], a[i+1]."""

    width: int
    lanes: int = 16


@dataclass(frozen=True)
class LogprobsOrder:
    """logprob[i] = float32(float64(x[i]) - (float64(m) + log64(total))); m = max x; total = block sums added in order
    in float32; a block of `block` entries: lane i%16 adds exp32(x[i] - m) ascending from +0, lanes added by halves."""

    vocab_size: int
    block: int = 4096
    lanes: int = 16


@dataclass(frozen=True)
class PointwiseOrder:
    """silu_mul: (g / (1 + exp32(0 - max(-87, g)))) * u. rope: x1*cos - x2*sin and x2*cos + x1*sin, every product and
    the sum rounded (no FMA). exp32, log64: the polynomials of `kernels/reference/math.py`, mul/add/fma/shift only."""

    exp: str = "exp32-v1"
    log: str = "log64-v1"
    rope: str = "mul-mul-add-v1"


@dataclass(frozen=True)
class SamplingOrder:
    """argmax over kept tokens of z[i] + gumbel(seed, position, i), ties to the lower id, in float64;
    z[i] = (x[i] - max x) / T; x is the row after logit bias, repetition, frequency and presence penalties, in this
    order and in float32 (`kernels/logits.py`); gumbel is -log64(-log64(u)), u from splitmix64 of (seed, position,
    token id) alone. Kept: the first top_k by (value descending, id ascending); then while the float64 running sum
    before the token < top_p * total, summed in that order over exp32(float32(z)); then weight >= min_p. The sums are
    one chain (`weight_sum` "float64-chain"), or exact and without an order over int64(trunc(2^40 * weight))
    ("int64-2^40"), compared as float64."""

    vocab_size: int
    noise: str = "splitmix64-gumbel-v1"
    weight_sum: str = "float64-chain"


Order = (
    LinearOrder | MmaLinearOrder | AttentionOrder | MmaAttentionOrder | MoeCombineOrder
    | NormOrder | LogprobsOrder | PointwiseOrder | SamplingOrder
)  # fmt: skip

_MMA_CLASSES = ("sm90",)
_KV_SPLIT_SIZE = 512  # keys; 1024 gives prefill 3 to 7 % and costs batch-1 decode up to 55 % (dev/LOG.md)
_TO_FLOAT32 = ("o", "down", "lm_head")  # added to the residual stream, or logits
_DTYPES_OF: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"cpu": ("float32", "bfloat16"), "sm90": ("bfloat16", "float16")}
)
DEVICE_CLASSES = tuple(_DTYPES_OF)


def _check(device_class: str, **dtypes: str) -> None:
    if device_class not in _DTYPES_OF:
        raise ValueError(f"no Orders for device class {device_class!r}; supported: {', '.join(_DTYPES_OF)}")
    for name, dtype in dtypes.items():
        if dtype not in _DTYPES_OF[device_class]:
            supported = ", ".join(_DTYPES_OF[device_class])
            raise ValueError(f"no Order for {name}={dtype!r} on {device_class}; supported: {supported}")


def _check_mma(device_class: str, *dtypes: str) -> None:
    for dtype in dtypes:
        _check(device_class, dtype=dtype)
    if device_class not in _MMA_CLASSES:
        raise ValueError(f"no tensor-core Orders on {device_class!r}; they are for: {', '.join(_MMA_CLASSES)}")


def _check_cpu(device_class: str, instead: str) -> None:
    if device_class in _MMA_CLASSES:
        raise ValueError(f"this Order is for device class cpu; {device_class} has {instead}")


def _check_shape(n: int, k: int) -> None:
    if n < 1 or k < 1:
        raise ValueError(f"linear needs n >= 1 and k >= 1, got n={n}, k={k}")


def linear_order(n: int, k: int, weight_dtype: str, activation_dtype: str, device_class: str) -> LinearOrder:
    """Order of y[n] = sum over k on device class "cpu".

    Raises ValueError for an unsupported dtype, or a dimension below 1.
    """
    _check_cpu(device_class, "mma_linear_order")
    _check(device_class, weight_dtype=weight_dtype, activation_dtype=activation_dtype)
    _check_shape(n, k)
    if weight_dtype == "float32":
        if activation_dtype != "float32":
            raise ValueError("float32 weights take float32 activations, got activation_dtype='bfloat16'")
        return LinearOrder(weight_dtype, activation_dtype, k_block=256, pairing="ascending")
    return LinearOrder(weight_dtype, activation_dtype, k_block=512, pairing="odd-even")


def mma_linear_order(
    n: int, k: int, weight_dtype: str, output_dtype: str, device_class: str, has_bias: bool = False
) -> MmaLinearOrder:
    """Order of y[n] = sum over k on tensor cores; `output_dtype` is `weight_dtype` or "float32".

    Raises ValueError as `linear_order`.
    """
    _check_mma(device_class, weight_dtype)
    _check_shape(n, k)
    if output_dtype not in (weight_dtype, "float32"):
        raise ValueError(f"output_dtype={output_dtype!r}: supported are {weight_dtype} and float32")
    return MmaLinearOrder(n, k, weight_dtype, output_dtype, _k_slices(n, k), has_bias)


def _k_slices(n: int, k: int) -> int:
    """Slices of K: 2 where a long sum meets few columns, so that a pass over K is latency. Elsewhere decode gains less
    by slices than prefill loses with them, and vendor kernels would be lost (dev/LOG.md, over all row counts)."""
    wanted = 2 if n <= 2048 and k >= 8192 else 1
    return wanted if k % (wanted * 128) == 0 else 1


def attention_order(head_dim: int, kv_dtype: str, device_class: str) -> AttentionOrder:
    """Order of grouped-query attention on "cpu", pages anchored at position 0. Raises ValueError as `linear_order`."""
    _check_cpu(device_class, "mma_attention_order")
    _check(device_class, kv_dtype=kv_dtype)
    if not 1 <= head_dim <= 256 or head_dim % 2:
        raise ValueError(f"attention supports even head_dim from 2 to 256, got {head_dim}")
    return AttentionOrder(head_dim, kv_dtype)


def mma_attention_order(head_dim: int, value_dim: int, kv_dtype: str, device_class: str) -> MmaAttentionOrder:
    """Order of attention on tensor cores: grouped-query (head_dim = value_dim), or absorbed MLA over one latent tensor
    whose first `value_dim` features are the values. Raises ValueError as `linear_order`."""
    _check_mma(device_class, kv_dtype)
    if not 16 <= value_dim <= head_dim <= 1024 or head_dim % 16 or value_dim % 16:
        raise ValueError(
            f"attention on {device_class} takes 16 <= value_dim <= head_dim <= 1024, multiples of 16; "
            f"got head_dim={head_dim}, value_dim={value_dim}"
        )
    row_sum = "halves" if value_dim == head_dim else "mma"
    return MmaAttentionOrder(head_dim, value_dim, kv_dtype, KV_BLOCK, _KV_SPLIT_SIZE, row_sum)


def moe_combine_order(top_k: int, device_class: str) -> MoeCombineOrder:
    """Order in which the chosen experts of a token are added. Raises ValueError as `linear_order`."""
    _check_mma(device_class)
    return MoeCombineOrder(top_k)


def norm_order(width: int, device_class: str) -> NormOrder:
    """Order of RMSNorm over `width` features."""
    _check(device_class)
    return NormOrder(width) if device_class == "cpu" else NormOrder(width, lanes=512)


def logprobs_order(vocab_size: int, device_class: str) -> LogprobsOrder:
    """Order of log-softmax over the vocabulary."""
    _check(device_class)
    return LogprobsOrder(vocab_size) if device_class == "cpu" else LogprobsOrder(vocab_size, block=4096, lanes=512)


def pointwise_order(device_class: str) -> PointwiseOrder:
    """Arithmetic of rope and activations, and the versions of exp and log."""
    _check(device_class)
    return PointwiseOrder()


def sampling_order(vocab_size: int, device_class: str) -> SamplingOrder:
    """Order and noise of the sampler."""
    _check(device_class)
    return SamplingOrder(vocab_size, weight_sum="float64-chain" if device_class == "cpu" else "int64-2^40")


def model_orders(
    config: ModelConfig, weight_dtype: str, activation_dtype: str, kv_dtype: str, device_class: str
) -> dict[str, Order]:
    """All Orders of a model, keyed by a readable name such as "linear.qkv" or "attention".

    Raises ValueError naming the attention kind, dimension or dtype for which there is no Order.
    """
    if config.attention_kind != "gqa":
        raise ValueError(f"no Orders for attention_kind={config.attention_kind!r} on {device_class}; supported: gqa")
    orders: dict[str, Order] = {}
    is_mma, biases, width = device_class in _MMA_CLASSES, config.linear_biases(), config.head_dim
    for name, (n, k) in config.linear_shapes().items():
        output = "float32" if name in _TO_FLOAT32 else weight_dtype
        orders[f"linear.{name}"] = (
            mma_linear_order(n, k, weight_dtype, output, device_class, biases[name]) if is_mma
            else linear_order(n, k, weight_dtype, activation_dtype, device_class)
        )  # fmt: skip
    orders["attention"] = (
        mma_attention_order(width, width, kv_dtype, device_class) if is_mma
        else attention_order(width, kv_dtype, device_class)
    )  # fmt: skip
    orders["norm.hidden"] = norm_order(config.hidden_size, device_class)
    if config.qk_norm:
        orders["norm.head"] = norm_order(config.head_dim, device_class)
    orders["pointwise"] = pointwise_order(device_class)
    orders["logprobs"] = logprobs_order(config.vocab_size, device_class)
    orders["sampling"] = sampling_order(config.vocab_size, device_class)
    return orders


_MEANT_BEFORE = {"weight_sum": "float64-chain"}  # fields added later, and what every Order meant until then


def _told(order: Order) -> dict[str, object]:
    """The fields that enter a fingerprint: an Order that did not change keeps its fingerprint."""
    return {name: value for name, value in asdict(order).items() if _MEANT_BEFORE.get(name) != value}


def fingerprint(weights_digest: str, orders: Mapping[str, Order], device_class: str) -> str:
    """Hash of (weights digest, Orders, device class, numerics version): equal fingerprints promise equal bits."""
    table = {name: [type(order).__name__, _told(order)] for name, order in sorted(orders.items())}
    text = json.dumps([weights_digest, table, device_class, NUMERICS_VERSION], sort_keys=True)
    return "isobit-" + hashlib.sha256(text.encode()).hexdigest()[:24]


if __name__ == "__main__":
    from isobit.order_table import main

    main()
