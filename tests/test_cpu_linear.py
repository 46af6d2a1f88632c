"""The linear and pointwise CPU kernels: bytes of the reference, for any rows, threads, schedule and library.

Inputs are order-sensitive: magnitudes spread over 2^24, with zeros of both signs and subnormals among them. The control
is the same sum in another order, which differs.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np
import pytest
import torch

from isobit.kernels.bitcompare import first_difference
from isobit.kernels.cpu.features import supported_libraries
from isobit.kernels.cpu.ladder import TimedLinear, choose_ladder
from isobit.kernels.cpu.library import CpuLibrary, PackedLinear
from isobit.kernels.interface import AttentionShape, HeadNorms, RopeTables
from isobit.kernels.reference import ops as reference
from isobit.kernels.reference.math import flush
from isobit.order import linear_order, norm_order

LIBRARIES = supported_libraries()
DTYPES = (("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16"))
MANY_ROWS = (*range(1, 41), 64, 65, 96, 97, 127, 257)
FEW_ROWS = (1, 2, 5, 6, 7, 13, 97, 121)  # for the scalar library, which is slow: every tile size and two chunks


def assert_same_bits(expected: Any, actual: torch.Tensor, what: str = "") -> None:
    difference = first_difference(np.asarray(expected), actual.numpy())
    assert difference is None, f"{what} {difference}"


def spread(*shape: int, seed: int) -> torch.Tensor:
    """Values of magnitude 2^-12 to 2^12; one in 64 is a zero of either sign, one in 64 a subnormal."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator) * 2.0 ** torch.randint(-12, 13, shape, generator=generator)
    kind = torch.randint(0, 64, shape, generator=generator)
    values = torch.where(kind == 0, values * 0.0, values)
    return torch.where(kind == 1, values.sign() * 1e-40, values)


def problem(n: int, k: int, rows: int, weight_dtype: str, seed: int) -> tuple[torch.Tensor, ...]:
    """x [rows, k], weight [n, k], bias [n], addend [rows, n]."""
    weight = spread(n, k, seed=seed).to(getattr(torch, weight_dtype))
    return spread(rows, k, seed=seed + 1), weight, spread(n, seed=seed + 2), spread(rows, n, seed=seed + 3)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(("weight_dtype", "activation_dtype"), DTYPES)
def test_linear_is_its_order(library: str, weight_dtype: str, activation_dtype: str) -> None:
    kernels = CpuLibrary(library, num_threads=2)
    sizes = [(1, 1), (17, 2), (65, 255), (16, 256), (130, 257), (3, 511), (64, 513), (33, 1025)]  # k blocks: 256, 512
    epilogues = list(itertools.product((False, True), repeat=2))
    for case, (n, k) in enumerate(sizes):
        x, weight, bias, addend = problem(n, k, 3, weight_dtype, seed=10 * case)
        order = linear_order(n, k, weight_dtype, activation_dtype, "cpu")
        for with_bias, with_addend in epilogues if case < 2 else epilogues[-1:]:
            chosen_bias, chosen_addend = (bias if with_bias else None), (addend if with_addend else None)
            expected = reference.linear(
                order, x.numpy(), weight.float().numpy(),
                bias.numpy() if with_bias else None, addend.numpy() if with_addend else None,
            )  # fmt: skip
            packed = kernels.pack_linear(weight, chosen_bias)
            for schedule in kernels.linear_schedules(weight_dtype, activation_dtype):
                y = kernels.linear(x, packed, activation_dtype, schedule, chosen_addend)
                assert_same_bits(expected, y, f"n={n} k={k} {schedule}")


