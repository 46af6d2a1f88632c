"""Mixture-of-experts linears on sm90: every (token, slot) pair goes through its expert's weight, MmaLinearOrder.

`align` cuts the pairs into tiles on the device, `moe_linear` runs a schedule over them. The output is indexed by
(token, slot), so the order in which sorting lists pairs cannot matter. Does not know how experts are chosen. Invariant:
every schedule of `moe_schedules` gives the bits of `reference_moe_linear`, for any routing; no host sync, and nothing
is allocated but the output.
"""

from __future__ import annotations

import functools

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from isobit.kernels.interface import TORCH_DTYPES
from isobit.kernels.triton.moe_kernels import copy_rows_kernel, experts_kernel, reference_kernel, stream_kernel
from isobit.kernels.triton.moe_routing import MoeRouting, align
from isobit.kernels.triton.moe_schedules import MoeSchedule, default_schedule, moe_schedules
from isobit.order import MmaLinearOrder

__all__ = [
    "MoeRouting", "MoeSchedule", "MoeWorkspace", "align", "default_schedule", "moe_linear", "moe_schedules",
    "reference_moe_linear",
]  # fmt: skip

_COPY_WIDTH = 2048


class MoeWorkspace:
    """Scratch of one stream: rows of x in the order of the sorted pairs. Owned by the caller, grown by `reserve`."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.copied = torch.empty(0, dtype=dtype, device=device)

    def reserve(self, num_pairs: int, k: int) -> None:
        """Room for `num_pairs` rows of `k`; call it before a capture, never inside one."""
        if self.copied.numel() < num_pairs * k:
            self.copied = torch.empty(num_pairs * k, dtype=self.copied.dtype, device=self.copied.device)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 2  # the interpreter
    return torch.cuda.get_device_properties(device).multi_processor_count


def _pairs_per_row(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, order: MmaLinearOrder) -> int:
    """top_k where x has a row a token, 1 where it has a row a pair; checks all shapes on the way."""
    dtype = TORCH_DTYPES[order.weight_dtype]
    if weights.dim() != 3 or weights.shape[1:] != (order.n, order.k) or weights.dtype != dtype:
        raise ValueError(
            f"expert weights must be {dtype} [experts, {order.n}, {order.k}], got {weights.dtype} {tuple(weights.shape)}"
        )
    if order.k % order.k_slices:
        raise ValueError(f"k must divide into k_slices, got {order}")
    tokens, top_k = ids.shape
    if x.shape not in ((tokens, order.k), (tokens * top_k, order.k)) or x.dtype != dtype:
        raise ValueError(
            f"x must be {dtype} [{tokens}, {order.k}] or [{tokens * top_k}, {order.k}] for ids {tuple(ids.shape)}, "
            f"got {x.dtype} {tuple(x.shape)}"
        )
    if not x.is_contiguous() or not weights.is_contiguous():
        raise ValueError(f"x and weights must be contiguous, got strides {x.stride()} and {weights.stride()}")
    return top_k if x.shape[0] == tokens else 1


def _output(ids: torch.Tensor, order: MmaLinearOrder, out: torch.Tensor | None) -> torch.Tensor:
    shape, dtype = (ids.numel(), order.n), TORCH_DTYPES[order.output_dtype]
    if out is None:
        return torch.empty(shape, dtype=dtype, device=ids.device)
    if out.shape != shape or out.dtype != dtype or not out.is_contiguous():
        raise ValueError(f"out must be contiguous {dtype} {shape}, got {out.dtype} {tuple(out.shape)}")
    return out


def moe_linear(
    x: torch.Tensor,
    weights: torch.Tensor,
    routing: MoeRouting,
    order: MmaLinearOrder,
    schedule: MoeSchedule,
    workspace: MoeWorkspace | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [T, K] or [T * top_k, K], weights [experts, N, K] -> [T * top_k, N], row token * top_k + slot.

    `routing` was aligned with the schedule's block; `workspace` is needed by schedules that copy rows. A pair whose id
    names no expert leaves its row unwritten.
    """
    per_row = _pairs_per_row(x, weights, routing.ids, order)
    if routing.block != schedule.block:
        raise ValueError(f"schedule {schedule.name} takes tiles of {schedule.block} pairs, got {routing.block}")
    if weights.shape[0] != routing.num_experts:
        raise ValueError(f"routing over {routing.num_experts} experts, weights of {weights.shape[0]}")
    out = _output(routing.ids, order, out)
    if routing.num_pairs == 0:
        return out
    if schedule.kernel == "stream":
        _launch_stream(x, weights, out, routing, order, schedule, per_row)
    else:
        _launch_experts(x, weights, out, routing, order, schedule, per_row, workspace)
    return out


