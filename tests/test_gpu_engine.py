"""The engine over the GPU's library, in Triton's interpreter where there is no GPU: the same path, slowly.

The interpreter adds inside a product in an order of its own, so logits are compared by size; bits are compared on the
card (`tests/gpu/test_relations.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: pip install -e '.[dev]'")

from isobit import loading
from isobit.config import EngineConfig
from isobit.kernels.admission import AdmissionTable, Claim
from isobit.kernels.gpu.claims import gpu_kernels
from isobit.kernels.gpu.library import GpuLibrary
from isobit.kernels.interface import Ladder
from isobit.kernels.verdict_cache import ADMITTED, Verdict
from isobit.order import Order
from isobit.plan import DeviceFacts, Plan
from isobit.request import SamplingParams
from tests import interpreter
from tests.harness import Arrival, all_logits, make_prompt, run_with
from tests.test_models import relative_error, transformers_logits
from tests.tiny import make_tiny

pytestmark = pytest.mark.skipif(not interpreter.INTERPRETED, reason="the card has tests of its own")


class InterpretedLibrary(GpuLibrary):
    """Without what the interpreter cannot do: Gluon kernels, and timing."""

    def attention(self, *arguments: Any, schedule: str = "auto") -> torch.Tensor:
        return super().attention(*arguments, schedule="split-triton")

    def linear_ladder(self, order: Order, admitted: Any) -> Ladder:
        steps = sorted((self.linear_rows(order, name)[1], name) for name in admitted)  # type: ignore[arg-type]
        return tuple(dict(steps).items())


def open_kernels(plan: Plan) -> tuple[GpuLibrary, AdmissionTable]:
    library = InterpretedLibrary(plan.kernel_library, plan.dtype, torch.device("cpu"))
    verdicts = {
        Claim(kernel.op, order, kernel.name, schedule): Verdict(ADMITTED)
        for order in plan.orders.values()
        for kernel in gpu_kernels(library, plan.orders)
        if kernel.claims(order) is None
        for schedule in kernel.schedules
    }
    return library, AdmissionTable(verdicts)


def test_a_model_runs_and_its_logits_are_those_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "device_facts", lambda device: DeviceFacts("sm90", ("sm90",), 2, 1 << 34))
    monkeypatch.setattr(loading, "open_kernels", open_kernels)
    folder = make_tiny("qwen3", tmp_path)
    config = EngineConfig(
        model=str(folder), device="cuda", dtype="float16", context_length=128, max_total_tokens=512, random_seed=0
    )
    loaded = loading.load_model(config)
    prompt = make_prompt(7, loaded.model_config.vocab_size)
    [ours] = all_logits(loaded, [prompt])
    assert relative_error(ours, transformers_logits(folder, prompt)) < 0.01
    greedy = SamplingParams(max_tokens=2, temperature=0.0, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    drawn = SamplingParams(max_tokens=2, temperature=0.9, seed=3, top_p=0.9, repetition_penalty=1.3, ignore_eos=True)
    script = [Arrival("greedy", prompt, greedy), Arrival("drawn", prompt[:3], drawn)]
    run = run_with(loaded, config, script, chunked_prefill_size=4)
    assert run.stats.max_step_requests == 2, "no batch was formed"
    first = run.results["greedy"]
    assert first.token_ids[0] == int(ours[-1].argmax()) and len(run.results["drawn"].token_ids) == 2
    assert first.prompt_logprobs is not None and len(first.prompt_logprobs) == 7
    expected = ours[-1].double().log_softmax(0)[first.token_ids[0]]
    assert abs(first.logprobs[0].logprob - float(expected)) < 0.01