def rows_one_by_one(
    kernels: CpuLibrary, x: torch.Tensor, packed: PackedLinear, dtype: str, addend: torch.Tensor
) -> torch.Tensor:
    return torch.cat([kernels.linear(x[i : i + 1], packed, dtype, "stream", addend[i : i + 1]) for i in range(len(x))])


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(("weight_dtype", "activation_dtype"), DTYPES)
def test_rows_threads_and_schedules_cannot_be_seen(library: str, weight_dtype: str, activation_dtype: str) -> None:
    kernels = CpuLibrary(library, num_threads=1)
    rows, threads = (FEW_ROWS, (1, 3)) if library == "scalar" else (MANY_ROWS, (1, 2, 3, 7))
    x, weight, bias, addend = problem(131, 577, max(rows), weight_dtype, seed=7)
    packed = kernels.pack_linear(weight, bias)
    alone = rows_one_by_one(kernels, x, packed, activation_dtype, addend)
    generator = torch.Generator().manual_seed(0)
    for num_rows, num_threads in itertools.product(rows, threads):
        chosen = torch.randperm(len(x), generator=generator)[:num_rows]
        kernels.num_threads = num_threads
        for schedule in kernels.linear_schedules(weight_dtype, activation_dtype):
            y = kernels.linear(x[chosen], packed, activation_dtype, schedule, addend[chosen])
            assert_same_bits(alone[chosen], y, f"{num_rows} rows, {num_threads} threads, {schedule}")


@pytest.mark.parametrize(("weight_dtype", "activation_dtype"), DTYPES)
def test_libraries_agree(weight_dtype: str, activation_dtype: str) -> None:
    x, weight, bias, addend = problem(150, 1300, 9, weight_dtype, seed=3)
    results = []
    for library in LIBRARIES:
        kernels = CpuLibrary(library, num_threads=2)
        results.append(kernels.linear(x, kernels.pack_linear(weight, bias), activation_dtype, "tile", addend))
    for library, result in zip(LIBRARIES, results, strict=True):
        assert_same_bits(results[0], result, library)


@pytest.mark.parametrize("weight_dtype", ["float32", "bfloat16"])
def test_control_another_order_differs(weight_dtype: str) -> None:
    kernels = CpuLibrary("auto", num_threads=1)
    x, weight, _, _ = problem(131, 577, 8, weight_dtype, seed=7)
    y = kernels.linear(x, kernels.pack_linear(weight), "float32", "tile")
    backwards = kernels.linear(x.flip(1).contiguous(), kernels.pack_linear(weight.flip(1)), "float32", "tile")
    unconstrained = torch.nn.functional.linear(x, weight.float())
    for other in (backwards, unconstrained):
        assert first_difference(y.numpy(), other.numpy()) is not None
        assert (y != other).float().mean() > 0.5, "the inputs do not depend on the order"


def test_bfloat16_activations_are_rounded_once() -> None:
    kernels = CpuLibrary("auto", num_threads=1)
    x, weight, _, _ = problem(40, 300, 5, "bfloat16", seed=5)
    packed = kernels.pack_linear(weight)
    rounded = kernels.linear(flush_tensor(x).to(torch.bfloat16).float(), packed, "float32", "tile")
    assert_same_bits(rounded, kernels.linear(x, packed, "bfloat16", "tile"))
    assert not torch.equal(rounded, kernels.linear(x, packed, "float32", "tile")), "rounding changed nothing"


