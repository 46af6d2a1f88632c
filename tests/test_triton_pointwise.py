"""Norm, rope, activation and embedding kernels of sm90 against the numpy reference, by bytes, in Triton's interpreter.

`tests/gpu/test_pointwise.py` does the same on the card. Inputs hold no subnormals: the GPU keeps them, the CPU's
arithmetic, which the reference has, flushes them.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

import tests.interpreter  # noqa: E402, F401  (rounds as the device does)
from isobit.kernels.interface import AttentionShape, HeadNorms, RopeTables  # noqa: E402
from isobit.kernels.probe_data import floats  # noqa: E402
from isobit.kernels.reference import math as reference_math  # noqa: E402
from isobit.kernels.reference import ops  # noqa: E402
from isobit.kernels.reference.math import round_bf16  # noqa: E402
from isobit.kernels.triton import math as triton_math  # noqa: E402
from isobit.kernels.triton.activation import silu_mul  # noqa: E402
from isobit.kernels.triton.embedding import embedding  # noqa: E402
from isobit.kernels.triton.norm import rms_norm  # noqa: E402
from isobit.kernels.triton.rope import rope_and_cache  # noqa: E402
from isobit.order import NormOrder, norm_order  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs in the interpreter; tests/gpu has the card")


def same(ours: torch.Tensor, expected: np.ndarray) -> bool:
    """Equal bytes; NaN has one form."""
    got = ours.float().numpy() if ours.dtype == torch.bfloat16 else ours.numpy()
    assert got.dtype == expected.dtype and got.shape == expected.shape
    whole = np.int64 if got.itemsize == 8 else np.int32
    nan = np.isnan(expected)
    return np.array_equal(np.isnan(got), nan) and np.array_equal(got[~nan].view(whole), expected[~nan].view(whole))


@triton.jit
def _exp_kernel(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y + i, triton_math.exp32(tl.load(x + i)))


@triton.jit
def _log_kernel(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y + i, triton_math.log64(tl.load(x + i)))


@triton.jit
def _gumbel_kernel(seed, position, y, N: tl.constexpr):
    ids = tl.arange(0, N)
    key = triton_math.noise_key(tl.load(seed).to(tl.uint64), tl.load(position).to(tl.uint64))
    tl.store(y + ids, triton_math.gumbel(key, ids))


def test_exp32_and_log64() -> None:
    edges = np.array([np.nan, -np.inf, -87.33, np.nextafter(np.float32(-87.33), -100), -87.34, 0, -0.0, 88], np.float32)
    x = np.concatenate([np.linspace(-100, 88, 4000, dtype=np.float32), edges, np.minimum(floats(1, 88), 88)])
    y = torch.empty(4096)
    _exp_kernel[(1,)](torch.from_numpy(x), y, 4096)
    assert same(y, reference_math.exp32(x))
    assert not same(y, np.exp(x))
    x64 = np.concatenate([2.0 ** np.linspace(-1000, 1000, 2000), np.linspace(0.5, 2.5, 2096)])
    y64 = torch.empty(4096, dtype=torch.float64)
    _log_kernel[(1,)](torch.from_numpy(x64), y64, 4096)
    assert same(y64, reference_math.log64(x64))
    assert not same(y64, np.log(x64))


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (11, 12), (2**64 - 1, 131071)])
def test_noise(seed: int, position: int) -> None:
    y = torch.empty(1024, dtype=torch.float64)
    seed_tensor = torch.from_numpy(np.array([seed], np.uint64).view(np.int64))
    _gumbel_kernel[(1,)](seed_tensor, torch.tensor([position]), y, 1024)
    assert same(y, reference_math.gumbel(seed, position, np.arange(1024)))


@pytest.mark.parametrize("width", [2, 64, 96, 128, 192, 512, 513, 2048, 2560])
def test_rms_norm(width: int) -> None:
    order = norm_order(width, "sm90")
    x, weight = floats(1, 5, width), floats(2, width)
    expected = ops.rms_norm(order, x, weight, 1e-6)
    whole = rms_norm(torch.from_numpy(x), torch.from_numpy(weight), 1e-6, order, torch.float32)
    assert same(whole, expected)
    strided = torch.zeros(3, width + 7)
    strided[:, :width] = torch.from_numpy(x[2:])
    part = rms_norm(strided[:, :width], torch.from_numpy(weight), 1e-6, order, torch.bfloat16)
    assert same(part, round_bf16(expected[2:]))


def test_rms_norm_reads_bfloat16_and_refuses_what_does_not_fit() -> None:
    order = norm_order(96, "sm90")
    x, weight = torch.from_numpy(floats(1, 2, 96)).bfloat16(), torch.from_numpy(floats(2, 96))
    expected = ops.rms_norm(order, x.float().numpy(), weight.numpy(), 1e-5)
    assert same(rms_norm(x, weight, 1e-5, order, torch.float32), expected)
    assert rms_norm(x[:0], weight, 1e-5, order, torch.float32).shape == (0, 96)
    with pytest.raises(ValueError, match="widths must agree"):
        rms_norm(x[:, :95], weight, 1e-5, order, torch.float32)
    with pytest.raises(ValueError, match="contiguous"):
        rms_norm(torch.zeros(96, 2).T, weight, 1e-5, order, torch.float32)


def test_control_another_number_of_lanes_gives_other_bits() -> None:
    x, weight = torch.from_numpy(floats(1, 8, 2048)), torch.from_numpy(floats(2, 2048))
    expected = ops.rms_norm(norm_order(2048, "sm90"), x.numpy(), weight.numpy(), 1e-6)
    assert not same(rms_norm(x, weight, 1e-6, NormOrder(2048, 256), torch.float32), expected)


def test_silu_mul_of_every_gate() -> None:
    gates = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    tiny = gates.float().abs() < 2.0**-100  # a product may be subnormal
    gates = torch.where(tiny, torch.tensor(0.5, dtype=torch.bfloat16), gates).reshape(64, 1024)
    ups = torch.from_numpy(floats(4, 64, 1024, low=0, high=8)).bfloat16()
    gate_up = torch.cat([gates, ups], dim=1)
    with np.errstate(all="ignore"):
        expected = round_bf16(ops.silu_mul(gate_up.float().numpy()))
        assert same(silu_mul(gate_up), expected)
    wide = torch.zeros(3, 100, dtype=torch.bfloat16)
    wide[:, :86] = gate_up[:3, 1000:1086]
    assert same(silu_mul(wide[:, :86]), round_bf16(ops.silu_mul(wide[:, :86].float().numpy())))
    with pytest.raises(ValueError, match="equal width"):
        silu_mul(gate_up[:, :7])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embedding_and_an_id_that_is_not_there(dtype: torch.dtype) -> None:
    weight = torch.from_numpy(floats(6, 10, 1100)).to(dtype)
    out = embedding(weight, torch.tensor([3, 10, 9, -1, 3], dtype=torch.int32))
    assert torch.equal(out[[0, 2, 4]], weight[[3, 9, 3]].float())
    assert out[[1, 3]].isnan().all()


ROPES = [(64, 64, False, 4, 2, True), (96, 96, True, 3, 3, True), (128, 32, False, 9, 1, False),
         (80, 40, True, 4, 2, True), (256, 128, False, 2, 1, True)]  # fmt: skip


@pytest.mark.parametrize(("head_dim", "rotary", "interleaved", "heads", "kv_heads", "normed"), ROPES)
def test_rope_and_cache(
    head_dim: int, rotary: int, interleaved: bool, heads: int, kv_heads: int, normed: bool
) -> None:
    qkv = torch.from_numpy(floats(9, 4, (heads + 2 * kv_heads) * head_dim)).bfloat16()
    cos, sin = (torch.from_numpy(floats(seed, 50, rotary // 2, high=-1)) for seed in (10, 11))
    positions, slots = (torch.tensor(x, dtype=torch.int32) for x in ([4, 9, 33, 0], [5, -1, 17, 16]))
    norm, eps = norm_order(head_dim, "sm90"), 1e-6
    norms = HeadNorms(torch.from_numpy(floats(12, head_dim)), torch.from_numpy(floats(13, head_dim)), eps)
    kv_layer = torch.full((2, 3, kv_heads, 8, head_dim), float("nan"), dtype=torch.bfloat16)
    got = rope_and_cache(
        qkv, positions, slots, RopeTables(cos, sin, interleaved), norms if normed else None, kv_layer,
        AttentionShape(heads, kv_heads, head_dim), norm,
    )  # fmt: skip
    rows = qkv.float().numpy().reshape(4, -1, head_dim)
    q, k, v = np.split(rows, [heads, heads + kv_heads], axis=1)
    if normed:
        q, k = (ops.rms_norm(norm, x, w.numpy(), eps) for x, w in ((q, norms.q), (k, norms.k)))
    q, k = (round_bf16(ops.rope(x, cos.numpy()[positions], sin.numpy()[positions], interleaved)) for x in (q, k))
    assert same(got, q.reshape(4, -1))
    expected = np.full(kv_layer.shape, np.nan, np.float32)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[0, slot // 8, :, slot % 8], expected[1, slot // 8, :, slot % 8] = k[row], v[row]
    assert same(kv_layer, expected)


def test_rope_and_cache_refuses_what_does_not_fit() -> None:
    shape, norm = AttentionShape(2, 1, 64), norm_order(64, "sm90")
    tables = RopeTables(torch.zeros(8, 32), torch.zeros(8, 32))
    ints = torch.zeros(1, dtype=torch.int32)
    qkv, kv_layer = torch.zeros(1, 256, dtype=torch.bfloat16), torch.zeros(2, 1, 1, 8, 64, dtype=torch.bfloat16)
    for bad_qkv, bad_layer, match in (
        (qkv[:, :255], kv_layer, "expected rows of 256"),
        (qkv, kv_layer[..., :32], "expected contiguous"),
        (qkv, kv_layer.half(), "must be equal"),
    ):
        with pytest.raises(ValueError, match=match):
            rope_and_cache(bad_qkv, ints, ints, tables, None, bad_layer, shape, norm)
