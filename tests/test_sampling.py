"""Sampling through the engine: seeds, company, ties, tiny temperatures, penalties, NaN (bug cases E, and 145).

The sampler's arithmetic is proven against its Order in test_cpu_head.py; here it is the path from params to tokens.
"""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from isobit.config import EngineConfig
from isobit.engine import LLMEngine
from isobit.loading import LoadedModel, load_model
from isobit.request import SamplingParams
from tests.harness import Arrival, Result, all_logits, make_prompt, run_script, run_with
from tests.tiny import make_tiny


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = make_tiny("llama", tmp_path_factory.mktemp("llama"))
    return EngineConfig(model=str(folder), context_length=512, random_seed=0)


@pytest.fixture(scope="module")
def loaded(config: EngineConfig) -> LoadedModel:
    return load_model(config)


def ask(loaded: LoadedModel, config: EngineConfig, params: SamplingParams, salt: int = 0, length: int = 20) -> Result:
    prompt = make_prompt(length, loaded.model_config.vocab_size, salt)
    return run_with(loaded, config, [Arrival("r", prompt, params)]).results["r"]


SEEDED = SamplingParams(max_tokens=20, temperature=0.8, seed=42, logprobs=0, ignore_eos=True)


@pytest.mark.parametrize("mates", ["seeded", "unseeded", "greedy"])
def test_case_33_company_does_not_take_the_seed(loaded: LoadedModel, config: EngineConfig, mates: str) -> None:
    kinds = {
        "seeded": replace(SEEDED, seed=7),
        "unseeded": replace(SEEDED, seed=None),
        "greedy": replace(SEEDED, temperature=0.0),
    }
    prompt = make_prompt(20, loaded.model_config.vocab_size)
    solo = ask(loaded, config, SEEDED).bits
    script = [Arrival(f"mate{index}", make_prompt(5 + index, 500, 9), kinds[mates]) for index in range(7)]
    for place in (0, 2, 3, 5, 7):
        order = [*script[:place], Arrival("r", prompt, SEEDED), *script[place:]]
        run = run_with(loaded, config, order, random_seed=place)  # unseeded mates get other seeds each time
        assert run.stats.max_step_requests == 8
        assert run.results["r"].bits == solo


def test_case_38_concurrent_seeds_are_told_apart(loaded: LoadedModel, config: EngineConfig) -> None:
    prompt = make_prompt(20, loaded.model_config.vocab_size)
    script = [Arrival(f"s{seed}", prompt, replace(SEEDED, seed=seed, temperature=1.5)) for seed in range(10)]
    after = [replace(arrival, name=f"again {arrival.name}", at_step=30) for arrival in script[::-1]]  # in their slots
    run = run_with(loaded, config, [*script, *after])
    assert run.stats.max_step_requests == 10
    texts = {tuple(result.token_ids) for result in run.results.values()}
    assert len(texts) >= 9
    for seed in range(10):
        solo = ask(loaded, config, replace(SEEDED, seed=seed, temperature=1.5))
        assert run.results[f"s{seed}"].bits == run.results[f"again s{seed}"].bits == solo.bits


def test_unseeded_requests_differ_and_random_seed_replays_them(config: EngineConfig, loaded: LoadedModel) -> None:
    prompt = make_prompt(20, loaded.model_config.vocab_size)
    free = SamplingParams(max_tokens=20, temperature=1.5, ignore_eos=True)
    script = [Arrival(f"u{index}", prompt, free) for index in range(20)]
    first = run_with(loaded, config, script, random_seed=5).results
    again = run_with(loaded, config, script, random_seed=5).results
    other = run_with(loaded, config, script, random_seed=None).results
    assert len({tuple(result.token_ids) for result in first.values()}) >= 15
    assert [result.bits for result in first.values()] == [result.bits for result in again.values()]
    assert [result.bits for result in first.values()] != [result.bits for result in other.values()]


