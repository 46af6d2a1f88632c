"""The reference against exact rational arithmetic, float64 and independent spellings; then the relations it must keep.

Tolerances are for truth (float64), never for invariance, which is compared by bytes.
"""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest
import torch

from isobit import request
from isobit.kernels.bitcompare import first_difference
from isobit.kernels.probe_data import bits, floats, with_specials
from isobit.kernels.reference import math as arithmetic
from isobit.kernels.reference import ops
from isobit.order import (
    AttentionOrder,
    attention_order,
    linear_order,
    logprobs_order,
    norm_order,
    sampling_order,
)

Float32 = npt.NDArray[np.float32]
SMALLEST_NORMAL = Fraction(1, 2**126)


def round_exactly(value: Fraction) -> float:
    """float32 nearest-even of an exact value with an unbounded exponent; then overflow to inf, subnormal to zero."""
    if value == 0:
        return 0.0
    exponent = 0
    while abs(value) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    while abs(value) < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** (exponent - 23)
    rounded = round(value / unit) * unit  # Python rounds a Fraction's half to even
    if abs(rounded) >= Fraction(2) ** 128:
        return math.copysign(math.inf, value)
    return float(rounded) if abs(rounded) >= SMALLEST_NORMAL else math.copysign(0.0, value)


def hard_triples() -> tuple[Float32, Float32, Float32]:
    """Operands whose a*b + c cancels, ties, underflows around 2^-126, or has c far below half a unit of a*b."""
    one = np.float32(1)
    rows = [floats(s, 3, 120, low=-low, high=high) for s, low, high in ((1, 3, 3), (2, 70, -56), (3, 20, 20))]
    a, b = floats(4, 120), floats(5, 120)
    rows.append(np.stack([a, b, np.float32(-1) * (a * b)]))  # cancels all but the rounding error of the product
    few = (bits(6, 2, 120) % np.uint64(9)).astype(np.float32)
    rows.append(
        np.stack([one + few[0] * np.float32(2**-12), one + few[1] * np.float32(2**-12), a * np.float32(2**-36)])
    )
    steps = (bits(7, 2, 120) % np.uint64(8)).astype(np.float32)
    below, above = one - steps[0] * np.float32(2**-24), (one + steps[1] * np.float32(2**-23)) * np.float32(2**-126)
    rows.append(np.stack([below, above, 0 * a]))  # products on both sides of the smallest normal number
    joined = np.concatenate(rows, axis=1)
    return joined[0], joined[1], joined[2]


def exact(function: object, *operands: Float32) -> Float32:
    """`function` of Fractions, applied elementwise to non-special operands and rounded once."""
    assert callable(function)
    columns = [[Fraction(float(x)) for x in operand] for operand in operands]
    return np.array([round_exactly(function(*values)) for values in zip(*columns, strict=True)], np.float32)


def assert_same(expected: Float32, actual: Float32) -> None:
    assert first_difference(expected + np.float32(0), actual + np.float32(0)) is None  # an exact zero has no sign


def test_fma_mul_add_div_round_once() -> None:
    a, b, c = hard_triples()
    truth = exact(lambda x, y, z: x * y + z, a, b, c)
    assert_same(truth, arithmetic.fma32(a, b, c))
    assert_same(exact(lambda x, y: x * y, a, b), arithmetic.mul32(a, b))
    assert_same(exact(lambda x, y: x + y, a, c), arithmetic.add32(a, c))
    assert_same(exact(lambda x, y: x - y, a, c), arithmetic.sub32(a, c))
    assert_same(exact(lambda x, y: x / y, a, b), arithmetic.div32(a, b))
    underflowing = np.abs(a.astype(np.float64) * b) < 2.0**-126
    assert underflowing.sum() > 20 and (np.abs(arithmetic.mul32(a, b)) == 2.0**-126).any(), "no result near 2^-126"
    # control: rounding to float64 first, then to float32, is wrong on these operands
    twice = (a.astype(np.float64) * b + c).astype(np.float32)
    assert first_difference(truth, twice) is not None


