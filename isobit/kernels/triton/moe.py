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
from isobit.kernels.triton.moe_kernels import experts_kernel, reference_kernel, stream_kernel
from isobit.kernels.triton.moe_routing import MoeRouting, align
from isobit.kernels.triton.moe_schedules import MoeSchedule, default_schedule, moe_schedules
from isobit.order import MmaLinearOrder

__all__ = [
    "MoeRouting", "MoeSchedule", "align", "default_schedule", "moe_linear", "moe_schedules",
    "reference_moe_linear",
]  # fmt: skip


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 2  # the interpreter
    return torch.cuda.get_device_properties(device).multi_processor_count


def _unit(size: int) -> int:
    """Sizes go to a kernel in units of 8 where they are multiples of it: a compiler that knows so moves 16 bytes."""
    return 8 if size % 8 == 0 else 1


def _pairs_per_row(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, order: MmaLinearOrder) -> int:
    """top_k where x has a row a token, 1 where it has a row a pair; checks all shapes on the way."""
    dtype = TORCH_DTYPES[order.weight_dtype]
    if weights.dim() != 3 or weights.shape[1:] != (order.n, order.k) or weights.dtype != dtype:
        raise ValueError(
            f"expert weights must be {dtype} [experts, {order.n}, {order.k}], "
            f"got {weights.dtype} {tuple(weights.shape)}"
        )
    if order.k % order.k_slices or order.has_bias:
        raise ValueError(f"experts have no bias, and k_slices divide k; got {order}")
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
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [T, K] or [T * top_k, K], weights [experts, N, K] -> [T * top_k, N], row token * top_k + slot.

    `routing` was aligned with the schedule's block and more. A pair whose id names no expert leaves its row unwritten.
    """
    per_row = _pairs_per_row(x, weights, routing.ids, order)
    if (routing.block, routing.more) != (schedule.block, schedule.more):
        raise ValueError(
            f"schedule {schedule.name} takes tiles of {schedule.block} and {schedule.more} pairs, "
            f"got {routing.block} and {routing.more}"
        )
    if weights.shape[0] != routing.num_experts:
        raise ValueError(f"routing over {routing.num_experts} experts, weights of {weights.shape[0]}")
    out = _output(routing.ids, order, out)
    if routing.num_pairs == 0:
        return out
    if schedule.kernel == "stream":
        _launch_stream(x, weights, out, routing, order, schedule, per_row)
    else:
        _launch_experts(x, weights, out, routing, order, schedule, per_row)
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
    n_unit, k_unit = _unit(order.n), _unit(order.k // order.k_slices)
    stream_kernel[(routing.max_tiles * triton.cdiv(order.n, schedule.columns),)](
        x, weights, out, routing.ids, routing.pairs, routing.tiles, order.n // n_unit, order.k // k_unit, per_row,
        routing.num_experts, ROWS=schedule.rows, COLUMNS=schedule.columns, DEPTH=schedule.depth,
        SLICES=order.k_slices, N_UNIT=n_unit, K_UNIT=k_unit,
        EVEN=order.k // order.k_slices % schedule.depth == 0, ONCE=schedule.once,
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
) -> None:
    w_tiles = TensorDescriptor.from_tensor(weights.view(-1, order.k), [schedule.columns, schedule.depth])
    programs = min(
        _multiprocessors(x.device) * schedule.per_multiprocessor,
        routing.max_tiles * triton.cdiv(order.n, schedule.columns),
    )
    n_unit = _unit(order.n)
    experts_kernel[(programs,)](
        x, w_tiles, out, routing.pairs, routing.tiles, routing.num_tiles, order.n // n_unit, order.k // 8, per_row,
        ROWS=schedule.rows, SHORT=schedule.short, MORE=schedule.more, COLUMNS=schedule.columns,
        DEPTH=schedule.depth, SLICES=order.k_slices, N_UNIT=n_unit,
        EVEN=order.k // order.k_slices % schedule.depth == 0, SWAP=schedule.swap, PARTS=schedule.parts,
        num_warps=schedule.warps, num_stages=schedule.stages, enable_fp_fusion=False,
    )  # fmt: skip


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
