"""Verdicts on disk: remembered under all they depend on, rebuilt from any damage, never trusted without proof."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from reference_library import ReferenceLibrary, declare

from isobit.kernels import admission
from isobit.kernels.admission import AdmissionTable, Claim, admit
from isobit.kernels.registry import Kernel
from isobit.kernels.verdict_cache import ADMITTED, REFUSED, Verdict
from isobit.order import Order, norm_order

FACTS = {"device_class": "cpu", "cpu": "test"}
NORM = norm_order(40, "cpu")
WRONG_CALLS = 3  # after so many a norm of 8 lanes shows


def verdict_of(table: AdmissionTable, kernel: Kernel, order: Order) -> Verdict:
    return table.verdicts[Claim(kernel.op, order, kernel.name, kernel.schedules[0])]


def prove_norm(
    path: Path, wrong: bool = False, facts: Mapping[str, str] = FACTS, source_hash: str = "1"
) -> tuple[int, str]:
    """(calls made to the kernel, status)."""
    library = ReferenceLibrary(dataclasses.replace(NORM, lanes=8) if wrong else NORM)
    kernel = declare(library, "rms_norm", source_hash=source_hash)
    table = admit([kernel], {"norm": NORM}, path, facts)
    return library.num_calls, verdict_of(table, kernel, NORM).status


def test_verdicts_are_remembered_under_all_they_depend_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "deep" / "folder" / "a.json"
    proven, status = prove_norm(path)
    assert proven > 30 and status == ADMITTED
    assert prove_norm(path) == (0, ADMITTED)
    assert prove_norm(path, facts={**FACTS, "torch": "other"}) == (proven, ADMITTED)
    # same name, other source, now wrong: proven again, refused, and remembered as refused
    assert prove_norm(path, wrong=True, source_hash="2") == (WRONG_CALLS, REFUSED)
    assert prove_norm(path, wrong=True, source_hash="2") == (0, REFUSED)
    assert prove_norm(path) == (0, ADMITTED)
    for name, value in (("NUMERICS_VERSION", 10**6), ("PROBE_VERSION", 10**6), ("_sources_hash", lambda: "other")):
        with monkeypatch.context() as patch:
            patch.setattr(admission, name, value)
            assert prove_norm(path) == (proven, ADMITTED), name
    assert [file.name for file in path.parent.iterdir()] == ["a.json"], "a temporary file was left"


def promote(text: str) -> str:
    return text.replace('"status": "refused"', '"status": "admitted"')


def change_entry(change: Callable[[dict[str, Any]], Any]) -> Callable[[str], str]:
    def apply(text: str) -> str:
        data = json.loads(text)
        for name, entry in data["verdicts"].items():
            data["verdicts"][name] = change(entry)
        return json.dumps(data)

    return apply


DAMAGE: dict[str, Callable[[str], str]] = {
    "empty": lambda text: "",
    "truncated": lambda text: text[: len(text) // 2],
    "one byte short": lambda text: text[:-1],
    "not json": lambda text: "hello",
    "a list": lambda text: "[1, 2]",
    "null": lambda text: "null",
    "deep": lambda text: "[" * 100_000,
    "other format": lambda text: text.replace('"format": 1', '"format": 2'),
    "verdicts a list": lambda text: '{"format": 1, "verdicts": []}',
    "entries strings": change_entry(lambda entry: "admitted"),
    "refused made admitted": promote,
    "difference dropped": change_entry(lambda entry: {**entry, "verdict": {"status": "admitted"}}),
    "verdict a number": change_entry(lambda entry: {**entry, "verdict": 1}),
    "digest gone": change_entry(lambda entry: {name: entry[name] for name in ("key", "verdict")}),
    "another key": change_entry(lambda entry: {**entry, "key": {**entry["key"], "op": "linear"}}),
}


@pytest.mark.parametrize("damage", list(DAMAGE))
def test_a_damaged_cache_is_rebuilt(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "a.json"
    assert prove_norm(path, wrong=True) == (WRONG_CALLS, REFUSED)
    text = path.read_text()
    assert DAMAGE[damage](text) != text
    path.write_text(DAMAGE[damage](text))
    assert prove_norm(path, wrong=True) == (WRONG_CALLS, REFUSED)
    assert prove_norm(path, wrong=True) == (0, REFUSED), "it was not rebuilt"


def test_bytes_that_are_no_text_and_entries_under_a_foreign_name_are_not_trusted(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(bytes(range(256)))
    assert prove_norm(path, wrong=True) == (WRONG_CALLS, REFUSED)
    admitted = tmp_path / "b.json"
    prove_norm(admitted, source_hash="2")
    [(refused_name, _)] = json.loads(path.read_text())["verdicts"].items()
    [(_, entry)] = json.loads(admitted.read_text())["verdicts"].items()
    path.write_text(json.dumps({"format": 1, "verdicts": {refused_name: entry}}))
    assert prove_norm(path, wrong=True) == (WRONG_CALLS, REFUSED)


@pytest.mark.parametrize("place", ["file in the way", "a folder"])
def test_a_cache_that_cannot_be_written_costs_time_only(tmp_path: Path, place: str) -> None:
    path = tmp_path / "way" / "a.json"
    if place == "a folder":
        path.mkdir(parents=True)
    else:
        path.parent.write_text("not a folder")
    for _ in range(2):
        with pytest.warns(UserWarning, match="cannot be kept"):
            calls, status = prove_norm(path)
        assert calls > 30 and status == ADMITTED


def test_exceptions_are_not_remembered(tmp_path: Path) -> None:
    class OutOfMemory(ReferenceLibrary):
        def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
            raise MemoryError("just now")

    kernel = declare(OutOfMemory(NORM), "rms_norm")
    with warnings.catch_warnings():
        table = admit([kernel], {"norm": NORM}, tmp_path / "a.json", FACTS)
    assert "MemoryError: just now" in verdict_of(table, kernel, NORM).detail
    assert prove_norm(tmp_path / "a.json")[1] == ADMITTED
