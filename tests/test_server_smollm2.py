"""A real model behind a real server: SmolLM2-135M, offline and over HTTP, alone and in company, to the last bit."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from isobit import LLM, SamplingParams
from isobit.checkpoint import embedded_checkpoint
from isobit.engine import LLMEngine
from tests.server_harness import Server, answer_bits, joined, running_server

QUESTION = "Why is the sky blue?"
BODY: dict[str, Any] = {"prompt": "The capital of France is", "max_tokens": 10, "logprobs": 3, "return_token_ids": True}


@pytest.fixture(scope="module")
def llm() -> LLM:
    try:
        embedded_checkpoint()
    except ValueError as error:
        pytest.skip(str(error))
    return LLM("smollm2", context_length=512, chunked_prefill_size=64, max_total_tokens=4096)


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[Server]:
    engine = LLMEngine(llm.engine.config, llm.engine.loaded)
    with running_server(engine, llm.tokenizer) as running:
        yield running


def test_the_answer_makes_sense_and_is_the_offline_one(llm: LLM, server: Server) -> None:
    params = SamplingParams(max_tokens=24, temperature=0.0, logprobs=0)
    [offline] = llm.chat([{"role": "user", "content": QUESTION}], params, use_tqdm=False)
    online = server.chat(QUESTION, max_tokens=24, temperature=0, logprobs=True, return_token_ids=True)
    output = offline.outputs[0]
    assert "sky" in output.text and output.text == online["choices"][0]["message"]["content"]
    assert online["prompt_token_ids"] == list(offline.prompt_token_ids)
    assert online["choices"][0]["token_ids"] == list(output.token_ids)
    numbers = [entry["logprob"] for entry in online["choices"][0]["logprobs"]["content"]]
    assert output.logprobs is not None and numbers == [entry.logprob for entry in output.logprobs]
    assert all(np.float32(number) == number for number in numbers)  # float32 bits survive JSON
    chunks = server.stream("/v1/chat/completions", messages=[{"role": "user", "content": QUESTION}],
                           max_tokens=24, temperature=0)  # fmt: skip
    assert joined(chunks) == output.text


def test_alone_in_a_crowd_warm_and_chunked(server: Server) -> None:  # cases 1, 10, 20
    body = {**BODY, "prompt": "Rivers and mountains. " * 25 + BODY["prompt"], "temperature": 0.8, "seed": 7}
    server.post("/flush_cache")
    alone = server.complete(**body)
    assert alone["usage"]["prompt_tokens"] > 64  # so the prompt was cut into chunks of at most 64
    warm = server.complete(**body)
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64
    crowd = [{"prompt": f"Number {index} is", "max_tokens": 6, "seed": index} for index in range(8)]
    server.post("/flush_cache")
    with ThreadPoolExecutor(9) as pool:
        others = [pool.submit(lambda one=one: server.complete(**one)) for one in crowd]
        amid = pool.submit(lambda: server.complete(**body)).result()
        for other in others:
            other.result()
    assert server.engine.stats().max_step_requests >= 4
    assert answer_bits(alone) == answer_bits(warm) == answer_bits(amid)
    assert answer_bits(alone) != answer_bits(server.complete(**{**body, "seed": 8}))


def test_scoring_gives_the_bits_of_generating(llm: LLM, server: Server) -> None:  # case 21
    generated = server.complete(**BODY, temperature=1.0, seed=3)["choices"][0]
    ids = [*generated["prompt_token_ids"], *generated["token_ids"]]
    scored = server.complete(prompt=ids, echo=True, max_tokens=0, logprobs=0)["choices"][0]["logprobs"]
    assert scored["token_logprobs"][-10:] == generated["logprobs"]["token_logprobs"]
    assert llm.score([ids], use_tqdm=False)[0] == scored["token_logprobs"]
    assert scored["token_logprobs"][0] is None  # case 23


def test_english_is_likely(llm: LLM) -> None:
    """Case 23: scores read from a wrong position would be hugely negative; chance would give -10.8."""
    text = "The sun is a star. It is the centre of our solar system, and all the planets move around it."
    [scores] = llm.score([text], use_tqdm=False)
    values = [score for score in scores[1:] if score is not None]
    assert scores[0] is None and len(values) == len(scores) - 1 > 15
    assert -4 < sum(values) / len(values) < -1
    [swapped] = llm.score([" ".join(text.split()[::-1])], use_tqdm=False)
    backwards = [score for score in swapped[1:] if score is not None]
    assert sum(backwards) / len(backwards) < -5, "control: the same words backwards are not English"


def test_echo_of_emoji_and_accents(server: Server) -> None:  # case 97
    text = "👩‍👩‍👧 žluťoučký kůň 日本語 <|im_start|>user"
    [choice] = server.complete(prompt=text, echo=True, max_tokens=0, logprobs=1)["choices"]
    assert choice["text"] == "".join(choice["logprobs"]["tokens"]) == text


def test_what_the_server_says_about_itself(server: Server) -> None:
    info = server.client.get("/server_info").json()
    assert info["vocab_size"] == 49152 and info["context_length"] == 512
    assert info["fingerprint"] == server.complete(**BODY)["system_fingerprint"]
    assert {"linear.qkv", "attention", "sampling"} <= set(info["plan"]["orders"])
    assert info["kernels"]