def test_sqrt_rounds_once() -> None:
    x = np.abs(floats(8, 500, low=-126, high=126))
    root = arithmetic.sqrt32(x)
    low, high = (np.nextafter(root, np.float32(direction)) for direction in (0, np.inf))
    for value, r, l, h in zip(x.tolist(), root.tolist(), low.tolist(), high.tolist(), strict=True):
        value, r, l, h = (Fraction(number) for number in (value, r, l, h))
        assert ((l + r) / 2) ** 2 <= value <= ((r + h) / 2) ** 2


def test_subnormals_are_zero_and_signs_are_kept() -> None:
    tiny, normal, one = np.float32(1e-40), np.float32(2.0**-126), np.float32(1)
    for x, expected in ((tiny, 0x00000000), (-tiny, 0x80000000), (normal, 0x00800000)):
        assert arithmetic.flush(x).view(np.uint32) == expected
    assert arithmetic.fma32(tiny, np.float32(2.0**100), one) == 1
    assert arithmetic.mul32(-normal, np.float32(0.5)).view(np.uint32) == 0x80000000
    assert arithmetic.add32(np.float32(1.5) * normal, -normal).view(np.uint32) == 0
    assert arithmetic.fma32(-one, np.float32(0), np.float32(0)).view(np.uint32) == 0
    assert arithmetic.fma32(-one, np.float32(0), np.float32(-0.0)).view(np.uint32) == 0x80000000
    # the tie between the largest subnormal with 24 bits and 2^-126 goes up, anything below it is zero (as on x86)
    assert arithmetic.mul32(np.float32(1 - 2.0**-24), normal) == 0
    assert arithmetic.fma32(np.float32(1 - 2.0**-24), normal, np.float32(0)) == 0
    half_way = arithmetic.mul32(np.float32(1 - 2.0**-12), np.float32(1 + 2.0**-12) * normal)  # 1 - 2^-24: below
    assert half_way == 0
    assert arithmetic.fma32(np.float32(1 - 2.0**-13), np.float32(1 + 2.0**-13) * normal, 0) == normal  # 1 - 2^-26


def test_nan_and_inf_pass_through() -> None:
    inf, nan, one = np.float32(np.inf), np.float32(np.nan), np.float32(1)
    assert np.isnan(arithmetic.fma32(inf, 0, one)) and np.isnan(arithmetic.fma32(inf, one, -inf))
    assert arithmetic.fma32(np.float32(2e38), 2, one) == np.inf
    assert arithmetic.fma32(one, one, -inf) == -np.inf
    assert np.isnan(arithmetic.exp32(nan)) and np.isnan(arithmetic.round_bf16(nan))


def test_round_bf16_is_nearest_even() -> None:
    x = np.concatenate(
        [floats(9, 5000, low=-120, high=126), (np.arange(512, dtype=np.uint32) + 0x3F7F8000 << 0).view(np.float32)]
    )
    assert_same(torch.from_numpy(x).to(torch.bfloat16).float().numpy(), arithmetic.round_bf16(x))
    ties = np.array([0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x007FFFFF, 0x807FFFFF], np.uint32).view(np.float32)
    assert arithmetic.round_bf16(ties).view(np.uint32).tolist() == [
        0x3F800000, 0x3F820000, 0x7F800000, 0x00000000, 0x80000000,
    ]  # fmt: skip


def test_exp32_and_log64_are_accurate() -> None:
    x = -np.abs(floats(10, 4000, low=-30, high=6))
    x = np.concatenate([x[x > -87.3], np.linspace(-87.32, 87, 4001, dtype=np.float32)])
    truth = np.array([math.exp(value) for value in x.tolist()])
    assert np.abs(arithmetic.exp32(x) / truth - 1).max() < 2.0**-22  # about 1.2e-7 measured
    edges = np.array([0.0, -0.0, -87.33, np.nextafter(np.float32(-87.33), np.float32(-88)), -np.inf], np.float32)
    assert arithmetic.exp32(edges)[:2].tolist() == [1, 1]
    assert arithmetic.exp32(edges)[2] > 2.0**-126 and arithmetic.exp32(edges)[3:].tolist() == [0, 0]
    y = np.concatenate([(bits(11, 4000) >> np.uint64(12)) * 2.0**-52 + 2.0**-53, [1.0, 2.0**-53, 1 - 2.0**-53, 37.5]])
    logs = np.array([math.log(value) for value in y.tolist()])
    assert np.abs(arithmetic.log64(y) - logs).max() < 1e-14 and np.all(np.abs(arithmetic.log64(y) - logs) <= 1e-14)
    near_one = np.array([1 - 2.0**-53, 1 - 2.0**-30])
    assert np.abs(arithmetic.log64(near_one) / np.log1p(near_one - 1) - 1).max() < 1e-15


