"""The resolved choice of dtypes, Orders, kernels and sizes, each with its reason. No torch; frozen; printed at start.

"auto" chooses only among things that keep the promise; an explicit choice that cannot keep it, or cannot run here, is
an error naming the conflict and what to choose instead. The plan does not prove anything: `kernels/admission.py` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from isobit.config import EngineConfig
from isobit.model_config import ModelConfig, check_context_length, context_limit
from isobit.order import AttentionOrder, MmaAttentionOrder, Order, fingerprint, model_orders

DEFAULT_TOTAL_TOKENS = {"cpu": 16384, "sm90": 131072}
DEFAULT_REQUESTS = {"cpu": 64, "sm90": 256}
DEFAULT_CHUNK = {"cpu": 512, "sm90": 8192}
KV_MEMORY_SHARE = 0.5  # of the device's memory, the most a KV cache may be sized to


@dataclass(frozen=True)
class DeviceFacts:
    """What the device offers: its class, kernel libraries it can run (best first), CPU cores to put to use, bytes of
    the device's memory."""

    device_class: str
    libraries: tuple[str, ...]
    num_cores: int
    memory_bytes: int


@dataclass(frozen=True)
class Plan:
    """Resolved choices. `reasons` maps each name to one sentence; equal fingerprints promise equal bits."""

    device_class: str
    dtype: str
    activation_dtype: str
    kv_cache_dtype: str
    kernel_library: str
    num_threads: int
    context_length: int
    page_size: int
    num_pages: int
    chunked_prefill_size: int
    max_running_requests: int
    attention_kind: str
    model_arithmetic: str
    orders: Mapping[str, Order]
    reasons: Mapping[str, str]

    def fingerprint(self, weights_digest: str) -> str:
        """Hash of what decides the bits: weights, the model's arithmetic, Orders, device class, numerics version."""
        return fingerprint(f"{weights_digest} {self.model_arithmetic}", self.orders, self.device_class)

    def as_dict(self) -> dict[str, object]:
        """JSON-ready form for /server_info: values, reasons, and each Order as text."""
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in ("orders", "reasons")}
        return {
            **plain,
            "orders": {name: str(order) for name, order in self.orders.items()},
            "reasons": dict(self.reasons),
        }

    def format(self) -> str:
        """The plan as text, one choice a line with its reason."""
        rows = [(name, str(getattr(self, name)), reason) for name, reason in self.reasons.items()]
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        return "\n".join(f"{name:<{widths[0]}}  {value:<{widths[1]}}  {reason}" for name, value, reason in rows)


def resolve_plan(config: EngineConfig, model: ModelConfig, facts: DeviceFacts) -> Plan:
    """Resolve the user's options against the model and the machine.

    Raises ValueError when a choice cannot be kept: an unsupported library, dtype, context length or KV size.
    """
    dtype, activation, kv_dtype, reasons = resolve_dtypes(config, model, facts.device_class)
    library = _resolve_library(config, facts, reasons)
    threads = _pick(reasons, "num_threads", config.num_threads, facts.num_cores, "cores this process may use")
    requests = _pick(reasons, "max_running_requests", config.max_running_requests,
                     DEFAULT_REQUESTS[facts.device_class], "most requests in one step; cannot move a bit")  # fmt: skip
    chunk = _pick(reasons, "chunked_prefill_size", config.chunked_prefill_size, DEFAULT_CHUNK[facts.device_class],
                  "most tokens in one step; cannot move a bit")  # fmt: skip
    orders = model_orders(model, dtype, activation, kv_dtype, facts.device_class)
    page = _resolve_page(orders["attention"], kv_bytes_per_token(model, kv_dtype), reasons)
    context = _resolve_context(config, model, facts, page, reasons)
    pages = _resolve_pages(config, facts, context, page, reasons)
    reasons["attention_kind"] = "capability declared by the architecture"
    return Plan(
        device_class=facts.device_class,
        dtype=dtype,
        activation_dtype=activation,
        kv_cache_dtype=kv_dtype,
        kernel_library=library,
        num_threads=threads,
        context_length=context,
        page_size=page.num_tokens,
        num_pages=pages,
        chunked_prefill_size=chunk,
        max_running_requests=requests,
        attention_kind=model.attention_kind,
        model_arithmetic=model.arithmetic(),
        orders=MappingProxyType(orders),
        reasons=MappingProxyType(reasons),
    )


@dataclass(frozen=True)
class _Page:
    """A page of the KV cache over all layers."""

    num_tokens: int
    num_bytes: int


def _resolve_page(order: Order, bytes_per_token: int, reasons: dict[str, str]) -> _Page:
    assert isinstance(order, (AttentionOrder, MmaAttentionOrder)), f"attention has the Order {order}"
    reasons["page_size"] = "kv_block of the attention's Order: a page holds one block of keys"
    return _Page(order.kv_block, order.kv_block * bytes_per_token)


def kv_bytes_per_token(model: ModelConfig, kv_dtype: str) -> int:
    """Bytes one token takes in the KV cache over all layers."""
    return model.num_layers * 2 * model.num_kv_heads * model.head_dim * (4 if kv_dtype == "float32" else 2)


