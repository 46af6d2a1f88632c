"""Rows of an embedding table as float32, on NVIDIA GPUs: a move of data, no arithmetic.

An id outside the table cannot be refused without waiting for the device, so its row is NaN: it shows in every logit
after it. Does not know prompts; the caller checks ids on the host. Invariant: row i depends on ids[i] alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["embedding"]

_BLOCK = 1024


@triton.jit
def _embedding_kernel(weight, ids, out, num_ids, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(ids + row).to(tl.int64)
    known = (token >= 0) & (token < num_ids)
    value = tl.load(weight + token * width + column, mask=known & (column < width), other=0.0).to(tl.float32)
    tl.store(out + row * width + column, tl.where(known, value, float("nan")), mask=column < width)


def embedding(weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """weight [V, D] (any float dtype), ids int32 [M] -> float32 [M, D]; an id outside [0, V) gives a row of NaN."""
    num_ids, width = weight.shape
    out = torch.empty((ids.numel(), width), dtype=torch.float32, device=weight.device)
    if ids.numel():
        grid = (ids.numel(), triton.cdiv(width, _BLOCK))
        _embedding_kernel[grid](weight, ids, out, num_ids, width, _BLOCK, num_warps=4, enable_fp_fusion=False)
    return out
