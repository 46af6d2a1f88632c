"""/v1/completions: log-probs and echo, seeds, n, prompt lists, stop strings, streams, usage. Over real HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.fake_engine import FakeEngine, fake_tokenizer
from tests.server_harness import Server, answer_bits, joined, running_server

PROMPT = "the order of addition"
PATH = "/v1/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server(FakeEngine(), fake_tokenizer()) as running:
        yield running


def ids_of(server: Server, text: str) -> list[int]:
    return server.post("/tokenize", prompt=text)["tokens"]


def script(server: Server, prompt: str, text: str) -> None:
    tokenizer = server.tokenizer
    server.engine.script(tokenizer.encode(prompt), tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("as_ids", [False, True])
def test_echo_scores_the_prompt_and_generates_nothing(server: Server, as_ids: bool) -> None:  # case 90
    ids = ids_of(server, PROMPT)
    answer = server.complete(prompt=ids if as_ids else PROMPT, echo=True, max_tokens=0, logprobs=1)
    [choice] = answer["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"] == "".join(logprobs["tokens"]) == PROMPT  # case 97
    assert len(logprobs["token_logprobs"]) == len(ids)
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert all(value < 0 for value in logprobs["token_logprobs"][1:])
    assert logprobs["text_offset"] == [sum(map(len, logprobs["tokens"][:index])) for index in range(len(ids))]
    assert choice["finish_reason"] == "length" and answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["prompt_tokens"] == len(ids)


@pytest.mark.parametrize("text", ["ž日本😀x", " two  spaces", "<|im_start|>user\nhi<|im_end|>"])
def test_echoed_tokens_join_to_the_text(server: Server, text: str) -> None:  # case 97
    [choice] = server.complete(prompt=text, echo=True, max_tokens=3, logprobs=0, temperature=0)["choices"]
    assert choice["text"].startswith(text)
    assert "".join(choice["logprobs"]["tokens"]).startswith(text)
    assert "Ġ" not in "".join(choice["logprobs"]["tokens"])


def test_echo_then_generation_has_the_bits_of_generation_alone(server: Server) -> None:
    alone = server.complete(prompt=PROMPT, max_tokens=6, logprobs=3, seed=2)["choices"][0]
    both = server.complete(prompt=PROMPT, max_tokens=6, logprobs=3, seed=2, echo=True)["choices"][0]
    assert both["text"] == PROMPT + alone["text"]
    assert both["logprobs"]["token_logprobs"][-6:] == alone["logprobs"]["token_logprobs"]
    assert both["logprobs"]["text_offset"][-6] == len(PROMPT)


@pytest.mark.parametrize(
    "settings",
    [{"top_k": 1}, {"top_p": 0.01}, {"min_p": 0.9}, {"logit_bias": {"5": -100}}, {"temperature": 0}],
)
def test_filters_never_reach_the_logprobs(server: Server, settings: dict[str, Any]) -> None:  # cases 22, 91
    answer = server.complete(prompt=PROMPT, echo=True, max_tokens=3, logprobs=5, seed=1, **settings)
    plain = server.complete(prompt=PROMPT, echo=True, max_tokens=0, logprobs=5)
    count = answer["usage"]["prompt_tokens"]
    numbers = answer["choices"][0]["logprobs"]["token_logprobs"]
    assert numbers[:count] == plain["choices"][0]["logprobs"]["token_logprobs"]


def test_minus_infinity_is_a_number() -> None:  # case 91
    from isobit.request import TokenLogprob
    from isobit.server.logprobs import completion_logprobs

    entry = TokenLogprob(5, float("-inf"), ((6, 0.0), (5, float("-inf"))))
    shaped = completion_logprobs(fake_tokenizer(), ["a"], [entry], 2, 0)
    assert shaped["token_logprobs"] == [-9999.0] and shaped["top_logprobs"][0]["a"] == -9999.0


def test_logprobs_zero_is_not_off(server: Server) -> None:  # case 92
    chosen = server.complete(prompt=PROMPT, max_tokens=4, logprobs=0, seed=1)["choices"][0]["logprobs"]
    assert len(chosen["token_logprobs"]) == 4 and chosen["top_logprobs"] is None
    assert server.complete(prompt=PROMPT, max_tokens=4, seed=1)["choices"][0]["logprobs"] is None


def test_most_logprobs(server: Server) -> None:  # case 99
    top = server.complete(prompt=PROMPT, max_tokens=1, logprobs=64, seed=1)["choices"][0]["logprobs"]["top_logprobs"]
    assert len(top[0]) in (64, 65)  # the chosen token comes on top when it is none of the best
    assert "64" in server.refused(PATH, {"prompt": PROMPT, "logprobs": 65})["message"]


def test_prompt_logprobs_field(server: Server) -> None:
    ids = ids_of(server, PROMPT)
    [choice] = server.complete(prompt=PROMPT, max_tokens=1, prompt_logprobs=1)["choices"]
    entries = choice["prompt_logprobs"]
    assert entries[0] is None and len(entries) == len(ids)
    assert all(str(token) in entry for token, entry in zip(ids[1:], entries[1:], strict=True))
    server.refused(PATH, {"prompt": PROMPT, "prompt_logprobs": 1, "stream": True})


def test_each_list_of_alternatives_is_as_long_as_asked(server: Server) -> None:
    """One routine computes the prompt's log-probs for `echo` with `logprobs` and for `prompt_logprobs`."""
    body = {"prompt": PROMPT, "echo": True, "max_tokens": 2, "seed": 1}
    for few, many in ((1, 5), (5, 1)):
        [both] = server.complete(**body, logprobs=few, prompt_logprobs=many)["choices"]
        [alone] = server.complete(**body, logprobs=few)["choices"]
        [prompt] = server.complete(**body, prompt_logprobs=many)["choices"]
        assert both["logprobs"] == alone["logprobs"] and both["prompt_logprobs"] == prompt["prompt_logprobs"]