def flush_tensor(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(flush(x.numpy()).copy())


@pytest.mark.parametrize("library", LIBRARIES)
def test_bad_rows_stay_alone(library: str) -> None:
    kernels = CpuLibrary(library, num_threads=2)
    x, weight, _, _ = problem(70, 100, 8, "float32", seed=9)
    packed = kernels.pack_linear(weight)
    clean = kernels.linear(x, packed, "float32", "tile")
    x[2], x[5, 3] = float("nan"), float("inf")
    for schedule in kernels.linear_schedules("float32", "float32"):
        y = kernels.linear(x, packed, "float32", schedule)
        good = torch.tensor([0, 1, 3, 4, 6, 7])
        assert_same_bits(clean[good], y[good], schedule)
        assert y[2].isnan().all() and not y[5].isfinite().all()


def test_out_may_be_the_addend_and_memory_may_be_unaligned() -> None:
    kernels = CpuLibrary("auto", num_threads=2)
    x, weight, bias, addend = problem(70, 100, 8, "float32", seed=11)
    packed = kernels.pack_linear(weight, bias)
    expected = kernels.linear(x, packed, "float32", "tile", addend)
    shifted = torch.empty(x.numel() + 1)[1:].view_as(x).copy_(x)
    assert shifted.data_ptr() % 8 == 4, "the copy is aligned after all"
    total = addend.clone()
    assert kernels.linear(shifted, packed, "float32", "stream", total, out=total) is total
    assert_same_bits(expected, total)


def test_the_callers_floating_point_environment_is_kept() -> None:
    kernels = CpuLibrary("auto", num_threads=2)
    x = torch.full((8, 64), 1e-30)
    y = kernels.linear(x, kernels.pack_linear(torch.full((64, 64), 1e-10)), "float32", "tile")
    assert (y == 0).all(), "subnormal results are flushed inside"
    assert np.float32(1e-40) * np.float32(1) != 0, "subnormals still exist outside"


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embedding_reads_the_packed_weight(library: str, dtype: torch.dtype) -> None:
    kernels = CpuLibrary(library, num_threads=2)
    weight = spread(131, 77, seed=1).to(dtype)
    packed = kernels.pack_linear(weight)
    ids = torch.tensor([0, 130, 64, 63, 0], dtype=torch.int32)
    assert_same_bits(weight.float()[ids.long()], kernels.embedding(packed, ids))
    for bad in (-1, 131):
        with pytest.raises(ValueError, match=rf"token id {bad} is outside \[0, 131\)"):
            kernels.embedding(packed, torch.tensor([3, bad], dtype=torch.int32))


def test_what_is_refused() -> None:
    kernels = CpuLibrary("scalar", num_threads=1)
    packed = kernels.pack_linear(torch.ones(4, 8))
    with pytest.raises(ValueError, match="no schedule 'fast'; it has: stream, tile"):
        kernels.linear(torch.ones(1, 8), packed, "float32", "fast")
    with pytest.raises(ValueError, match=r"float32 or bfloat16, got \[4, 8\] of torch\.float16"):
        kernels.pack_linear(torch.ones(4, 8, dtype=torch.float16))
    with pytest.raises(ValueError, match=r"the bias of a weight \[4, 8\] is \[4\]"):
        kernels.pack_linear(torch.ones(4, 8), torch.ones(5))
    with pytest.raises(ValueError, match="num_threads=65: from 1 to 64"):
        CpuLibrary("scalar", num_threads=65)
    assert kernels.linear_schedules("float32", "bfloat16") == ()


# ---- pointwise


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("width", [1, 15, 64, 577])
def test_rms_norm_and_silu_mul_are_their_orders(library: str, width: int) -> None:
    kernels = CpuLibrary(library, num_threads=3)
    x, weight, gate_up = spread(70, width, seed=1), spread(width, seed=2), spread(70, 2 * width, seed=3) * 4
    gate_up[0, 0], gate_up[1, 0], gate_up[2, 0] = float("inf"), float("-inf"), float("nan")
    norm, silu = kernels.rms_norm(x, weight, 1e-5), kernels.silu_mul(gate_up)
    assert_same_bits(reference.rms_norm(norm_order(width, "cpu"), x.numpy(), weight.numpy(), 1e-5), norm)
    assert_same_bits(reference.silu_mul(gate_up.numpy()), silu)
    for row in (0, 33, 69):
        assert_same_bits(norm[row : row + 1], kernels.rms_norm(x[row : row + 1], weight, 1e-5))
        assert_same_bits(silu[row : row + 1], kernels.silu_mul(gate_up[row : row + 1]))


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(("rotary_dim", "interleaved"), [(16, False), (10, False), (16, True), (6, True)])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16])
def test_rope_and_cache(library: str, rotary_dim: int, interleaved: bool, kv_dtype: torch.dtype) -> None:
    kernels, rows, heads, kv_heads, width = CpuLibrary(library, num_threads=2), 90, 4, 2, 16
    generator = torch.Generator().manual_seed(1)
    qkv = spread(rows, (heads + 2 * kv_heads) * width, seed=4)
    positions = torch.randint(0, 50, (rows,), generator=generator, dtype=torch.int32)
    slots = torch.randperm(3 * 64, generator=generator)[:rows].to(torch.int32)
    cos, sin = spread(50, rotary_dim // 2, seed=5), spread(50, rotary_dim // 2, seed=6)
    q_norm, k_norm = spread(width, seed=7), spread(width, seed=8)
    for norms in ((None, None), (q_norm, k_norm)):
        layer = torch.full((2, 3, kv_heads * width * 64), 7.0, dtype=kv_dtype)
        q = kernels.rope_and_cache(
            qkv, positions, slots, RopeTables(cos, sin, interleaved),
            None if norms[0] is None else HeadNorms(*norms, 1e-6), layer, AttentionShape(heads, kv_heads, width),
        )  # fmt: skip
        split = qkv.view(rows, heads + 2 * kv_heads, width).numpy()
        expected_q, expected_k = (
            rotated(part, norm, cos[positions.long()], sin[positions.long()], interleaved)
            for part, norm in zip((split[:, :heads], split[:, heads:-kv_heads]), norms, strict=True)
        )
        assert_same_bits(flush(expected_q.reshape(rows, -1)), flush_tensor(q))
        keys = layer[0].view(3, kv_heads, width, 64).permute(0, 3, 1, 2).reshape(192, kv_heads, width).float()
        values = layer[1].view(3, kv_heads, 64, width).permute(0, 2, 1, 3).reshape(192, kv_heads, width).float()
        dtype = str(kv_dtype).removeprefix("torch.")
        assert_same_bits(flush(reference.round_to(dtype, expected_k)), flush_tensor(keys[slots.long()]))
        assert_same_bits(flush(reference.round_to(dtype, split[:, -kv_heads:])), flush_tensor(values[slots.long()]))
        untouched = torch.ones(192, dtype=torch.bool).index_fill(0, slots.long(), False)
        assert untouched.sum() == 192 - rows
        assert (keys[untouched] == 7).all() and (values[untouched] == 7).all(), "a slot nobody asked for was written"


def rotated(x: Any, norm: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> Any:
    if norm is not None:
        x = reference.rms_norm(norm_order(x.shape[-1], "cpu"), x, norm.numpy(), 1e-6)
    return reference.rope(x, cos.numpy(), sin.numpy(), interleaved)


def test_ladder_holds_admitted_schedules_only_and_takes_any_number_of_rows() -> None:
    kernels = CpuLibrary("auto", num_threads=1)
    for weight_dtype, activation_dtype in (("float32", "float32"), ("bfloat16", "bfloat16")):
        offered = kernels.linear_schedules(weight_dtype, activation_dtype)
        for admitted in (offered, ("tile",), ("stream",), ("stream", "tile")):
            ladder = kernels.linear_ladder(linear_order(1, 1, weight_dtype, activation_dtype, "cpu"), admitted)
            assert {schedule for _, schedule in ladder} <= set(admitted)
            assert [most for most, _ in ladder] == sorted({most for most, _ in ladder}) and ladder[-1][0] >= 2**31
    ladder = kernels.linear_ladder(linear_order(1, 1, "float32", "float32", "cpu"), ("stream", "tile"))
    assert (ladder[0][1], ladder[-1][1]) == ("stream", "tile")


def test_ladder_takes_the_faster_of_two_schedules_that_must_be_timed() -> None:
    def make_linear(weight: torch.Tensor) -> TimedLinear:
        return lambda x, schedule: time.sleep(0.01 if schedule in slow else 0)

    admitted = ("stream", "tile", "stream-dp", "tile-dp")
    for slow in ({"stream", "tile-dp"}, {"stream-dp", "tile"}):
        ladder = choose_ladder(admitted, make_linear, "bfloat16")
        assert [schedule for _, schedule in ladder if schedule in slow] == []
