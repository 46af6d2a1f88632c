"""The kernels of one GPU behind the face of `KernelLibrary`: Triton and vendor kernels, each under its schedules.

Does not know models or requests. Invariant: a schedule chooses how something is computed, never what; what stays on the
device between calls (workspaces, step buffers) belongs to this object and is never shared with another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import torch

from isobit.kernels.gpu.attention import GpuAttention, StepPlans
from isobit.kernels.gpu.linear import GpuLinears, LinearWeight
from isobit.kernels.gpu.tensors import GpuTensors, StepBuffers
from isobit.kernels.interface import (
    TORCH_DTYPES,
    AttentionInputs,
    AttentionShape,
    Draws,
    HeadNorms,
    Ladder,
    RopeTables,
    StepArrays,
)
from isobit.kernels.registry import ONE_SCHEDULE
from isobit.kernels.triton.activation import silu_mul
from isobit.kernels.triton.embedding import embedding
from isobit.kernels.triton.norm import rms_norm
from isobit.kernels.triton.rope import rope_and_cache
from isobit.kernels.triton.sampling import sample
from isobit.kernels.triton.top import top_logits
from isobit.kernels.triton.vocabulary import argmax, logprobs
from isobit.order import (
    MmaAttentionOrder,
    MmaLinearOrder,
    Order,
    logprobs_order,
    norm_order,
    sampling_order,
)

__all__ = ["GpuLibrary"]



class GpuLibrary(GpuTensors):
    """The kernels of device class `name` ("sm90") in one dtype of weights and activations, on the current GPU.

    `device` "cpu" is for Triton's interpreter, in tests.
    """

    def __init__(self, name: str, dtype: str, device: torch.device | None = None) -> None:
        self.name = name
        self.dtype_name = dtype
        self.dtype = TORCH_DTYPES[dtype]
        self.device = device or torch.device("cuda", torch.cuda.current_device())
        self.num_threads = 1  # GPU kernels use none of the host's
        self.source_hash = _source_hash()
        self._linears = GpuLinears(name, self.device, self.source_hash)
        self._attention = GpuAttention(name, dtype, self.device)
        self._buffers = StepBuffers(self.device)

    # ---- schedules

    def schedules(self, op: str, order: Order) -> tuple[str, ...]:
        """The schedules that an op offers under an Order."""
        if op == "linear":
            assert isinstance(order, MmaLinearOrder), f"linear has the Order {order}"
            return tuple(self._linears.schedules(order))
        if op == "attention":
            assert isinstance(order, MmaAttentionOrder), f"attention has the Order {order}"
            return self._attention.schedules(order)
        return ONE_SCHEDULE

    def linear_rows(self, order: MmaLinearOrder, schedule: str) -> tuple[int, int]:
        """The least and the most rows a schedule of a linear is offered for."""
        offered = self._linears.schedules(order)[schedule]
        return offered.min_rows, offered.max_rows

    def linear_ladder(self, order: Order, admitted: Sequence[str]) -> Ladder:
        """(most rows, schedule) among the `admitted`, by time on this card."""
        assert isinstance(order, MmaLinearOrder), f"{self.name} has no linear for {order}"
        return self._linears.ladder(order, admitted)

    # ---- a step

    def begin_step(self, arrays: StepArrays) -> tuple[torch.Tensor, AttentionInputs]:
        """(token_ids int32 [M], attention inputs), sent up without waiting; valid until the next step begins."""
        sent = self._buffers.send({spec.name: getattr(arrays, spec.name) for spec in fields(arrays)})
        token_ids = sent.pop("token_ids")
        return token_ids, AttentionInputs(**sent, schedule=StepPlans(arrays))

    def make_weight(self, order: Order, weight: torch.Tensor, bias: torch.Tensor | None = None) -> LinearWeight:
        """weight [N, K] in the Order's dtype, bias float32 [N], on the device."""
        assert isinstance(order, MmaLinearOrder), f"{self.name} has no linear for {order}"
        assert order.has_bias == (bias is not None), f"{order} and bias {bias}"
        return LinearWeight(order, self.upload(weight.contiguous()), None if bias is None else self.upload(bias))

    def linear(
        self,
        x: torch.Tensor,
        packed: LinearWeight,
        activation_dtype: str,
        schedule: str,
        addend: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [M, K], addend float32 [M, N] -> [M, N] (MmaLinearOrder); `out` may be `addend`, not `x`."""
        assert activation_dtype == packed.order.weight_dtype, f"{activation_dtype} activations under {packed.order}"
        return self._linears.run(x, packed, schedule, addend, out)

    def reference_linear(self, x: torch.Tensor, packed: LinearWeight, addend: torch.Tensor | None) -> torch.Tensor:
        """What every schedule must give: the plainest kernel of MmaLinearOrder."""
        return self._linears.reference(x, packed, addend)

    def embedding(self, packed: LinearWeight, ids: torch.Tensor) -> torch.Tensor:
        """Rows `ids` (int32 [M]) of the weight, float32 [M, K]; NaN for an id outside [0, N): no wait to raise."""
        return embedding(packed.weight, ids)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x float32 [M, D], weight float32 [D] -> [M, D] in the activations' dtype (NormOrder)."""
        return rms_norm(x, weight, eps, norm_order(x.shape[1], self.name), self.dtype)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up [M, 2F] (gate, then up) -> [M, F] (PointwiseOrder)."""
        return silu_mul(gate_up)

    def rope_and_cache(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        rope: RopeTables,
        head_norms: HeadNorms | None,
        kv_layer: torch.Tensor,
        shape: AttentionShape,
    ) -> torch.Tensor:
        """Norm the heads of q and k if asked, rotate them, write K and V to the cache; returns q [M, H*D]."""
        norm = norm_order(shape.head_dim, self.name)
        return rope_and_cache(qkv, positions, slots, rope, head_norms, kv_layer, shape, norm)

    def attention(
        self,
        q: torch.Tensor,
        kv_layer: torch.Tensor,
        inputs: AttentionInputs,
        shape: AttentionShape,
        scale: float,
        schedule: str = "auto",
    ) -> torch.Tensor:
        """Causal attention of q [M, H*D] over paged K and V -> [M, H*D] (MmaAttentionOrder)."""
        return self._attention.run(q, kv_layer, inputs, shape, scale, schedule)

    def reference_attention(
        self, q: torch.Tensor, kv_layer: torch.Tensor, inputs: AttentionInputs, shape: AttentionShape, scale: float
    ) -> torch.Tensor:
        """What every schedule must give: the plainest kernel of MmaAttentionOrder."""
        return self._attention.reference(q, kv_layer, inputs, shape, scale)

    # ---- from logits to tokens

    def argmax(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """logits [R, V] -> (lowest id of the largest value int32 [R], bool [R]: no NaN or infinity in the row)."""
        return argmax(logits)

    def logprobs(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """logits [R, V] -> (maxima float32 [R], lse float64 [R]) (LogprobsOrder)."""
        return logprobs(logits, logprobs_order(logits.shape[1], self.name))

    def top_rows(self, logits: torch.Tensor, n: int) -> torch.Tensor:
        """Ids int32 [R, n] of the n largest of each row of [R, V], by (value descending, id ascending)."""
        return top_logits(logits, n)

    def sample_rows(self, logits: torch.Tensor, draws: Draws) -> torch.Tensor:
        """Tokens int32 [R] drawn from rows [R, V] of adjusted logits (SamplingOrder)."""
        return sample(logits, draws, sampling_order(logits.shape[1], self.name))


def _source_hash() -> str:
    """Hash of the kernels' sources: what another text compiled must be proven anew."""
    digest = hashlib.sha256()
    kernels = Path(__file__).parents[1]
    for path in sorted(path for folder in ("gpu", "triton", "vendor") for path in (kernels / folder).rglob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
