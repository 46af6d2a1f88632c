"""Admission refuses what is wrong, at the right coordinate, and trusts no cache that does not prove itself.

Wrong kernels are the C library or the reference with one thing changed: each is a control for the probes of its op.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reference_library import ReferenceLibrary, declare

from isobit import doctor
from isobit.kernels import admission
from isobit.kernels.admission import AdmissionTable, Claim, admit, host_facts
from isobit.kernels.bitcompare import first_difference
from isobit.kernels.calls import call, prepare
from isobit.kernels.cpu.claims import library_kernels
from isobit.kernels.cpu.library import CpuLibrary
from isobit.kernels.probes import probes_for
from isobit.kernels.reference.calls import expect
from isobit.kernels.registry import OPS, OPS_OF_ORDER
from isobit.kernels.verdict_cache import ADMITTED, NOT_OFFERED, REFUSED, Verdict
from isobit.order import (
    Order,
    attention_order,
    linear_order,
    logprobs_order,
    norm_order,
    pointwise_order,
    sampling_order,
)

FACTS = {"device_class": "cpu", "cpu": "test"}
FP32 = linear_order(1, 1, "float32", "float32", "cpu")
SMALL_ORDERS: dict[str, Order] = {
    "linear": FP32,
    "attention": attention_order(4, "bfloat16", "cpu"),
    "norm": norm_order(40, "cpu"),
    "pointwise": pointwise_order("cpu"),
    "logprobs": logprobs_order(300, "cpu"),
    "sampling": sampling_order(300, "cpu"),
}


# ---- bitcompare


def test_first_difference_counts_signs_of_zero_and_not_nan_payloads() -> None:
    a = np.array([[1, 0.0], [np.nan, 3]], np.float32)
    b = a.copy()
    b.view(np.uint32)[1, 0] |= 5  # another NaN
    assert first_difference(a, b) is None
    b[1, 1] = np.nextafter(np.float32(3), np.float32(4))
    found = first_difference(a, b)
    assert found is not None and found.coordinate == (1, 1)
    assert (found.expected_bits, found.actual_bits) == ("0x40400000", "0x40400001")
    assert "at [1, 1]" in str(found) and "0x40400001" in str(found)
    b[0, 1] = -0.0
    found = first_difference(a, b)
    assert found is not None and (found.coordinate, found.actual_bits) == ((0, 1), "0x80000000")
    assert first_difference(a, a.astype(np.float64)) is not None and first_difference(a, a[:1]) is not None
    assert first_difference(np.array([True]), np.array([False])) is not None


# ---- wrong kernels


class Wrapped(CpuLibrary):
    """The C library with its linear changed by `change(self, x, packed weight [N, K], y)`."""

    def __init__(self, name: str, change: Callable[..., torch.Tensor]) -> None:
        super().__init__("auto", 1)
        self.name = name
        self.change = change
        self.weight = torch.empty(0)

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        self.weight, self.bias = weight, bias
        return super().pack_linear(weight, bias)

    def linear(self, x: torch.Tensor, packed: Any, activation_dtype: str, schedule: str,
               addend: torch.Tensor | None = None, out: torch.Tensor | None = None) -> torch.Tensor:  # fmt: skip
        before = None if addend is None else addend.clone()
        y = super().linear(x, packed, activation_dtype, "tile", addend, out)
        return self.change(self, x, y, before)


def reversed_sum(self: Wrapped, x: torch.Tensor, y: torch.Tensor, addend: torch.Tensor | None) -> torch.Tensor:
    packed = CpuLibrary.pack_linear(self, self.weight.flip(1).contiguous(), self.bias)
    return CpuLibrary.linear(self, x.flip(1).contiguous(), packed, "float32", "tile", addend)


def framework_matmul(self: Wrapped, x: torch.Tensor, y: torch.Tensor, addend: torch.Tensor | None) -> torch.Tensor:
    product = torch.from_numpy(x.numpy() @ self.weight.numpy().T)
    product = product if self.bias is None else product + self.bias
    return product if addend is None else addend + product


def nudged_if(condition: Callable[[Wrapped, torch.Tensor], bool], row: int, column: int) -> Callable[..., torch.Tensor]:
    """One bit of one element is wrong when `condition` holds."""

    def change(self: Wrapped, x: torch.Tensor, y: torch.Tensor, addend: torch.Tensor | None) -> torch.Tensor:
        if condition(self, x):
            y.view(torch.int32)[row, column] ^= 1
        return y

    return change


def raising(self: Wrapped, x: torch.Tensor, y: torch.Tensor, addend: torch.Tensor | None) -> torch.Tensor:
    raise RuntimeError("no such instruction")


WRONG_LINEARS = {
    "honest": lambda self, x, y, addend: y,
    "reversed": reversed_sum,
    "matmul": framework_matmul,
    "beyond 8 rows": nudged_if(lambda self, x: x.shape[0] > 8, 8, 0),
    "2 threads": nudged_if(lambda self, x: self.num_threads == 2, 0, 3),
    "last row": nudged_if(lambda self, x: x.shape[0] == 97, 96, 82),
    "misaligned": nudged_if(lambda self, x: x.data_ptr() % 16 != 0, 0, 0),
    "odd K": nudged_if(lambda self, x: x.shape[1] % 2 == 1, -1, -1),
    "raises": raising,
    "wrong shape": lambda self, x, y, addend: y[:, :-1],
    "not for me": lambda self, x, y, addend: y,
}


@pytest.fixture(scope="module")
def linear_table(tmp_path_factory: pytest.TempPathFactory) -> AdmissionTable:
    kernels = [declare(Wrapped(name, change), "linear") for name, change in WRONG_LINEARS.items()]
    kernels[-1] = dataclasses.replace(kernels[-1], claims=lambda order: "lacks the instruction")
    kernels.append(declare(Wrapped("gpu", WRONG_LINEARS["honest"]), "linear", device_classes=("sm90",)))
    table = admit(kernels, {"linear.o": FP32}, tmp_path_factory.mktemp("cache") / "a.json", FACTS)
    assert all(kernel.library.num_threads == 1 for kernel in kernels), "threads were not restored"
    return table


@pytest.mark.parametrize(
    ("name", "coordinate", "run"),
    [
        ("reversed", None, "1 rows, 1 threads"),
        ("matmul", None, "rows"),
        ("beyond 8 rows", (8, 0), "9 rows, 1 threads"),
        ("2 threads", (0, 3), "1 rows, 2 threads"),
        ("last row", (96, 82), "97 rows"),
        ("misaligned", (0, 0), "misaligned"),
        ("odd K", (0, 36 if FP32.k_block % 2 else 18), "K=257, 1 rows"),
        ("wrong shape", (), "1 rows"),
    ],
)
def test_wrong_linear_is_refused_at_its_coordinate(
    linear_table: AdmissionTable, name: str, coordinate: tuple[int, ...] | None, run: str
) -> None:
    verdict = linear_table.verdicts[Claim("linear", FP32, name, "only")]
    assert verdict.status == REFUSED and verdict.difference is not None
    assert run in verdict.detail, verdict
    if coordinate is not None:
        assert verdict.difference.coordinate == coordinate, verdict
    assert verdict.difference.expected_bits != verdict.difference.actual_bits
    with pytest.raises(ValueError, match="linear") as error:
        linear_table.require("linear", FP32, name, "only")
    for part in ("LinearOrder(", name, verdict.difference.actual_bits, verdict.detail, "Admitted on this machine"):
        assert part in str(error.value)


def test_only_the_honest_kernel_can_be_had(linear_table: AdmissionTable) -> None:
    assert linear_table.schedules("linear", FP32) == (("honest", "only"),)
    linear_table.require("linear", FP32, "honest", "only")
    assert linear_table.require_any("linear", FP32, "honest") == ("only",)
    for op, order, kernel, schedule in (
        ("linear", FP32, "honest", "other"),
        ("linear", FP32, "unheard of", "only"),
        ("linear", dataclasses.replace(FP32, k_block=128), "honest", "only"),
        ("embedding", FP32, "honest", "only"),
        ("linear", FP32, "not for me", ""),
    ):
        with pytest.raises(ValueError, match="is not admitted"):
            linear_table.require(op, order, kernel, schedule)
    for name in ("raises", "reversed", "not for me"):
        with pytest.raises(ValueError, match="is not admitted"):
            linear_table.require_any("linear", FP32, name)
    with pytest.raises(TypeError):
        linear_table.verdicts[Claim("linear", FP32, "raises", "only")] = Verdict(ADMITTED)  # type: ignore[index]


def test_exceptions_and_reasons_are_told(linear_table: AdmissionTable) -> None:
    raised = linear_table.verdicts[Claim("linear", FP32, "raises", "only")]
    assert raised.status == REFUSED and raised.detail == "raised RuntimeError: no such instruction"
    reason = linear_table.verdicts[Claim("linear", FP32, "not for me", "")]
    assert reason == Verdict(NOT_OFFERED, "lacks the instruction")
    assert linear_table.verdicts[Claim("linear", FP32, "gpu", "")].detail == "runs on sm90, not on cpu"


# ---- every op's probes can tell right from wrong


class Mutant(ReferenceLibrary):
    """The reference with the parts that no Order describes done another way."""

    def embedding(self, packed: Any, ids: torch.Tensor) -> torch.Tensor:
        return super().embedding(packed, ids.clamp(max=81))

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=1)
        return torch.nn.functional.silu(gate) * up

    def rope_and_cache(self, *arguments: Any) -> torch.Tensor:
        q = super().rope_and_cache(*arguments)
        arguments[5][0, -1, -1] = 3  # writes outside its slots
        return q

    def argmax(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        last = logits.shape[1] - 1 - logits.flip(1).argmax(1)
        return last.int(), super().argmax(logits)[1]  # ties to the highest id

    def top_logits(self, row: torch.Tensor, n: int) -> torch.Tensor:
        return torch.argsort(row.flip(0), descending=True, stable=True)[:n].neg().add(row.numel() - 1).int()

    def sample(self, row: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float, seed: int,
               position: int) -> int:  # fmt: skip
        return super().sample(row, temperature, top_k, top_p, min_p, seed, position + 1)


CHANGED_FIELDS: dict[str, dict[str, Any]] = {
    "linear": {"k_block": 128}, "attention": {"kv_block": 32, "lanes": 8}, "rms_norm": {"lanes": 8},
    "logprobs": {"lanes": 8},
}  # fmt: skip
OF_OP = {op: order for order in SMALL_ORDERS.values() for op in OPS_OF_ORDER[type(order)]}


@pytest.mark.parametrize("op", OPS)
def test_probes_pass_the_reference_and_refuse_a_mutant(op: str) -> None:
    """The twins agree (calls.py lays pages out as it should), and a small mistake shows in the first few runs."""
    order: Any = OF_OP[op]
    probes = probes_for(op, order)
    honest = ReferenceLibrary(order)
    for probe in probes[:3]:
        truth = expect(op, order, probe.inputs)
        for run in probe.runs[:: max(1, len(probe.runs) // 5)]:
            inputs = probe.select(run.rows)
            outputs = call(honest, op, order, "only", inputs, run.misaligned, prepare(honest, op, order, inputs))
            for name, expected in truth.items():
                assert first_difference(expected[list(run.rows)], outputs[name]) is None, (probe.label, run, name)
    if op in CHANGED_FIELDS:
        wrong: ReferenceLibrary = ReferenceLibrary(dataclasses.replace(order, **CHANGED_FIELDS[op]))
    else:
        wrong = Mutant(order)
    truths = [(probe, expect(op, order, probe.inputs)) for probe in probes[:2]]
    verdict, lasting = admission._prove(declare(wrong, op), order, "only", truths)
    assert verdict.status == REFUSED and lasting and verdict.difference is not None, verdict


def test_inputs_are_integers_made_float_and_order_sensitive() -> None:
    for op in OPS:
        first, again = probes_for(op, OF_OP[op])[0], probes_for(op, OF_OP[op])[0]
        for name in first.row_inputs:
            if first.inputs[name] is not None and first.inputs[name].dtype != object:
                assert first.inputs[name].tobytes() == again.inputs[name].tobytes()
    x = probes_for("linear", FP32)[0].inputs["x"]
    magnitudes = np.abs(x[x != 0])
    assert (magnitudes < 2.0**-126).any() and np.signbit(x[x == 0]).any() and not np.signbit(x[x == 0]).all()
    assert magnitudes.max() > 2.0**3 and (magnitudes < 2.0**-100).any()


# ---- the C library and the command


def test_this_cpus_library_is_admitted_and_a_second_start_proves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = CpuLibrary("auto", 2)
    orders = {name: order for name, order in SMALL_ORDERS.items() if name != "attention"}
    orders["attention"] = attention_order(64, "bfloat16", "cpu")
    table = admit(library_kernels(library), orders, tmp_path / "a.json", host_facts())
    assert {verdict.status for verdict in table.verdicts.values()} == {ADMITTED}, table.verdicts
    assert library.num_threads == 2
    for order in orders.values():
        for op in OPS_OF_ORDER[type(order)]:
            assert table.require_all(op, order, library.name)

    def forbidden(*arguments: Any) -> Any:
        raise AssertionError("proved again")

    monkeypatch.setattr(admission, "expect", forbidden)
    monkeypatch.setattr(admission, "call", forbidden)
    warm = admit(library_kernels(library), orders, tmp_path / "a.json", host_facts())
    assert dict(warm.verdicts) == dict(table.verdicts)


def test_library_claims_its_own_orders_only() -> None:
    for kernel in library_kernels(CpuLibrary("auto", 1)):
        own = FP32 if kernel.op in ("linear", "embedding") else OF_OP[kernel.op]
        changed = {"k_slices": 2} if kernel.op in ("linear", "embedding") else None
        if kernel.op in ("attention", "rope_and_cache"):
            changed = {"kv_split_size": 64}
        if changed:
            reason = kernel.claims(dataclasses.replace(own, **changed))  # type: ignore[type-var]
            assert reason is not None and "computes" in reason
        elif kernel.op not in ("linear", "embedding"):
            assert kernel.claims(own) is None


def test_doctor_prints_verdicts_and_fails_where_an_op_has_no_kernel(
    linear_table: AdmissionTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = doctor.report(linear_table, {"o": FP32}, {"avx512": "this CPU lacks avx512f"})
    assert [gap["op"] for gap in found["missing"]] == ["embedding"]
    text = doctor.format_report(found)
    for part in (
        "at [96, 82] expected",
        "lacks the instruction",
        "library avx512 is not used",
        "NO KERNEL for embedding",
    ):
        assert part in text
    lines = {verdict["kernel"]: verdict for verdict in json.loads(json.dumps(found))["verdicts"]}
    assert lines["beyond 8 rows"]["difference"]["coordinate"] == [8, 0]

    monkeypatch.setattr(doctor, "doctor_orders", lambda model: {"norm": SMALL_ORDERS["norm"]})
    assert doctor.run_doctor("any", cache_path=tmp_path / "d.json", progress=False) == 0
    assert "NormOrder(40, 16)" in capsys.readouterr().out
    unknown = dataclasses.replace(SMALL_ORDERS["norm"], lanes=8)  # type: ignore[type-var]
    monkeypatch.setattr(doctor, "doctor_orders", lambda model: {"norm": unknown})
    assert doctor.run_doctor("any", as_json=True, cache_path=tmp_path / "d.json") == 1
    printed = json.loads(capsys.readouterr().out)
    assert printed["missing"] == [{"op": "rms_norm", "order": "NormOrder(40, 8)"}]
    assert {verdict["status"] for verdict in printed["verdicts"]} == {NOT_OFFERED}