def test_case_42_top_k_1_is_greedy(loaded: LoadedModel, config: EngineConfig) -> None:
    for salt in range(50):
        greedy = ask(loaded, config, SamplingParams(max_tokens=8, temperature=0.0), salt)
        top_1 = ask(loaded, config, SamplingParams(max_tokens=8, temperature=1.0, top_k=1, seed=salt), salt)
        filtered = ask(loaded, config, SamplingParams(max_tokens=8, temperature=0.0, top_k=50, top_p=0.1), salt)
        assert greedy.token_ids == top_1.token_ids == filtered.token_ids


def test_case_43_exact_ties_go_to_the_lower_id(tmp_path: Path) -> None:
    """Two output rows of the checkpoint are made copies and lifted above all others: 102 answers, in batches of six."""
    from safetensors.torch import load_file, save_file

    folder = make_tiny("llama", tmp_path / "tied", tie_word_embeddings=False)
    tensors = load_file(folder / "model.safetensors")
    head = tensors["lm_head.weight"]
    head[301] = head[77]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = EngineConfig(model=str(folder), dtype="float32", context_length=256)
    tied = load_model(config)
    bias = {77: 100.0, 301: 100.0}
    logits = all_logits(tied, [make_prompt(20, 500)])[0][-1]
    assert logits[77] == logits[301]
    for params in (
        SamplingParams(max_tokens=6, temperature=0.0, logit_bias=bias, ignore_eos=True),
        *(SamplingParams(max_tokens=6, top_k=1, seed=seed, logit_bias=bias, ignore_eos=True) for seed in range(16)),
    ):
        prompts = [Arrival(f"r{index}", make_prompt(20 + index, 500), params) for index in range(6)]
        for result in run_with(tied, config, prompts).results.values():
            assert result.token_ids == [77] * 6


@pytest.mark.parametrize("temperature", [1e-2, 1e-4, 1e-6, 1e-38, 1e-300])
def test_case_45_tiny_temperatures(loaded: LoadedModel, config: EngineConfig, temperature: float) -> None:
    params = SamplingParams(max_tokens=10, temperature=temperature, seed=3, logprobs=2, ignore_eos=True)
    result = ask(loaded, config, params)
    assert len(result.token_ids) == len(result.logprobs) == 10
    assert all(math.isfinite(entry.logprob) for entry in result.logprobs)
    if temperature <= 1e-4:
        assert result.token_ids == ask(loaded, config, replace(params, temperature=0.0)).token_ids


def test_case_47_penalties_beside_none(loaded: LoadedModel, config: EngineConfig) -> None:
    prompt = make_prompt(30, loaded.model_config.vocab_size)
    plain = SamplingParams(max_tokens=16, temperature=0.0, logprobs=0, ignore_eos=True)
    penalised = replace(plain, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5)
    solo = [ask(loaded, config, params, length=30).bits for params in (plain, penalised)]
    assert solo[0] != solo[1], "the penalty changed nothing"
    for order in ((0, 1), (1, 0)):
        both = [Arrival(str(place), prompt, (plain, penalised)[place], at_step=at) for at, place in enumerate(order)]
        run = run_with(loaded, config, both)
        assert [run.results["0"].bits, run.results["1"].bits] == solo


def test_case_49_temperature_follows_theory(loaded: LoadedModel, config: EngineConfig) -> None:
    """The first token's frequencies over 600 seeds against softmax(logits / T) in float64, by total variation."""
    prompt = make_prompt(20, loaded.model_config.vocab_size)
    logits = all_logits(loaded, [prompt])[0][-1].double()
    entropies = []
    for temperature in (0.1, 1.0, 5.0):
        expected = torch.softmax(logits / temperature, dim=0)
        params = SamplingParams(max_tokens=1, temperature=temperature)
        script = [Arrival(str(seed), prompt, replace(params, seed=seed)) for seed in range(600)]
        run = run_with(loaded, config, script, max_queued_requests=600, disable_radix_cache=False)
        counts = Counter(result.token_ids[0] for result in run.results.values())
        best = expected.argsort(descending=True)[:5].tolist()
        for token_id in best:
            probability = float(expected[token_id])
            deviation = math.sqrt(600 * probability * (1 - probability)) + 1
            assert abs(counts[token_id] - 600 * probability) < 4.5 * deviation
        entropies.append(len(counts))
    assert entropies == sorted(entropies) and entropies[0] < entropies[2]


