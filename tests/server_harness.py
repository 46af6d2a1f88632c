"""A real server on 127.0.0.1 in a thread, and small helpers to talk to it as a client would: bytes over HTTP."""

from __future__ import annotations

import json
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx

from isobit.engine import LLMEngine
from isobit.sampling_defaults import SamplingDefaults
from isobit.server import run
from isobit.server.app import create_app
from isobit.tokenizer import Tokenizer


class Server:
    """A running server: its engine (look, do not touch while requests run), tokenizer, address and a client."""

    def __init__(self, engine: Any, tokenizer: Tokenizer, url: str) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.url = url
        self.client = httpx.Client(base_url=url, timeout=60)

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        """JSON of a 200 answer, read strictly."""
        response = self.client.post(path, json=body)
        assert response.status_code == 200, response.text
        return strict_json(response.text)

    def complete(self, **body: Any) -> dict[str, Any]:
        return self.post("/v1/completions", **body)

    def chat(self, content: str = "hello", **body: Any) -> dict[str, Any]:
        return self.post("/v1/chat/completions", messages=[{"role": "user", "content": content}], **body)

    def refused(self, path: str, body: Any, status: int = 400) -> dict[str, Any]:
        """The error object of a refused body (an object, or raw bytes), checked for OpenAI's form."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        response = self.client.post(path, content=content, headers={"Content-Type": "application/json"})
        assert response.status_code == status, (response.status_code, response.text[:500])
        assert response.headers["content-type"].startswith("application/json")
        error = strict_json(response.text)["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["message"], error
        return error

    def stream(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """The chunks of a stream; [DONE] must come exactly once, last."""
        with self.client.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = [line for line in response.iter_lines() if line]
        assert all(line.startswith("data: ") for line in lines), lines
        assert lines[-1] == "data: [DONE]" and lines.count("data: [DONE]") == 1
        return [strict_json(line[6:]) for line in lines[:-1]]

    def metric(self, name: str) -> float:
        for line in self.client.get("/metrics").text.splitlines():
            if line.startswith(name + " "):
                return float(line.split()[1])
        raise AssertionError(f"no metric {name}")

    def needle(self) -> bytes:
        """Bytes of a fixed sampled request: token ids, log-prob bits, finish reason, usage (cached tokens apart)."""
        answer = self.complete(
            prompt="the needle of this page", max_tokens=12, temperature=1.0, seed=11, logprobs=2, return_token_ids=True
        )
        return answer_bits(answer)


def answer_bits(answer: dict[str, Any]) -> bytes:
    """What must not change of a completions answer, as bytes."""
    parts = []
    for choice in answer["choices"]:
        logprobs = choice["logprobs"] or {"token_logprobs": [], "top_logprobs": None}
        values = [value for value in logprobs["token_logprobs"] if value is not None]
        for named in logprobs["top_logprobs"] or ():
            values += (named or {}).values()
        parts.append(json.dumps([choice["index"], choice["text"], choice.get("token_ids"), choice["finish_reason"]]))
        parts.append(struct.pack(f"<{len(values)}f", *values).hex())
    usage = answer["usage"]
    return "|".join([*parts, str([usage["prompt_tokens"], usage["completion_tokens"]])]).encode()


def strict_json(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


@contextmanager
def running_server(
    engine: LLMEngine, tokenizer: Tokenizer, defaults: SamplingDefaults | None = None
) -> Iterator[Server]:
    """Serve until the block ends."""
    listener = run.bind("127.0.0.1", 0)
    uvicorn_server = run.Server(create_app(engine, tokenizer, defaults), grace_seconds=0.5)
    thread = threading.Thread(target=uvicorn_server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    wait_until(lambda: uvicorn_server.started, "the server did not start")
    server = Server(engine, tokenizer, f"http://127.0.0.1:{listener.getsockname()[1]}")
    try:
        yield server
    finally:
        server.client.close()
        uvicorn_server.should_exit = True
        thread.join(10)
        listener.close()
        assert not thread.is_alive(), "the server did not stop"


def wait_until(condition: Any, message: str, seconds: float = 10.0) -> None:
    """Wait for a condition; fail with `message` when it does not come."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, message
        time.sleep(0.005)


def joined(chunks: Sequence[dict[str, Any]], index: int = 0) -> str:
    """Text of one choice of a stream, either route."""
    pieces = []
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] == index:
                pieces.append(choice["text"] if "text" in choice else choice["delta"].get("content", ""))
    return "".join(pieces)
