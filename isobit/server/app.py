"""The HTTP application: routes and nothing else. Work is in `serving`, shapes in `completions` and `chat`.

Invariant: every body is read strictly, every mistake of a caller is a 4xx in OpenAI's form before anything is queued,
and every answer is strict JSON.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from isobit import __version__
from isobit.request import MAX_N
from isobit.sampling_defaults import SamplingDefaults, resolve_defaults
from isobit.server.async_engine import AsyncEngine, EngineDeadError
from isobit.server.chat import ChatFormat, encode_chat, start_chat
from isobit.server.completions import CompletionFormat, start_completion
from isobit.server.errors import ApiError, error_response, json_response
from isobit.server.metrics import Metrics
from isobit.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    parse_body,
)
from isobit.server.serving import Run, Serving
from isobit.server.transport import ClientGoneError, EventStream, read_body, run_while_connected

if TYPE_CHECKING:
    from isobit.engine import LLMEngine
    from isobit.tokenizer import Tokenizer

_logger = logging.getLogger("isobit.server")

DETERMINISM_AXES = (
    "batch mates", "order of arrival", "chunked prefill", "prefix cache", "page layout", "preemption and resumption",
    "number of threads", "instruction set", "restart", "generated versus scored", "streamed or whole",
)  # fmt: skip


def create_app(
    engine: LLMEngine,
    tokenizer: Tokenizer,
    defaults: SamplingDefaults | None = None,
) -> FastAPI:
    """The application serving `engine`. The engine's thread starts and ends with the application's lifespan."""
    if defaults is None:
        defaults = resolve_defaults(engine.model_config.generation_defaults)
    metrics = Metrics(engine.stats())
    async_engine = AsyncEngine(engine, metrics.observe_step)
    name = engine.config.served_model_name or PurePath(engine.config.model).name
    serving = Serving(async_engine, tokenizer, defaults, name)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async_engine.start()
        try:
            yield
        finally:
            await async_engine.stop()
            serving.close()

    app = FastAPI(title="isobit", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.serving = serving
    _add_error_handlers(app, metrics)
    _add_openai_routes(app, serving)
    _add_text_routes(app, serving)
    _add_state_routes(app, serving, metrics)
    return app


def _add_error_handlers(app: FastAPI, metrics: Metrics) -> None:
    async def api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError), "registered for ApiError"
        metrics.errors.labels(str(error.status)).inc()
        return error_response(error)

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException), "registered for HTTPException"
        return await api_error(request, ApiError(error.status_code, f"{request.url.path}: {error.detail}"))

    async def client_gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)

    async def dead(request: Request, error: Exception) -> Response:
        return await api_error(request, ApiError(503, str(error)))

    async def bug(request: Request, error: Exception) -> Response:
        return await api_error(request, ApiError(500, f"internal error: {type(error).__name__}: {error}"))

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(ClientGoneError, client_gone)
    app.add_exception_handler(EngineDeadError, dead)
    app.add_exception_handler(Exception, bug)


Started = tuple[Run, CompletionFormat | ChatFormat]


async def _answer(request: Request, stream: bool, start: Callable[[], Awaitable[Started]]) -> Response:
    """Start, then answer whole or streamed; the run is dropped when the client leaves."""

    async def whole() -> dict[str, Any]:
        run, shape = await start()
        try:
            return await shape.whole()
        finally:
            run.close()

    if not stream:
        return json_response(await run_while_connected(request.receive, whole()))
    run, shape = await start()
    return EventStream(shape.chunks(), on_close=run.close)


def _add_openai_routes(app: FastAPI, serving: Serving) -> None:
    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = parse_body(CompletionRequest, await read_body(request))
        return await _answer(request, bool(body.stream), lambda: start_completion(serving, body))

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        body = parse_body(ChatRequest, await read_body(request))
        return await _answer(request, bool(body.stream), lambda: start_chat(serving, body))

    @app.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [_model_card(serving)]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        serving.check_model(name)
        return json_response(_model_card(serving))


def _model_card(serving: Serving) -> dict[str, Any]:
    return {
        "id": serving.model_name,
        "object": "model",
        "created": 0,
        "owned_by": "isobit",
        "root": serving.engine.engine.config.model,
        "max_model_len": serving.context_length,
        "determinism": _determinism(serving),
    }


def _determinism(serving: Serving) -> dict[str, Any]:
    return {
        "level": "bitwise",
        "statement": "token ids and log-prob bits are a function of weights, Orders, prompt, sampling parameters, seed",
        "axes": list(DETERMINISM_AXES),
        "fingerprint": serving.fingerprint,
    }


def _add_text_routes(app: FastAPI, serving: Serving) -> None:
    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body = parse_body(TokenizeRequest, await read_body(request))
        serving.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give either prompt or messages", "prompt")
        if body.prompt is not None:
            tokens = await serving.encode(body.prompt, add_special_tokens=body.add_special_tokens)
        else:
            tokens = await encode_chat(serving, body.messages, body.add_generation_prompt, {})
        return json_response({"tokens": tokens, "count": len(tokens), "max_model_len": serving.context_length})

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body = parse_body(DetokenizeRequest, await read_body(request))
        serving.check_model(body.model)
        vocab_size = serving.engine.engine.model_config.vocab_size
        bad = [token for token in body.tokens if not 0 <= token < vocab_size]
        if bad:
            raise ApiError(400, f"token id {bad[0]} is outside the vocabulary [0, {vocab_size})", "tokens")
        text = await serving.in_text_thread(
            lambda: serving.tokenizer.decode(body.tokens, skip_special_tokens=body.skip_special_tokens)
        )
        return json_response({"prompt": text})


def _add_state_routes(app: FastAPI, serving: Serving, metrics: Metrics) -> None:
    engine = serving.engine

    @app.get("/health")
    async def health() -> Response:
        if engine.death is not None:
            raise ApiError(503, engine.death)
        return json_response({"status": "ok"})

    @app.get("/server_info")
    async def server_info() -> Response:
        return json_response(await engine.call(lambda inner: _describe(serving, inner)))

    @app.api_route("/flush_cache", methods=["GET", "POST"])
    async def flush_cache() -> Response:
        if await engine.call(lambda inner: inner.flush_cache()):
            return json_response({"flushed": True})
        raise ApiError(409, "cached pages are in use by a running request; nothing was flushed, try again later")

    @app.get("/metrics")
    async def show_metrics() -> Response:
        stats = await engine.call(lambda inner: inner.stats())
        return Response(metrics.render(stats), media_type="text/plain; version=0.0.4; charset=utf-8")


def _describe(serving: Serving, engine: LLMEngine) -> dict[str, Any]:
    return {
        **engine.server_info(),
        "version": __version__,
        "model": serving.model_name,
        "config": asdict(engine.config),
        "sampling_defaults": serving.defaults.as_dict(),
        "limits": {
            "n": MAX_N,
            "max_logprobs": engine.config.max_logprobs,
            "max_queued_requests": engine.config.max_queued_requests,
        },
        "determinism": _determinism(serving),
        "stats": asdict(engine.stats()),
    }
