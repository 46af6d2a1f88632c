"""Which ops there are under each kind of Order, and the form in which a kernel claims to keep one.

Each technology declares its own kernels (`cpu/claims.py`). A declaration is a claim; `admission.py` proves it on this
machine before anything runs. Does not know batches: which schedule runs is chosen among the admitted, when it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from isobit.kernels.interface import KernelLibrary
from isobit.order import (
    AttentionOrder,
    LinearOrder,
    LogprobsOrder,
    MmaAttentionOrder,
    MmaLinearOrder,
    NormOrder,
    Order,
    PointwiseOrder,
    SamplingOrder,
)

__all__ = ["ONE_SCHEDULE", "OPS", "OPS_OF_ORDER", "Kernel"]

# The ops proven for each kind of Order. `rope_and_cache` stands under attention, whose head width and KV dtype it has.
OPS_OF_ORDER: Mapping[type[Any], tuple[str, ...]] = MappingProxyType(
    {
        LinearOrder: ("linear", "embedding"),
        MmaLinearOrder: ("linear", "embedding"),
        NormOrder: ("rms_norm",),
        AttentionOrder: ("rope_and_cache", "attention"),
        MmaAttentionOrder: ("rope_and_cache", "attention"),
        PointwiseOrder: ("silu_mul",),
        LogprobsOrder: ("logprobs", "top_logits"),
        SamplingOrder: ("argmax", "sample"),
    }
)
ONE_SCHEDULE = ("only",)  # of ops whose library method takes no schedule
OPS = tuple(dict.fromkeys(op for ops in OPS_OF_ORDER.values() for op in ops))


@dataclass(frozen=True)
class Kernel:
    """A claim: `library`'s method named `op` keeps every Order for which `claims` returns None, under each schedule.

    `claims(order)` returns None, or the reason why the kernel does not offer that Order. `library` has the settable
    attribute `num_threads`. `source_hash` changes with anything that can change the kernel's bits, its compiler too.
    """

    name: str
    op: str
    device_classes: tuple[str, ...]
    schedules: tuple[str, ...]
    source_hash: str
    claims: Callable[[Order], str | None]
    library: KernelLibrary

    def __post_init__(self) -> None:
        assert self.op in OPS, f"unknown op {self.op!r}"
        assert self.schedules, f"{self.name} offers no schedule of {self.op}"
