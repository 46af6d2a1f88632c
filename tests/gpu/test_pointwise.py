"""Norm, rope, activation, embedding, log-probs and sampling kernels on the card against the numpy reference, by bytes.

The truth is computed once for 257 rows; every count of rows that straddles a threshold must give its first rows. Each
op has a control: the unconstrained way to compute it, which must give other bits. Inputs hold no subnormals.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from isobit.kernels.interface import AttentionShape, Draws, HeadNorms, RopeTables
from isobit.kernels.probe_data import floats
from isobit.kernels.reference import ops
from isobit.kernels.reference.math import round_bf16
from isobit.order import logprobs_order, norm_order, sampling_order

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")

from isobit.kernels.triton.activation import silu_mul  # noqa: E402
from isobit.kernels.triton.embedding import embedding  # noqa: E402
from isobit.kernels.triton.norm import rms_norm  # noqa: E402
from isobit.kernels.triton.rope import rope_and_cache  # noqa: E402
from isobit.kernels.triton.sampling import sample  # noqa: E402
from isobit.kernels.triton.top import top_logits  # noqa: E402
from isobit.kernels.triton.vocabulary import argmax, logprobs  # noqa: E402

ROW_COUNTS = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257)
VOCAB_SIZE = 151936
Settings = tuple[float, int, float, float]  # temperature, top_k, top_p, min_p
MIXED: list[Settings] = [
    (1.0, 0, 1.0, 0.0), (0.7, 0, 1.0, 0.05), (1.3, 5, 1.0, 0.0), (1.0, 40, 0.6, 0.0), (0.8, 0, 0.9, 0.0),
    (2.0, 100, 0.97, 0.01), (30.0, 20000, 1.0, 0.0), (1.0, 0, 1e-9, 0.0), (1e-3, 1, 0.5, 0.5), (4.0, 64, 1.0, 0.0),
    (1.5, 0, 0.999, 0.0), (1.0, 65, 1.0, 0.0),
]  # fmt: skip


def cuda(array: np.ndarray, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.from_numpy(array).to("cuda", dtype)


def same(ours: torch.Tensor, expected: np.ndarray) -> bool:
    """Equal bytes; NaN has one form."""
    got = (ours.float() if ours.dtype == torch.bfloat16 else ours).cpu().numpy()
    assert got.dtype == expected.dtype and got.shape == expected.shape
    if expected.dtype.kind != "f":
        return np.array_equal(got, expected)
    nan, whole = np.isnan(expected), np.int64 if got.itemsize == 8 else np.int32
    return np.array_equal(np.isnan(got), nan) and np.array_equal(got[~nan].view(whole), expected[~nan].view(whole))


@pytest.mark.parametrize("width", [64, 128, 576, 2048, 4096, 5120, 7168])
def test_rms_norm_at_every_row_count(width: int) -> None:
    order = norm_order(width, "sm90")
    x, weight = floats(1, 257, width), floats(2, width)
    expected = ops.rms_norm(order, x, weight, 1e-6)
    rounded = round_bf16(expected)
    x_gpu, weight_gpu = cuda(x), cuda(weight)
    for m in ROW_COUNTS:
        assert same(rms_norm(x_gpu[:m], weight_gpu, 1e-6, order, torch.float32), expected[:m]), m
        assert same(rms_norm(x_gpu[257 - m :], weight_gpu, 1e-6, order, torch.bfloat16), rounded[257 - m :]), m
    strided = torch.empty(257, width + 64, device="cuda")
    strided[:, :width] = x_gpu
    assert same(rms_norm(strided[:, :width], weight_gpu, 1e-6, order, torch.float32), expected)
    control = torch.nn.functional.rms_norm(x_gpu, (width,), weight_gpu, 1e-6)
    assert not same(control, expected)


def test_silu_mul_of_every_gate() -> None:
    gates = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    gates = torch.where(gates.float().abs() < 2.0**-100, torch.tensor(0.5, dtype=torch.bfloat16), gates)
    gates = gates.reshape(64, 1024).repeat(5, 3)[:257, :3072]
    ups = torch.from_numpy(floats(4, 257, 3072, low=0, high=8)).bfloat16()
    gate_up = torch.cat([gates, ups], dim=1)
    with np.errstate(all="ignore"):
        expected = round_bf16(ops.silu_mul(gate_up.float().numpy()))
    gate_up = gate_up.cuda()
    for m in ROW_COUNTS:
        assert same(silu_mul(gate_up[:m]), expected[:m]), m
    control = torch.nn.functional.silu(gate_up[:, :3072]) * gate_up[:, 3072:]
    assert not same(control, expected)


@pytest.mark.parametrize(
    ("head_dim", "rotary", "interleaved", "heads", "kv_heads", "normed"),
    [(128, 128, False, 32, 8, True), (64, 64, False, 9, 3, False), (96, 48, True, 8, 8, True),
     (256, 128, False, 5, 1, True)],
)  # fmt: skip
def test_rope_and_cache(head_dim: int, rotary: int, interleaved: bool, heads: int, kv_heads: int, normed: bool) -> None:
    shape, norm, eps = AttentionShape(heads, kv_heads, head_dim), norm_order(head_dim, "sm90"), 1e-6
    qkv = torch.from_numpy(floats(9, 257, (heads + 2 * kv_heads) * head_dim)).bfloat16()
    cos, sin = floats(10, 999, rotary // 2, high=-1), floats(11, 999, rotary // 2, high=-1)
    positions = (np.arange(257) * 3 % 999).astype(np.int32)
    slots = np.random.default_rng(1).permutation(8 * 64)[:257].astype(np.int32)
    q_norm, k_norm = floats(12, head_dim), floats(13, head_dim)
    q, k, v = np.split(qkv.float().numpy().reshape(257, -1, head_dim), [heads, heads + kv_heads], axis=1)
    if normed:
        q, k = ops.rms_norm(norm, q, q_norm, eps), ops.rms_norm(norm, k, k_norm, eps)
    q, k = (round_bf16(ops.rope(x, cos[positions], sin[positions], interleaved)) for x in (q, k))
    norms = HeadNorms(cuda(q_norm), cuda(k_norm), eps) if normed else None
    tables, qkv = RopeTables(cuda(cos), cuda(sin), interleaved), qkv.cuda()
    for m in (1, 2, 17, 64, 257):
        kv_layer = torch.full((2, 8, kv_heads, 64, head_dim), float("nan"), dtype=torch.bfloat16, device="cuda")
        got = rope_and_cache(qkv[:m], cuda(positions), cuda(slots), tables, norms, kv_layer, shape, norm)
        expected = np.full(kv_layer.shape, np.nan, np.float32)
        expected[0, slots[:m] // 64, :, slots[:m] % 64] = k[:m]
        expected[1, slots[:m] // 64, :, slots[:m] % 64] = v[:m]
        assert same(got, q[:m].reshape(m, -1)) and same(kv_layer, expected), m
    assert not same(got, qkv[:, : heads * head_dim].float().cpu().numpy())


def test_embedding() -> None:
    weight = cuda(floats(6, 1000, 4096), torch.bfloat16)
    ids = (torch.arange(257, device="cuda", dtype=torch.int32) * 17) % 1000
    expected = weight[ids.long()].float()
    for m in ROW_COUNTS:
        assert torch.equal(embedding(weight, ids[:m]), expected[:m])
    assert embedding(weight, torch.tensor([1000, -1], dtype=torch.int32, device="cuda")).isnan().all()


def vocabulary_rows(count: int) -> np.ndarray:
    """Rows as of a language model; some rounded, so that there are ties everywhere."""
    rows = (np.random.default_rng(0).standard_normal((count, VOCAB_SIZE)) * 3).astype(np.float32)
    rows[1::3] = np.round(rows[1::3] * 4) / 4
    rows[2::3, ::5] = -np.inf
    return rows


def test_logprobs_argmax_and_top() -> None:
    rows = vocabulary_rows(9)
    order = logprobs_order(VOCAB_SIZE, "sm90")
    maxima, lse = ops.logprobs(order, rows)
    ids, finite = ops.argmax(rows)
    top = np.stack([ops.top_logits(row, 200) for row in rows])
    everything = cuda(rows).repeat(29, 1)[:257]
    for m in (1, 2, 9, 64, 257):
        of = np.arange(m) % 9
        got_maxima, got_lse = logprobs(everything[:m], order)
        assert same(got_maxima, maxima[of] + np.float32(0)) and same(got_lse, lse[of]), m
        got_ids, got_finite = argmax(everything[:m])
        assert same(got_finite, finite[of]) and same(got_ids[got_finite], ids[of][finite[of]]), m
        for n in (1, 20, 64):
            assert same(top_logits(everything[:m], n), top[of, :n]), (m, n)
    assert same(top_logits(everything[:9], 200), top)
    control = torch.logsumexp(everything[:9].double(), dim=1)
    assert not same(control, lse)
    assert not same(top_logits(everything[:9].bfloat16().float(), 64), top[:, :64])


def test_sample() -> None:
    rows, count = vocabulary_rows(12), len(MIXED)
    order = sampling_order(VOCAB_SIZE, "sm90")
    rng = np.random.default_rng(3)
    columns = [np.array(column) for column in zip(*MIXED, strict=True)]
    seeds, positions = rng.integers(0, 2**64, count, np.uint64), rng.integers(0, 10**6, count)
    expected = np.array(
        [
            ops.sample(order, row, *settings, int(seed), int(position))
            for row, settings, seed, position in zip(rows, MIXED, seeds, positions, strict=True)
        ],
        np.int32,
    )
    rows_gpu = cuda(rows)
    for choice in ([0], [4], [2, 3], list(range(12)), list(range(11, -1, -1)), list(range(12)) * 6):
        draws = Draws(*(column[choice] for column in columns), seeds[choice], positions[choice])
        assert same(sample(rows_gpu[choice], draws, order), expected[choice]), choice
    draws = Draws(*columns, seeds + np.uint64(1), positions)
    assert not same(sample(rows_gpu, draws, order), expected)


def repeated(times: int, run: Callable[[], torch.Tensor]) -> int:
    """How many of `times` runs, beside matrix products on another stream, differ from the first."""
    first = run().clone()
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    beside = torch.cuda.Stream()
    a = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    for i in range(times):
        if i % 4 == 0:
            with torch.cuda.stream(beside):
                a @ a
        differing += (run().view(torch.int32) != first.view(torch.int32)).any()
    torch.cuda.synchronize()
    return int(differing)


def test_a_thousand_repeats_beside_another_stream() -> None:
    x, weight, gate_up = cuda(floats(1, 65, 4096)), cuda(floats(2, 4096)), cuda(floats(3, 65, 8192), torch.bfloat16)
    rows = cuda(vocabulary_rows(3))
    norm, head = norm_order(4096, "sm90"), logprobs_order(VOCAB_SIZE, "sm90")
    order = sampling_order(VOCAB_SIZE, "sm90")
    draws = Draws(
        np.ones(3), np.array([0, 20, 500]), np.array([1.0, 0.9, 0.9]), np.zeros(3), np.arange(3, dtype=np.uint64),
        np.arange(3),
    )  # fmt: skip
    assert repeated(1000, lambda: rms_norm(x, weight, 1e-6, norm, torch.float32)) == 0
    assert repeated(1000, lambda: silu_mul(gate_up)) == 0
    assert repeated(1000, lambda: logprobs(rows, head)[1]) == 0
    assert repeated(1000, lambda: argmax(rows)[0]) == 0
    assert repeated(1000, lambda: sample(rows, draws, order)) == 0
    noise = iter(range(1, 10_000))
    assert repeated(20, lambda: x[: next(noise) % 2 + 1, :2].sum(dim=0)) > 0  # control
