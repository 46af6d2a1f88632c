"""Chunks, re-scoring, preemption and aborts at the sizes public bug reports ask for (bug cases, sections C, D and O).

The real engine over a tiny checkpoint with a context of 4096 tokens. Bytes are compared, and the engine's counters
prove that chunks were cut, requests preempted, pages found in the cache, and aborts spread over all phases.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from isobit.config import EngineConfig
from isobit.engine import LLMEngine
from isobit.loading import LoadedModel, load_model
from isobit.request import RequestState, SamplingParams
from tests.harness import Arrival, Result, Run, make_prompt, run_script, run_with
from tests.tiny import tiny_checkpoint

VOCAB = 503
SCORED = SamplingParams(max_tokens=24, temperature=1.0, seed=5, logprobs=3, prompt_logprobs=1, ignore_eos=True)


@pytest.fixture(scope="module")
def config() -> EngineConfig:
    return EngineConfig(
        model=str(tiny_checkpoint("qwen3")), dtype="bfloat16", context_length=4096, max_total_tokens=8192,
        random_seed=0, num_threads=2, disable_radix_cache=True, chunked_prefill_size=4096,
    )  # fmt: skip


@pytest.fixture(scope="module")
def loaded(config: EngineConfig) -> LoadedModel:
    return load_model(config)


@pytest.fixture(scope="module")
def long_needle(config: EngineConfig, loaded: LoadedModel) -> tuple[Arrival, bytes]:
    """3001 tokens, and the bytes of its run in one piece, alone."""
    needle = Arrival("needle", make_prompt(3001, VOCAB), SCORED)
    run = run_with(loaded, config, [needle])
    assert run.stats.max_step_rows == 3001, "this run was to be in one piece"
    return needle, run.results["needle"].bits


@pytest.mark.parametrize("traffic", [False, True], ids=["alone", "beside decodes"])
@pytest.mark.parametrize("budget", [64, 100, 257, 512, 2048, 4096])
def test_case_20_a_long_prompt_in_chunks(
    config: EngineConfig, loaded: LoadedModel, long_needle: tuple[Arrival, bytes], budget: int, traffic: bool
) -> None:
    needle, whole = long_needle
    params = SamplingParams(max_tokens=80, temperature=0.7, seed=1, ignore_eos=True)
    mates = [Arrival(f"mate{i}", make_prompt(3 + i, VOCAB, salt=i + 1), params) for i in range(6 if traffic else 0)]
    run = run_with(loaded, config, [*mates, replace(needle, at_step=2)], chunked_prefill_size=budget)
    assert run.stats.max_step_rows == min(budget, 3001 + len(mates)), "the budget was not used"
    assert run.stats.max_step_requests == 1 + len(mates), "prompt and decodes did not share a step"
    assert run.results["needle"].bits == whole


@pytest.fixture(scope="module")
def generated(config: EngineConfig, loaded: LoadedModel) -> tuple[Arrival, Result]:
    """200 tokens sampled with log-probs, alone."""
    params = SamplingParams(max_tokens=200, temperature=1.0, seed=9, logprobs=4, ignore_eos=True)
    arrival = Arrival("g", make_prompt(75, VOCAB, salt=3), params)
    result = run_with(loaded, config, [arrival]).results["g"]
    assert len(set(result.token_ids)) > 50
    return arrival, result


def crowd(count: int) -> list[Arrival]:
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=2, ignore_eos=True)
    return [Arrival(f"m{i}", make_prompt(5 + 9 * i, VOCAB, salt=40 + i), params) for i in range(count)]


@pytest.mark.parametrize("how", ["cold", "chunked", "in a crowd", "warm"])
def test_case_21_two_hundred_tokens_scored_again(
    config: EngineConfig, loaded: LoadedModel, generated: tuple[Arrival, Result], how: str
) -> None:
    """Scoring computes every position (it takes no cached page), so "warm" is a generation from cached pages."""
    arrival, result = generated
    text = (*arrival.prompt, *result.token_ids)
    score = Arrival("score", text, SamplingParams(max_tokens=0, prompt_logprobs=4))
    if how == "warm":
        again = [replace(arrival, name="first"), replace(arrival, at_step=220)]
        run = run_with(loaded, config, [*again, replace(score, at_step=500)], disable_radix_cache=False)
        assert run.results["g"].num_cached_tokens == 64 and run.results["score"].num_cached_tokens == 0
        assert run.results["g"].bits == result.bits
    elif how == "chunked":
        run = run_with(loaded, config, [score], chunked_prefill_size=17)
        assert run.stats.max_step_rows == 17 and run.stats.num_steps >= 17
    elif how == "in a crowd":
        run = run_with(loaded, config, [*crowd(12), replace(score, at_step=4)], chunked_prefill_size=100)
        assert run.stats.max_step_requests == 13
    else:
        run = run_with(loaded, config, [score])
        assert run.stats.num_steps == 1
    scores = run.results["score"].prompt_logprobs
    assert scores is not None and list(scores[75:]) == result.logprobs


def test_case_26_eight_requests_in_a_pool_for_three(config: EngineConfig, loaded: LoadedModel) -> None:
    """Answers as with a big pool; what came out step by step has every token once, whoever was preempted."""
    params = SamplingParams(max_tokens=300, temperature=1.0, logprobs=1, ignore_eos=True)
    script = [Arrival(f"r{i}", make_prompt(20 + 9 * i, VOCAB, salt=i), replace(params, seed=i)) for i in range(8)]
    big = run_with(loaded, config, script)
    assert big.stats.num_preemptions == 0
    for cache_off in (True, False):
        small = replace(config, max_total_tokens=18 * 64, disable_radix_cache=cache_off, context_length=512)
        engine = LLMEngine(small, loaded.reconfigured(small))
        for arrival in script:
            engine.add_request(arrival.name, arrival.prompt, arrival.params)
        pieces = {arrival.name: Result(finish_reason="length") for arrival in script}
        ended: Counter[str] = Counter()
        while engine.has_unfinished():
            outputs = engine.step()
            assert len({output.request_id for output in outputs}) == len(outputs)
            for output in outputs:
                assert len(output.new_token_ids) == len(output.new_logprobs) == 1 and not ended[output.request_id]
                pieces[output.request_id].token_ids += output.new_token_ids
                pieces[output.request_id].logprobs += output.new_logprobs
                ended[output.request_id] += output.finish_reason == "length"
        assert engine.stats().num_preemptions >= 3, "nothing was preempted"
        assert engine.stats().num_generation_tokens == 8 * 300 and set(ended.values()) == {1}
        assert all(pieces[name].bits == result.bits for name, result in big.results.items())


@pytest.mark.parametrize("after", [0, 1, 50])
def test_case_27_preempted_after_k_tokens_and_resumed(config: EngineConfig, loaded: LoadedModel, after: int) -> None:
    """0: in the middle of its prompt. The part of the case for one device; two ranks are not offered."""
    arrival = Arrival("r", make_prompt(200, VOCAB), replace(SCORED, max_tokens=70))
    expected = run_with(loaded, config, [arrival]).results["r"]
    changed = replace(config, chunked_prefill_size=90)
    engine = LLMEngine(changed, loaded.reconfigured(changed))
    engine.add_request("r", arrival.prompt, arrival.params)
    request = engine.scheduler.requests["r"]
    outputs = []
    while request.num_output_tokens < after or not request.num_computed_tokens:
        outputs += engine.step()
    assert engine.scheduler.preempt("r") and request.state is RequestState.PREEMPTED
    assert request.num_output_tokens == after and not request.pages
    while engine.has_unfinished():
        outputs += engine.step()
    assert request.num_preemptions == 1
    assert [token for output in outputs for token in output.new_token_ids] == expected.token_ids
    assert [entry for output in outputs for entry in output.new_logprobs] == expected.logprobs
    assert [o.prompt_logprobs for o in outputs if o.prompt_logprobs] == [expected.prompt_logprobs]


def phase_of(engine: LLMEngine, name: str, max_tokens: int) -> str:
    """Where a request stands in its life, from the scheduler's own records."""
    request = engine.scheduler.requests.get(name)
    if request is None:
        return "finished"
    if request.state is not RequestState.RUNNING:
        return "queued"
    if not request.num_output_tokens:
        return "mid-prefill"
    return "finishing" if request.num_output_tokens == max_tokens - 1 else "decode"


