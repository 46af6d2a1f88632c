"""One thread drives the engine; coroutines add requests, read their outputs, and drop them.

Knows the engine's interface and asyncio, no HTTP. Invariant: only the engine thread touches the engine
(besides `check_request` and `new_seed`, which change nothing that runs), commands run in order between steps, and
whoever stops reading aborts.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from isobit.request import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from isobit.engine import EngineStats, LLMEngine

T = TypeVar("T")
_logger = logging.getLogger("isobit.server")


class EngineDeadError(RuntimeError):
    """The engine thread has ended; the message says why."""


class EngineBusyError(RuntimeError):
    """The queue is full; trying again later may work."""


@dataclass(frozen=True)
class Sample:
    """One request of the engine: a prompt and the params of one sample (n = 1, seed set)."""

    prompt_token_ids: Sequence[int]
    params: SamplingParams


class Submission:
    """Samples submitted together; yields (index, output) as they come, until each has finished."""

    def __init__(self, owner: AsyncEngine, count: int) -> None:
        self._owner = owner
        name = uuid.uuid4().hex
        self.request_ids = [f"{name}-{index}" for index in range(count)]
        self._open = set(range(count))
        self.queue: asyncio.Queue[tuple[int, RequestOutput]] = asyncio.Queue()

    async def outputs(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """Outputs in the order the engine gave them; outputs of a sample given up by `finish` are dropped."""
        while self._open:
            index, output = await self.queue.get()
            if index not in self._open:
                continue
            if output.finish_reason is not None:
                self._open.discard(index)
                self._owner.forget(self.request_ids[index])
            yield index, output

    def finish(self, index: int) -> None:
        """Give up one sample: the engine drops it at once."""
        if index in self._open:
            self._open.discard(index)
            self._owner.abort(self.request_ids[index])

    def close(self) -> None:
        """Give up everything still open; harmless when all is done."""
        for index in list(self._open):
            self.finish(index)


class AsyncEngine:
    """Drives an LLMEngine from one thread. `on_step` is called in that thread after every step with the new stats."""

    def __init__(self, engine: LLMEngine, on_step: Callable[[EngineStats], None] | None = None) -> None:
        self.engine = engine
        self._on_step = on_step
        self._commands: queue.SimpleQueue[tuple[Callable[[LLMEngine], Any] | None, Future[Any]]] = queue.SimpleQueue()
        self._routes: dict[str, tuple[Submission, int]] = {}  # touched in the event loop only
        self._live: set[str] = set()  # ids in the engine; touched in the engine thread only
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._death: str | None = "the engine was not started"

    @property
    def death(self) -> str | None:
        """Why the engine thread is not running, or None while it is."""
        return self._death

    def start(self) -> None:
        """Start the thread; outputs go to the running event loop."""
        assert self._thread is None, "started twice"
        self._loop = asyncio.get_running_loop()
        self._death = None
        self._thread = threading.Thread(target=self._run, name="isobit-engine", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """End the thread after the step it is in; open requests fail."""
        if self._thread is not None and self._thread.is_alive():
            self._commands.put((None, Future()))
            await asyncio.to_thread(self._thread.join)

    async def call(self, function: Callable[[LLMEngine], T]) -> T:
        """Run `function(engine)` in the engine thread, between steps. Raises what it raises, or EngineDeadError."""
        future: Future[T] = Future()
        self._commands.put((function, future))
        if self._death is not None:
            self._refuse_commands()
        return await asyncio.wrap_future(future)

    async def submit(self, samples: Sequence[Sample]) -> Submission:
        """Queue all samples or none. Raises ValueError, EngineBusyError or EngineDeadError."""
        submission = Submission(self, len(samples))
        for index, request_id in enumerate(submission.request_ids):
            self._routes[request_id] = (submission, index)
        try:
            await self.call(lambda engine: self._add_all(submission.request_ids, samples))
        except BaseException:
            submission.close()
            raise
        return submission

    def abort(self, request_id: str) -> None:
        """Drop a request; nothing more comes from it."""
        self.forget(request_id)
        self._commands.put((lambda engine: self._drop(request_id), Future()))

    def forget(self, request_id: str) -> None:
        """Stop routing a request's outputs."""
        self._routes.pop(request_id, None)

    def _add_all(self, request_ids: Sequence[str], samples: Sequence[Sample]) -> None:
        limit, queued = self.engine.config.max_queued_requests, len(self._live)
        if len(samples) > limit:
            raise ValueError(f"prompts times n is {len(samples)}; the limit (max_queued_requests) is {limit}")
        if queued + len(samples) > limit:
            raise EngineBusyError(
                f"{queued} requests are queued and this one brings {len(samples)}; "
                f"the limit (max_queued_requests) is {limit}; try again later"
            )
        for request_id, sample in zip(request_ids, samples, strict=True):
            try:
                self.engine.add_request(request_id, sample.prompt_token_ids, sample.params)
            except Exception:
                for added in request_ids:
                    self._drop(added)
                raise
            self._live.add(request_id)

    def _run(self) -> None:
        try:
            while self._run_commands():
                if self.engine.has_unfinished():
                    self._step()
            self._die("the server is shutting down")
        except BaseException as error:
            _logger.exception("the engine thread ended")
            self._die(f"the engine stopped: {type(error).__name__}: {error}")

    def _run_commands(self) -> bool:
        """Run what is queued; waits for something when the engine is idle. False when asked to stop."""
        block = not self.engine.has_unfinished()
        while block or not self._commands.empty():
            block = False
            function, future = self._commands.get()
            if function is None:
                return False
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = function(self.engine)
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)
        return True

    def _step(self) -> None:
        try:
            outputs = self.engine.step()
        except Exception as error:
            _logger.exception("a step failed; its requests are dropped")
            outputs = self._drop_all(f"the engine failed in a step: {type(error).__name__}: {error}")
        if self._on_step is not None:
            self._on_step(self.engine.stats())
        if outputs:
            self._live.difference_update(output.request_id for output in outputs if output.finish_reason is not None)
            self._post(self._deliver, outputs)

    def _drop_all(self, message: str) -> list[RequestOutput]:
        """Every request was in reach of the failed step: fail them all, and go on only if the engine is whole."""
        failed = [_error_output(request_id, message) for request_id in sorted(self._live)]
        self._post(self._deliver, failed)
        for output in failed:
            self._drop(output.request_id)
        self.engine.check_integrity()
        return []

    def _drop(self, request_id: str) -> None:
        self._live.discard(request_id)
        self.engine.abort(request_id)

    def _post(self, function: Callable[..., None], *arguments: Any) -> None:
        assert self._loop is not None, "not started"
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            route = self._routes.get(output.request_id)
            if route is not None:
                submission, index = route
                submission.queue.put_nowait((index, output))

    def _die(self, message: str) -> None:
        self._death = message
        self._post(self._fail_routes, message)
        self._refuse_commands()

    def _fail_routes(self, message: str) -> None:
        self._deliver([_error_output(request_id, message) for request_id in self._routes])

    def _refuse_commands(self) -> None:
        while True:
            try:
                _, future = self._commands.get_nowait()
            except queue.Empty:
                return
            if future.set_running_or_notify_cancel():
                future.set_exception(EngineDeadError(self._death or "the engine is not running"))


def _error_output(request_id: str, message: str) -> RequestOutput:
    return RequestOutput(request_id, (), (), "error", None, message, 0, None)
