"""Clients that leave, queues that fill, steps that fail: what runs on is unchanged, nothing leaks. Over real HTTP."""

from __future__ import annotations

import logging
import random
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from tests.fake_engine import FakeEngine, fake_tokenizer
from tests.server_harness import Server, answer_bits, running_server, strict_json, wait_until

COMPLETIONS = "/v1/completions"
LONG = {"prompt": "a long one", "max_tokens": 200, "ignore_eos": True, "seed": 1}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server(FakeEngine(), fake_tokenizer()) as running:
        yield running


@pytest.fixture
def slow(server: Server) -> Iterator[Server]:
    server.engine.step_seconds = 0.02
    yield server
    server.engine.step_seconds = 0.0


def is_empty(server: Server) -> bool:
    stats = server.engine.stats()
    return bool(stats.num_running == stats.num_waiting == 0)


def pages_in_use(server: Server) -> int:
    stats = server.engine.stats()
    return int(stats.num_pages - stats.num_free_pages - stats.num_cached_pages)


def test_closed_streams_stop_at_once(slow: Server) -> None:  # case 130
    solo = slow.needle()
    with ExitStack() as stack:
        open_lines = []  # httpx closes a response when its iterator is dropped
        for index in range(8):
            body = {**LONG, "prompt": f"stream {index}", "stream": True}
            open_lines.append(stack.enter_context(slow.client.stream("POST", COMPLETIONS, json=body)).iter_lines())
            next(open_lines[-1])
        wait_until(lambda: slow.engine.stats().num_running == 8, "the streams did not run together")
    wait_until(lambda: is_empty(slow), "a closed stream runs on", seconds=2)
    assert pages_in_use(slow) == 0 and slow.metric("isobit_num_requests_running") == 0
    steps = slow.engine.stats().num_steps
    assert slow.needle() == solo
    assert slow.engine.stats().num_steps - steps <= 14  # nobody else shared the steps


def test_a_client_that_leaves_an_unstreamed_request(slow: Server) -> None:  # case 130
    for path, body in (
        (COMPLETIONS, {**LONG, "n": 3}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "ignore_eos": True}),
    ):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(slow.url + path, json=body, timeout=httpx.Timeout(5, read=0.2))
        assert slow.engine.stats().max_step_requests >= 1
        wait_until(lambda: is_empty(slow), "an abandoned request runs on", seconds=2)
    assert pages_in_use(slow) == 0


