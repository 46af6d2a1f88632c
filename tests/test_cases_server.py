"""A real server over a real (tiny) model at the sizes public bug reports ask for (bug cases of sections A, D, E, N, O).

The other server tests use made-up logits; here kernels, cache and scheduler are the real ones, and where there is an
outside reference it is transformers over the same checkpoint.
"""

from __future__ import annotations

import asyncio
import math
import random
import resource
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import pytest
import torch

from isobit.config import EngineConfig
from isobit.engine import LLMEngine
from isobit.loading import LoadedModel, load_model
from isobit.tokenizer import load_tokenizer
from tests.harness import make_prompt
from tests.server_harness import Server, answer_bits, running_server, strict_json, wait_until
from tests.tiny import tiny_checkpoint

PATH, CHAT = "/v1/completions", "/v1/chat/completions"
VOCAB = 503


@pytest.fixture(scope="module")
def config() -> EngineConfig:
    return EngineConfig(
        model=str(tiny_checkpoint("llama")), context_length=512, chunked_prefill_size=64, random_seed=0, num_threads=2
    )


@pytest.fixture(scope="module")
def loaded(config: EngineConfig) -> LoadedModel:
    return load_model(config)


@pytest.fixture(scope="module")
def server(config: EngineConfig, loaded: LoadedModel) -> Iterator[Server]:
    with running_server(LLMEngine(config, loaded), load_tokenizer(config.model)) as running:
        yield running


def ids(length: int, salt: int = 0) -> list[int]:
    return list(make_prompt(length, VOCAB, salt))


def test_case_7_echoed_logprobs_alone_and_as_one_list(server: Server) -> None:
    prompts = [ids(3 + 9 * i, salt=i) for i in range(16)]
    settings = {"echo": True, "logprobs": 5, "max_tokens": 1, "temperature": 0}
    together = server.complete(prompt=prompts, **settings)["choices"]
    assert server.engine.stats().max_step_requests >= 4, "no batch was formed"
    for index, prompt in enumerate(prompts):
        [alone] = server.complete(prompt=prompt, **settings)["choices"]
        assert together[index] == {**alone, "index": index, "seed": together[index]["seed"]}
        assert len(alone["logprobs"]["token_logprobs"]) == len(prompt) + 1


def test_case_26_streams_through_preemptions(config: EngineConfig, loaded: LoadedModel, server: Server) -> None:
    """8 x 300 tokens streamed from a server whose pool holds three of them, against the roomy server's answers."""
    bodies = [
        {"prompt": ids(30 + 5 * i, salt=i), "max_tokens": 300, "seed": i, "ignore_eos": True, "logprobs": 1,
         "return_token_ids": True}
        for i in range(8)
    ]  # fmt: skip
    with ThreadPoolExecutor(8) as pool:
        whole = list(pool.map(lambda body: server.complete(**body), bodies))
    assert server.engine.stats().num_preemptions == 0
    small = replace(config, max_total_tokens=18 * 64)
    engine = LLMEngine(small, loaded.reconfigured(small))
    with running_server(engine, server.tokenizer) as crowded, ThreadPoolExecutor(8) as pool:
        options = {"stream_options": {"include_usage": True}}
        streams = list(pool.map(lambda body: crowded.stream(PATH, **body, **options), bodies))
        assert crowded.metric("isobit_preemptions_total") >= 3, "nothing was preempted"
    for chunks, answer in zip(streams, whole, strict=True):
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        tokens = [token for choice in choices for token in choice["token_ids"]]
        assert tokens == answer["choices"][0]["token_ids"] and len(tokens) == 300
        numbers = [value for choice in choices if choice["logprobs"] for value in choice["logprobs"]["token_logprobs"]]
        assert numbers == answer["choices"][0]["logprobs"]["token_logprobs"]
        assert "".join(choice["text"] for choice in choices) == answer["choices"][0]["text"]
        assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
        assert chunks[-1]["usage"]["completion_tokens"] == 300
        assert chunks[-1]["usage"]["prompt_tokens"] == answer["usage"]["prompt_tokens"]


