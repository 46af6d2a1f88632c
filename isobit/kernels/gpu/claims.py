"""What the kernels of a GpuLibrary claim, for the Orders of a model, and their admission on this card.

Declarations only; `probes.py` and `prove.py` prove them. A GPU's linear has other schedules for other (N, K), so it is
declared once for each Order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from isobit.kernels.admission import AdmissionTable, admit
from isobit.kernels.gpu.device import proof_facts
from isobit.kernels.gpu.library import GpuLibrary
from isobit.kernels.gpu.probes import PROBE_VERSION
from isobit.kernels.gpu.prove import prove_on_device
from isobit.kernels.registry import OPS_OF_ORDER, Kernel
from isobit.order import AttentionOrder, LinearOrder, Order

__all__ = ["admit_library", "gpu_kernels"]


def gpu_kernels(library: GpuLibrary, orders: Mapping[str, Order]) -> tuple[Kernel, ...]:
    """The kernels of the library for each distinct Order."""
    kernels = []
    for order in dict.fromkeys(orders.values()):
        if isinstance(order, (LinearOrder, AttentionOrder)):
            raise ValueError(f"{order} is for device class cpu, not for {library.name}")
        for op in OPS_OF_ORDER[type(order)]:
            schedules = library.schedules(op, order)
            claims = _only(order)
            kernels.append(Kernel(library.name, op, (library.name,), schedules, library.source_hash, claims, library))
    return tuple(kernels)


def _only(order: Order) -> Callable[[Order], str | None]:
    return lambda other: None if other == order else f"declared for {order}"


def admit_library(
    library: GpuLibrary, orders: Mapping[str, Order], cache_path: Path | None = None, progress: bool = False
) -> AdmissionTable:
    """Prove every kernel of the library for these Orders on this card, or take the verdicts from the cache."""
    kernels = gpu_kernels(library, orders)
    facts = {**proof_facts(library.name), "gpu_probes": str(PROBE_VERSION), "dtype": str(library.dtype)}
    return admit(kernels, orders, cache_path, facts, progress, prove_on_device)