def test_case_22_logprobs_are_the_raw_models(loaded: LoadedModel, config: EngineConfig) -> None:
    prompt = make_prompt(20, loaded.model_config.vocab_size)
    logits = all_logits(loaded, [prompt])[0][-1].double()
    expected = torch.log_softmax(logits, dim=0)
    seen = set()
    for params in (
        SamplingParams(max_tokens=1, temperature=0.0, logprobs=4),
        SamplingParams(max_tokens=1, temperature=5.0, seed=1, logprobs=4),
        SamplingParams(max_tokens=1, temperature=0.5, top_k=3, top_p=0.5, min_p=0.1, seed=2, logprobs=4),
        SamplingParams(max_tokens=1, temperature=0.0, logit_bias={9: 50.0}, logprobs=4),
    ):
        entry = ask(loaded, config, params).logprobs[0]
        assert abs(entry.logprob - float(expected[entry.token_id])) < 1e-5
        seen.add(struct.pack("<4f", *(value for _, value in entry.top)))
    assert len(seen) == 1, "alternatives moved with temperature, filters or bias"


def test_min_p_top_p_and_min_tokens_hold(loaded: LoadedModel, config: EngineConfig) -> None:
    """Case 36: no token below min_p times the best is drawn with a seed, beside top_k and top_p."""
    prompt = make_prompt(20, loaded.model_config.vocab_size)
    probabilities = torch.softmax(all_logits(loaded, [prompt])[0][-1].double(), dim=0)
    allowed = {int(i) for i in (probabilities >= 0.5 * probabilities.max()).nonzero()}
    drawn = {
        ask(loaded, config, SamplingParams(max_tokens=1, min_p=0.5, top_k=40, top_p=0.99, seed=seed)).token_ids[0]
        for seed in range(60)
    }
    assert drawn <= allowed
    greedy = ask(loaded, config, SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)).token_ids
    stop = greedy[2]
    params = SamplingParams(max_tokens=12, temperature=0.0, stop_token_ids=(stop,), ignore_eos=True)
    stopped = ask(loaded, config, params)
    assert stopped.token_ids == greedy[: greedy.index(stop) + 1] and stopped.finish_reason == "stop"
    forced = ask(loaded, config, replace(params, min_tokens=8))
    assert stop not in forced.token_ids[:8] and len(forced.token_ids) >= 8


def test_samples_of_one_request_differ_and_are_reproducible(loaded: LoadedModel, config: EngineConfig) -> None:
    parent = replace(SEEDED, seed=5, n=4, temperature=1.5)
    children = [ask(loaded, config, parent.child(index)) for index in range(4)]
    assert len({tuple(child.token_ids) for child in children}) == 4
    assert children[0].bits == ask(loaded, config, replace(parent, n=1)).bits
    assert [child.bits for child in children] == [ask(loaded, config, parent.child(i)).bits for i in range(4)]