def test_noise_is_the_scalar_definition() -> None:
    golden, mask = 0x9E3779B97F4A7C15, 2**64 - 1
    for seed, position, token in ((0, 0, 0), (2**63 - 1, 2**31 - 1, 49151), (12345, 77, 5)):
        key = request.mix64((request.mix64(seed + golden & mask) + position * golden) & mask)
        h = request.mix64((key + (token + 1) * golden) & mask)
        u = ((h >> 12) + 0.5) * 2.0**-52
        expected = -math.log(-math.log(u))
        assert abs(arithmetic.gumbel(seed, position, [token])[0] - expected) < 1e-13 * max(1, abs(expected))
    noise = arithmetic.gumbel(3, 4, np.arange(20000))
    assert abs(noise.mean() - 0.5772) < 0.03 and abs(noise.var() - math.pi**2 / 6) < 0.08  # 4 standard errors


# ---- linear


def fma_loop(pairs: list[tuple[float, float]]) -> np.float32:
    """One FMA chain from +0, written with exact fractions."""
    total = 0.0
    for a, b in pairs:
        total = round_exactly(Fraction(a) * Fraction(b) + Fraction(total))
    return np.float32(total)


@pytest.mark.parametrize("k", [1, 5, 8, 19])
def test_linear_is_its_docstring(k: int) -> None:
    """Blocks of 8 instead of hundreds, so that exact fractions can follow."""
    x, w, bias, addend = floats(20, 2, k), ops.round_to("bfloat16", floats(21, 3, k)), floats(22, 3), floats(23, 2, 3)
    for activation, pairing in (("float32", "ascending"), ("float32", "odd-even"), ("bfloat16", "odd-even")):
        weight = "float32" if pairing == "ascending" else "bfloat16"
        order = dataclasses.replace(linear_order(3, k, weight, activation, "cpu"), k_block=8)
        rounded = ops.round_to(activation, x)
        expected = np.zeros((2, 3), np.float32)
        for m, n in np.ndindex(2, 3):
            blocks = []
            for start in range(0, k, 8):
                ks = list(range(start, min(start + 8, k)))
                if pairing == "odd-even":
                    ks = [j for even in ks[::2] for j in (even + 1, even) if j < k]
                blocks.append(fma_loop([(float(rounded[m, j]), float(w[n, j])) for j in ks]))
            total = blocks[0]
            for block in blocks[1:]:
                total = np.float32(total + block)
            expected[m, n] = addend[m, n] + np.float32(total + bias[n])
        assert_same(expected, ops.linear(order, x, w, bias, addend))


