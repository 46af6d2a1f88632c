"""Bad requests are 400s with a message, streamed or not, and change nobody: a needle after each equals its solo."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.fake_engine import VOCAB, FakeEngine, fake_tokenizer
from tests.server_harness import Server, running_server

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
CONTEXT = 256
BAD_NUMBERS = ("NaN", "Infinity", "-Infinity", "-1", "1e308", "1e999", "true", '"1"', "[]", "1" + "0" * 400)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server(FakeEngine(context_length=CONTEXT), fake_tokenizer()) as running:
        yield running


@pytest.fixture(scope="module")
def solo(server: Server) -> bytes:
    return server.needle()


def refuse_everywhere(server: Server, solo: bytes, field: str, text: str) -> None:
    """The JSON `text` as `field` is a 400 on both routes, whole and streamed, and the needle is unchanged."""
    for stream in ("true", "false"):
        for path, rest in ((COMPLETIONS, '"prompt": "x"'), (CHAT, f'"messages": {json.dumps(MESSAGES)}')):
            error = server.refused(path, f'{{{rest}, "stream": {stream}, "{field}": {text}}}'.encode())
            assert error["type"] == "invalid_request_error"
            assert "Traceback" not in error["message"] and len(error["message"]) < 1000
    assert server.needle() == solo


@pytest.mark.parametrize("text", BAD_NUMBERS)
@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "repetition_penalty"])
def test_numbers_out_of_range(server: Server, solo: bytes, field: str, text: str) -> None:  # cases 110, 128
    refuse_everywhere(server, solo, field, text)


@pytest.mark.parametrize("field", ["frequency_penalty", "presence_penalty"])
def test_penalties_out_of_range(server: Server, solo: bytes, field: str) -> None:  # case 110
    for text in ("NaN", "Infinity", "-2.1", "2.1", "1e308"):
        refuse_everywhere(server, solo, field, text)


@pytest.mark.parametrize("text", ["0", "-1"])
def test_repetition_penalty_is_above_zero(server: Server, solo: bytes, text: str) -> None:  # case 128
    refuse_everywhere(server, solo, "repetition_penalty", text)


def test_repetition_penalties_that_work(server: Server) -> None:  # case 128
    for penalty in (0.5, 1, 1.2, 2, 100):
        prompt = [5] * (CONTEXT - 10)
        answer = server.complete(prompt=prompt, repetition_penalty=penalty, max_tokens=4, seed=1, ignore_eos=True)
        assert answer["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize(
    "text",
    ['{"-1": 1}', f'{{"{VOCAB}": 1}}', '{"1000000000": 1}', '{"abc": 1}', '{"1.5": 1}', '{"5": 101}', '{"5": NaN}',
     '{"5": null}', '{"5": "1"}', "[]", "5", '{"5": 1, "05": 2}', '{"99999999999999999999": 1}', '{"": 1}'],
)  # fmt: skip
def test_logit_bias(server: Server, solo: bytes, text: str) -> None:  # case 112
    refuse_everywhere(server, solo, "logit_bias", text)


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("stop", json.dumps("x" * 4097)), ("n", "5000000"), ("n", "0"), ("n", "-1"), ("n", "1.5"), ("n", "129"),
        ("prompt_logprobs", "1000000000"), ("prompt_logprobs", "-1"),
        ("stop_token_ids", "[null]"), ("stop_token_ids", "[[1]]"), ("stop_token_ids", '["1"]'),
        ("stop_token_ids", f"[{VOCAB}]"), ("stop_token_ids", "[-1]"), ("stop_token_ids", "[1.5]"),
        ("stop", "[null]"), ("stop", "[[\"a\"]]"), ("stop", "[1]"), ("stop", '[""]'), ("stop", '""'),
        ("stop", json.dumps(["x"] * 1000)), ("stop", "5"),
        ("seed", "-1"), ("seed", str(2**63)), ("seed", str(2**64)), ("seed", "1.5"), ("seed", '"7"'), ("seed", "true"),
        ("top_k", "-2"), ("top_k", "1.5"), ("max_tokens", "-1"), ("max_tokens", "1.5"), ("max_tokens", str(2**64)),
        ("min_tokens", "-1"), ("min_tokens", "1000"), ("stream_options", "5"), ("model", "5"),
        ("stream", '"yes"'), ("ignore_eos", "1"), ("stream_options", '{"surprise": true}'),
        ("response_format", '{"type": "json_schema", "json_schema": {}}'), ("tools", '[{"type": "function"}]'),
        ("tool_choice", '"required"'), ("modalities", '["audio"]'), ("temperatur", "1"),
        ("stream_options", '{"continuous_usage_stats": true}'), ("extra", '{"a": 1}'),
    ],
)  # fmt: skip
def test_other_fields(server: Server, solo: bytes, field: str, text: str) -> None:  # cases 113, 115, 117, 129
    if field == "min_tokens" and text == "1000":
        for stream in (False, True):
            body = {"prompt": "x", "min_tokens": 1000, "max_tokens": 5, "stream": stream}
            assert "min_tokens" in server.refused(COMPLETIONS, body)["message"]
        return
    start = time.monotonic()
    refuse_everywhere(server, solo, field, text)
    assert time.monotonic() - start < 10


def test_errors_name_the_field_and_what_is_possible(server: Server) -> None:
    error = server.refused(COMPLETIONS, {"prompt": "x", "temperatur": 1})
    assert error["param"] == "temperatur" and "temperature" in error["message"]
    error = server.refused(COMPLETIONS, {"prompt": "x", "top_p": 1.5})
    assert error["param"] == "top_p" and "1.5" in error["message"]
    error = server.refused(COMPLETIONS, {"prompt": "x", "seed": "7"})
    assert error["param"] == "seed"
    error = server.refused(COMPLETIONS, {"prompt": "x", "n": 5000000})
    assert error["param"] == "n" and "128" in error["message"]


@pytest.mark.parametrize(
    "prompt",
    [None, [], [[]], [[1], []], [None], [1, None], [1, "a"], ["a", 1], ["a", ["b"]], [[1, [2]]], [1.5], [True], 5, {},
     [VOCAB], [-1], [2**40], [[1, VOCAB]], ["fine", ""]],
)  # fmt: skip
def test_prompts(server: Server, solo: bytes, prompt: Any) -> None:  # cases 113, 115, 118
    if prompt == ["fine", ""]:  # BOS alone is a prompt, as this tokenizer adds one
        assert len(server.complete(prompt=prompt, max_tokens=1, seed=1)["choices"]) == 2
        return
    for stream in (False, True):
        server.refused(COMPLETIONS, {"prompt": prompt, "stream": stream})
    assert server.needle() == solo


def test_the_empty_prompt_is_bos_or_refused(server: Server) -> None:  # case 118
    answer = server.complete(prompt="", max_tokens=2, seed=1, return_token_ids=True, echo=True, logprobs=1)
    assert answer["choices"][0]["prompt_token_ids"] == [0]
    assert answer["choices"][0]["logprobs"]["token_logprobs"][0] is None
    tokenizer = fake_tokenizer()
    tokenizer._backend.post_processor = None
    with running_server(FakeEngine(), tokenizer) as without_bos:
        assert "begin-of-text" in without_bos.refused(COMPLETIONS, {"prompt": ""})["message"]
        assert without_bos.complete(prompt="x", max_tokens=1)["usage"]["prompt_tokens"] == 1


@pytest.mark.parametrize("size", [CONTEXT, CONTEXT + 1, 2 * CONTEXT])
def test_too_long_prompts(server: Server, solo: bytes, size: int) -> None:  # case 119
    for stream in (False, True):
        error = server.refused(COMPLETIONS, {"prompt": [5] * size, "stream": stream})
        assert str(size) in error["message"] and str(CONTEXT) in error["message"]
        assert error["code"] == "context_length_exceeded"
    assert server.needle() == solo


def test_longest_prompts_that_fit(server: Server) -> None:
    answer = server.complete(prompt=[5] * (CONTEXT - 1), max_tokens=50, seed=1)
    assert answer["usage"]["total_tokens"] == CONTEXT and answer["choices"][0]["finish_reason"] == "length"
    scored = server.complete(prompt=[5] * CONTEXT, max_tokens=0, echo=True, logprobs=0)
    assert len(scored["choices"][0]["logprobs"]["token_logprobs"]) == CONTEXT


def test_a_huge_text_is_refused_at_once(server: Server, solo: bytes) -> None:  # case 119
    start = time.monotonic()
    for body in ({"prompt": "word " * 2_000_000}, {"messages": [{"role": "user", "content": "word " * 2_000_000}]}):
        for stream in (False, True):
            error = server.refused(COMPLETIONS if "prompt" in body else CHAT, {**body, "stream": stream})
            assert "10000000" in error["message"] and str(CONTEXT) in error["message"]
    assert time.monotonic() - start < 8
    assert server.needle() == solo


def test_a_body_above_the_limit(server: Server, solo: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isobit.server.transport.MAX_BODY_BYTES", 1000)
    assert "1000" in server.refused(COMPLETIONS, {"prompt": "x" * 2000}, status=413)["message"]
    assert server.needle() == solo


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'"a"', b"\xff\xfe", b"[" * 100000, b'{"a": 1' + b"0" * 9999]
)
def test_bodies_that_are_no_object(server: Server, solo: bytes, body: bytes) -> None:
    for path in (COMPLETIONS, CHAT, "/tokenize", "/detokenize"):
        server.refused(path, body)
    assert server.needle() == solo


DEEP = "[" * 400 + "]" * 400


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, f'{{"prompt": {DEEP}}}'),
        (COMPLETIONS, f'{{"prompt": "x", "logit_bias": {DEEP}}}'),
        (CHAT, f'{{"messages": [{{"role": {DEEP}, "content": "x"}}]}}'),
        (CHAT, f'{{"messages": [{{"role": "user", "content": "x", "name": {DEEP}}}]}}'),
        (CHAT, f'{{"messages": {json.dumps(MESSAGES)}, "chat_template_kwargs": {{"x": {DEEP}}}}}'),
    ],
)
def test_deep_nesting(server: Server, solo: bytes, path: str, body: str) -> None:
    for text in (body, body.replace(DEEP, '{"a":' * 400 + "1" + "}" * 400)):
        assert "nested more than 64 levels" in server.refused(path, text.encode())["message"]
    assert server.needle() == solo
    many = "[" * 20000 + "1"  # brackets inside a text are no nesting
    server.post("/tokenize", prompt=many[:1000])


@pytest.mark.parametrize(
    ("body", "kept"),
    [
        ({"prompt": "x", "model": "m" * 100_000}, "is not served here"),
        ({"prompt": "x", "k" * 100_000: 1}, "top_p"),
        ({"prompt": "x", **{f"k{index}": 1 for index in range(10_000)}}, "top_p"),
        ({"prompt": [10**4000]}, "outside the vocabulary"),
    ],
)
def test_what_the_caller_sent_is_not_sent_back_whole(server: Server, body: dict[str, Any], kept: str) -> None:
    error = server.refused(COMPLETIONS, body, 404 if "model" in body else 400)
    assert len(json.dumps(error)) < 2500 and kept in error["message"]


def test_surrogates_that_reach_the_template(server: Server) -> None:
    body = {"messages": MESSAGES, "max_tokens": 1, "chat_template_kwargs": {"bos_token": "\ud800"}}
    assert "lone surrogate" in server.refused(CHAT, body)["message"]


def test_lone_surrogates(server: Server) -> None:
    server.refused(COMPLETIONS, b'{"prompt": "\\ud800"}')
    server.refused(CHAT, b'{"messages": [{"role": "user", "content": "\\ud800"}]}')
    server.refused(COMPLETIONS, b'{"prompt": "x", "model": "\\ud800"}', status=404)
    answer = server.client.post(COMPLETIONS, content=b'{"prompt": "x", "stop": ["\\ud83d"], "max_tokens": 2}')
    assert answer.status_code == 200  # a stop string that can never come


@pytest.mark.parametrize("seed", [0, 2**31, 2**63 - 1])
def test_seeds_that_work(server: Server, seed: int) -> None:  # case 117
    first = server.complete(prompt="x", seed=seed, max_tokens=8)["choices"][0]
    assert first == server.complete(prompt="x", seed=seed, max_tokens=8)["choices"][0] and first["seed"] == seed
    assert first["text"] != server.complete(prompt="x", seed=7, max_tokens=8)["choices"][0]["text"]


def test_large_top_k_is_no_filter(server: Server) -> None:  # case 122
    def text(top_k: int, **more: Any) -> str:
        answer = server.complete(prompt="top", top_k=top_k, max_tokens=6, seed=3, **more)
        return str(answer["choices"][0]["text"])

    tops = (-1, 0, VOCAB - 1, VOCAB, VOCAB + 1, 2**31 - 1, 2**40)
    with ThreadPoolExecutor(8) as pool:
        greedy = pool.submit(text, 50, temperature=0)
        texts = list(pool.map(text, tops))
        assert greedy.result() == text(1) == text(0, temperature=0)  # case 42
    assert len(set(texts)) == 1


@pytest.mark.parametrize("limit", [2**31 - 1, 2**63])
def test_huge_max_tokens_is_clamped_without_memory(server: Server, limit: int) -> None:  # case 129
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    answer = server.complete(prompt="x", max_tokens=limit, seed=1)
    assert answer["usage"]["total_tokens"] <= CONTEXT
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # kB


@pytest.mark.parametrize(
    "field",
    [{"user": "me"}, {"metadata": {"a": "b"}}, {"store": True}, {"tools": []}, {"tools": None},
     {"tool_choice": "none"}, {"response_format": {"type": "text"}}, {"temperature": None}, {"stop": None}],
)  # fmt: skip
def test_fields_that_ask_for_nothing(server: Server, field: dict[str, Any]) -> None:
    body = {"max_tokens": 3, "seed": 1}
    plain = server.chat(**body)["choices"]
    assert server.chat(**body, **field)["choices"] == plain


def test_best_of_and_suffix(server: Server) -> None:
    assert len(server.complete(prompt="x", best_of=2, n=2, max_tokens=1)["choices"]) == 2
    assert "best_of" in server.refused(COMPLETIONS, {"prompt": "x", "best_of": 2})["message"]
    assert "suffix" in server.refused(COMPLETIONS, {"prompt": "x", "suffix": "y"})["message"]
    server.complete(prompt="x", best_of=None, suffix=None, max_tokens=1)


def test_one_bad_prompt_of_a_list_runs_nothing(server: Server) -> None:
    before = server.engine.stats().num_prompt_tokens
    error = server.refused(COMPLETIONS, {"prompt": [[5, 6], [VOCAB], [7]], "max_tokens": 4})
    assert "prompt 1" in error["message"] and str(VOCAB) in error["message"]
    assert server.engine.stats().num_prompt_tokens == before


def test_bad_requests_during_a_long_one(server: Server) -> None:  # cases 112, 113
    body = {"prompt": "the long one", "max_tokens": 100, "seed": 5, "ignore_eos": True, "logprobs": 1}
    alone = server.complete(**body)["choices"]
    server.engine.step_seconds = 0.005
    try:
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(lambda: server.complete(**body)["choices"])
            count = 0
            while not running.done():
                server.refused(COMPLETIONS, {"prompt": [VOCAB + count]})
                server.refused(CHAT, {"messages": MESSAGES, "logit_bias": {"100000": 1}})
                count += 1
    finally:
        server.engine.step_seconds = 0.0
    assert count > 3 and running.result() == alone


def test_more_prompts_than_the_queue_holds(server: Server) -> None:
    start = time.monotonic()
    assert "4096" in server.refused(COMPLETIONS, {"prompt": ["a"] * 200_000, "n": 2})["message"]
    assert time.monotonic() - start < 3


@pytest.mark.parametrize("name", ["self", "messages", "add_generation_prompt", "tools", "tokenize", "conversation"])
def test_template_arguments_that_are_taken(server: Server, name: str) -> None:
    assert name in server.refused(CHAT, {"messages": MESSAGES, "chat_template_kwargs": {name: 1}})["message"]
    server.chat(max_tokens=1, chat_template_kwargs={"enable_thinking": False})


def test_unknown_routes_and_models(server: Server) -> None:
    assert server.client.get("/v1/nothing").json()["error"]["message"]
    assert server.client.get("/v1/completions").status_code == 405
    assert server.refused(COMPLETIONS, {"prompt": "x", "model": "gpt-4"}, status=404)["code"] == "model_not_found"
    assert server.client.get("/v1/models/gpt-4").status_code == 404
    assert server.client.get("/v1/models/fake").json()["id"] == "fake"
    server.complete(prompt="x", model="folder/fake", max_tokens=1)


@pytest.mark.parametrize("tokens", [[VOCAB], [-1], [None], "x", None])
def test_detokenize(server: Server, tokens: Any) -> None:
    server.refused("/detokenize", {"tokens": tokens})
    assert server.post("/detokenize", tokens=[]) == {"prompt": ""}
    server.refused("/tokenize", {})
    server.refused("/tokenize", {"prompt": "x", "messages": MESSAGES})
