"""Attention of a GPU: the plan of a step, made once for all layers, and the kernels that follow it.

Knows the arrays of a step; knows no models. Invariant: which kernel takes which request is a matter of speed, and is
decided from numbers the host has.
"""

from __future__ import annotations

import torch

from isobit.kernels.gpu.tensors import StepBuffers
from isobit.kernels.interface import AttentionInputs, AttentionShape, StepArrays
from isobit.kernels.triton.attention import (
    REFERENCE,
    AttentionBatch,
    AttentionWorkspace,
    attention,
    attention_schedules,
    plan_attention,
    reference_attention,
)
from isobit.order import MmaAttentionOrder, mma_attention_order

__all__ = ["GpuAttention", "StepPlans"]


class StepPlans:
    """What a step consists of, and its plans by (query heads a key/value head, schedule), made when first asked for."""

    def __init__(self, arrays: StepArrays) -> None:
        self.arrays = arrays
        self.batches: dict[tuple[int, str], AttentionBatch] = {}


class GpuAttention:
    """The attention of one library: plans of the step at hand, their buffers, the workspace of partial results."""

    def __init__(self, device_class: str, dtype: str, device: torch.device) -> None:
        self.device_class = device_class
        self.dtype = dtype
        self.device = device
        self.workspace = AttentionWorkspace(device)
        self._buffers: dict[tuple[int, str], StepBuffers] = {}

    def schedules(self, order: MmaAttentionOrder) -> tuple[str, ...]:
        """Names of what can run under an Order, "auto" (the choice by rows) first."""
        return attention_schedules(order)

    def run(
        self,
        q: torch.Tensor,
        kv_layer: torch.Tensor,
        inputs: AttentionInputs,
        shape: AttentionShape,
        scale: float,
        schedule: str,
    ) -> torch.Tensor:
        """q [M, H*D] -> [M, H*D]."""
        order = self._order(shape)
        batch = self._batch(inputs, order, shape, schedule)
        return attention(q, kv_layer, batch, order, shape, scale, self.workspace)

    def reference(
        self, q: torch.Tensor, kv_layer: torch.Tensor, inputs: AttentionInputs, shape: AttentionShape, scale: float
    ) -> torch.Tensor:
        """The plainest kernel of the Order."""
        order = self._order(shape)
        batch = self._batch(inputs, order, shape, REFERENCE)
        return reference_attention(q, kv_layer, batch, order, shape, scale, self.workspace)

    def _order(self, shape: AttentionShape) -> MmaAttentionOrder:
        return mma_attention_order(shape.head_dim, shape.head_dim, self.dtype, self.device_class)

    def _batch(
        self, inputs: AttentionInputs, order: MmaAttentionOrder, shape: AttentionShape, schedule: str
    ) -> AttentionBatch:
        plans: StepPlans = inputs.schedule
        key = (shape.num_heads // shape.num_kv_heads, schedule)
        if key not in plans.batches:
            arrays = plans.arrays
            plan = plan_attention(arrays.query_starts, arrays.start_positions, order, shape, schedule)
            if key not in self._buffers:
                self._buffers[key] = StepBuffers(self.device)
            words = self._buffers[key].send({"words": plan.words})["words"]
            plans.batches[key] = AttentionBatch(
                inputs.query_starts, inputs.start_positions, inputs.page_tables, plan, words
            )
        return plans.batches[key]
