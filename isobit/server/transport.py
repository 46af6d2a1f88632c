"""Bodies in, events out, and the moment a client leaves.

Knows HTTP only. Invariant: when the client goes, the work is cancelled at once, streamed or not; and a stream begins
only after the request was accepted, so a refused request is never a 200.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from isobit.server.errors import ApiError, encode, to_json

MAX_BODY_BYTES = 64 * 1024 * 1024

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client closed the connection before the answer was whole."""


async def read_body(request: Request) -> bytes:
    """The whole body. Raises ApiError 413 above MAX_BODY_BYTES without reading on, ClientGoneError if it never ends."""
    parts: list[bytes] = []
    size = 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > MAX_BODY_BYTES:
                raise ApiError(413, f"the request body is larger than {MAX_BODY_BYTES} bytes")
            parts.append(part)
    except ClientDisconnect as error:
        raise ClientGoneError from error
    return b"".join(parts)


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def run_while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Result of `work`; if the client leaves first, `work` is cancelled and ClientGoneError raised."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_until_disconnect(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        for pending in (task, watcher):
            pending.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


class EventStream(Response):
    """Server-sent events: one `data:` line for each item, then `[DONE]`. An ApiError inside becomes one error event.

    `on_close` is called once the stream is over, however it ended, also when it never began.
    """

    media_type = "text/event-stream"

    def __init__(self, items: AsyncIterator[dict[str, Any]], on_close: Callable[[], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._items = items
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await run_while_connected(receive, self._send_all(send))
        except (ClientGoneError, OSError):
            return
        finally:
            self._on_close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for item in self._items:
                await self._send_event(send, to_json(item))
        except ApiError as error:
            await self._send_event(send, to_json(error.body()))
        await self._send_event(send, "[DONE]")
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_event(self, send: Send, text: str) -> None:
        await send({"type": "http.response.body", "body": b"data: " + encode(text) + b"\n\n", "more_body": True})