def test_seeds_are_seeds_streamed_or_not(server: Server) -> None:  # case 37
    texts = []
    for seed in (0, 1, 2):
        body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 1.0, "seed": seed}
        first = server.complete(**body)["choices"][0]
        assert first["seed"] == seed
        assert server.complete(**body)["choices"][0]["text"] == joined(server.stream(PATH, **body)) == first["text"]
        texts.append(first["text"])
    assert len(set(texts)) == 3


def test_unseeded_samples_differ_and_can_be_replayed(server: Server) -> None:  # case 39
    choices = [server.complete(prompt=PROMPT, max_tokens=8)["choices"][0] for _ in range(20)]
    assert len({choice["text"] for choice in choices}) >= 15
    for choice in choices[:3]:
        assert server.complete(prompt=PROMPT, max_tokens=8, seed=choice["seed"])["choices"][0]["text"] == choice["text"]


def test_n_samples(server: Server) -> None:  # case 41
    body = {"prompt": PROMPT, "max_tokens": 10, "n": 4, "seed": 5}
    whole = server.complete(**body)
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    assert len({choice["text"] for choice in whole["choices"]}) > 1
    assert answer_bits(server.complete(**body)) == answer_bits(whole)
    chunks = server.stream(PATH, **body)
    for choice in whole["choices"]:
        ends = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"] and c["finish_reason"]]
        assert len(ends) == 1 and joined(chunks, choice["index"]) == choice["text"]
        alone = server.complete(prompt=PROMPT, max_tokens=10, seed=choice["seed"])["choices"][0]
        assert alone["text"] == choice["text"]
    assert server.complete(**{**body, "n": 1})["choices"][0]["text"] == whole["choices"][0]["text"]


def test_prompt_lists_times_n(server: Server) -> None:  # case 109
    prompts = ["the sum", "a page of", "row and batch"]
    settings = {"max_tokens": 6, "n": 2, "seed": 3, "logprobs": 1}
    for given in (prompts, [ids_of(server, prompt) for prompt in prompts]):
        answer = server.complete(prompt=given, **settings)
        assert [choice["index"] for choice in answer["choices"]] == list(range(6))
        for index, prompt in enumerate(prompts):
            solo = server.complete(prompt=prompt, **settings)["choices"]
            for sample in range(2):
                assert answer["choices"][index * 2 + sample] == {**solo[sample], "index": index * 2 + sample}
    assert answer["usage"]["prompt_tokens"] == sum(len(ids_of(server, prompt)) for prompt in prompts)


@pytest.mark.parametrize(
    ("output", "stop", "shown"),
    [
        ("ABCDEFGHIJKLM", ["DEFGHIJ"], "ABC"),  # case 100
        ("alpha beta gamma delta", ["beta gamma"], "alpha "),
        ("the tokens of", ["ken"], "the to"),
        ("one two three", ["x" * 20, "z"], "one two three"),
    ],
)
def test_stop_strings_whole_and_streamed(server: Server, output: str, stop: list[str], shown: str) -> None:
    prompt = f"say {output}"
    script(server, prompt, output)
    body = {"prompt": prompt, "max_tokens": 60, "temperature": 0, "stop": stop, "return_token_ids": True, "logprobs": 1}
    [whole] = server.complete(**body)["choices"]
    assert whole["text"] == shown and whole["finish_reason"] == "stop"
    chunks = server.stream(PATH, **body)
    assert joined(chunks) == shown
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert all(choice["text"] for choice in choices[:-1])  # case 101
    assert [token for choice in choices for token in choice["token_ids"]] == whole["token_ids"]
    numbers = [value for choice in choices for value in choice["logprobs"]["token_logprobs"]]
    assert numbers == whole["logprobs"]["token_logprobs"]
    assert whole["stop_reason"] == (stop[0] if shown != output else None)


