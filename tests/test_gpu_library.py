"""The GPU's kernel library, its checks and its proof, in Triton's interpreter where there is no GPU.

What the interpreter cannot do (tensor-core arithmetic, Gluon, vendor libraries) is proven on the card by `tests/gpu`.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from isobit.cli import main
from isobit.config import EngineConfig
from isobit.order import (
    MmaLinearOrder,
    Order,
    logprobs_order,
    mma_attention_order,
    norm_order,
    pointwise_order,
    sampling_order,
)

pytest.importorskip("triton", reason="Triton is not installed: pip install -e '.[dev]'")

from isobit.kernels.gpu.checks import Check, device_floats, difference
from isobit.kernels.gpu.library import GpuLibrary
from isobit.kernels.gpu.probes import checks_for
from isobit.kernels.gpu.prove import prove_checks
from isobit.kernels.gpu.tune import Candidate, TuningCache, choose_schedules
from isobit.kernels.triton.linear_call import LinearWorkspace
from isobit.kernels.verdict_cache import ADMITTED, REFUSED
from isobit.loading import load_model
from isobit.model_config import load_model_config
from isobit.plan import DeviceFacts, resolve_plan
from tests import interpreter

CASES: list[tuple[str, Order]] = [
    ("embedding", MmaLinearOrder(40, 64, "bfloat16", "float32")),
    ("rms_norm", norm_order(64, "sm90")),
    ("rms_norm", norm_order(577, "sm90")),
    ("silu_mul", pointwise_order("sm90")),
    ("rope_and_cache", mma_attention_order(16, 16, "bfloat16", "sm90")),
    ("argmax", sampling_order(503, "sm90")),
    ("logprobs", logprobs_order(5003, "sm90")),
    ("top_logits", logprobs_order(503, "sm90")),
    ("sample", sampling_order(503, "sm90")),
]


@pytest.fixture(scope="module")
def library() -> GpuLibrary:
    return GpuLibrary("sm90", "bfloat16", torch.device(interpreter.DEVICE))


@pytest.mark.parametrize(("op", "order"), CASES, ids=[f"{op}-{i}" for i, (op, _) in enumerate(CASES)])
def test_kernels_give_the_reference_bits(library: GpuLibrary, op: str, order: Order) -> None:
    checks = list(itertools.islice(checks_for(library, op, order, "only", {}), 3))
    assert len(checks) == 3
    verdict, lasting = prove_checks(iter(checks))
    assert verdict.status == ADMITTED and lasting, str(verdict)


@pytest.mark.parametrize("shape", [(72, 256, "float32", 2), (37, 44, "float16", 1)], ids=str)
def test_linears_run_under_every_schedule(shape: tuple[int, int, str, int]) -> None:
    """For the plumbing: the interpreter adds in another order than a tensor core, and has no bfloat16 products."""
    library = GpuLibrary("sm90", "float16", torch.device(interpreter.DEVICE))
    n, k, output_dtype, k_slices = shape
    order = MmaLinearOrder(n, k, "float16", output_dtype, k_slices)
    x, weight = (device_floats(i, (size, k), torch.float16, library.device, high=1) for i, size in enumerate((5, n)))
    packed, truth = library.make_weight(order, weight), x.double() @ weight.double().T
    magnitude = x.double().abs() @ weight.double().abs().T
    tried = 0
    for schedule in library.schedules("linear", order):
        least, most = library.linear_rows(order, schedule)
        if least <= 5 <= most:
            y = library.linear(x, packed, "float16", schedule)
            assert ((y.double() - truth).abs() <= 2.0**-10 * magnitude + 1e-6).all(), schedule
            tried += 1
    assert tried >= 1
    with pytest.raises(ValueError, match="has no schedule 'fast'"):
        library.linear(x, packed, "float16", "fast")


def test_a_wrong_kernel_is_refused_by_coordinate(library: GpuLibrary) -> None:
    expected = {"y": device_floats(1, (5, 7), torch.bfloat16, library.device)}
    wrong = expected["y"].clone()
    wrong[3, 2] = -wrong[3, 2]
    verdict, lasting = prove_checks(iter([Check("planted", lambda: {"y": wrong}, expected)]))
    assert verdict.status == REFUSED and lasting
    assert verdict.difference is not None and verdict.difference.coordinate == (3, 2)
    verdict, lasting = prove_checks(iter([Check("planted", lambda: {"y": wrong.float()}, expected)]))
    assert verdict.status == REFUSED and "bfloat16" in str(verdict), "another dtype is another answer"

    def broken() -> dict[str, Any]:
        raise RuntimeError("no such kernel image")

    verdict, lasting = prove_checks(iter([Check("planted", broken, expected)]))
    assert verdict.status == REFUSED and not lasting and "no such kernel image" in verdict.detail


def test_nan_equals_nan_and_zeros_of_two_signs_differ() -> None:
    x = torch.tensor([torch.nan, 0.0])
    assert difference(x, x.clone()) is None
    found = difference(x, torch.tensor([torch.nan, -0.0]))
    assert found is not None and found.coordinate == (1,)


def test_schedules_are_chosen_for_every_number_of_rows() -> None:
    def never(rows: int, times: int) -> None:
        raise AssertionError("one candidate need not be timed")

    ladder = choose_schedules([Candidate("few", 1, 16, never), Candidate("many", 17, sys.maxsize, never)])
    assert ladder == ((16, "few"), (sys.maxsize, "many"))
    with pytest.raises(ValueError, match="no admitted schedule takes 1 to 1 rows"):
        choose_schedules([Candidate("many", 17, sys.maxsize, never)])


def test_no_schedule_runs_outside_the_rows_it_was_proven_for(library: GpuLibrary) -> None:
    """Also where it is the only one admitted."""
    order = MmaLinearOrder(256, 256, "bfloat16", "float32")
    [large] = [name for name in library.schedules("linear", order) if library.linear_rows(order, name)[0] > 200]
    with pytest.raises(ValueError, match=f"no admitted schedule takes 1 to 1 rows; there are: .'{large}'."):
        library._linears._timed(order, [large])


def test_a_remembered_ladder_is_used_only_if_it_is_proven(
    library: GpuLibrary, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    linears, order = library._linears, MmaLinearOrder(256, 256, "bfloat16", "float32")
    names = list(library.schedules("linear", order))
    few = next(name for name in names if library.linear_rows(order, name)[1] < 100)
    most, anew = library.linear_rows(order, few)[1], ((sys.maxsize, "timed anew"),)
    [any_rows] = [name for name in names if library.linear_rows(order, name)[1] == sys.maxsize]
    monkeypatch.setattr("isobit.kernels.gpu.linear.proof_facts", lambda device_class: {})
    monkeypatch.setattr(linears, "_timed", lambda *_: anew)
    for wrong in ((), ((most, few),), ((sys.maxsize, few),), ((most, few), (sys.maxsize, any_rows)), ((5, "gone"),)):
        monkeypatch.setattr(TuningCache, "get", lambda self, key, wrong=wrong: wrong)
        assert linears.ladder(order, names, tmp_path / "tuning.json") == anew, wrong
    steps, least = [], 1
    while least < sys.maxsize:
        name = next(n for n in names if library.linear_rows(order, n)[0] <= least <= library.linear_rows(order, n)[1])
        steps.append((library.linear_rows(order, name)[1], name))
        least = steps[-1][0] + 1
    monkeypatch.setattr(TuningCache, "get", lambda self, key: tuple(steps))
    assert linears.ladder(order, names, tmp_path / "tuning.json") == tuple(steps)


def test_room_for_slices_never_shrinks_under_a_thread_that_asked_for_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Schedules are compiled on several threads that share the room; a kernel writes as far as it asked for."""
    workspace, small_asked = LinearWorkspace(torch.device("cpu")), threading.Event()
    empty = torch.empty

    def slow_for_large(size: int, **options: Any) -> torch.Tensor:
        if size > 100:
            small_asked.wait(1)
        else:
            small_asked.set()
            time.sleep(0.1)
        return empty(size, **options)

    monkeypatch.setattr(torch, "empty", slow_for_large)
    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(workspace.reserve, size, size) for size in (1000, 10)]:
            future.result()
    assert workspace.partials.numel() >= 1000 and workspace.counters.numel() >= 1000


