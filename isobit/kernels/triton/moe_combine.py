"""The experts of a token added up and put on the residual stream: MoeCombineOrder, one rounding named per step.

    y = w_0 * e_0                      rounded
    y = fma(w_j, e_j, y)               j = 1 .. top_k - 1, slots ascending, each rounded once
    y = shared + y                     only where there is a shared expert, rounded
    out = residual + y                 rounded

e_j and shared are what the experts' linears wrote (bf16, fp16 or float32), read as float32. Does not know routing.
Invariant: every output element is made by one thread from its own token; nothing is added across threads.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from isobit.order import MoeCombineOrder

__all__ = ["moe_combine"]

_WIDTH = 1024


@triton.jit(do_not_specialize=("width_units",))
def _combine_kernel(experts, weights, shared, residual, out, width_units, TOP_K: tl.constexpr, UNIT: tl.constexpr,
                    WIDTH: tl.constexpr):  # fmt: skip
    width = width_units * UNIT  # in units of 8 where it is a multiple of 8: 16-byte loads
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < width
    at = experts + token * TOP_K * width + column
    y = tl.load(weights + token * TOP_K) * tl.load(at, mask=inside, other=0.0).to(tl.float32)
    for j in tl.static_range(1, TOP_K):  # REDUCTION ORDER: see MoeCombineOrder
        weight = tl.load(weights + token * TOP_K + j) + tl.zeros([WIDTH], tl.float32)
        y = tl.fma(weight, tl.load(at + j * width, mask=inside, other=0.0).to(tl.float32), y)
    if shared is not None:
        y = tl.load(shared + token * width + column, mask=inside, other=0.0).to(tl.float32) + y
    y = tl.load(residual + token * width + column, mask=inside, other=0.0) + y
    tl.store(out + token * width + column, y, mask=inside)


def moe_combine(
    expert_out: torch.Tensor,
    weights: torch.Tensor,
    residual: torch.Tensor,
    order: MoeCombineOrder,
    shared: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """expert_out [T, top_k, D], weights float32 [T, top_k], residual float32 [T, D] -> float32 [T, D].

    `shared` [T, D] is the shared expert's output; `out` may be `residual`. Raises ValueError for other shapes.
    """
    tokens, top_k, width = expert_out.shape
    if top_k != order.top_k or weights.shape != (tokens, top_k) or residual.shape != (tokens, width):
        raise ValueError(
            f"combine of {tuple(expert_out.shape)} with weights {tuple(weights.shape)} and residual "
            f"{tuple(residual.shape)} under {order}: expected [T, top_k, D], [T, top_k] and [T, D]"
        )
    if weights.dtype != torch.float32 or residual.dtype != torch.float32:
        raise ValueError(f"weights and residual must be float32, got {weights.dtype} and {residual.dtype}")
    if shared is not None and shared.shape != residual.shape:
        raise ValueError(f"the shared expert's output must be {tuple(residual.shape)}, got {tuple(shared.shape)}")
    if out is None:
        out = torch.empty_like(residual)
    tensors = {"expert_out": expert_out, "weights": weights, "residual": residual, "shared": shared, "out": out}
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")
    if tokens:
        unit = 8 if width % 8 == 0 else 1
        _combine_kernel[(tokens, triton.cdiv(width, _WIDTH))](
            expert_out, weights, shared, residual, out, width // unit, TOP_K=top_k, UNIT=unit, WIDTH=_WIDTH,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out
