"""Where the reduction order of every output element is fixed.

An Order says in which sequence the products of ONE output element are added and where roundings happen, and nothing
else. It is chosen from (model dimensions, dtypes, device class). It does not know the words batch, rows or sequences:
`tests/test_order.py` inspects the signatures. A Schedule (tile, threads, instruction set) may look at the batch,
because admission proved that it cannot move a bit of the Order's reference (`kernels/reference`).

Arithmetic common to all Orders of device class "cpu": IEEE fp32, round to nearest even, subnormal operands read as
zero and subnormal results flushed to zero (FTZ/DAZ), `fma(a, b, c)` rounds once. `python -m isobit.order MODEL` prints
the table of a model; no torch, no GPU.
"""

from __future__ import annotations

import hashlib
import json
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from isobit.model_config import ModelConfig

__all__ = [
    "KV_BLOCK",
    "NUMERICS_VERSION",
    "AttentionOrder",
    "LinearOrder",
    "LogprobsOrder",
    "NormOrder",
    "Order",
    "PointwiseOrder",
    "SamplingOrder",
    "attention_order",
    "fingerprint",
    "linear_order",
    "logprobs_order",
    "model_orders",
    "norm_order",
    "pointwise_order",
    "sampling_order",
]

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
    before the token < top_p * total, summed in that order over exp32(float32(z)); then weight >= min_p."""

    vocab_size: int
    noise: str = "splitmix64-gumbel-v1"


Order = LinearOrder | AttentionOrder | NormOrder | LogprobsOrder | PointwiseOrder | SamplingOrder

_DEVICE_CLASSES = ("cpu",)
_DTYPES = ("float32", "bfloat16")


def _check(device_class: str, **dtypes: str) -> None:
    if device_class not in _DEVICE_CLASSES:
        raise ValueError(f"no Orders for device class {device_class!r}; supported: {', '.join(_DEVICE_CLASSES)}")
    for name, dtype in dtypes.items():
        if dtype not in _DTYPES:
            raise ValueError(f"no Order for {name}={dtype!r} on {device_class}; supported: {', '.join(_DTYPES)}")


def linear_order(n: int, k: int, weight_dtype: str, activation_dtype: str, device_class: str) -> LinearOrder:
    """Order of y[n] = sum over k; `k_slices` may depend on (n, k) on a device class where that is faster (not on cpu).

    Raises ValueError for an unsupported device class, dtype, or a dimension below 1.
    """
    _check(device_class, weight_dtype=weight_dtype, activation_dtype=activation_dtype)
    if n < 1 or k < 1:
        raise ValueError(f"linear needs n >= 1 and k >= 1, got n={n}, k={k}")
    if weight_dtype == "float32":
        if activation_dtype != "float32":
            raise ValueError("float32 weights take float32 activations, got activation_dtype='bfloat16'")
        return LinearOrder(weight_dtype, activation_dtype, k_block=256, pairing="ascending")
    return LinearOrder(weight_dtype, activation_dtype, k_block=512, pairing="odd-even")


def attention_order(head_dim: int, kv_dtype: str, device_class: str) -> AttentionOrder:
    """Order of grouped-query attention over pages anchored at position 0. Raises ValueError as `linear_order`."""
    _check(device_class, kv_dtype=kv_dtype)
    if not 1 <= head_dim <= 256 or head_dim % 2:
        raise ValueError(f"attention supports even head_dim from 2 to 256, got {head_dim}")
    return AttentionOrder(head_dim, kv_dtype)


def norm_order(width: int, device_class: str) -> NormOrder:
    """Order of RMSNorm over `width` features."""
    _check(device_class)
    return NormOrder(width)


def logprobs_order(vocab_size: int, device_class: str) -> LogprobsOrder:
    """Order of log-softmax over the vocabulary."""
    _check(device_class)
    return LogprobsOrder(vocab_size)


def pointwise_order(device_class: str) -> PointwiseOrder:
    """Arithmetic of rope and activations, and the versions of exp and log."""
    _check(device_class)
    return PointwiseOrder()


def sampling_order(vocab_size: int, device_class: str) -> SamplingOrder:
    """Order and noise of the sampler."""
    _check(device_class)
    return SamplingOrder(vocab_size)


def model_orders(
    config: ModelConfig, weight_dtype: str, activation_dtype: str, kv_dtype: str, device_class: str
) -> dict[str, Order]:
    """All Orders of a model, keyed by a readable name such as "linear.qkv" or "attention".

    Raises ValueError naming the attention kind, dimension or dtype for which there is no Order.
    """
    if config.attention_kind != "gqa":
        raise ValueError(f"no Orders for attention_kind={config.attention_kind!r} on {device_class}; supported: gqa")
    orders: dict[str, Order] = {}
    for name, (n, k) in config.linear_shapes().items():
        orders[f"linear.{name}"] = linear_order(n, k, weight_dtype, activation_dtype, device_class)
    orders["attention"] = attention_order(config.head_dim, kv_dtype, device_class)
    orders["norm.hidden"] = norm_order(config.hidden_size, device_class)
    if config.qk_norm:
        orders["norm.head"] = norm_order(config.head_dim, device_class)
    orders["pointwise"] = pointwise_order(device_class)
    orders["logprobs"] = logprobs_order(config.vocab_size, device_class)
    orders["sampling"] = sampling_order(config.vocab_size, device_class)
    return orders


def fingerprint(weights_digest: str, orders: Mapping[str, Order], device_class: str) -> str:
    """Hash of (weights digest, Orders, device class, numerics version): equal fingerprints promise equal bits."""
    table = {name: [type(order).__name__, asdict(order)] for name, order in sorted(orders.items())}
    text = json.dumps([weights_digest, table, device_class, NUMERICS_VERSION], sort_keys=True)
    return "isobit-" + hashlib.sha256(text.encode()).hexdigest()[:24]


def format_orders(orders: Mapping[str, Order]) -> str:
    """The Orders as aligned text, each kind followed once by its sentence of arithmetic."""
    width = max(len(name) for name in orders)
    lines = [f"{name:<{width}}  {order}" for name, order in orders.items()]
    kinds = dict.fromkeys(type(order) for order in orders.values())
    for kind in kinds:
        sentence = f"{kind.__name__}: {' '.join((kind.__doc__ or '').split())}"
        lines.append("\n" + textwrap.fill(sentence, 118, subsequent_indent="  ", break_on_hyphens=False))
    lines.append(f"\nThese are the docstrings of {__file__}; kernels/reference/ops.py executes them.")
    return "\n".join(lines)


def _main() -> None:
    import argparse

    from isobit.config import EngineConfig
    from isobit.model_config import load_model_config
    from isobit.plan import resolve_dtypes

    parser = argparse.ArgumentParser(prog="python -m isobit.order", description="Print the Orders of a model.")
    parser.add_argument("model", nargs="?", default="smollm2", help="checkpoint folder, .gguf file, or 'smollm2'")
    for option in ("--weight-dtype", "--activation-dtype", "--kv-cache-dtype"):
        parser.add_argument(option, default="auto", choices=("auto", *_DTYPES), help="auto: as a server would choose")
    args = parser.parse_args()
    try:
        config = load_model_config(args.model)
        options = EngineConfig(
            dtype=args.weight_dtype, activation_dtype=args.activation_dtype, kv_cache_dtype=args.kv_cache_dtype
        )
        orders = model_orders(config, *resolve_dtypes(options, config)[:3], "cpu")
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
    print(f"{config.architecture}, numerics version {NUMERICS_VERSION}, device class cpu\n")
    print(format_orders(orders))


if __name__ == "__main__":
    _main()
