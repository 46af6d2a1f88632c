"""Linears of a GPU: a weight, the schedules that can run it, and which of them is fastest for how many rows.

Triton's schedules and those of cuBLASLt stand side by side; what they are called is all that `ops.py` knows of them.
Invariant: one weight has one Order, and every schedule that is admitted for it gives the same bits.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from isobit.kernels.gpu.device import proof_facts
from isobit.kernels.gpu.tune import MOST_ROWS, Candidate, TuningCache, choose_schedules
from isobit.kernels.interface import TORCH_DTYPES, Ladder
from isobit.kernels.triton.linear import linear, reference_linear
from isobit.kernels.triton.linear_call import LinearWorkspace
from isobit.kernels.triton.linear_schedules import LinearSchedule, linear_schedules
from isobit.kernels.vendor.cublaslt import CublasLt, VendorSchedule
from isobit.order import MmaLinearOrder

__all__ = ["GpuLinears", "LinearWeight"]

_PAST_L2 = 192 << 20  # bytes: weights timed in turn must not stay in the L2 cache (60 MB on an NVIDIA H200)


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """A weight [N, K] on the device under its Order, and its bias float32 [N]."""

    order: MmaLinearOrder
    weight: torch.Tensor
    bias: torch.Tensor | None


class GpuLinears:
    """The linears of one library: schedules by Order and name, the workspace they share, ladders."""

    def __init__(self, device_class: str, device: torch.device, source_hash: str) -> None:
        self.device_class = device_class
        self.device = device
        self.source_hash = source_hash
        self.workspace = LinearWorkspace(device)
        self.vendor = _open_vendor(device)
        self._schedules: dict[MmaLinearOrder, dict[str, LinearSchedule | VendorSchedule]] = {}

    def schedules(self, order: MmaLinearOrder) -> dict[str, LinearSchedule | VendorSchedule]:
        """By name, everything that can run under an Order."""
        if order not in self._schedules:
            offered: list[LinearSchedule | VendorSchedule] = [*linear_schedules(order)]
            if self.vendor is not None and not order.has_bias:  # cuBLASLt adds no bias in float32 to 16 bits
                offered += self.vendor.schedules(order)
            self._schedules[order] = {schedule.name: schedule for schedule in offered}
        return self._schedules[order]

    def run(
        self,
        x: torch.Tensor,
        packed: LinearWeight,
        name: str,
        addend: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [M, K] -> [M, N]. Raises ValueError for a schedule that is not offered under the weight's Order."""
        schedule = self.schedules(packed.order).get(name)
        if schedule is None:
            known = ", ".join(self.schedules(packed.order))
            raise ValueError(f"{packed.order} has no schedule {name!r}; it has: {known}")
        rest = (self.workspace, packed.bias, addend, out)
        if isinstance(schedule, LinearSchedule):
            return linear(x, packed.weight, packed.order, schedule, *rest)
        assert self.vendor is not None, "a vendor's schedule without the vendor"
        return self.vendor.linear(x, packed.weight, packed.order, schedule, *rest)

    def reference(self, x: torch.Tensor, packed: LinearWeight, addend: torch.Tensor | None) -> torch.Tensor:
        """The plainest kernel of the Order."""
        return reference_linear(x, packed.weight, packed.order, bias=packed.bias, addend=addend)

    def ladder(self, order: MmaLinearOrder, admitted: Sequence[str], cache_path: Path | None = None) -> Ladder:
        """The fastest admitted schedule by rows: timed on this card once, then read from the cache."""
        cache = TuningCache(cache_path)
        key: dict[str, Any] = {
            "order": asdict(order), "admitted": sorted(admitted), "facts": proof_facts(self.device_class),
            "source": self.source_hash,
        }  # fmt: skip
        ladder = cache.get(key)
        if ladder is None or not self._is_proven(order, ladder, admitted):
            ladder = self._timed(order, admitted)
            cache.put(key, ladder)
        return ladder

    def _is_proven(self, order: MmaLinearOrder, ladder: Ladder, admitted: Sequence[str]) -> bool:
        """Whether every step is an admitted schedule on rows it is offered for, and any number of rows has a step."""
        offered, least = self.schedules(order), 1
        for most, name in ladder:
            if name not in admitted or not offered[name].min_rows <= least <= most <= offered[name].max_rows:
                return False
            least = most + 1
        return bool(ladder) and ladder[-1][0] == sys.maxsize

    def _timed(self, order: MmaLinearOrder, admitted: Sequence[str]) -> Ladder:
        offered = self.schedules(order)
        dtype = TORCH_DTYPES[order.weight_dtype]
        copies = max(1, min(12, _PAST_L2 // (order.n * order.k * dtype.itemsize)))
        # As in service: a bias is another compiled kernel. Results have a place, or every graph would take its own.
        bias = torch.zeros(order.n, device=self.device) if order.has_bias else None
        weights = [
            LinearWeight(order, torch.randn((order.n, order.k), dtype=dtype, device=self.device), bias)
            for _ in range(copies)
        ]
        x = torch.randn((MOST_ROWS, order.k), dtype=dtype, device=self.device)
        out = torch.empty((MOST_ROWS, order.n), dtype=TORCH_DTYPES[order.output_dtype], device=self.device)

        def candidate(name: str) -> Candidate:
            def run(rows: int, times: int) -> None:
                for at in range(times):
                    self.run(x[:rows], weights[at % copies], name, out=out[:rows])

            return Candidate(name, offered[name].min_rows, offered[name].max_rows, run)

        with torch.inference_mode():
            return choose_schedules([candidate(name) for name in admitted])


def _open_vendor(device: torch.device) -> CublasLt | None:
    """cuBLASLt; None where it cannot be loaded, and in Triton's interpreter."""
    if device.type != "cuda":
        return None
    try:
        return CublasLt(device)
    except (ValueError, RuntimeError):
        return None
