"""Paged grouped-query attention on sm90 under `MmaAttentionOrder`: schedules, launches and the reference.

A schedule says which kernel walks the requests with many rows and which one splits those with few. It may look at the
batch, because it cannot move a bit: every schedule is proven against `reference_attention`. Knows tensors, shapes and
the plan of a step; knows no model. Invariant: no wait for the device, no state but the workspace that is passed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as SwizzledDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from isobit.kernels.interface import TORCH_DTYPES, AttentionShape
from isobit.kernels.triton.attention_decode import decode_kernel
from isobit.kernels.triton.attention_math import exponent_scale
from isobit.kernels.triton.attention_plan import SPLIT_TILE_ROWS, AttentionPlan, cut_into_tiles
from isobit.kernels.triton.attention_tiles import combine_kernel, split_kernel, walk_kernel
from isobit.kernels.triton.attention_wgmma import wgmma_kernel
from isobit.order import MmaAttentionOrder

__all__ = [
    "AttentionBatch", "AttentionPlan", "AttentionWorkspace", "attention", "attention_schedules", "plan_attention",
    "reference_attention",
]  # fmt: skip

REFERENCE = "reference"
_ALL = 1 << 30
_COMBINED_AHEAD = 16  # splits whose results are asked for before the first is merged


@dataclass(frozen=True, slots=True)
class _Kernel:
    """`kind`: "plain" (pointers), "tma", or "gluon" (TMA rings of its own)."""

    kind: str
    rows: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class _Schedule:
    """Requests of at most `most_split_rows` (token, head) rows are split, all others walk."""

    walk: _Kernel
    split: _Kernel
    most_split_rows: int


def _schedules(head_dim: int) -> dict[str, _Schedule]:
    """By name. The registers and the shared memory of an SM hold three consumers of 64 rows up to 128 features, else
    one; 16 rows of 128 features fit one warp."""
    wide = padded_dim(head_dim) > 128
    wgmma = _Kernel("gluon", 64 if wide else 192, 4, 2)
    few = _Kernel("gluon", SPLIT_TILE_ROWS, 4 if wide else 1, 2)
    deep = _Kernel("gluon", SPLIT_TILE_ROWS, 4 if wide else 2, 3)
    plain = _Kernel("plain", SPLIT_TILE_ROWS, 4, 1)
    schedules = {
        "auto": _Schedule(wgmma, few, 4 * SPLIT_TILE_ROWS),
        "walk": _Schedule(wgmma, few, 0),
        "split": _Schedule(wgmma, few, _ALL),
        "split-deep": _Schedule(wgmma, deep, _ALL),
        "split-triton": _Schedule(plain, plain, _ALL),
        REFERENCE: _Schedule(plain, plain, 0),
    }
    if not wide:
        schedules["walk-triton"] = _Schedule(_Kernel("tma", 64, 4, 3), few, 0)
    return schedules


def attention_schedules(order: MmaAttentionOrder) -> tuple[str, ...]:
    """Names of what is offered for an Order, "auto" first. Raises ValueError for an Order not computed here."""
    _check_order(order)
    return tuple(name for name in _schedules(order.head_dim) if name != REFERENCE)


def padded_dim(head_dim: int) -> int:
    """Features of a tile: a power of two; those past `head_dim` are zero and add nothing."""
    return max(64, 1 << (head_dim - 1).bit_length())


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """A step on the device: int32 query_starts [B + 1], start_positions [B], page_tables [B, pages], plan.words."""

    query_starts: torch.Tensor
    start_positions: torch.Tensor
    page_tables: torch.Tensor
    plan: AttentionPlan
    words: torch.Tensor


class AttentionWorkspace:
    """Partial results of splits. Grows on demand; `reserve` for the largest plan before a graph is captured."""

    def __init__(self, device: torch.device) -> None:
        self._floats = torch.empty(0, dtype=torch.float32, device=device)

    def reserve(self, num_floats: int) -> None:
        """Make room; what was handed out before stays with the work already queued."""
        if self._floats.numel() < num_floats:
            self._floats = torch.empty(num_floats, dtype=torch.float32, device=self._floats.device)

    def partials(self, plan: AttentionPlan, shape: AttentionShape) -> tuple[torch.Tensor, torch.Tensor]:
        """(m and l [KV, partial rows, 2], o [KV, partial rows, padded head_dim]), flat."""
        rows = shape.num_kv_heads * plan.partial_rows
        self.reserve(max(4, rows * (padded_dim(shape.head_dim) + 2)))
        return self._floats[rows * padded_dim(shape.head_dim) :], self._floats


def plan_attention(
    query_starts: npt.NDArray[np.int32],
    start_positions: npt.NDArray[np.int32],
    order: MmaAttentionOrder,
    shape: AttentionShape,
    schedule: str = "auto",
) -> AttentionPlan:
    """Plan of a step, on the host. Raises ValueError for an unknown schedule, an Order or a shape not supported."""
    _check_order(order)
    _check_shape(order, shape)
    chosen = _schedule(order, schedule)
    group = shape.num_heads // shape.num_kv_heads
    return cut_into_tiles(
        query_starts, start_positions, group, order.kv_split_size, schedule, chosen.walk.rows, chosen.most_split_rows
    )


def attention(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    batch: AttentionBatch,
    order: MmaAttentionOrder,
    shape: AttentionShape,
    scale: float,
    workspace: AttentionWorkspace,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of q [M, H*D] over kv_layer [2, pages, KV, kv_block, D] -> [M, H*D].

    Rows of q that belong to no request of the batch are left as they are in `out`. Raises ValueError for tensors that
    do not fit the Order, or a scale not above 0.
    """
    _check_tensors(q, kv_layer, order, shape)
    chosen = _schedule(order, batch.plan.schedule)
    out = torch.empty_like(q) if out is None else out
    launch = _Launch(q, kv_layer, out, batch, order, shape, scale)
    if batch.plan.num_tiles:
        launch.walk(chosen.walk)
    if batch.plan.num_items:
        launch.split(chosen.split, *workspace.partials(batch.plan, shape))
    return out