def test_a_damaged_tuning_file_is_as_good_as_none(tmp_path: Any) -> None:
    path = tmp_path / "tuning.json"
    cache = TuningCache(path)
    cache.put({"order": 1}, ((4, "a"), (9, "b")))
    assert TuningCache(path).get({"order": 1}) == ((4, "a"), (9, "b"))
    assert TuningCache(path).get({"order": 2}) is None
    path.write_text(path.read_text()[:-9])
    assert TuningCache(path).get({"order": 1}) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_a_gpu_is_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="no NVIDIA GPU is visible to torch; use device=cpu"):
        load_model(EngineConfig(device="cuda"))
    for command in (["doctor", "--device", "cuda"], ["plan", "--model", "smollm2", "--device", "cuda"]):
        assert main(command) == 2
        assert capsys.readouterr().err.startswith("error: device=cuda: no NVIDIA GPU is visible")


def test_options_that_a_gpu_cannot_keep_are_refused() -> None:
    facts, model = DeviceFacts("sm90", ("sm90",), 8, 141 << 30), load_model_config("smollm2")
    for options, message in (
        ({"cpu_library": "avx2"}, "cpu_library=avx2 is for device=cpu"),
        ({"num_threads": 2}, "num_threads=2 is for device=cpu"),
        ({"kv_cache_dtype": "float16"}, "kv_cache_dtype=float16 with dtype=bfloat16 has no Order on sm90"),
    ):
        with pytest.raises(ValueError, match=message):
            resolve_plan(EngineConfig(device="cuda", **options), model, facts)
    with pytest.raises(ValueError, match="dtype='float32': on cuda supported are auto, bfloat16, float16"):
        EngineConfig(device="cuda", dtype="float32")
    plan = resolve_plan(EngineConfig(device="cuda"), model, facts)
    assert (plan.dtype, plan.chunked_prefill_size, plan.kernel_library) == ("bfloat16", 8192, "sm90")