def _launch_stream(
    x: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
    routing: MoeRouting,
    order: MmaLinearOrder,
    schedule: MoeSchedule,
    per_row: int,
) -> None:
    unit = 1 if order.k % (8 * order.k_slices) else 8
    stream_kernel[(routing.max_tiles * triton.cdiv(order.n, schedule.columns),)](
        x, weights, out, routing.ids, routing.pairs, routing.tiles, order.n, order.k // unit, per_row,
        routing.num_experts, ROWS=schedule.rows, COLUMNS=schedule.columns, DEPTH=schedule.depth,
        SLICES=order.k_slices, UNIT=unit, EVEN=order.k // order.k_slices % schedule.depth == 0,
        num_warps=schedule.warps, num_stages=schedule.stages, enable_fp_fusion=False,
    )  # fmt: skip


def _launch_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
    routing: MoeRouting,
    order: MmaLinearOrder,
    schedule: MoeSchedule,
    per_row: int,
    workspace: MoeWorkspace | None,
) -> None:
    x_tiles = None
    if schedule.copied:
        x_tiles = TensorDescriptor.from_tensor(
            _copied(x, routing, order, per_row, workspace), [schedule.rows, schedule.depth]
        )
    w_tiles = TensorDescriptor.from_tensor(weights.view(-1, order.k), [schedule.columns, schedule.depth])
    programs = min(
        _multiprocessors(x.device) * schedule.per_multiprocessor,
        routing.max_tiles * triton.cdiv(order.n, schedule.columns),
    )
    experts_kernel[(programs,)](
        x, x_tiles, w_tiles, out, routing.pairs, routing.tiles, routing.num_tiles, order.n, order.k // 8, per_row,
        ROWS=schedule.rows, COLUMNS=schedule.columns, DEPTH=schedule.depth, SLICES=order.k_slices,
        EVEN=order.k // order.k_slices % schedule.depth == 0, SWAP=schedule.swap, PARTS=schedule.parts,
        TAIL=schedule.tail, num_warps=schedule.warps, num_stages=schedule.stages, enable_fp_fusion=False,
    )  # fmt: skip


def _copied(
    x: torch.Tensor, routing: MoeRouting, order: MmaLinearOrder, per_row: int, workspace: MoeWorkspace | None
) -> torch.Tensor:
    size = routing.num_pairs * order.k
    if workspace is None or workspace.copied.numel() < size or workspace.copied.dtype != x.dtype:
        raise ValueError(f"the workspace lacks room for {routing.num_pairs} rows of {order.k} {x.dtype}: call reserve")
    copied = workspace.copied[:size].view(routing.num_pairs, order.k)
    copy_rows_kernel[(routing.num_pairs, triton.cdiv(order.k, _COPY_WIDTH))](
        x, routing.pairs, copied, routing.num_pairs, order.k // 8, per_row, WIDTH=_COPY_WIDTH, num_warps=4
    )
    return copied


def reference_moe_linear(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, order: MmaLinearOrder
) -> torch.Tensor:
    """The Order itself: one pair at a time, unsorted; shapes as `moe_linear`."""
    per_row = _pairs_per_row(x, weights, ids, order)
    out = _output(ids, order, None)
    if ids.numel():
        reference_kernel[(ids.numel(), triton.cdiv(order.n, 64))](
            x, weights, out, ids, order.n, order.k, per_row, weights.shape[0], SLICES=order.k_slices, COLUMNS=64,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out
