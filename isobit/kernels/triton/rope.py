"""Head norms, rotary embedding and the write to the KV cache on NVIDIA GPUs, in one launch over q, k and v.

A program takes a few heads of one kind (q, k or v) of one row. RMSNorm of a head (NormOrder) and the rotation
(PointwiseOrder: two products and a sum, all rounded) stay in float32; the result is rounded once, when written. Does
not know attention or requests. Invariant: a head's output depends on that head, its position and the weights alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from isobit.kernels.interface import AttentionShape, HeadNorms, RopeTables
from isobit.kernels.triton.math import add_halves
from isobit.kernels.triton.norm import norm_lanes
from isobit.order import NormOrder

__all__ = ["rope_and_cache"]

_HEADS, _WARPS = 8, 4  # of one program: with 128 features of 2 bytes, 2 KB


@triton.jit
def _head_factor(x, head, mask, eps, D: tl.constexpr, HEADS: tl.constexpr, LANES: tl.constexpr):
    """1 / sqrt(mean square + eps) of each head, [HEADS, 1]."""
    lane = tl.arange(0, LANES)
    chain = tl.zeros([HEADS, LANES], tl.float32)
    for start in tl.static_range(0, D, LANES):  # REDUCTION ORDER: see NormOrder
        inside = mask[:, None] & (start + lane < D)[None, :]
        value = tl.load(x + head[:, None] * D + (start + lane)[None, :], mask=inside, other=0.0).to(tl.float32)
        chain = tl.fma(value, value, chain)
    mean = tl.div_rn(add_halves(chain, HEADS, LANES), D * 1.0)
    return tl.div_rn(1.0, tl.sqrt_rn(mean + eps))[:, None]


@triton.jit
def _load_features(x, head, mask, features, inside, factor, weight, D: tl.constexpr, HAS_NORM: tl.constexpr):
    """Chosen features of every head as float32, normed: [HEADS, features]."""
    value = tl.load(x + head[:, None] * D + features[None, :], mask=mask[:, None] & inside[None, :], other=0.0)
    value = value.to(tl.float32)
    if HAS_NORM:
        value = (value * factor) * tl.load(weight + features, mask=inside, other=0.0)[None, :]
    return value


@triton.jit
def _rotate_and_store(
    x, out, head_stride, head, mask, cos, sin, weight, eps,
    D: tl.constexpr, R: tl.constexpr, INTERLEAVED: tl.constexpr, HAS_NORM: tl.constexpr,
    HEADS: tl.constexpr, LANES: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    factor = 1.0
    if HAS_NORM:
        factor = _head_factor(x, head, mask, eps, D, HEADS, LANES)
    out += head[:, None] * head_stride
    pair = tl.arange(0, HALF)
    inside = pair < R // 2
    c = tl.load(cos + pair, mask=inside, other=0.0)[None, :]
    s = tl.load(sin + pair, mask=inside, other=0.0)[None, :]
    if INTERLEAVED:
        feature = tl.arange(0, 2 * HALF)
        both = _load_features(x, head, mask, feature, feature < R, factor, weight, D, HAS_NORM)
        x1, x2 = tl.split(tl.reshape(both, [HEADS, HALF, 2]))
        both = tl.reshape(tl.join(x1 * c - x2 * s, x2 * c + x1 * s), [HEADS, 2 * HALF])
        both_mask = mask[:, None] & (feature < R)[None, :]
        tl.store(out + feature[None, :], both.to(out.dtype.element_ty), mask=both_mask)
    else:
        x1 = _load_features(x, head, mask, pair, inside, factor, weight, D, HAS_NORM)
        x2 = _load_features(x, head, mask, pair + R // 2, inside, factor, weight, D, HAS_NORM)
        pair_mask = mask[:, None] & inside[None, :]
        tl.store(out + pair[None, :], (x1 * c - x2 * s).to(out.dtype.element_ty), mask=pair_mask)
        tl.store(out + pair[None, :] + R // 2, (x2 * c + x1 * s).to(out.dtype.element_ty), mask=pair_mask)
    if R < D:
        feature = R + tl.arange(0, REST)
        rest = _load_features(x, head, mask, feature, feature < D, factor, weight, D, HAS_NORM)
        rest_mask = mask[:, None] & (feature < D)[None, :]
        tl.store(out + feature[None, :], rest.to(out.dtype.element_ty), mask=rest_mask)


@triton.jit(do_not_specialize=["num_heads", "num_kv_heads"])
def _rope_and_cache_kernel(
    qkv, positions, slots, cos, sin, q_norm, k_norm, q_out, kv_layer,
    row_stride, num_heads, num_kv_heads, page_size, plane_stride, eps,
    D: tl.constexpr, R: tl.constexpr, INTERLEAVED: tl.constexpr, HAS_NORM: tl.constexpr,
    HEADS: tl.constexpr, LANES: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    q_groups, kv_groups = tl.cdiv(num_heads, HEADS), tl.cdiv(num_kv_heads, HEADS)
    head = tl.arange(0, HEADS)
    qkv += row * row_stride
    position = tl.load(positions + row).to(tl.int64)
    cos += position * (R // 2)
    sin += position * (R // 2)
    if group < q_groups:
        head += group * HEADS
        q_out += row * num_heads * D
        _rotate_and_store(
            qkv, q_out, D, head, head < num_heads, cos, sin, q_norm, eps,
            D, R, INTERLEAVED, HAS_NORM, HEADS, LANES, HALF, REST,
        )  # fmt: skip
    else:
        slot = tl.load(slots + row)
        page = (slot // page_size).to(tl.int64)
        kv_layer += (page * num_kv_heads * page_size + slot % page_size) * D
        head_stride = page_size * D
        group -= q_groups
        if group < kv_groups:
            head += group * HEADS
            written = (head < num_kv_heads) & (slot >= 0)
            _rotate_and_store(
                qkv + num_heads * D, kv_layer, head_stride, head, written, cos, sin, k_norm, eps,
                D, R, INTERLEAVED, HAS_NORM, HEADS, LANES, HALF, REST,
            )  # fmt: skip
        else:
            head += (group - kv_groups) * HEADS
            feature = tl.arange(0, WIDTH)[None, :]
            copied = ((head < num_kv_heads) & (slot >= 0))[:, None] & (feature < D)
            value = tl.load(qkv + (num_heads + num_kv_heads + head[:, None]) * D + feature, mask=copied, other=0.0)
            tl.store(kv_layer + plane_stride + head[:, None] * head_stride + feature, value, mask=copied)


def rope_and_cache(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    rope: RopeTables,
    head_norms: HeadNorms | None,
    kv_layer: torch.Tensor,
    shape: AttentionShape,
    norm: NormOrder,
) -> torch.Tensor:
    """Norm q and k heads, rotate them, write K and V to the cache; returns q [M, H*D] in qkv's dtype.

    qkv [M, (H + 2 KV) * D] (rows may be strided); positions, slots int32 [M]: slot = physical page * page size +
    offset, a negative slot writes nothing; kv_layer [2, pages, KV, page_size, D]; `norm` is the Order of head norms.
    Raises ValueError for tensors that do not fit together.
    """
    num_rows, d = qkv.shape[0], shape.head_dim
    rotary_dim = 2 * rope.cos.shape[1]
    _check(qkv, kv_layer, rotary_dim, shape, norm)
    q = torch.empty((num_rows, shape.num_heads * d), dtype=qkv.dtype, device=qkv.device)
    if not num_rows:
        return q
    q_norm, k_norm, eps = (head_norms.q, head_norms.k, head_norms.eps) if head_norms else (rope.cos, rope.cos, 0.0)
    groups = triton.cdiv(shape.num_heads, _HEADS) + 2 * triton.cdiv(shape.num_kv_heads, _HEADS)
    _rope_and_cache_kernel[(num_rows, groups)](
        qkv, positions, slots, rope.cos, rope.sin, q_norm, k_norm, q, kv_layer,
        qkv.stride(0), shape.num_heads, shape.num_kv_heads, kv_layer.shape[3], kv_layer.stride(0), eps,
        D=d, R=rotary_dim, INTERLEAVED=rope.interleaved, HAS_NORM=head_norms is not None,
        HEADS=_HEADS, LANES=norm_lanes(norm), HALF=triton.next_power_of_2(rotary_dim // 2),
        REST=triton.next_power_of_2(max(d - rotary_dim, 1)), WIDTH=triton.next_power_of_2(d),
        num_warps=_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return q


def _check(qkv: torch.Tensor, kv_layer: torch.Tensor, rotary_dim: int, shape: AttentionShape, norm: NormOrder) -> None:
    width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    if qkv.shape[1] != width or qkv.stride(1) != 1:
        raise ValueError(f"qkv {tuple(qkv.shape)}, strides {qkv.stride()}: expected rows of {width} for {shape}")
    if kv_layer.shape[2::2] != (shape.num_kv_heads, shape.head_dim) or not kv_layer.is_contiguous():
        raise ValueError(
            f"kv_layer {tuple(kv_layer.shape)}: expected contiguous [2, pages, KV, page_size, D] of {shape}"
        )
    if kv_layer.dtype != qkv.dtype:
        raise ValueError(f"qkv is {qkv.dtype} and the KV cache {kv_layer.dtype}: they must be equal")
    if not 0 < rotary_dim <= shape.head_dim or norm.width != shape.head_dim:
        raise ValueError(f"rotary_dim={rotary_dim} and {norm} do not fit head_dim={shape.head_dim}")
