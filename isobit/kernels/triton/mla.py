"""Paged absorbed-MLA attention on sm90: which kernel runs, with which tile, over which workspace.

All query heads read one latent tensor; q [M, H, latent + rope], out [M, H, latent]. Knows tensors and the host's plan
of the batch (`mla_plan`); never looks at the device's numbers. Invariant: every schedule of `mla_schedules` gives the
bits of `reference_mla`, the plainest kernel of the Order; no launch allocates but the output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from isobit.kernels.interface import TORCH_DTYPES
from isobit.kernels.triton.attention_math import exponent_scale
from isobit.kernels.triton.mla_plan import MlaPlan, MlaTables, mla_plan, pad_plan, upload_plan
from isobit.kernels.triton.mla_tiles import item_kernel, merge_kernel
from isobit.kernels.triton.mla_wgmma import wgmma_kernel
from isobit.order import MmaAttentionOrder

__all__ = [
    "MlaPlan", "MlaSchedule", "MlaTables", "MlaWorkspace", "mla_attention", "mla_plan", "mla_schedules", "pad_plan",
    "reference_mla", "upload_plan",
]  # fmt: skip

_FOLDED_ROWS = 64


@dataclass(frozen=True, slots=True)
class MlaSchedule:
    """A tile of `rows` (token, head) pairs; `kernel` is "triton" (any width) or "wgmma" (256 or 512 + 64)."""

    name: str
    kernel: str
    rows: int
    num_warps: int
    num_stages: int = 1


_REFERENCE = MlaSchedule("reference", "triton", 16, 4)
_TRITON = (
    MlaSchedule("triton-16", "triton", 16, 4, 2),
    MlaSchedule("triton-64", "triton", 64, 8, 2),
)
_WGMMA = MlaSchedule("wgmma-64", "wgmma", 64, 4)


def mla_schedules(order: MmaAttentionOrder) -> tuple[MlaSchedule, ...]:
    """The schedules offered for an Order. Raises ValueError for an Order that no kernel here computes."""
    _check_order(order)
    if order.value_dim in (256, 512) and order.head_dim - order.value_dim == order.kv_block == 64:
        return (_WGMMA,)
    return _TRITON


class MlaWorkspace:
    """Scratch of one stream: the results of splits that wait to be merged. Owned by the caller, grown by `reserve`.

    `partial_*`: of splits that are items of their own; `folded`: of the splits that a program has walked so far, one
    tile a program.
    """

    def __init__(self, device: torch.device, latent: int) -> None:
        self.device, self.latent = device, latent
        self.partial_ml, self.partial_o, self.folded = (torch.empty(0, device=device) for _ in range(3))

    def reserve(self, partial_rows: int, num_programs: int) -> None:
        """Room for `partial_rows` rows and `num_programs` programs; call it before a capture, never inside one."""
        if self.partial_ml.numel() < 2 * partial_rows:
            self.partial_ml = torch.empty(2 * partial_rows, device=self.device)
            self.partial_o = torch.empty(partial_rows * self.latent, device=self.device)
        if self.folded.numel() < num_programs * _FOLDED_ROWS * self.latent:
            self.folded = torch.empty(num_programs * _FOLDED_ROWS * self.latent, device=self.device)

    def check(self, tables: MlaTables) -> None:
        """Raises ValueError unless there is room for a plan."""
        programs = len(tables.programs) - 1
        short = self.folded.numel() < programs * _FOLDED_ROWS * self.latent
        if short or self.partial_ml.numel() < 2 * tables.partial_rows:
            raise ValueError(
                f"the workspace lacks room for {tables.partial_rows} partial rows and {programs} programs: "
                "call reserve() before the step"
            )


def _check_order(order: MmaAttentionOrder) -> None:
    latent, rope = order.value_dim, order.head_dim - order.value_dim
    if not 64 <= latent <= 512 or latent % 64 or rope not in (32, 64):
        raise ValueError(f"MLA takes 64 to 512 latent features in steps of 64 and 32 or 64 of rope, got {order}")
    if order.row_sum != "mma":
        raise ValueError(f"MLA kernels take the row sum through the tensor core (row_sum='mma'), got {order}")
    if order.kv_split_size % order.kv_block:
        raise ValueError(f"kv_split_size must be a multiple of kv_block, got {order}")


def _check(q: torch.Tensor, latent_layer: torch.Tensor, order: MmaAttentionOrder) -> None:
    _check_order(order)
    dtype = TORCH_DTYPES[order.kv_dtype]
    if q.dim() != 3 or q.shape[2] != order.head_dim or q.dtype != dtype or not q.is_contiguous():
        raise ValueError(f"q must be contiguous {dtype} [M, H, {order.head_dim}], got {q.dtype} {tuple(q.shape)}")
    page = (order.kv_block, order.head_dim)
    if latent_layer.shape[1:] != page or latent_layer.dtype != dtype or not latent_layer.is_contiguous():
        raise ValueError(
            f"the latent layer must be contiguous {dtype} [pages, {page[0]}, {page[1]}], "
            f"got {latent_layer.dtype} {tuple(latent_layer.shape)}"
        )


def mla_attention(
    q: torch.Tensor,
    latent_layer: torch.Tensor,
    tables: MlaTables,
    order: MmaAttentionOrder,
    scale: float,
    schedule: MlaSchedule,
    workspace: MlaWorkspace,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of q [M, H, head_dim] over latent_layer [pages, kv_block, head_dim] -> [M, H, value_dim].

    `tables` come from a plan made for the schedule's tile. Rows of a step must be in the cache already. Raises
    ValueError for tensors that do not fit the Order or the plan, or a scale not above 0.
    """
    _check(q, latent_layer, order)
    if tables.rows_per_tile != schedule.rows:
        raise ValueError(f"the plan has tiles of {tables.rows_per_tile} rows, schedule {schedule.name} needs another")
    workspace.check(tables)
    if out is None:
        out = torch.empty((*q.shape[:2], order.value_dim), dtype=q.dtype, device=q.device)
    _launch_items(q, latent_layer, out, tables, order, scale, schedule, workspace)
    if len(tables.merges):
        merge_kernel[(len(tables.merges),)](
            out, tables.merges, workspace.partial_ml, workspace.partial_o, order.value_dim,
            LATENT=triton.next_power_of_2(order.value_dim), num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def _launch_items(
    q: torch.Tensor,
    latent_layer: torch.Tensor,
    out: torch.Tensor,
    tables: MlaTables,
    order: MmaAttentionOrder,
    scale: float,
    schedule: MlaSchedule,
    workspace: MlaWorkspace,
) -> None:
    if schedule.kernel == "wgmma":
        _launch_wgmma(q, latent_layer, out, tables, order, scale, workspace)
        return
    rope = order.head_dim - order.value_dim
    item_kernel[(len(tables.items),)](
        q, latent_layer, out, tables.items, workspace.partial_ml, workspace.partial_o, tables.query_starts,
        tables.start_positions, tables.page_tables, tables.page_tables.shape[1], q.shape[1], exponent_scale(scale),
        order.value_dim, rope, ROWS=schedule.rows, LATENT=triton.next_power_of_2(order.value_dim), ROPE=rope,
        PAGE=order.kv_block, SPLIT=order.kv_split_size, num_warps=schedule.num_warps,
        num_stages=schedule.num_stages, enable_fp_fusion=False,
    )  # fmt: skip


def _launch_wgmma(
    q: torch.Tensor,
    latent_layer: torch.Tensor,
    out: torch.Tensor,
    tables: MlaTables,
    order: MmaAttentionOrder,
    scale: float,
    workspace: MlaWorkspace,
) -> None:
    layout = gl.NVMMASharedLayout(128, 16, 2)
    rows, pages = q.view(-1, order.head_dim), latent_layer.view(-1, order.head_dim)
    quarter, rope = [64, order.value_dim // 4], [64, order.head_dim - order.value_dim]
    wgmma_kernel[(len(tables.programs) - 1,)](
        TensorDescriptor.from_tensor(rows, quarter, layout), TensorDescriptor.from_tensor(rows, rope, layout),
        TensorDescriptor.from_tensor(pages, quarter, layout), TensorDescriptor.from_tensor(pages, rope, layout),
        out, workspace.folded, workspace.partial_ml, workspace.partial_o, tables.items, tables.programs,
        tables.query_starts, tables.start_positions, tables.page_tables, tables.page_tables.shape[1], q.shape[1],
        exponent_scale(scale), order.kv_split_size // order.kv_block, PAGE=order.kv_block, num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip


def reference_mla(
    q: torch.Tensor,
    latent_layer: torch.Tensor,
    query_starts: Any,
    start_positions: Any,
    page_tables: Any,
    order: MmaAttentionOrder,
    scale: float,
) -> torch.Tensor:
    """The Order itself: tiles of 16 rows that walk all their splits; the batch's int32 arrays are on the host."""
    plan = mla_plan(query_starts, start_positions, q.shape[1], order, _REFERENCE.rows, 1, walk=True)
    tables = upload_plan(plan, query_starts, start_positions, page_tables, q.device)
    workspace = MlaWorkspace(q.device, order.value_dim)
    workspace.reserve(0, 1)
    return mla_attention(q, latent_layer, tables, order, scale, _REFERENCE, workspace)
