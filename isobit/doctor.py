"""`isobit doctor`: proves every kernel that this machine can run and prints the table of verdicts.

Shows what `kernels/admission.py` found, decides nothing. Exit code 1 when some op of some Order is left without an
admitted kernel.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from isobit.kernels.admission import AdmissionTable, Claim, admit
from isobit.kernels.cpu.build import machine_libraries
from isobit.kernels.cpu.claims import library_kernels
from isobit.kernels.cpu.features import REQUIRED_FLAGS, supported_libraries
from isobit.kernels.cpu.library import CpuLibrary
from isobit.kernels.registry import OPS_OF_ORDER
from isobit.kernels.verdict_cache import ADMITTED, Verdict
from isobit.model_config import load_model_config
from isobit.order import Order, model_orders

__all__ = ["doctor_orders", "format_report", "missing_ops", "report", "run_doctor"]

# (weights, activations, KV cache): what a user can choose
_DTYPES = (
    ("float32", "float32", "float32"),
    ("bfloat16", "float32", "bfloat16"),
    ("bfloat16", "bfloat16", "bfloat16"),
)


def run_doctor(
    model: str = "smollm2",
    as_json: bool = False,
    cache_path: Path | None = None,
    progress: bool = True,
    device: str = "cpu",
) -> int:
    """Prove and print; returns the exit code. Raises ValueError for a model that cannot be read, or a missing GPU."""
    progress = progress and not as_json
    if device == "cuda":
        table, orders = _prove_gpu(model, cache_path, progress)
        found = report(table, orders, {})
    else:
        orders = doctor_orders(model)
        libraries, unavailable = _open_libraries()
        kernels = [kernel for library in libraries for kernel in library_kernels(library)]
        found = report(admit(kernels, orders, cache_path, progress=progress), orders, unavailable)
    print(json.dumps(found, indent=2) if as_json else format_report(found))
    return 1 if found["missing"] else 0


def doctor_orders(model: str) -> dict[str, Order]:
    """The Orders of a model under every choice of dtypes, each once."""
    config = load_model_config(model)
    distinct: dict[Order, str] = {}
    for dtypes in _DTYPES:
        for name, order in model_orders(config, *dtypes, device_class="cpu").items():
            distinct.setdefault(order, f"{name} {'/'.join(dtypes)}")
    return {name: order for order, name in distinct.items()}


def _prove_gpu(model: str, cache_path: Path | None, progress: bool) -> tuple[AdmissionTable, dict[str, Order]]:
    """The table of the GPU's kernels, and the Orders, under each dtype a user can choose."""
    from isobit.kernels.gpu.device import gpu_facts  # asks the driver

    device_class, _ = gpu_facts()
    from isobit.kernels.gpu.claims import admit_library
    from isobit.kernels.gpu.library import GpuLibrary

    config = load_model_config(model)
    verdicts: dict[Claim, Verdict] = {}
    orders: dict[str, Order] = {}
    for dtype in ("bfloat16", "float16"):
        own = model_orders(config, dtype, dtype, dtype, device_class)
        verdicts.update(admit_library(GpuLibrary(device_class, dtype), own, cache_path, progress).verdicts)
        orders.update({f"{name} {dtype}": order for name, order in own.items()})
    return AdmissionTable(verdicts), orders


def _open_libraries() -> tuple[list[CpuLibrary], dict[str, str]]:
    """The libraries that run here, and for each other one of this machine type the reason why not."""
    libraries, unavailable = [], {}
    supported = supported_libraries()
    for name in machine_libraries(platform.machine()):
        if name not in supported:
            unavailable[name] = f"this CPU lacks one or more of {', '.join(REQUIRED_FLAGS[name])}"
            continue
        try:
            libraries.append(CpuLibrary(name))
        except (ValueError, RuntimeError, OSError) as error:
            unavailable[name] = str(error)
    return libraries, unavailable


def missing_ops(table: AdmissionTable, orders: Mapping[str, Order]) -> list[tuple[str, Order]]:
    """(op, Order) pairs that no kernel was admitted for."""
    return [
        (op, order)
        for order in dict.fromkeys(orders.values())
        for op in OPS_OF_ORDER[type(order)]
        if not table.schedules(op, order)
    ]


def report(table: AdmissionTable, orders: Mapping[str, Order], unavailable: Mapping[str, str]) -> dict[str, Any]:
    """The findings, ready for JSON: `verdicts`, `missing`, `unavailable_libraries`."""
    verdicts = [
        {
            "op": claim.op,
            "order": _short(claim.order),
            "kernel": claim.kernel,
            "schedule": claim.schedule,
            **asdict(verdict),
        }
        for claim, verdict in table.verdicts.items()
    ]
    return {
        "verdicts": verdicts,
        "missing": [{"op": op, "order": _short(order)} for op, order in missing_ops(table, orders)],
        "unavailable_libraries": dict(unavailable),
    }


def _short(order: Order) -> str:
    return f"{type(order).__name__}({', '.join(str(value) for value in asdict(order).values())})"


def format_report(found: Mapping[str, Any]) -> str:
    """The findings as text: one line a verdict, then libraries that cannot run here, then what is missing."""
    rows = [("op", "order", "kernel", "schedule", "verdict")]
    rows += [(v["op"], v["order"], v["kernel"], v["schedule"] or "-", _verdict_text(v)) for v in found["verdicts"]]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = ["  ".join([*(f"{row[i]:<{widths[i]}}" for i in range(4)), row[4]]) for row in rows]
    lines += [f"library {name} is not used: {reason}" for name, reason in found["unavailable_libraries"].items()]
    lines += [f"NO KERNEL for {gap['op']} under {gap['order']}" for gap in found["missing"]]
    admitted = sum(v["status"] == ADMITTED for v in found["verdicts"])
    lines.append(f"{admitted} of {len(found['verdicts'])} admitted, {len(found['missing'])} ops without a kernel")
    return "\n".join(lines)


def _verdict_text(verdict: Mapping[str, Any]) -> str:
    parts = [verdict["status"], verdict["detail"]]
    if difference := verdict["difference"]:
        parts.append(
            f"at {list(difference['coordinate'])} expected {difference['expected']} ({difference['expected_bits']}), "
            f"got {difference['actual']} ({difference['actual_bits']})"
        )
    return ": ".join(part for part in parts if part)