def test_case_145_overflow_is_an_error_not_token_zero(tmp_path: Path) -> None:
    """A token whose embedding overflowed fails its request naming NaN; mates and later requests are untouched."""
    from safetensors.torch import load_file, save_file

    folder = make_tiny("llama", tmp_path / "overflow")
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    embedding[13] = torch.inf
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = EngineConfig(model=str(folder), dtype="float32", context_length=256)
    broken = load_model(config)
    params = SamplingParams(max_tokens=4, temperature=0.0, logprobs=0)
    clean = tuple(token for token in make_prompt(90, 500) if token != 13)[:70]
    solo = run_with(broken, config, [Arrival("clean", clean, params)]).results["clean"].bits
    bad = Arrival("bad", (*clean[:66], 13, *clean[66:]), params)
    run = run_with(broken, config, [Arrival("clean", clean, params), bad, replace(bad, name="later", at_step=5),
                                    Arrival("after", clean, params, at_step=9)])  # fmt: skip
    assert run.results["bad"].finish_reason == run.results["later"].finish_reason == "error"
    assert "NaN" in str(run.results["bad"].error) and not run.results["bad"].token_ids
    assert run.results["clean"].bits == run.results["after"].bits == solo


def test_a_model_that_overflows_float32_answers_nothing(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = make_tiny("llama", tmp_path / "scaled")
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if "gate_proj" in name or "up_proj" in name:
            tensor.mul_(1e25)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = EngineConfig(model=str(folder), dtype="float32", context_length=256)
    params = SamplingParams(max_tokens=4, temperature=0.0, prompt_logprobs=0)
    result = run_with(load_model(config), config, [Arrival("r", make_prompt(9, 500), params)]).results["r"]
    assert result.finish_reason == "error" and not result.token_ids


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ((), SamplingParams(), "no tokens"),
        ((5, -1), SamplingParams(), "-1 is outside the vocabulary"),
        ((5, 10**9), SamplingParams(), "outside the vocabulary"),
        ((True,), SamplingParams(), "whole number"),
        ((5,) * 513, SamplingParams(), "513 tokens and the context length is 512"),
        ((5,) * 512, SamplingParams(), "no room to generate"),
        ((5,), SamplingParams(logit_bias={499999: 1.0}), "logit_bias token id 499999"),
        ((5,), SamplingParams(stop_token_ids=(10**6,)), "stop_token_ids entry 1000000"),
        ((5,), SamplingParams(logprobs=10**6), "above the limit of 64"),
        ((5,), SamplingParams(n=2), "one sample"),
    ],
)
def test_bad_requests_change_nothing(
    loaded: LoadedModel, config: EngineConfig, prompt: tuple[int, ...], params: SamplingParams, message: str
) -> None:
    engine = LLMEngine(config, loaded)
    needle = Arrival("r", make_prompt(20, loaded.model_config.vocab_size), SEEDED)
    engine.add_request("running", needle.prompt, needle.params)
    first = engine.step()
    with pytest.raises(ValueError, match=message):
        engine.add_request("bad", prompt, params)
    rest = [output for _ in range(19) for output in engine.step()]
    tokens = [token for output in (*first, *rest) for token in output.new_token_ids]
    assert tokens == run_with(loaded, config, [needle]).results["r"].token_ids
    assert not engine.has_unfinished()


def test_huge_max_tokens_is_clamped_to_the_room(loaded: LoadedModel, config: EngineConfig) -> None:
    engine = LLMEngine(config, loaded)
    assert engine.check_request((5,) * 500, SamplingParams(max_tokens=2**62)) == 12
    assert engine.check_request((5,) * 500, SamplingParams()) == 12


def test_float16_is_refused_and_its_checkpoints_are_widened(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "half")
    raw = json.loads((folder / "config.json").read_text())
    for key in ("dtype", "torch_dtype"):
        if key in raw:
            raw[key] = "float16"
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="float16"):
        EngineConfig(model=str(folder), dtype="float16")
    plan = load_model(EngineConfig(model=str(folder))).plan
    assert plan.dtype == "float32" and "float16" in plan.reasons["dtype"]


def test_logprob_values_are_float32(loaded: LoadedModel, config: EngineConfig) -> None:
    entry = ask(loaded, config, SEEDED).logprobs[0]
    assert float(np.float32(entry.logprob)) == entry.logprob
    assert run_script(LLMEngine(config, loaded), []).results == {}
