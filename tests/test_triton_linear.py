"""Triton linears in the interpreter: every schedule against float64, odd shapes, bias and addend, and what is refused.

numpy's dot stands for the tensor core here, so these tests are of addresses, masks, slices and counters; bytes are
tests/gpu/test_linear.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

import tests.interpreter  # noqa: F401  bfloat16 is rounded to nearest, as on the device
from isobit.kernels.interface import TORCH_DTYPES
from isobit.kernels.triton.linear import linear, reference_linear
from isobit.kernels.triton.linear_call import LinearWorkspace
from isobit.kernels.triton.linear_schedules import ANY_ROWS, LinearSchedule, linear_schedules
from isobit.order import MmaLinearOrder, mma_linear_order

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter; tests/gpu has the device's")

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def tensor_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter would multiply the integers that bfloat16 is kept in; products of 16-bit floats are float32."""

    def wide(handle: TensorHandle) -> Any:
        if handle.dtype.scalar == tl.bfloat16:
            return (handle.data.astype(np.uint32) << 16).view(np.float32)
        return handle.data.astype(np.float32)

    def dot(self: Any, a: TensorHandle, b: TensorHandle, acc: TensorHandle, *_: Any) -> TensorHandle:
        return TensorHandle(np.matmul(wide(a), wide(b)) + acc.data, acc.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)


def order_of(n: int, k: int, output: str = "float32", slices: int = 1, dtype: str = "bfloat16") -> MmaLinearOrder:
    return MmaLinearOrder(n, k, dtype, output, slices)


