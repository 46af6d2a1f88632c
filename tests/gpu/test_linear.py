"""Linears on the card, by bytes: every schedule, Triton's and cuBLASLt's, against the plainest kernel of the Order.

Each claim has a control that must differ: K in another order, other slices, split-K, a vendor kernel that forbids
split-K and adds in another order all the same. Inputs have exponents over a wide range, so that each shows.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")

from isobit.kernels.gpu.checks import device_floats, difference  # noqa: E402
from isobit.kernels.interface import TORCH_DTYPES  # noqa: E402
from isobit.kernels.triton.linear import linear, reference_linear  # noqa: E402
from isobit.kernels.triton.linear_call import LinearWorkspace  # noqa: E402
from isobit.kernels.triton.linear_schedules import linear_schedules  # noqa: E402
from isobit.kernels.vendor.cublaslt import CublasLt, VendorSchedule  # noqa: E402
from isobit.order import MmaLinearOrder  # noqa: E402

DEVICE = torch.device("cuda", 0)
ROWS = 2100
COUNTS = (
    1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300, 512, 513, 1024, 1025,
    2048, 2049, 2100,
)  # fmt: skip
ORDERS = [
    MmaLinearOrder(768, 2048, "bfloat16", "bfloat16"),
    MmaLinearOrder(2048, 5120, "bfloat16", "float32"),
    MmaLinearOrder(5120, 768, "float16", "float16"),
    MmaLinearOrder(2048, 8192, "bfloat16", "float32", 2),
    MmaLinearOrder(2048, 8192, "bfloat16", "bfloat16", 2),
    MmaLinearOrder(576, 4096, "float16", "float32", 4),
    MmaLinearOrder(320, 2176, "bfloat16", "bfloat16", 2),  # slices are no multiple of most depths
    MmaLinearOrder(577, 2056, "bfloat16", "float32"),  # odd N, a tail of K
    MmaLinearOrder(96, 333, "bfloat16", "bfloat16"),  # odd K
    MmaLinearOrder(8, 64, "bfloat16", "float32"),
]

Run = Callable[..., torch.Tensor]


@pytest.fixture(scope="module")
def cublaslt() -> CublasLt:
    return CublasLt(DEVICE)


def name_of(order: MmaLinearOrder) -> str:
    return f"{order.k}x{order.n} in {order.k_slices}, {order.weight_dtype} to {order.output_dtype}"


def inputs(order: MmaLinearOrder, rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of x lie apart, with NaN between them, where the Order's K allows it."""
    dtype = TORCH_DTYPES[order.weight_dtype]
    low, high = (-3, 2) if dtype == torch.float16 else (-10, 3)
    x = device_floats(12, (rows, order.k), dtype, DEVICE, low, high)
    apart = torch.full((rows, order.k + 16), torch.nan, dtype=dtype, device=DEVICE)
    apart[:, 8 : 8 + order.k] = x
    return apart[:, 8 : 8 + order.k] if order.k % 8 == 0 else x, device_floats(
        11, (order.n, order.k), dtype, DEVICE, -3, 2
    )


def schedules(order: MmaLinearOrder, vendor: CublasLt) -> Iterator[tuple[Any, Run]]:
    for schedule in linear_schedules(order):
        yield schedule, linear
    for chosen in vendor.schedules(order):
        yield chosen, vendor.linear


def assert_same(expected: torch.Tensor, actual: torch.Tensor, label: str) -> None:
    found = difference(expected, actual)
    assert found is None, f"{label}: {found}"


