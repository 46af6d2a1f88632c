"""What the kernels of a CpuLibrary claim: for each op the Orders of device class "cpu", and the schedules it offers.

Declarations only; `admission.py` proves them. Another technology has a file like this one of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from isobit.kernels.cpu.library import ATTENTION_SCHEDULES, CpuLibrary
from isobit.kernels.registry import ONE_SCHEDULE, OPS_OF_ORDER, Kernel
from isobit.order import (
    AttentionOrder,
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

__all__ = ["library_kernels"]


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