def reference_attention(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    batch: AttentionBatch,
    order: MmaAttentionOrder,
    shape: AttentionShape,
    scale: float,
    workspace: AttentionWorkspace,
) -> torch.Tensor:
    """The Order on this card: tiles of 16 rows, plain loads, one walk. The batch is planned with `REFERENCE`."""
    if batch.plan.schedule != REFERENCE:
        raise ValueError(f"plan the batch with schedule={REFERENCE!r}, not {batch.plan.schedule!r}")
    return attention(q, kv_layer, batch, order, shape, scale, workspace)


class _Launch:
    """The launches of one call; what all kernels are given is put together once."""

    def __init__(
        self,
        q: torch.Tensor,
        kv_layer: torch.Tensor,
        out: torch.Tensor,
        batch: AttentionBatch,
        order: MmaAttentionOrder,
        shape: AttentionShape,
        scale: float,
    ) -> None:
        self.q, self.kv_layer, self.out, self.plan, self.words = q, kv_layer, out, batch.plan, batch.words
        self.heads, self.group = shape.num_kv_heads, shape.num_heads // shape.num_kv_heads
        self.dim, self.page, self.split_size = shape.head_dim, order.kv_block, order.kv_split_size
        tables = batch.page_tables
        v_plane = kv_layer.shape[1] * self.heads * self.page
        self.scale = exponent_scale(scale)
        self.where = (batch.query_starts, batch.start_positions, tables, tables.stride(0), v_plane, self.heads,
                      self.group, self.dim, self.scale)  # fmt: skip

    def descriptor(self, kind: str) -> Any:
        """What `kind` of kernel reads [2 * pages * KV * kv_block, D] through; "plain" ones have no use for it."""
        block = [self.page, padded_dim(self.dim)]
        rows = self.kv_layer.view(-1, self.dim)
        if kind == "gluon":
            dtype = gl.bfloat16 if self.q.dtype == torch.bfloat16 else gl.float16
            return SwizzledDescriptor.from_tensor(rows, block, gl.NVMMASharedLayout.get_default_for(block, dtype))
        return TensorDescriptor.from_tensor(rows, block) if kind == "tma" else self.q

    def walk(self, kernel: _Kernel) -> None:
        """Tiles that walk all their splits."""
        tile = (self.page, padded_dim(self.dim), self.split_size)
        desc = self.descriptor(kernel.kind)
        grid = (self.plan.num_tiles, self.heads)
        if kernel.kind == "gluon":
            wgmma_kernel[grid](
                self.q, desc, self.out, self.words, *self.where, *tile, kernel.num_stages, kernel.rows // 64,
                num_warps=kernel.num_warps, enable_fp_fusion=False,
            )  # fmt: skip
            return
        walk_kernel[grid](
            self.q, self.kv_layer, desc, self.out, self.words, *self.where, kernel.rows, *tile, kernel.kind == "tma",
            num_warps=kernel.num_warps, num_stages=kernel.num_stages, enable_fp_fusion=False,
        )  # fmt: skip

    def split(self, kernel: _Kernel, partial_ml: torch.Tensor, partial_o: torch.Tensor) -> None:
        """One program a split, then the combination of tiles that have several."""
        plan, tile = self.plan, (self.page, padded_dim(self.dim), self.split_size)
        grid = (self.heads, plan.num_items)
        given = (self.out, self.words[plan.items_at :], partial_ml, partial_o, *self.where, plan.partial_rows)
        if kernel.kind == "gluon":
            decode_kernel[grid](
                self.q, self.descriptor("gluon"), *given, *tile, kernel.num_stages, kernel.num_warps,
                num_warps=kernel.num_warps, enable_fp_fusion=False,
            )  # fmt: skip
        else:
            split_kernel[grid](
                self.q, self.kv_layer, *given, kernel.rows, *tile,
                num_warps=kernel.num_warps, num_stages=kernel.num_stages, enable_fp_fusion=False,
            )  # fmt: skip
        if plan.num_rows:
            overlapped = self.q.is_cuda  # started while the splits run, it waits for them by itself
            combine_kernel[(self.heads, plan.num_rows)](
                self.out, self.words[plan.rows_at :], partial_ml, partial_o, self.heads, self.group, self.dim,
                plan.partial_rows, tile[1], _COMBINED_AHEAD, overlapped,
                num_warps=tile[1] // 32, enable_fp_fusion=False, launch_pdl=overlapped,
            )  # fmt: skip