def test_a_client_that_leaves_while_sending(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    solo = server.needle()
    monitor = logging.getLogger("uvicorn.error")
    monitor.addHandler(caplog.handler)
    host, port = server.url.removeprefix("http://").split(":")
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
    for sent in (head, head + b"Content-Length: 99\r\n\r\n{"):
        connection = socket.create_connection((host, int(port)))
        connection.sendall(sent)
        connection.close()
    assert server.needle() == solo and is_empty(server)
    monitor.removeHandler(caplog.handler)
    assert not caplog.records, "leaving is the client's right, not an error of the server"


def test_aborts_at_any_phase_change_nobody(server: Server) -> None:  # case 132
    rng = random.Random(3)
    bodies = [
        {"prompt": [4 + (index * 7 + at) % 400 for at in range(rng.randrange(1, 90))], "max_tokens": 8,
         "seed": index, "logprobs": 1, "ignore_eos": True}
        for index in range(24)
    ]  # fmt: skip
    solo = [answer_bits(server.complete(**body)) for body in bodies]
    delays = [rng.uniform(0.01, 0.4) for _ in bodies]

    def one(index: int) -> bytes | None:
        if index % 2:
            return answer_bits(server.complete(**bodies[index]))
        try:
            httpx.post(server.url + COMPLETIONS, json=bodies[index], timeout=httpx.Timeout(9, read=delays[index]))
        except httpx.ReadTimeout:
            return None
        return b"finished before it was dropped"

    server.engine.step_seconds = 0.02
    try:
        with ThreadPoolExecutor(24) as pool:
            answers = list(pool.map(one, range(24)))
    finally:
        server.engine.step_seconds = 0.0
    assert answers[1::2] == solo[1::2]
    assert answers[::2].count(None) >= 5, "no request was dropped"
    wait_until(lambda: is_empty(server), "a dropped request runs on", seconds=2)
    assert pages_in_use(server) == 0
    assert server.post("/flush_cache") == {"flushed": True}
    assert server.engine.stats().num_free_pages == server.engine.stats().num_pages


def test_a_stop_string_frees_the_request(server: Server) -> None:
    prompt = "stop early"
    tokenizer = server.tokenizer
    server.engine.script(tokenizer.encode(prompt), tokenizer.encode("go halt " * 20, add_special_tokens=False))
    answer = server.complete(prompt=prompt, temperature=0, stop="halt", max_tokens=200)
    assert answer["choices"][0]["text"] == "go "
    wait_until(lambda: is_empty(server), "a stopped request runs on", seconds=2)


def test_a_full_queue() -> None:
    with running_server(FakeEngine(max_queued_requests=3), fake_tokenizer()) as server:
        server.engine.step_seconds = 0.02
        with server.client.stream("POST", COMPLETIONS, json={**LONG, "n": 2, "stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            for stream in (False, True):
                body = {"prompt": "x", "n": 2, "stream": stream}
                message = server.refused(COMPLETIONS, body, status=503)["message"]
                assert "2 requests are queued" in message and "3" in message
            server.complete(prompt="x", max_tokens=1)
        assert "limit" in server.refused(COMPLETIONS, {"prompt": "x", "n": 4})["message"]
        server.engine.step_seconds = 0.0
        wait_until(lambda: is_empty(server), "the stream runs on", seconds=2)
        server.complete(prompt="x", max_tokens=1, n=3)


def test_nan_logits_fail_one_request_and_nobody_else(server: Server) -> None:  # case 145
    solo = server.needle()
    prompt = server.tokenizer.encode("broken numbers")
    server.engine.poison(prompt)
    with ThreadPoolExecutor(2) as pool:
        needle = pool.submit(server.needle)
        error = server.refused(COMPLETIONS, {"prompt": prompt, "n": 2}, status=500)
        assert needle.result() == solo
    assert "NaN" in error["message"] and error["type"] == "server_error"
    with server.client.stream("POST", COMPLETIONS, json={"prompt": prompt, "stream": True}) as response:
        lines = [line for line in response.iter_lines() if line]
    assert "NaN" in strict_json(lines[0][6:])["error"]["message"] and lines[1:] == ["data: [DONE]"]
    wait_until(lambda: is_empty(server), "a failed request runs on", seconds=2)
    assert server.needle() == solo


def test_a_failing_step_fails_its_requests_and_the_engine_goes_on(server: Server) -> None:
    solo = server.needle()
    server.engine.fail_steps = 1
    assert "a made-up failure" in server.refused(COMPLETIONS, {"prompt": "x"}, status=500)["message"]
    assert server.client.get("/health").json() == {"status": "ok"}
    assert server.needle() == solo and pages_in_use(server) == 0


def test_an_engine_that_is_not_whole_after_a_failure_stops() -> None:
    engine = FakeEngine()
    with running_server(engine, fake_tokenizer()) as server:
        assert server.client.get("/health").status_code == 200
        engine.leak, engine.fail_steps = True, 1
        server.refused(COMPLETIONS, {"prompt": "x"}, status=500)
        wait_until(lambda: server.client.get("/health").status_code == 503, "the dead engine is called healthy")
        assert "a made-up leak" in server.client.get("/health").json()["error"]["message"]
        for stream in (False, True):
            assert "leak" in server.refused(COMPLETIONS, {"prompt": "x", "stream": stream}, status=503)["message"]
        assert server.client.get("/server_info").status_code == 503


def test_flush_and_cached_tokens(slow: Server) -> None:
    slow.engine.step_seconds = 0.0
    prompt = [5 + index % 300 for index in range(200)]
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": 3, "seed": 1, "logprobs": 2, "return_token_ids": True}
    slow.post("/flush_cache")
    cold, warm = slow.complete(**body), slow.complete(**body)
    assert cold["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] >= 128
    assert answer_bits(cold) == answer_bits(warm)
    assert slow.client.get("/flush_cache").json() == {"flushed": True}
    assert slow.complete(**body)["usage"] == cold["usage"]


def test_flush_while_a_request_uses_the_cache(slow: Server) -> None:
    body = {**LONG, "prompt": [5 + index % 300 for index in range(150)], "stream": True}
    with slow.client.stream("POST", COMPLETIONS, json=body) as response:
        lines = response.iter_lines()
        next(lines)
        answer = slow.client.post("/flush_cache")
    assert answer.status_code == 409 and "in use" in answer.json()["error"]["message"]
    wait_until(lambda: is_empty(slow), "the stream runs on", seconds=2)


def test_metrics() -> None:
    with running_server(FakeEngine(), fake_tokenizer()) as server:
        for _ in range(2):
            server.complete(prompt=[5 + index % 300 for index in range(150)], max_tokens=5, ignore_eos=True, seed=1)
        text = server.client.get("/metrics")
        assert text.headers["content-type"].startswith("text/plain")
        stats = server.engine.stats()
        assert server.metric("isobit_generation_tokens_total") == 10 == stats.num_generation_tokens
        assert server.metric("isobit_prompt_tokens_total") == 300
        assert server.metric("isobit_cached_tokens_total") == stats.num_cached_tokens > 0
        assert server.metric("isobit_steps_total") == server.metric("isobit_rows_per_step_count") == stats.num_steps
        assert server.metric("isobit_preemptions_total") == 0
        assert 0 < server.metric("isobit_kv_cache_usage") < 1
        assert server.metric("isobit_num_requests_waiting") == 0


def test_server_info(server: Server) -> None:  # case 178
    info = strict_json(server.client.get("/server_info").text)
    assert info["fingerprint"] == info["determinism"]["fingerprint"] == server.engine.fingerprint
    assert info["determinism"]["level"] == "bitwise" and "batch mates" in info["determinism"]["axes"]
    assert (info["context_length"], info["vocab_size"], info["chunked_prefill_size"]) == (256, 480, 512)
    assert "LinearOrder" in info["plan"]["orders"]["linear.qkv"]
    assert info["config"]["model"] == "folder/fake" and info["limits"]["n"] == 128
    [card] = server.client.get("/v1/models").json()["data"]
    assert card["max_model_len"] == 256 and card["determinism"] == info["determinism"]


def test_open_requests_are_told_that_the_server_ends(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine(context_length=4096)
    engine.step_seconds = 0.01
    with ThreadPoolExecutor() as clients, running_server(engine, fake_tokenizer()) as running:
        url = running.url + "/v1/completions"
        body = {"prompt": "the sum", "max_tokens": 4000, "ignore_eos": True, "seed": 1}
        whole = clients.submit(httpx.post, url, json=body, timeout=60)
        stream = clients.submit(httpx.post, url, json={**body, "stream": True}, timeout=60)
        wait_until(lambda: engine.stats().num_running == 2, "the requests do not run")
    for answer in (whole.result(), stream.result()):
        assert "the server is shutting down" in answer.text
    assert whole.result().status_code == 500 and stream.result().status_code == 200
    events = [line for line in stream.result().text.splitlines() if line]
    assert len(events) > 10 and events[-1] == "data: [DONE]" and "error" in strict_json(events[-2][6:])
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR], caplog.text


def test_two_servers_give_the_same_bytes(server: Server) -> None:
    with running_server(FakeEngine(chunked_prefill_size=3, max_running_requests=1), fake_tokenizer()) as other:
        assert other.needle() == server.needle()
        assert other.engine.stats().max_step_rows <= 3 < server.engine.stats().max_step_rows