def one_round(engine: LLMEngine, rng: random.Random, script: Sequence[Arrival], phases: Counter[str]) -> Run:
    """All at once; before each step some of those with an odd number are dropped, wherever they stand."""
    results = {arrival.name: Result() for arrival in script}
    victims = {arrival.name: arrival.params.max_tokens or 0 for arrival in script[1::2]}
    for arrival in script:
        engine.add_request(arrival.name, arrival.prompt, arrival.params)
    while engine.has_unfinished():
        running = sorted({request.request_id for request in engine.scheduler.running} & set(victims))
        choice = running if running and rng.random() < 0.5 else sorted(victims)
        for name in rng.sample(choice, min(len(choice), rng.randrange(4))):
            phase = phase_of(engine, name, victims.pop(name))
            assert engine.abort(name) == (phase != "finished")
            phases[phase] += 1
            results[name].finish_reason = "dropped"
        for output in engine.step():
            result = results[output.request_id]
            assert result.finish_reason is None, "an output after the end"
            result.token_ids.extend(output.new_token_ids)
            result.logprobs.extend(output.new_logprobs)
            result.finish_reason = output.finish_reason
    return Run(results, engine.stats(), engine)


def test_case_132_ten_rounds_of_three_hundred_half_of_them_dropped(config: EngineConfig, loaded: LoadedModel) -> None:
    changed = replace(
        config, context_length=256, chunked_prefill_size=100, max_total_tokens=32 * 64, disable_radix_cache=False
    )
    engine = LLMEngine(changed, loaded.reconfigured(changed))
    rng, phases = random.Random(132), Counter[str]()
    kinds = [(make_prompt(rng.randrange(1, 150), VOCAB, salt=i % 9), rng.randrange(2, 25)) for i in range(30)]
    script = [
        Arrival(
            f"r{i}", kinds[i % 30][0],
            SamplingParams(max_tokens=kinds[i % 30][1], seed=i % 60, logprobs=0, ignore_eos=True),
        )
        for i in range(300)
    ]  # fmt: skip
    solo = {i: run_with(loaded, config, [script[i]]).results[f"r{i}"].bits for i in range(60)}
    for _ in range(10):
        run = one_round(engine, rng, script, phases)
        for i in range(0, 300, 2):
            assert run.results[f"r{i}"].bits == solo[i % 60]
        engine.check_integrity()
        stats = engine.stats()
        assert stats.num_running == stats.num_waiting == 0
        assert stats.num_free_pages + stats.num_cached_pages == stats.num_pages == 32
        assert engine.flush_cache() and engine.stats().num_free_pages == 32
    assert engine.stats().max_step_requests > 8, "no batch was formed"
    for phase in ("queued", "mid-prefill", "decode", "finishing", "finished"):
        assert phases[phase] >= 5, phases
    plain = Arrival("after", kinds[0][0], script[0].params)
    assert run_script(engine, [plain]).results["after"].bits == solo[0]
