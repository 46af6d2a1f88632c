"""The parts models are made of. Each holds its weights and says which op runs them; no arithmetic is written here.

Shape legend: M rows (one a token), D hidden width, H query heads, KV key/value heads, F feed-forward width.
"""

from __future__ import annotations

import torch

from isobit.kernels.interface import AttentionShape, HeadNorms, RopeTables
from isobit.ops import AttentionInputs, Linear, Ops


class RMSNorm:
    """Root mean square norm (Zhang and Sennrich 2019) over the last dimension; weight [D] float32."""

    def __init__(self, ops: Ops, weight: torch.Tensor, eps: float) -> None:
        self.ops = ops
        self.weight = ops.parameter(weight)
        self.eps = eps

    def __call__(self, x_MD: torch.Tensor) -> torch.Tensor:
        return self.ops.rms_norm(x_MD, self.weight, self.eps)


class Attention:
    """Grouped-query attention (Ainslie et al. 2023) with rotary positions and optional q/k norms, paged KV."""

    def __init__(
        self,
        ops: Ops,
        shape: AttentionShape,
        qkv: Linear,
        o: Linear,
        rope: RopeTables,
        head_norms: HeadNorms | None = None,
    ) -> None:
        self.ops = ops
        self.shape = shape
        self.scale: float = shape.head_dim**-0.5
        self.qkv = qkv
        self.o = o
        self.rope = rope
        self.head_norms = head_norms

    def __call__(
        self, x_MD: torch.Tensor, inputs: AttentionInputs, kv_layer: torch.Tensor, residual_MD: torch.Tensor
    ) -> torch.Tensor:
        """Returns residual + attention output, float32 [M, D]; writes this step's K and V into `kv_layer`."""
        qkv = self.ops.linear(x_MD, self.qkv)
        q = self.ops.rope_and_cache(qkv, inputs, self.rope, self.head_norms, kv_layer, self.shape)
        out = self.ops.attention(q, kv_layer, inputs, self.shape, self.scale)
        return self.ops.linear(out, self.o, addend=residual_MD)


class GatedMLP:
    """SwiGLU feed-forward (Shazeer 2020): down(silu(gate) * up)."""

    def __init__(self, ops: Ops, gate_up: Linear, down: Linear) -> None:
        self.ops = ops
        self.gate_up = gate_up
        self.down = down

    def __call__(self, x_MD: torch.Tensor, residual_MD: torch.Tensor) -> torch.Tensor:
        """Returns residual + feed-forward output, float32 [M, D]."""
        hidden_MF = self.ops.silu_mul(self.ops.linear(x_MD, self.gate_up))
        return self.ops.linear(hidden_MF, self.down, addend=residual_MD)
