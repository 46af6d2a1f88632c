"""RMSNorm of rows on NVIDIA GPUs: one kernel whose layout is a function of the width alone.

The sum of squares is NormOrder's: lane i is one FMA chain over features i, i + lanes, ... and the lanes are added by
halves. A row is read once, kept in registers, and written in the dtype that the next linear reads. Does not know the
residual stream (linears add to it). Invariant: a row's program sees that row and the weight, nothing else.
"""

# jit functions carry no types
# mypy: disable-error-code="assignment,attr-defined"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from isobit.kernels.triton.math import add_halves
from isobit.order import NormOrder

__all__ = ["norm_lanes", "rms_norm"]

_MAX_WIDTH = 32768


@triton.jit
def _rms_norm_kernel(x, weight, out, row_stride, eps, WIDTH: tl.constexpr, LANES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    values, weights = (), ()  # both are asked for before the sum, or one row would wait for memory twice
    for start in tl.static_range(0, WIDTH, LANES):
        inside = start + lane < WIDTH
        value = tl.load(x + row * row_stride + start + lane, mask=inside, other=0.0)
        values = values + (value.to(tl.float32),)
        weights = weights + (tl.load(weight + start + lane, mask=inside, other=0.0),)
    chain = tl.zeros([LANES], tl.float32)
    for i in tl.static_range(len(values)):  # REDUCTION ORDER: see NormOrder
        chain = tl.fma(values[i], values[i], chain)
    mean = tl.div_rn(tl.sum(add_halves(tl.reshape(chain, [1, LANES]), 1, LANES), axis=0), WIDTH * 1.0)
    factor = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    for i in tl.static_range(len(values)):
        inside = i * LANES + lane < WIDTH
        y = (values[i] * factor) * weights[i]
        tl.store(out + row * WIDTH + i * LANES + lane, y.to(out.dtype.element_ty), mask=inside)


def norm_lanes(order: NormOrder) -> int:
    """Lanes worth keeping: a lane beyond the width holds +0, and adding +0 to a square moves no bit."""
    return int(min(order.lanes, triton.next_power_of_2(order.width)))


def _warps(width: int) -> int:
    return 1 if width <= 256 else 4 if width <= 4096 else 8 if width <= 8192 else 16


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, order: NormOrder, out_dtype: torch.dtype
) -> torch.Tensor:
    """x [M, D] (float32, bfloat16 or float16; rows may be strided), weight float32 [D] -> `out_dtype` [M, D].

    Raises ValueError for a width that is not the Order's, or more than 32768.
    """
    num_rows, width = x.shape
    if width != order.width or weight.shape != (width,) or width > _MAX_WIDTH:
        raise ValueError(
            f"rms_norm of x {tuple(x.shape)} with weight {tuple(weight.shape)} under {order}: "
            f"widths must agree and be at most {_MAX_WIDTH}"
        )
    if x.stride(1) != 1 or not weight.is_contiguous():
        raise ValueError(f"rms_norm takes rows of contiguous features, got strides {x.stride()}; pass x.contiguous()")
    out = torch.empty((num_rows, width), dtype=out_dtype, device=x.device)
    if num_rows:
        lanes = norm_lanes(order)
        warps = _warps(width)
        _rms_norm_kernel[(num_rows,)](
            x, weight, out, x.stride(0), eps, width, lanes, num_warps=warps, enable_fp_fusion=False
        )
    return out