@pytest.mark.parametrize("text", ["😀", "👩‍👩‍👧‍👦 family", "日本語", "žluťoučký"])
def test_characters_over_several_tokens(server: Server, text: str) -> None:  # case 102
    prompt = f"write {len(text)}"
    script(server, prompt, text)
    body = {"prompt": prompt, "max_tokens": 60, "temperature": 0}
    assert server.complete(**body)["choices"][0]["text"] == text
    chunks = server.stream(PATH, **body)
    assert joined(chunks) == text and "\ufffd" not in joined(chunks)
    cut = {**body, "max_tokens": 3}
    assert joined(server.stream(PATH, **cut)) == server.complete(**cut)["choices"][0]["text"]


def test_usage_in_streams(server: Server) -> None:  # case 106
    body = {"prompt": ["the sum", PROMPT], "n": 2, "max_tokens": 5, "seed": 1}
    server.complete(**body)  # so that both of the next find the same in the cache
    whole = server.complete(**body)
    chunks = server.stream(PATH, **body, stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert all("usage" not in chunk for chunk in server.stream(PATH, **body))
    server.refused(PATH, {**body, "stream_options": {"include_usage": True}})


def test_streamed_echo(server: Server) -> None:
    body = {"prompt": PROMPT, "echo": True, "max_tokens": 4, "seed": 1, "logprobs": 2, "n": 2}
    whole, chunks = server.complete(**body), server.stream(PATH, **body)
    for choice in whole["choices"]:
        own = [c["logprobs"] for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert joined(chunks, choice["index"]) == choice["text"]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [item for piece in own for item in piece[name]] == choice["logprobs"][name]


def test_max_tokens(server: Server) -> None:  # case 121
    count = len(ids_of(server, PROMPT))
    assert server.complete(prompt=PROMPT, seed=1, ignore_eos=True)["usage"]["completion_tokens"] == 16
    answer = server.complete(prompt=PROMPT, seed=1, ignore_eos=True, max_tokens=100000)
    assert answer["usage"]["completion_tokens"] == 256 - count
    assert answer["choices"][0]["finish_reason"] == "length"


def test_what_a_choice_needs_to_be_checked(server: Server) -> None:
    answer = server.complete(prompt=PROMPT, max_tokens=3, seed=1, return_token_ids=True)
    [choice] = answer["choices"]
    assert choice["prompt_token_ids"] == ids_of(server, PROMPT) and len(choice["token_ids"]) == 3
    assert answer["system_fingerprint"] == server.engine.fingerprint
    again = server.complete(prompt=choice["prompt_token_ids"], max_tokens=3, seed=1)
    assert again["choices"][0]["text"] == choice["text"]
    assert server.post("/detokenize", tokens=choice["token_ids"])["prompt"] == choice["text"]


def test_official_client_reads_both(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    whole = client.completions.create(model="fake", prompt=PROMPT, max_tokens=5, seed=1, logprobs=2, echo=True)
    assert whole.choices[0].logprobs is not None and whole.usage is not None
    assert whole.choices[0].finish_reason == "length" and whole.system_fingerprint == server.engine.fingerprint
    pieces = list(client.completions.create(model="fake", prompt=PROMPT, max_tokens=5, seed=1, echo=True, stream=True))
    assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text
    assert [model.id for model in client.models.list()] == ["fake"]
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="fake", prompt=PROMPT, temperature=-1)
    with pytest.raises(openai.NotFoundError, match="other"):
        client.completions.create(model="other", prompt=PROMPT)


def test_a_crowd_of_mixed_settings_changes_nobody(server: Server) -> None:  # cases 38, 47, 127
    settings: list[dict[str, Any]] = [
        {"temperature": 0.0}, {"temperature": 0.7, "top_k": 5}, {"top_p": 0.5}, {"min_p": 0.2},
        {"repetition_penalty": 1.3}, {"frequency_penalty": 1.0, "presence_penalty": -0.5}, {"logit_bias": {"9": 50}},
        {"min_tokens": 4, "stop": ["a"]}, {"logprobs": 3}, {"echo": True, "logprobs": 1}, {"n": 2}, {"top_k": 1},
    ]  # fmt: skip
    bodies = [
        {"prompt": f"prompt {index} of {PROMPT}", "max_tokens": 8, "seed": index, **settings[index % len(settings)]}
        for index in range(36)
    ]
    solo = [answer_bits(server.complete(**body)) for body in bodies]
    before = server.engine.stats().max_step_requests
    with ThreadPoolExecutor(18) as pool:
        server.engine.step_seconds = 0.01
        try:
            crowd = [answer_bits(answer) for answer in pool.map(lambda body: server.complete(**body), bodies)]
        finally:
            server.engine.step_seconds = 0.0
    assert crowd == solo and len(set(solo)) >= 34  # a large bias makes two alike
    assert server.engine.stats().max_step_requests > max(before, 4)
