"""SwiGLU's gate on NVIDIA GPUs: silu(gate) * up, element by element, in float32 between bf16 or fp16.

PointwiseOrder: (g / (1 + exp32(0 - max(-87, g)))) * u, every operation rounded, the division IEEE's. Does not know
linears. Invariant: an output element is a function of its own gate and up.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from isobit.kernels.triton.math import exp32

__all__ = ["silu_mul"]

_BLOCK, _WARPS = 1024, 4


@triton.jit
def _silu_mul_kernel(gate_up, out, row_stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate_up += row * row_stride
    gate = tl.load(gate_up + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + width + column, mask=inside, other=0.0).to(tl.float32)
    exponential = exp32(0.0 - tl.maximum(gate, -87.0, propagate_nan=tl.PropagateNan.ALL))
    y = tl.div_rn(gate, 1.0 + exponential) * up
    tl.store(out + row * width + column, y.to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [M, 2F] (gate, then up; rows may be strided) -> [M, F] of the same dtype.

    Raises ValueError for an odd width.
    """
    num_rows, double_width = gate_up.shape
    if double_width % 2 or gate_up.stride(1) != 1:
        raise ValueError(f"silu_mul takes rows of gate and up, contiguous, of equal width; got {tuple(gate_up.shape)}")
    width = double_width // 2
    out = torch.empty((num_rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if num_rows:
        grid = (num_rows, triton.cdiv(width, _BLOCK))
        _silu_mul_kernel[grid](gate_up, out, gate_up.stride(0), width, _BLOCK, num_warps=_WARPS, enable_fp_fusion=False)
    return out