@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")])
def test_linear_rows_stand_alone_and_are_near_float64(dtypes: tuple[str, str]) -> None:
    order, k = linear_order(7, 1101, *dtypes, "cpu"), 1101
    x, w = floats(24, 6, k, low=-3, high=0), ops.round_to(dtypes[0], floats(25, 7, k, low=-3, high=0))
    y = ops.linear(order, x, w)
    alone = np.concatenate([ops.linear(order, x[i : i + 1], w) for i in range(6)])
    assert first_difference(y, alone) is None
    exact_x = ops.round_to(dtypes[1], x).astype(np.float64)
    bound = np.abs(exact_x) @ np.abs(w.T.astype(np.float64)) * (order.k_block + k // order.k_block + 1) * 2.0**-24
    assert (np.abs(y - exact_x @ w.T.astype(np.float64)) <= bound).all()  # Higham 2002, blocked summation
    for change in (
        {"k_block": 64},
        {"pairing": "ascending" if order.pairing == "odd-even" else "odd-even"},
        {"k_slices": 3},
    ):
        assert first_difference(y, ops.linear(dataclasses.replace(order, **change), x, w)) is not None, change


# ---- attention


def attention_inputs(order: AttentionOrder, num_keys: int) -> tuple[Float32, Float32, Float32]:
    width = order.head_dim
    q = floats(30, num_keys, 4 * width, low=-4, high=1)
    return q, floats(31, num_keys, 2, width, low=-4, high=1), floats(32, num_keys, 2, width, low=-4, high=2)


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
def test_attention_whole_chunked_and_decode_are_one(kv_dtype: str) -> None:
    order = attention_order(16, kv_dtype, "cpu")
    q, k, v = attention_inputs(order, 150)
    whole = ops.attention(order, q, k, v, 0, 4, 0.25)
    for start, stop in ((0, 1), (0, 64), (63, 66), (100, 117), (149, 150)):
        stale_k, stale_v = k.copy(), v.copy()
        stale_k[stop:], stale_v[stop:] = np.nan, np.inf
        part = ops.attention(order, q[start:stop], stale_k, stale_v, start, 4, 0.25)
        assert first_difference(whole[start:stop], part) is None, (start, stop)
    late_nan = v.copy()
    late_nan[120] = np.nan
    touched = ops.attention(order, q, k, late_nan, 0, 4, 0.25)
    assert first_difference(whole[:120], touched[:120]) is None and np.isnan(touched[120:]).all()
    for change in ({"kv_block": 32, "lanes": 8}, {"kv_split_size": 64}):
        other = ops.attention(dataclasses.replace(order, **change), q, k, v, 0, 4, 0.25)
        differs = first_difference(whole, other) is not None
        assert differs == ("kv_block" in change), change  # one page a split is the same sum


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
def test_attention_is_near_float64(kv_dtype: str) -> None:
    order = attention_order(16, kv_dtype, "cpu")
    q, k, v = attention_inputs(order, 150)
    keys, values = (np.repeat(ops.round_to(kv_dtype, x).astype(np.float64), 2, axis=1) for x in (k, v))
    scores = np.einsum("mhd,thd->mht", q.reshape(150, 4, 16).astype(np.float64), keys) * 0.25
    scores = np.where(np.tril(np.ones((150, 150), bool))[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    truth = np.einsum("mht,thd->mhd", weights / weights.sum(-1, keepdims=True), values).reshape(150, -1)
    # scores carry 16 roundings relative to |q||k|/4, the sums at most 64 + 3 more; values are below 8
    magnitude = np.einsum("mhd,thd->mht", np.abs(q.reshape(150, 4, 16)), np.abs(keys)).max() * 0.25
    assert np.abs(ops.attention(order, q, k, v, 0, 4, 0.25) - truth).max() < 8 * 2.0**-24 * (2 * 17 * magnitude + 70)


# ---- the rest


def test_norm_rope_and_silu_are_near_float64() -> None:
    x, w = floats(40, 5, 100), floats(41, 100)
    y = ops.rms_norm(norm_order(100, "cpu"), x, w, 1e-5)
    exact_x = x.astype(np.float64)
    truth = exact_x / np.sqrt((exact_x**2).mean(1, keepdims=True) + 1e-5) * w
    assert np.abs(y / truth - 1).max() < (100 / 16 + 10) * 2.0**-24
    assert first_difference(y[2:3], ops.rms_norm(norm_order(100, "cpu"), x[2:3], w, 1e-5)) is None
    gate_up = floats(42, 5, 200, low=-8, high=5)
    gate, up = gate_up[:, :100].astype(np.float64), gate_up[:, 100:]
    moderate = gate > -80
    silu = gate / (1 + np.exp(-gate)) * up
    assert np.abs(ops.silu_mul(gate_up) / silu - 1)[moderate].max() < 6 * 2.0**-23
    angles = np.arange(3)[:, None] * np.array([1.0, 0.1, 0.01])
    cos, sin, heads = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32), floats(43, 3, 2, 8)
    for interleaved, pairs in ((False, ((0, 3), (1, 4), (2, 5))), (True, ((0, 1), (2, 3), (4, 5)))):
        out = ops.rope(heads, cos, sin, interleaved)
        for i, (first, second) in enumerate(pairs):
            turned = (heads[:, :, first] + 1j * heads[:, :, second].astype(np.complex128)) * (cos + 1j * sin)[
                :, i, None
            ]
            scale = np.abs(turned) * 2.0**-22
            assert (np.abs(out[:, :, first] - turned.real) <= scale).all()
            assert (np.abs(out[:, :, second] - turned.imag) <= scale).all()
        assert first_difference(heads[:, :, 6:], out[:, :, 6:]) is None


def test_logprobs_are_near_float64_and_rows_stand_alone() -> None:
    order, logits = logprobs_order(9001, "cpu"), with_specials(50, floats(51, 3, 9001, low=-4, high=3), 97)
    maxima, lse = ops.logprobs(order, logits)
    truth = np.log(np.exp(logits.astype(np.float64)).sum(1))
    assert maxima.tolist() == logits.max(1).tolist()
    assert np.abs(lse - truth).max() < (256 + 3 + 4) * 2.0**-24 + 2.0**-22
    assert np.abs(np.exp(ops.token_logprobs(logits, lse).astype(np.float64)).sum(1) - 1).max() < 1e-5
    for row in range(3):
        assert ops.logprobs(order, logits[row : row + 1])[1].tobytes() == lse[row].tobytes()
    other = dataclasses.replace(order, lanes=8)
    assert ops.logprobs(other, logits)[1].tobytes() != lse.tobytes()


def test_argmax_and_top_logits_break_ties_by_id() -> None:
    row = np.array([1, 3, -0.0, 3, 0.0, 1e-40, -np.inf], np.float32)
    assert ops.top_logits(row, 7).tolist() == [1, 3, 0, 2, 4, 5, 6]
    ids, finite = ops.argmax(np.stack([row, -np.abs(row), np.full(7, np.nan, np.float32)]))
    assert ids[0] == 1 and finite.tolist() == [False, False, False]
    ids, finite = ops.argmax(row[None, :6])
    assert (ids[0], finite[0]) == (1, True)


def draws(row: Float32, count: int, **settings: float) -> npt.NDArray[np.int64]:
    options = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **settings}
    order = sampling_order(row.size, "cpu")
    drawn = [
        ops.sample(
            order, row, options["temperature"], int(options["top_k"]), options["top_p"], options["min_p"], 9, position
        )
        for position in range(count)
    ]
    return np.bincount(drawn, minlength=row.size)


def test_sample_frequencies_are_the_filtered_softmax() -> None:
    probabilities = np.array([0.05, 0.4, 0.15, 0.3, 0.1])
    row = np.log(probabilities).astype(np.float32)
    for settings, kept in (
        ({}, [0, 1, 2, 3, 4]), ({"top_k": 2}, [1, 3]), ({"top_p": 0.71}, [1, 2, 3]), ({"top_p": 0.3}, [1]),
        ({"min_p": 0.3}, [1, 2, 3]), ({"top_k": 3, "min_p": 0.5}, [1, 3]), ({"temperature": 0.5}, [0, 1, 2, 3, 4]),
    ):  # fmt: skip
        counts = draws(row, 500, **settings)
        weights = np.zeros(5)
        weights[kept] = probabilities[kept] ** (1 / settings.get("temperature", 1.0))
        expected = weights / weights.sum() * 500
        assert (np.abs(counts - expected) <= 4.5 * np.sqrt(expected) + 1e-9).all(), (settings, counts, expected)


def test_sample_depends_on_seed_and_position_only() -> None:
    row, order = floats(60, 300, low=-3, high=1), sampling_order(300, "cpu")
    drawn = [ops.sample(order, row, 1.0, 0, 1.0, 0.0, seed, position) for seed in (1, 2) for position in range(8)]
    assert drawn == [
        ops.sample(order, row, 1.0, 0, 1.0, 0.0, seed, position) for seed in (1, 2) for position in range(8)
    ]
    assert drawn[:8] != drawn[8:] and len(set(drawn)) > 4
    assert ops.sample(order, row, 1.0, 1, 1.0, 0.0, 5, 6) == int(row.argmax())