@pytest.mark.parametrize("order", ORDERS, ids=name_of)
def test_every_schedule_gives_the_bytes_of_the_reference(order: MmaLinearOrder, cublaslt: CublasLt) -> None:
    x, weight = inputs(order)
    expected = reference_linear(x, weight, order)
    workspace = LinearWorkspace(DEVICE)
    tried = 0
    for schedule, run in schedules(order, cublaslt):
        counts = [count for count in COUNTS if schedule.min_rows <= count <= schedule.max_rows]
        assert counts, f"no count of rows tries {schedule.name}"
        for at, count in enumerate(counts):
            start = (0, (ROWS - count) // 2, ROWS - count)[at % 3]
            rows = slice(start, start + count)
            out = torch.full((count, order.n), torch.nan, dtype=expected.dtype, device=DEVICE)
            run(x[rows], weight, order, schedule, workspace, out=out)
            assert_same(expected[rows], out, f"{schedule.name}, {count} rows from {start}")
            tried += 1
    assert tried >= 20
    assert not workspace.counters.any()


@pytest.mark.parametrize("order", [order for order in ORDERS if order.output_dtype == "float32"], ids=name_of)
def test_bias_and_addend_in_place(order: MmaLinearOrder, cublaslt: CublasLt) -> None:
    x, weight = inputs(order)
    bias = device_floats(13, (order.n,), torch.float32, DEVICE, -12, 4)
    addend = device_floats(14, (ROWS, order.n), torch.float32, DEVICE, -8, 8)
    workspace = LinearWorkspace(DEVICE)
    for with_bias in (None, bias):
        expected = reference_linear(x, weight, order, with_bias, addend)
        plain = reference_linear(x, weight, order)
        assert_same(addend + (plain if with_bias is None else plain + bias), expected, "the reference's own additions")
        for schedule, run in schedules(order, cublaslt):
            if with_bias is not None and isinstance(schedule, VendorSchedule):
                continue
            count = min(schedule.max_rows, ROWS)
            out = addend[:count].clone()
            assert run(x[:count], weight, order, schedule, workspace, with_bias, out, out) is out
            assert_same(expected[:count], out, schedule.name)


def test_another_order_of_k_shows() -> None:
    order = MmaLinearOrder(2048, 8192, "bfloat16", "float32", 2)
    x, weight = inputs(order, 64)
    expected = reference_linear(x, weight, order)
    descending = reference_linear(x.flip(1).contiguous(), weight.flip(1).contiguous(), order)
    assert difference(expected, descending) is not None
    for slices in (1, 4):
        assert (
            difference(expected, reference_linear(x, weight, dataclasses.replace(order, k_slices=slices))) is not None
        )
    rows_alone = torch.cat([reference_linear(x[row : row + 1], weight, order) for row in range(0, 64, 9)])
    assert_same(expected[::9], rows_alone, "a row of the reference alone")


def test_a_reference_row_does_not_see_its_neighbours() -> None:
    order = MmaLinearOrder(64, 2048, "bfloat16", "float32")
    x, weight = inputs(order, 33)
    expected = reference_linear(x, weight, order)
    x = x.clone()
    x[1:] = torch.nan
    assert_same(expected[:1], reference_linear(x, weight, order)[:1], "beside NaN")


def _differing(vendor: CublasLt, order: MmaLinearOrder, rows: int) -> dict[int, list[bool]]:
    """Of the algorithms that the library recommends for `rows`: parts of K -> do its bytes differ."""
    x, weight = inputs(order, rows)
    expected = reference_linear(x, weight, order)
    workspace = LinearWorkspace(DEVICE)
    found: dict[int, list[bool]] = {}
    for rank in range(8):
        schedule = VendorSchedule(f"asked for {rows} rows", rows, rows, rank)
        try:
            out = vendor.linear(x, weight, order, schedule, workspace)
        except IndexError:
            break
        differs = difference(expected, out) is not None
        found.setdefault(vendor.split_k(order, schedule), []).append(differs)
    return found


def test_split_k_is_caught() -> None:
    order = MmaLinearOrder(2048, 5120, "bfloat16", "bfloat16")
    found = _differing(CublasLt(DEVICE, split_k=True), order, 1)
    split = [differs for parts, of in found.items() if parts > 1 for differs in of]
    assert split and all(split), found


def test_a_vendor_kernel_that_forbids_split_k_and_still_differs_is_caught(cublaslt: CublasLt) -> None:
    """torch's cuBLASLt path picks one at M=1, K=5120, N=2048: a flag is no proof."""
    order = MmaLinearOrder(2048, 5120, "bfloat16", "bfloat16")
    x, weight = inputs(order, 1)
    before = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    library = torch.backends.cuda.preferred_blas_library()
    try:
        torch.backends.cuda.preferred_blas_library("cublaslt")
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)
        out = torch.nn.functional.linear(x, weight)
    finally:
        torch.backends.cuda.preferred_blas_library(library)
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = before
    assert difference(reference_linear(x, weight, order), out) is not None
    assert set(_differing(cublaslt, order, 16)) == {1}  # ours are asked not to split, and do not


def test_vendor_calls_leave_torch_settings_alone(cublaslt: CublasLt) -> None:
    def settings() -> tuple[Any, ...]:
        of = torch.backends.cuda
        return of.preferred_blas_library(), of.matmul.allow_bf16_reduced_precision_reduction, of.matmul.allow_tf32

    before = settings()
    order = MmaLinearOrder(768, 2048, "bfloat16", "bfloat16")
    x, weight = inputs(order, 16)
    cublaslt.linear(x, weight, order, cublaslt.schedules(order)[0], LinearWorkspace(DEVICE))
    assert settings() == before


def test_no_library_is_a_reason() -> None:
    with pytest.raises(ValueError, match=r"no cuBLASLt: none of /nowhere/libcublasLt\.so"):
        CublasLt(DEVICE, path="/nowhere/libcublasLt.so")


@pytest.mark.parametrize("order", [ORDERS[3], ORDERS[0]], ids=name_of)
def test_a_thousand_random_choices_beside_another_stream(order: MmaLinearOrder, cublaslt: CublasLt) -> None:
    """Which program arrives last, which schedule runs and what else is on the card move no bit."""
    x, weight = inputs(order, 300)
    expected = reference_linear(x, weight, order)
    workspace = LinearWorkspace(DEVICE)
    offered = [(schedule, run) for schedule, run in schedules(order, cublaslt) if schedule.min_rows <= 300]
    drawn = random.Random(5)
    differing = torch.zeros((), dtype=torch.int64, device=DEVICE)
    noise, other = torch.randn(2048, 2048, device=DEVICE, dtype=torch.bfloat16), torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    for turn in range(1000):
        if turn % 4 == 0:
            with torch.cuda.stream(other):
                torch.mm(noise, noise)
        schedule, run = drawn.choice(offered)
        count = drawn.randint(schedule.min_rows, min(schedule.max_rows, 300))
        start = drawn.randint(0, 300 - count)
        out = run(x[start : start + count], weight, order, schedule, workspace)
        word = torch.int32 if out.dtype == torch.float32 else torch.int16
        differing += (out.view(word) != expected[start : start + count].view(word)).sum()
    assert int(differing) == 0


def test_a_linear_can_be_captured_in_a_graph(cublaslt: CublasLt) -> None:
    order = ORDERS[4]
    x, weight = inputs(order, 40)
    expected = reference_linear(x, weight, order)
    for schedule, run in schedules(order, cublaslt):
        if schedule.min_rows <= 40 <= schedule.max_rows:
            workspace = LinearWorkspace(DEVICE)
            out = torch.empty_like(expected)
            run(x, weight, order, schedule, workspace, out=out)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run(x, weight, order, schedule, workspace, out=out)
            for _ in range(3):
                out.fill_(torch.nan)
                graph.replay()
                assert_same(expected, out, schedule.name)