@pytest.mark.parametrize("filters", [{}, {"top_k": 40}, {"top_p": 0.99}, {"top_k": 40, "top_p": 0.99}], ids=str)
def test_case_36_min_p_with_a_seed(server: Server, filters: dict[str, Any]) -> None:
    """Repeatable, and no token below half the best one's probability: raw log-probs at temperature 1 tell."""
    body = {"prompt": ids(20), "seed": 3, "min_p": 0.5, "max_tokens": 60, "logprobs": 1, "ignore_eos": True}
    [choice] = server.complete(**body, **filters)["choices"]
    assert server.complete(**body, **filters)["choices"] == [choice]
    below_best = 0
    for chosen, top in zip(choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"], strict=True):
        assert chosen >= max(top.values()) + math.log(0.5) - 1e-6  # two float32 roundings
        below_best += chosen < max(top.values())
    assert below_best > 0, "only the best token was ever drawn: nothing was filtered"
    free = server.complete(**{**body, "min_p": 0.0})["choices"][0]["logprobs"]
    pairs = zip(free["token_logprobs"], free["top_logprobs"], strict=True)
    assert any(chosen < max(top.values()) + math.log(0.5) for chosen, top in pairs), "control: min_p matters here"


@pytest.mark.parametrize("temperature", [1e-2, 1e-4, 1e-6, 1e-38])
def test_case_45_tiny_temperatures_are_answered(server: Server, temperature: float) -> None:
    body = {"prompt": ids(20), "max_tokens": 20, "seed": 1, "logprobs": 2, "ignore_eos": True}
    [choice] = server.complete(**body, temperature=temperature)["choices"]
    assert choice["text"] and all(math.isfinite(value) for value in choice["logprobs"]["token_logprobs"])
    if temperature < 1e-3:
        assert choice["text"] == server.complete(**body, temperature=0)["choices"][0]["text"]


def test_case_113_absurd_sizes_are_refused_within_a_second(server: Server) -> None:
    """While another request decodes: memory stays flat and its answer is the one it gives alone."""
    bodies: list[tuple[str, dict[str, Any]]] = [
        (PATH, {"prompt": [5, 10**9]}), (PATH, {"prompt": [VOCAB]}), (PATH, {"prompt": "x", "n": 5_000_000}),
        (PATH, {"prompt": "x", "logprobs": 10**9}), (PATH, {"prompt": "x", "echo": True, "logprobs": 10**9}),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 10**9}),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "n": 5_000_000}),
    ]  # fmt: skip
    long = {"prompt": ids(9), "max_tokens": 480, "n": 4, "seed": 5, "ignore_eos": True, "logprobs": 1}
    alone = answer_bits(server.complete(**long))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(lambda: answer_bits(server.complete(**long)))
        wait_until(lambda: server.engine.stats().num_running >= 1 or running.done(), "it does not run")
        amid = 0
        for path, body in bodies:
            amid += not running.done()
            seconds = []
            for _ in range(3):
                start = time.monotonic()
                server.refused(path, body)
                seconds.append(time.monotonic() - start)
            assert min(seconds) < 1
        assert running.result() == alone
    assert amid, "the long request was over before the first bad one"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # kB


def random_body(rng: random.Random, index: int) -> dict[str, Any]:
    """Every sampling field, or not."""
    fields: dict[str, Any] = {
        "temperature": rng.choice([0, 0.2, 0.7, 1.0, 1.9]), "top_k": rng.choice([-1, 0, 1, 5, 10**6]),
        "top_p": rng.choice([0.1, 0.9, 1.0]), "min_p": rng.choice([0.0, 0.1, 0.9]),
        "repetition_penalty": rng.choice([0.7, 1.0, 1.3]), "frequency_penalty": rng.uniform(-2, 2),
        "presence_penalty": rng.uniform(-2, 2), "logit_bias": {str(rng.randrange(VOCAB)): rng.uniform(-100, 100)},
        "min_tokens": rng.randrange(8), "stop": ["e", "zz"], "stop_token_ids": [rng.randrange(VOCAB)],
        "ignore_eos": rng.random() < 0.5, "logprobs": rng.randrange(5), "echo": rng.random() < 0.5,
        "n": rng.randrange(1, 4), "include_stop_str_in_output": True, "skip_special_tokens": False,
    }  # fmt: skip
    chosen = {name: value for name, value in fields.items() if rng.random() < 0.4}
    return {"prompt": ids(1 + rng.randrange(150), salt=index), "max_tokens": 16, "seed": index, **chosen}