def _schedule(order: MmaAttentionOrder, name: str) -> _Schedule:
    schedules = _schedules(order.head_dim)
    if name not in schedules:
        raise ValueError(f"no attention schedule {name!r}; there are: {', '.join(schedules)}")
    return schedules[name]


def _check_order(order: MmaAttentionOrder) -> None:
    dim = order.head_dim
    if order.value_dim != dim or not 16 <= dim <= 256 or dim % 16:
        raise ValueError(
            f"grouped-query attention on sm90 takes head_dim = value_dim, a multiple of 16 up to 256; "
            f"got head_dim={dim}, value_dim={order.value_dim}"
        )
    if order.row_sum != "halves" or order.kv_block != 64 or order.kv_split_size % (4 * order.kv_block):
        raise ValueError(
            f"grouped-query attention on sm90 has kv_block=64, kv_split_size a multiple of 256 and row_sum='halves'; "
            f"got {order.kv_block}, {order.kv_split_size}, {order.row_sum!r}"
        )


def _check_shape(order: MmaAttentionOrder, shape: AttentionShape) -> None:
    if shape.head_dim != order.head_dim:
        raise ValueError(f"heads of {shape.head_dim} features under an Order of {order.head_dim}")
    if shape.num_kv_heads < 1 or shape.num_heads < 1 or shape.num_heads % shape.num_kv_heads:
        raise ValueError(f"{shape.num_heads} query heads cannot share {shape.num_kv_heads} key/value heads evenly")


def _check_tensors(q: torch.Tensor, kv_layer: torch.Tensor, order: MmaAttentionOrder, shape: AttentionShape) -> None:
    _check_order(order)
    _check_shape(order, shape)
    dtype = TORCH_DTYPES[order.kv_dtype]
    if q.dtype != dtype or kv_layer.dtype != dtype:
        raise ValueError(f"q and the cache must be {dtype}, the Order's kv_dtype; got {q.dtype} and {kv_layer.dtype}")
    if q.dim() != 2 or q.shape[1] != shape.num_heads * shape.head_dim or not q.is_contiguous():
        raise ValueError(
            f"q must be contiguous [M, {shape.num_heads * shape.head_dim}], got {tuple(q.shape)}, strides {q.stride()}"
        )
    page = (shape.num_kv_heads, order.kv_block, shape.head_dim)
    if kv_layer.dim() != 5 or kv_layer.shape[0] != 2 or kv_layer.shape[2:] != page or not kv_layer.is_contiguous():
        raise ValueError(
            f"kv_layer must be contiguous [2, pages, {', '.join(map(str, page))}], got {tuple(kv_layer.shape)}"
        )