def _pick(reasons: dict[str, str], name: str, asked: int | None, default: int, why: str) -> int:
    reasons[name] = "as asked" if asked is not None else why
    return default if asked is None else asked


def resolve_dtypes(
    config: EngineConfig, model: ModelConfig, device_class: str
) -> tuple[str, str, str, dict[str, str]]:
    """(dtype of weights, of activations, of the KV cache, reasons). Raises ValueError for a pair without an Order."""
    if device_class != "cpu":
        return _resolve_mma_dtypes(config, model, device_class)
    dtype, reasons = config.dtype, {"dtype": "as asked"}
    if dtype == "auto":
        dtype = "float32" if model.dtype in ("float32", "float16") else "bfloat16"
        reasons["dtype"] = f"the checkpoint is {model.dtype}" + (
            ", which float32 holds exactly" if model.dtype == "float16" else ""
        )
    activation = config.activation_dtype
    reasons["activation_dtype"] = "as asked" if activation != "auto" else "follows dtype"
    activation = dtype if activation == "auto" else activation
    if dtype == "float32" and activation == "bfloat16":
        raise ValueError("activation_dtype=bfloat16 needs dtype=bfloat16; float32 weights take float32 activations")
    kv_dtype = config.kv_cache_dtype
    reasons["kv_cache_dtype"] = "as asked" if kv_dtype != "auto" else "follows dtype"
    return dtype, activation, dtype if kv_dtype == "auto" else kv_dtype, reasons


def _resolve_mma_dtypes(
    config: EngineConfig, model: ModelConfig, device_class: str
) -> tuple[str, str, str, dict[str, str]]:
    """Tensor cores read weights, activations, K and V in one 16-bit dtype."""
    dtype, reasons = config.dtype, {"dtype": "as asked"}
    if dtype == "auto":
        dtype = "float16" if model.dtype == "float16" else "bfloat16"
        reasons["dtype"] = f"the checkpoint is {model.dtype}; tensor cores read 16 bits"
    for name in ("activation_dtype", "kv_cache_dtype"):
        asked = getattr(config, name)
        if asked not in ("auto", dtype):
            raise ValueError(f"{name}={asked} with dtype={dtype} has no Order on {device_class}: use {dtype} or auto")
        reasons[name] = "as asked" if asked != "auto" else "follows dtype"
    return dtype, dtype, dtype, reasons


def _resolve_library(config: EngineConfig, facts: DeviceFacts, reasons: dict[str, str]) -> str:
    if facts.device_class != "cpu":
        for name, idle in (("cpu_library", "auto"), ("num_threads", None)):
            if getattr(config, name) != idle:
                raise ValueError(f"{name}={getattr(config, name)} is for device=cpu; leave it out with {config.device}")
        reasons["kernel_library"] = "the kernels of this device class; all schedules give the same bits"
        return facts.libraries[0]
    if config.cpu_library == "auto":
        reasons["kernel_library"] = "widest instruction set of this CPU; all give the same bits"
        return facts.libraries[0]
    if config.cpu_library not in facts.libraries:
        raise ValueError(
            f"cpu_library={config.cpu_library} cannot run on this CPU; it runs: {', '.join(facts.libraries)}"
        )
    reasons["kernel_library"] = "as asked"
    return config.cpu_library


def _resolve_context(
    config: EngineConfig, model: ModelConfig, facts: DeviceFacts, page: _Page, reasons: dict[str, str]
) -> int:
    if config.context_length is not None:
        check_context_length(model, config.context_length)
        reasons["context_length"] = "as asked"
        return config.context_length
    limit = context_limit(model)
    why = "max_position_embeddings of the model"
    if limit != model.max_position_embeddings:
        why = f"what isobit serves of the model's {model.max_position_embeddings} (rope scaling or sliding window)"
    fits = int(facts.memory_bytes * KV_MEMORY_SHARE) // page.num_bytes * page.num_tokens
    if fits < limit:
        why = f"what {KV_MEMORY_SHARE:.0%} of the memory holds; the model allows {limit}"
        limit = fits
    if limit < 2:
        raise ValueError(f"one page of the KV cache takes {page.num_bytes} bytes: this machine's memory is too small")
    reasons["context_length"] = why
    return limit


def _resolve_pages(config: EngineConfig, facts: DeviceFacts, context: int, page: _Page, reasons: dict[str, str]) -> int:
    tokens = config.max_total_tokens
    if tokens is None:
        fits = int(facts.memory_bytes * KV_MEMORY_SHARE) // page.num_bytes * page.num_tokens
        tokens = max(context, min(DEFAULT_TOTAL_TOKENS[facts.device_class], fits))
        reasons["num_pages"] = f"{tokens} tokens: the default, at least one full context"
    else:
        reasons["num_pages"] = f"max_total_tokens={tokens} as asked"
    pages = -(-tokens // page.num_tokens)
    needed = pages * page.num_bytes
    if needed > facts.memory_bytes:
        raise ValueError(
            f"a KV cache of {tokens} tokens takes {needed} bytes and the machine has {facts.memory_bytes}; "
            "lower max_total_tokens or context_length"
        )
    return pages