def inputs(order: MmaLinearOrder, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(order.n + order.k + rows)
    dtype = TORCH_DTYPES[order.weight_dtype]
    x = torch.randn(rows, order.k, generator=made).to(dtype)
    weight = torch.randn(order.n, order.k, generator=made).to(dtype)
    return x, weight, torch.randn(order.n, generator=made), torch.randn(rows, order.n, generator=made)


def assert_right(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *added: torch.Tensor) -> None:
    """K float32 additions err by less than K * 2^-24 of the sum of magnitudes; a result in 16 bits by its rounding."""
    truth = x.double() @ weight.double().T + sum(added)
    magnitudes = x.double().abs() @ weight.double().abs().T + sum(part.abs() for part in added)
    tolerance = magnitudes * (x.shape[1] + 3) * 2.0**-24
    tolerance += truth.abs() * {torch.float32: 0.0, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[y.dtype]
    assert ((y.double() - truth).abs() <= tolerance + 1e-12).all()


def tiny(schedule: LinearSchedule) -> LinearSchedule:
    """The schedule with a tile that the interpreter can walk in a test."""
    columns, depth = min(schedule.columns, 32), min(schedule.depth, 32)
    return dataclasses.replace(schedule, rows=min(schedule.rows, 16), columns=columns, depth=depth)


@pytest.mark.parametrize("kernel", ["pointer", "slice", "persistent"])
@pytest.mark.parametrize("slices, rows", [(1, 40), (2, 1), (2, 17), (3, 17)])
def test_every_kernel_is_right(kernel: str, slices: int, rows: int) -> None:
    order = order_of(40, 32 * slices, "bfloat16" if slices == 1 else "float32", slices)
    schedule = tiny(next(s for s in linear_schedules(order_of(4096, 4096)) if s.kernel == kernel))
    x, weight, bias, addend = inputs(order, rows)
    workspace = LinearWorkspace(CPU)
    for _ in range(2):  # counters are left at zero
        y = linear(x, weight, order, schedule, workspace, bias)
        assert_right(y, x, weight, bias)
        assert not workspace.counters.any()
    if order.output_dtype == "float32":
        expected = reference_linear(x, weight, order, bias, addend)
        out = addend.clone()
        assert linear(x, weight, order, schedule, workspace, bias, out, out) is out
        assert_right(out, x, weight, bias, addend)
        assert_right(expected, x, weight, bias, addend)


@pytest.mark.parametrize("n, k", [(33, 40), (40, 50), (7, 31)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_odd_shapes(n: int, k: int, dtype: str) -> None:
    order = order_of(n, k, dtype, dtype=dtype)
    for schedule in {s.kernel: s for s in linear_schedules(order)}.values():
        for rows in (1, 17):
            x, weight, bias, _ = inputs(order, rows)
            assert_right(linear(x, weight, order, tiny(schedule), LinearWorkspace(CPU), bias), x, weight, bias)


@pytest.mark.parametrize("n, k", [(1, 1), (7, 31), (64, 64), (576, 2048), (2048, 10240), (4096, 12288), (50257, 768)])
@pytest.mark.parametrize("output", ["bfloat16", "float32"])
def test_any_number_of_rows_is_covered(n: int, k: int, output: str) -> None:
    for slices in (1, 2):
        if k % slices == 0:
            schedules = linear_schedules(order_of(n, k, output, slices))
            least = 1
            while least <= 1 << 20:
                fitting = [s.max_rows for s in schedules if s.min_rows <= least <= s.max_rows]
                assert fitting, f"no schedule for {least} rows"
                least = max(fitting) + 1
            assert any(s.max_rows == ANY_ROWS for s in schedules)
            assert len({s.name for s in schedules}) == len(schedules)


def test_rows_apart_give_what_rows_side_by_side_give() -> None:
    order = order_of(32, 64)
    x, weight, _, _ = inputs(order, 20)
    wide = torch.full((20, 96), torch.nan, dtype=x.dtype)
    wide[:, 16:80] = x
    for schedule in linear_schedules(order):
        apart = linear(wide[:, 16:80], weight, order, tiny(schedule), LinearWorkspace(CPU))
        assert torch.equal(apart, linear(x, weight, order, tiny(schedule), LinearWorkspace(CPU)))


@pytest.mark.parametrize("rows", [1, 5])
def test_layouts_are_refused_alike_for_one_row_and_many(rows: int) -> None:
    order = order_of(64, 64)
    x, weight, bias, addend = inputs(order, rows)
    schedule = linear_schedules(order)[0]
    wide = torch.zeros(rows, 200, dtype=x.dtype)
    refused = (
        wide[:, 1:65], wide[:, :128:2], torch.zeros(rows, 68, dtype=x.dtype)[:, :64],
        torch.as_strided(wide, (rows, 64), (32, 1)), x[:, :60], x.float(), x[0],
    )  # fmt: skip
    for bad in refused:
        with pytest.raises(ValueError, match="linear takes"):
            linear(bad, weight, order, schedule, LinearWorkspace(CPU))
    for wrong in ({"bias": bias.double()}, {"bias": bias[:-1]}, {"addend": addend.T.contiguous().T[:, :60]},
                  {"out": addend.bfloat16()}):  # fmt: skip
        with pytest.raises(ValueError, match="linear takes"):
            linear(x, weight, order, schedule, LinearWorkspace(CPU), **wrong)
    with pytest.raises(ValueError, match="contiguous"):
        linear(x, weight.T.contiguous().T, order, schedule, LinearWorkspace(CPU))
    with pytest.raises(ValueError, match="no addend"):
        linear(x, weight, order_of(64, 64, "bfloat16"), schedule, LinearWorkspace(CPU), addend=addend)


def test_no_rows() -> None:
    order = order_of(64, 64, "bfloat16")
    _, weight, _, _ = inputs(order, 1)
    y = linear(torch.empty(0, 64, dtype=weight.dtype), weight, order, linear_schedules(order)[0], LinearWorkspace(CPU))
    assert y.shape == (0, 64) and y.dtype == torch.bfloat16


def test_slices_are_a_function_of_n_and_k() -> None:
    for n, k in ((2048, 5120), (4096, 12288), (6144, 4096), (768, 2048), (4096, 14336), (1000, 4100)):
        order = mma_linear_order(n, k, "bfloat16", "float32", "sm90")
        assert k % order.k_slices == 0
        assert linear_schedules(order)