def test_case_127_sixty_four_requests_with_any_mix_of_fields(
    config: EngineConfig, loaded: LoadedModel, server: Server
) -> None:
    rng = random.Random(127)
    bodies = [random_body(rng, index) for index in range(64)]
    assert len({name for body in bodies for name in body}) == 20, "every field occurs"
    solo = [answer_bits(server.complete(**body)) for body in bodies]
    engine = LLMEngine(config, loaded)
    with running_server(engine, server.tokenizer) as fresh, ThreadPoolExecutor(64) as pool:
        crowd = list(pool.map(lambda body: answer_bits(fresh.complete(**body)), bodies))
    assert crowd == solo and len(set(solo)) == 64
    assert engine.stats().max_step_requests >= 8, "no batch was formed"


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.2, 2.0, 100.0])
def test_case_128_repetition_penalties_equal_transformers(server: Server, penalty: float) -> None:
    """Greedy tokens after a short and a long prompt, against generate() over the same checkpoint."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(server.engine.config.model, dtype=torch.float32).eval()
    texts = set()
    for length in (12, 400):
        prompt = torch.tensor([ids(length)])
        expected = reference.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=30, pad_token_id=0,
            repetition_penalty=penalty,
        )[0, length:].tolist()  # fmt: skip
        body = {"prompt": ids(length), "temperature": 0, "max_tokens": 30, "return_token_ids": True}
        got = server.complete(**body, repetition_penalty=penalty)["choices"][0]["token_ids"]
        assert got == expected
        texts.add(tuple(got) == tuple(server.complete(**body)["choices"][0]["token_ids"]))
    assert (False in texts) == (penalty != 1), "control: the penalty changes the answer"


def test_case_132_three_hundred_connections_half_of_them_dropped(server: Server) -> None:
    """Ten rounds of 30 over HTTP, dropped at random times; test_cases_schedule has ten rounds of 300 in one process."""
    rng = random.Random(132)
    kinds = [
        {"prompt": ids(rng.randrange(1, 200), salt=i), "max_tokens": rng.randrange(2, 40), "seed": i, "logprobs": 1,
         "ignore_eos": True}
        for i in range(30)
    ]  # fmt: skip
    solo = [answer_bits(server.complete(**body)) for body in kinds]
    dropped = 0

    async def one(client: httpx.AsyncClient, index: int) -> bytes:
        response = await client.post(PATH, json=kinds[index])
        assert response.status_code == 200, response.text
        return answer_bits(strict_json(response.text))

    async def one_round() -> int:
        async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=httpx.Limits()) as client:
            tasks = [asyncio.ensure_future(one(client, index)) for index in range(30)]
            for index in rng.sample(range(1, 30, 2), 15):
                await asyncio.sleep(rng.uniform(0, 0.015))
                tasks[index].cancel()
            answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert answers[::2] == solo[::2]
        assert all(a == s or isinstance(a, asyncio.CancelledError) for a, s in zip(answers, solo, strict=True))
        return sum(isinstance(answer, asyncio.CancelledError) for answer in answers)

    for _ in range(10):
        dropped += asyncio.run(one_round())
        wait_until(
            lambda: server.engine.stats().num_running == server.engine.stats().num_waiting == 0, "one runs on", 5
        )
        stats = server.engine.stats()
        assert stats.num_free_pages + stats.num_cached_pages == stats.num_pages
    assert dropped >= 15, "too few were dropped while they ran"
    assert server.post("/flush_cache") == {"flushed": True}
    assert server.engine.stats().num_free_pages == server.engine.stats().num_pages
    assert answer_bits(server.complete(**kinds[1])) == solo[1]
