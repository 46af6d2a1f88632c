"""From options to a listening server: load, bind, say where, serve.

Invariant: the address is printed only when connections are accepted there, and everything that can be refused was
refused before.
"""

from __future__ import annotations

import asyncio
import socket

import uvicorn
from fastapi import FastAPI

from isobit.config import EngineConfig
from isobit.engine import LLMEngine
from isobit.model_config import load_model_config
from isobit.sampling_defaults import resolve_defaults
from isobit.server.app import create_app
from isobit.tokenizer import load_tokenizer

BACKLOG = 2048
GRACE_SECONDS = 5.0  # for open requests, once the server was told to end


class Server(uvicorn.Server):
    """Ends as told: no new connections, some time for the open requests, then those left are told why they end."""

    def __init__(self, app: FastAPI, grace_seconds: float = GRACE_SECONDS) -> None:
        limit = int(grace_seconds) + 5  # of uvicorn, for a client that does not read the end of its stream
        super().__init__(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=limit))
        self._engine = app.state.serving.engine
        self._grace_seconds = grace_seconds

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop the engine after the grace: every open answer and stream then ends with an error that says so."""
        ending = asyncio.create_task(self._stop_engine())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    async def _stop_engine(self) -> None:
        await asyncio.sleep(self._grace_seconds)
        await self._engine.stop()


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ValueError naming the address and why it cannot be had."""
    if not 0 <= port <= 65535:
        raise ValueError(f"port={port} is outside [0, 65535]")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        raise ValueError(f"cannot listen on {host}:{port}: {error.strerror or error}; choose another --port") from error
    return listener


def serve(
    config: EngineConfig,
    host: str = "127.0.0.1",
    port: int = 8000,
    generation_config: str = "auto",
    sampling_defaults: str | None = None,
) -> None:
    """Load the model and serve it until interrupted. Raises ValueError for what cannot be done as asked."""
    resolve_defaults((), generation_config, sampling_defaults)
    listener = bind(host, port)
    try:
        load_model_config(config.model, config.parsed_overrides())  # its faults are told before the tokenizer's
        tokenizer = load_tokenizer(config.model, chat_template=config.chat_template)
        engine = LLMEngine(config)
        checkpoint = engine.model_config.generation_defaults
        app = create_app(engine, tokenizer, resolve_defaults(checkpoint, generation_config, sampling_defaults))
        print(engine.plan.format(), flush=True)
        print(f"fingerprint {engine.fingerprint}", flush=True)
        shown = f"[{host}]" if ":" in host else host
        print(f"serving {app.state.serving.model_name} at http://{shown}:{listener.getsockname()[1]}", flush=True)
        Server(app).run(sockets=[listener])
    finally:
        listener.close()
