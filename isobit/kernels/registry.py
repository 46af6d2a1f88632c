"""What kernels exist, which Order each claims, and under which schedules: declarations, no arithmetic, no proof.

A declaration is a claim; `admission.py` proves it on this machine before anything runs. Does not know batches: which
schedule runs is chosen in `ops.py` among the admitted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from isobit.kernels.cpu.library import ATTENTION_SCHEDULES, CpuLibrary
from isobit.order import (
    AttentionOrder,
    LinearOrder,
    LogprobsOrder,
    NormOrder,
    Order,
    PointwiseOrder,
    SamplingOrder,
    attention_order,
    linear_order,
    logprobs_order,
    norm_order,
    pointwise_order,
    sampling_order,
)

__all__ = ["OPS", "OPS_OF_ORDER", "Kernel", "library_kernels"]

# The ops proven for each kind of Order. `rope_and_cache` stands under attention, whose head width and KV dtype it has.
OPS_OF_ORDER: Mapping[type[Any], tuple[str, ...]] = MappingProxyType(
    {
        LinearOrder: ("linear", "embedding"),
        NormOrder: ("rms_norm",),
        AttentionOrder: ("rope_and_cache", "attention"),
        PointwiseOrder: ("silu_mul",),
        LogprobsOrder: ("logprobs", "top_logits"),
        SamplingOrder: ("argmax", "sample"),
    }
)
OPS = tuple(op for ops in OPS_OF_ORDER.values() for op in ops)
ONE_SCHEDULE = ("only",)  # of ops whose library method takes no schedule


@dataclass(frozen=True)
class Kernel:
    """A claim: `library`'s method named `op` keeps every Order for which `claims` returns None, under each schedule.

    `claims(order)` returns None, or the reason why the kernel does not offer that Order. `library` has the settable
    attribute `num_threads`. `source_hash` changes with anything that can change the kernel's bits.
    """

    name: str
    op: str
    device_classes: tuple[str, ...]
    schedules: tuple[str, ...]
    source_hash: str
    claims: Callable[[Order], str | None]
    library: Any

    def __post_init__(self) -> None:
        assert self.op in OPS, f"unknown op {self.op!r}"
        assert self.schedules, f"{self.name} offers no schedule of {self.op}"


def _claim(own: Callable[[Any], Order]) -> Callable[[Order], str | None]:
    """A claim to compute exactly `own(order)`, the Order of device class cpu with the dimensions of `order`."""

    def claims(order: Order) -> str | None:
        try:
            mine = own(order)
        except ValueError as error:
            return str(error)
        return None if mine == order else f"computes {mine}"

    return claims


_OWN_ORDER: Mapping[type[Any], Callable[[Any], Order]] = MappingProxyType(
    {
        NormOrder: lambda order: norm_order(order.width, "cpu"),
        AttentionOrder: lambda order: attention_order(order.head_dim, order.kv_dtype, "cpu"),
        PointwiseOrder: lambda order: pointwise_order("cpu"),
        LogprobsOrder: lambda order: logprobs_order(order.vocab_size, "cpu"),
        SamplingOrder: lambda order: sampling_order(order.vocab_size, "cpu"),
    }
)
_LINEAR_DTYPES = (("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16"))


def library_kernels(library: CpuLibrary) -> tuple[Kernel, ...]:
    """The kernels of one CpuLibrary. A linear kernel is declared for each pair of dtypes, as its schedules differ."""
    kernels = []
    for weight_dtype, activation_dtype in _LINEAR_DTYPES:
        own = linear_order(1, 1, weight_dtype, activation_dtype, "cpu")
        schedules = tuple(library.linear_schedules(weight_dtype, activation_dtype))
        for op, offered in (("linear", schedules), ("embedding", ONE_SCHEDULE)):
            if offered:
                kernels.append(_declare(library, op, offered, _claim(lambda order, own=own: own)))  # type: ignore[misc]
    for kind, own_order in _OWN_ORDER.items():
        for op in OPS_OF_ORDER[kind]:
            offered = tuple(ATTENTION_SCHEDULES) if op == "attention" else ONE_SCHEDULE
            kernels.append(_declare(library, op, offered, _claim(own_order)))
    return tuple(kernels)


def _declare(library: CpuLibrary, op: str, schedules: tuple[str, ...], claims: Callable[[Order], str | None]) -> Kernel:
    return Kernel(library.name, op, ("cpu",), schedules, library.source_hash, claims, library)
