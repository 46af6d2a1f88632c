"""Linear of device class "sm90" in Triton: launches the kernel and tile that a LinearSchedule names.

Does not choose schedules and knows no arithmetic (linear_kernels.py). Invariant: every launch is without FMA
contraction, on the current stream, without waiting for the device, and of a kernel that keeps MmaLinearOrder.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from isobit.kernels.triton.linear_call import LinearWorkspace, checked_output
from isobit.kernels.triton.linear_kernels import (
    pointer_kernel,
    reference_kernel,
    tma_persistent_kernel,
    tma_slice_kernel,
)
from isobit.kernels.triton.linear_schedules import LinearSchedule
from isobit.order import MmaLinearOrder

__all__ = ["linear", "reference_linear"]

_UNIT = 8  # elements of 2 bytes in a 16-byte load


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    order: MmaLinearOrder,
    schedule: LinearSchedule,
    workspace: LinearWorkspace,
    bias: torch.Tensor | None = None,
    addend: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [M, K], weight [N, K] -> [M, N]; bias float32 [N], addend float32 [M, N]; `out` may be `addend`, not `x`.

    x may have rows apart (unit inner stride, rows on 16-byte boundaries). Raises ValueError for anything else.
    """
    out = checked_output(x, weight, order, bias, addend, out)
    if x.shape[0] == 0:
        return out
    launch = {"pointer": _launch_pointer, "slice": _launch_slice, "persistent": _launch_persistent}[schedule.kernel]
    launch(x, weight, (bias, addend, out), order, schedule, workspace)
    return out


def _options(schedule: LinearSchedule) -> dict[str, Any]:
    return {"num_warps": schedule.warps, "num_stages": schedule.stages, "enable_fp_fusion": False}


def _tiles(num_rows: int, order: MmaLinearOrder, schedule: LinearSchedule) -> int:
    return int(triton.cdiv(num_rows, schedule.rows) * triton.cdiv(order.n, schedule.columns))


def _reserve(tiles: int, order: MmaLinearOrder, schedule: LinearSchedule, workspace: LinearWorkspace) -> None:
    if order.k_slices > 1:
        workspace.reserve(tiles * order.k_slices * schedule.rows * schedule.columns, tiles)


_Results = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor]  # bias, addend, out


def _launch_pointer(
    x: torch.Tensor,
    weight: torch.Tensor,
    results: _Results,
    order: MmaLinearOrder,
    schedule: LinearSchedule,
    workspace: LinearWorkspace,
) -> None:
    tiles = _tiles(x.shape[0], order, schedule)
    _reserve(tiles, order, schedule, workspace)
    unit = _UNIT if order.k % _UNIT == 0 else 1
    pointer_kernel[(tiles, order.k_slices)](
        x, weight, *results, workspace.partials, workspace.counters,
        x.shape[0], order.n, order.k // unit, x.stride(0) // unit,
        schedule.rows, schedule.columns, schedule.depth, order.k_slices,
        unit, order.k // order.k_slices % schedule.depth == 0, **_options(schedule),
    )  # fmt: skip


def _launch_slice(
    x: torch.Tensor,
    weight: torch.Tensor,
    results: _Results,
    order: MmaLinearOrder,
    schedule: LinearSchedule,
    workspace: LinearWorkspace,
) -> None:
    tiles = _tiles(x.shape[0], order, schedule)
    _reserve(tiles, order, schedule, workspace)
    tma_slice_kernel[(tiles, order.k_slices)](
        _tiled(x, schedule.rows, schedule.depth), _tiled(weight, schedule.columns, schedule.depth), *results,
        workspace.partials, workspace.counters, x.shape[0], order.n, order.k,
        schedule.rows, schedule.columns, schedule.depth, order.k_slices, schedule.swap, **_options(schedule),
    )  # fmt: skip


def _launch_persistent(
    x: torch.Tensor,
    weight: torch.Tensor,
    results: _Results,
    order: MmaLinearOrder,
    schedule: LinearSchedule,
    workspace: LinearWorkspace,
) -> None:
    bias, addend, out = results
    programs = min(workspace.multiprocessors, _tiles(x.shape[0], order, schedule))
    tma_persistent_kernel[(programs,)](
        _tiled(x, schedule.rows, schedule.depth), _tiled(weight, schedule.columns, schedule.depth),
        _tiled(out, schedule.rows, schedule.columns // schedule.parts), bias, addend,
        x.shape[0], order.n, order.k,
        schedule.rows, schedule.columns, schedule.depth, order.k_slices, schedule.parts, schedule.group,
        **_options(schedule),
    )  # fmt: skip


def _tiled(tensor: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [rows, columns])


def reference_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    order: MmaLinearOrder,
    bias: torch.Tensor | None = None,
    addend: torch.Tensor | None = None,
) -> torch.Tensor:
    """The Order on this card, as `linear`: what every schedule is compared with. Slow."""
    out = checked_output(x, weight, order, bias, addend, None)
    columns = 64
    grid = (triton.cdiv(x.shape[0], 16), triton.cdiv(order.n, columns))
    if x.shape[0]:
        reference_kernel[grid](
            x, weight, bias, addend, out, x.shape[0], order.n, order.k, x.stride(0), order.k_slices, columns,
            num_warps=4, num_stages=1, enable_fp_fusion=False,
        )  # fmt: skip
    return out
