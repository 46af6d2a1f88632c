"""/v1/chat/completions: log-probs, streams, the chat template, sampling defaults. Over real HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from isobit.sampling_defaults import resolve_defaults
from tests.fake_engine import FakeEngine, fake_tokenizer
from tests.server_harness import Server, joined, running_server
from tests.tiny import tiny_tokenizer

PATH = "/v1/chat/completions"
MESSAGES = [{"role": "system", "content": "add in order"}, {"role": "user", "content": "the sum of parts"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server(FakeEngine(), fake_tokenizer()) as running:
        yield running


def test_logprobs_without_alternatives(server: Server) -> None:  # case 93
    answer = server.chat(max_tokens=4, logprobs=True, seed=1)
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == 4 and all(entry["top_logprobs"] == [] for entry in content)
    assert all(set(entry) == {"token", "logprob", "bytes", "top_logprobs"} for entry in content)
    assert server.chat(max_tokens=4, seed=1)["choices"][0]["logprobs"] is None


def test_top_logprobs(server: Server) -> None:  # cases 93, 99
    content = server.chat(max_tokens=4, logprobs=True, top_logprobs=20, seed=1)["choices"][0]["logprobs"]["content"]
    for entry in content:
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert len(values) == 20 and values == sorted(values, reverse=True)
    server.chat(max_tokens=1, logprobs=True, top_logprobs=64)
    assert "64" in server.refused(PATH, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 65})["message"]
    assert "logprobs=true" in server.refused(PATH, {"messages": MESSAGES, "top_logprobs": 5})["message"]


def test_bytes_join_to_the_text(server: Server) -> None:
    text = "žluťoučký 😀"
    ids = server.tokenizer.apply_chat_template([{"role": "user", "content": "emoji"}])
    server.engine.script(ids, server.tokenizer.encode(text, add_special_tokens=False))
    [choice] = server.chat("emoji", temperature=0, logprobs=True, max_tokens=60)["choices"]
    content = choice["logprobs"]["content"]
    assert choice["message"]["content"] == text and choice["finish_reason"] == "stop"
    assert bytes(byte for entry in content[:-1] for byte in entry["bytes"]).decode() == text
    assert "".join(entry["token"] for entry in content[:-1]) == text
    assert content[-1]["token"] == "<|eos|>"  # the token that ended the turn is scored too, and is not in the text


def test_stream(server: Server) -> None:  # cases 104, 105
    body: dict[str, Any] = {"messages": MESSAGES, "n": 3, "seed": 4, "max_tokens": 8, "logprobs": True,
                            "top_logprobs": 2, "return_token_ids": True}  # fmt: skip
    whole = server.post(PATH, **body)
    chunks = server.stream(PATH, **body, stream_options={"include_usage": True})
    for index, choice in enumerate(whole["choices"]):
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert own[0]["delta"] == {"role": "assistant"}
        assert all("role" not in piece["delta"] and piece["delta"].get("content") != "" for piece in own[1:])
        assert [piece["finish_reason"] for piece in own[:-1]] == [None] * (len(own) - 1)
        assert own[-1]["finish_reason"] == choice["finish_reason"] and own[-1]["seed"] == choice["seed"]
        assert joined(chunks, index) == choice["message"]["content"]
        assert [token for piece in own[1:] for token in piece["token_ids"]] == choice["token_ids"]
        content = [entry for piece in own[1:] if piece["logprobs"] for entry in piece["logprobs"]["content"]]
        assert content == choice["logprobs"]["content"]
    assert len({choice["message"]["content"] for choice in whole["choices"]}) > 1
    assert chunks[-1]["choices"] == [] and {**chunks[-1]["usage"], "prompt_tokens_details": None} == {
        **whole["usage"], "prompt_tokens_details": None,
    }  # fmt: skip
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_official_client_reads_both(server: Server) -> None:  # cases 93, 104
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    settings: Any = {"model": "fake", "messages": MESSAGES, "seed": 1, "logprobs": True, "top_logprobs": 3}
    whole = client.chat.completions.create(**settings, max_completion_tokens=6)
    assert whole.choices[0].message.role == "assistant" and whole.choices[0].logprobs is not None
    pieces = list(client.chat.completions.create(**settings, max_tokens=6, stream=True))
    for piece in pieces:
        type(piece).model_validate(piece.model_dump(), strict=True)
    assert pieces[0].choices[0].delta.role == "assistant"
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == whole.choices[0].message.content
    with pytest.raises(openai.BadRequestError, match="alternate"):
        client.chat.completions.create(model="fake", messages=[MESSAGES[1], MESSAGES[1]])  # type: ignore[list-item]


def test_seeds(server: Server) -> None:  # case 37
    texts = {}
    for seed in (0, 1, 2):
        body = {"messages": MESSAGES, "temperature": 1.0, "seed": seed, "max_tokens": 12}
        texts[seed] = server.post(PATH, **body)["choices"][0]["message"]["content"]
        assert joined(server.stream(PATH, **body)) == texts[seed]
    assert len(set(texts.values())) == 3


def test_prompt_ids_are_those_of_transformers(server: Server) -> None:  # case 133
    answer = server.post(PATH, messages=MESSAGES, max_tokens=1, return_token_ids=True)
    expected = tiny_tokenizer().apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=True)["input_ids"]
    assert answer["prompt_token_ids"] == expected and expected.count(0) == 1  # one BOS
    assert server.post("/tokenize", messages=MESSAGES)["tokens"] == expected
    plain = server.complete(prompt="the sum", max_tokens=1, return_token_ids=True)["choices"][0]["prompt_token_ids"]
    assert plain == tiny_tokenizer()("the sum")["input_ids"] and plain.count(0) == 1


def test_content_parts_of_text_are_joined(server: Server) -> None:
    parts = [{"type": "text", "text": "the sum "}, {"type": "text", "text": "of parts"}]
    messages = [MESSAGES[0], {"role": "user", "content": parts, "name": None}]
    body = {"max_tokens": 4, "seed": 1, "return_token_ids": True}
    split, whole = server.post(PATH, messages=messages, **body), server.post(PATH, messages=MESSAGES, **body)
    assert split["prompt_token_ids"] == whole["prompt_token_ids"]
    image = [{"type": "image_url", "image_url": {"url": "data:"}}]
    assert "text parts" in server.refused(PATH, {"messages": [{"role": "user", "content": image}]})["message"]


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([MESSAGES[1], MESSAGES[1]], "alternate"),
        ([{"role": "tool", "content": "x"}], "Unknown role tool"),
        ([{"role": "king", "content": "x"}], "king"),
        ([{"role": "user"}], "content"),
        ([{"role": "user", "content": None}], "content"),
        ([{"content": "x"}], "role"),
        (["hello"], "object"),
        ([], "non-empty"),
        (None, "non-empty"),
        ("hello", "non-empty"),
        ([{"role": "user", "content": "x", "tool_calls": [{}]}], "tool_calls"),
    ],
)
def test_refused_messages(server: Server, messages: Any, words: str) -> None:  # case 134
    for stream in (False, True):
        assert words in server.refused(PATH, {"messages": messages, "stream": stream})["message"]


def test_empty_content_is_a_turn(server: Server) -> None:  # case 118
    assert server.chat("", max_tokens=2, seed=1)["usage"]["completion_tokens"] == 2


def test_model_without_template() -> None:  # case 134
    tokenizer = fake_tokenizer()
    tokenizer._transformers.chat_template = None
    with running_server(FakeEngine(), tokenizer) as server:
        assert "no chat template" in server.refused(PATH, {"messages": MESSAGES})["message"]
        assert len(server.needle()) > 0


def test_unset_max_tokens_is_the_room_left(server: Server) -> None:  # case 121
    answer = server.post(PATH, messages=MESSAGES, seed=1, ignore_eos=True)
    assert answer["usage"]["total_tokens"] == 256 and answer["choices"][0]["finish_reason"] == "length"
    assert server.post(PATH, messages=MESSAGES, seed=1, ignore_eos=True, max_tokens=99999)["usage"] == {
        **answer["usage"], "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip


def test_precedence_of_sampling_defaults() -> None:  # case 135
    engine = FakeEngine(defaults=(("temperature", 0.7), ("top_k", 3), ("top_p", 0.9)))
    flags = resolve_defaults(engine.model_config.generation_defaults, "auto", '{"top_p": 0.5}')
    with running_server(engine, fake_tokenizer(), flags) as server:
        shown = server.client.get("/server_info").json()["sampling_defaults"]
        assert shown["temperature"] == {"value": 0.7, "source": "checkpoint"}
        assert shown["top_k"] == {"value": 3, "source": "checkpoint"}
        assert shown["top_p"] == {"value": 0.5, "source": "server flag"}
        assert shown["min_p"] == {"value": 0.0, "source": "built in"}
        body: dict[str, Any] = {"max_tokens": 10, "seed": 9}
        explicit: dict[str, Any] = {"temperature": 0.7, "top_k": 3, "top_p": 0.5}

        def text(**settings: Any) -> str:
            return str(server.chat(**{**body, **settings})["choices"][0]["message"]["content"])

        assert text() == text(**explicit) != text(temperature=1.0, top_k=0, top_p=1.0)
        assert text(temperature=0, seed=1) == text(temperature=0, seed=2)
    with running_server(engine, fake_tokenizer(), resolve_defaults((("top_k", 3),), "none")) as server:
        assert server.client.get("/server_info").json()["sampling_defaults"]["top_k"]["source"] == "built in"


@pytest.mark.parametrize("end", [1, 3])
def test_every_end_of_text_ends_the_turn(server: Server, end: int) -> None:  # case 136
    content = f"end with {end}"
    ids = server.tokenizer.apply_chat_template([{"role": "user", "content": content}])
    server.engine.script(ids, [*server.tokenizer.encode("done", add_special_tokens=False), end])
    [choice] = server.chat(content, temperature=0, return_token_ids=True)["choices"]
    assert choice["message"]["content"] == "done" and choice["finish_reason"] == "stop"
    assert choice["token_ids"][-1] == end and choice["stop_reason"] is None


def test_bad_defaults_are_refused() -> None:
    with pytest.raises(ValueError, match="not JSON"):
        resolve_defaults((), "auto", "{")
    with pytest.raises(ValueError, match="top_p"):
        resolve_defaults((), "auto", '{"top_p": 3}')
    with pytest.raises(ValueError, match="names from"):
        resolve_defaults((), "auto", '{"seed": 3}')
