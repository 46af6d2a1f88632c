"""The scheduler: which tokens of which requests the next step computes, and in which pages.

It knows neither model nor tensors, and it does not tell prefill from decode: a request has token ids, and a number of
them that are computed; a step computes some of the rest. Since a row is a pure function of its prefix, any cut is
right, and the scheduler owes nothing to alignment, batch mates or history.

Invariants: requests run in order of arrival; only a request that arrived earlier can take pages from a running one;
so the earliest running request advances in every step, and work always ends (see `check_integrity` for the pages).
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, deque
from dataclasses import dataclass

from isobit.pages import PagePool
from isobit.prefix_cache import PrefixCache
from isobit.request import Request, RequestState


@dataclass(slots=True)
class ScheduledChunk:
    """Positions `start` to `start + num_tokens - 1` of one request; their keys and values go to `request.pages`."""

    request: Request
    start: int
    num_tokens: int
    needs_logits: bool  # the chunk ends with the last token there is: its last row decides the next one

    @property
    def token_ids(self) -> list[int]:
        return self.request.token_ids[self.start : self.start + self.num_tokens]

    @property
    def pages(self) -> list[int]:
        """Page table of the request as it is now; `publish` may replace entries by equal pages after the step."""
        return self.request.pages


@dataclass(slots=True)
class ScheduledStep:
    """What one step computes (at most one chunk a request), and the ids of the requests preempted to make room."""

    chunks: list[ScheduledChunk]
    preempted: list[str]

    @property
    def num_tokens(self) -> int:
        return sum([chunk.num_tokens for chunk in self.chunks])


@dataclass(frozen=True)
class SchedulerStats:
    """State and counters for metrics. Preemptions, cached tokens and evicted pages are totals since the start."""

    num_running: int
    num_waiting: int
    num_preemptions: int
    num_cached_tokens: int
    num_pages: int
    num_free_pages: int
    num_cached_pages: int
    num_evicted_pages: int


def _by_arrival(request: Request) -> int:
    return request.arrival


class Scheduler:
    """Continuous batching over one page pool. One thread drives it, in this cycle:

    `step = schedule()`, compute it, `commit(step)`, then for each chunk either `publish(request)` (its results are
    finite) or `finish(request, "error")`; where `needs_logits`: `append_token`, and `finish` when that was the last.

    A step has at most `chunked_prefill_size` tokens and `max_running_requests` requests (never more requests than
    tokens, so that none is left out). A sequence, prompt and output, has at most `context_length` tokens.
    """

    def __init__(
        self, pool: PagePool, cache: PrefixCache, max_running_requests: int, chunked_prefill_size: int,
        context_length: int,
    ) -> None:  # fmt: skip
        self.pool = pool
        self.cache = cache
        self.max_running_requests = min(max_running_requests, chunked_prefill_size)
        self.chunked_prefill_size = chunked_prefill_size
        self.context_length = context_length
        self.requests: dict[str, Request] = {}  # all that are not finished
        self.running: list[Request] = []  # both in order of arrival
        self.waiting: deque[Request] = deque()
        self._num_arrived = 0
        self._num_preemptions = 0
        self._num_cached_tokens = 0

    def add(self, request: Request) -> None:
        """Queue a new request. Raises ValueError, changing nothing, for one that could never be served."""
        prompt, size = len(request.prompt_token_ids), self.pool.page_size
        total = prompt + request.max_tokens
        if request.request_id in self.requests:
            raise ValueError(f"request id {request.request_id!r} is in use; ids of unfinished requests must differ")
        if prompt == 0:
            raise ValueError("the prompt is empty: at least one token is needed")
        if total > self.context_length:
            raise ValueError(
                f"{prompt} prompt tokens and max_tokens={request.max_tokens} make {total}, "
                f"more than the context length {self.context_length}: shorten the prompt or lower max_tokens"
            )
        needed = self.pool.pages_for(max(prompt, total - 1))  # the last token is never computed
        if needed > self.pool.num_pages:
            raise ValueError(
                f"{prompt} prompt tokens and max_tokens={request.max_tokens} need {needed} pages of {size} tokens, but "
                f"the KV cache has {self.pool.num_pages}: raise max_total_tokens or lower max_tokens"
            )
        assert request.state is RequestState.WAITING and not request.pages, f"request {request.request_id} is not new"
        request.arrival = self._num_arrived
        self._num_arrived += 1
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def has_unfinished(self) -> bool:
        return bool(self.requests)

    def schedule(self) -> ScheduledStep:
        """The next step: running decodes, then running prefills, then waiting requests, each in order of arrival."""
        budget = self.chunked_prefill_size
        chunks: dict[Request, ScheduledChunk] = {}
        preempted: list[str] = []
        prefills: list[Request] = []
        page_size = self.pool.page_size
        for request in tuple(self.running):
            start = request.num_computed_tokens
            if len(request.token_ids) - start != 1:
                prefills.append(request)
            elif request.state is RequestState.RUNNING and (
                start < len(request.pages) * page_size or self._make_room(request, 1, chunks, preempted)
            ):
                chunks[request] = ScheduledChunk(request, start, 1, True)
        budget -= len(chunks)
        for request in prefills:
            if request.state is not RequestState.RUNNING:
                continue
            count = self._make_room(request, min(self._num_left(request), budget), chunks, preempted)
            if count:
                budget -= count
                chunks[request] = self._chunk(request, count)
        if not preempted:
            self._admit(budget, chunks)
        return ScheduledStep(list(chunks.values()), preempted)

    def _num_left(self, request: Request) -> int:
        left = len(request.token_ids) - request.num_computed_tokens
        assert left > 0, f"request {request.request_id} has nothing to compute: append a token to it, or finish it"
        return left

    def _chunk(self, request: Request, count: int) -> ScheduledChunk:
        start = request.num_computed_tokens
        return ScheduledChunk(request, start, count, start + count == len(request.token_ids))

    def _make_room(
        self, request: Request, count: int, chunks: dict[Request, ScheduledChunk], preempted: list[str]
    ) -> int:
        """Pages for the next `count` tokens of a running request, or for fewer; returns how many tokens have room.

        Evicts cached pages first. Only when not even one token has room, the latest arrived running request gives up
        its pages, unless that is `request` itself: then it waits, with what it has, for those before it.
        """
        size, start = self.pool.page_size, request.num_computed_tokens
        while True:
            available = self.pool.num_free + self.cache.num_evictable
            count_that_fits = min(count, (len(request.pages) + available) * size - start)
            if count_that_fits > 0 or count == 0:
                break
            victim = self.running[-1]
            if victim is request:
                return 0
            self._preempt(victim)
            chunks.pop(victim, None)
            preempted.append(victim.request_id)
        self._allocate(request, start + count_that_fits)
        return count_that_fits

    def _allocate(self, request: Request, num_tokens: int) -> None:
        """Let `request` have pages for its first `num_tokens` tokens; there must be enough, free or evictable."""
        missing = self.pool.pages_for(num_tokens) - len(request.pages)
        if missing > 0:
            self.cache.evict(missing - self.pool.num_free)
            pages = self.pool.allocate(missing)
            assert pages is not None, f"{missing} pages were promised, {self.pool.num_free} are free"
            request.pages += pages

    def _admit(self, budget: int, chunks: dict[Request, ScheduledChunk]) -> None:
        """Start waiting requests, first come first served, while budget and pages last.

        A request is started only when all its tokens have room, and one page more for each that runs: else it would
        soon be preempted. With none running all pages are free or evictable, so the first in the queue always starts.
        """
        while self.waiting and budget > 0 and len(self.running) < self.max_running_requests:
            request = self.waiting[0]
            cached = [] if request.needs_prompt_logprobs else self.cache.match(request.token_ids)
            self.cache.lock(cached)
            missing = self.pool.pages_for(len(request.token_ids)) - len(cached) + len(self.running)
            if missing > self.pool.num_free + self.cache.num_evictable:
                self.cache.release(cached)
                return
            self.waiting.popleft()
            insort(self.running, request, key=_by_arrival)
            request.state = RequestState.RUNNING
            request.pages, request.num_published_pages = cached, len(cached)
            request.num_computed_tokens = len(cached) * self.pool.page_size
            if request.num_cached_tokens is None:
                request.num_cached_tokens = request.num_computed_tokens
                self._num_cached_tokens += request.num_computed_tokens
            count = min(self._num_left(request), budget)
            self._allocate(request, request.num_computed_tokens + count)
            budget -= count
            chunks[request] = self._chunk(request, count)

    def commit(self, step: ScheduledStep) -> None:
        """`step` is computed: the keys and values of its chunks stand in the pages."""
        for chunk in step.chunks:
            if chunk.request.state is RequestState.RUNNING:  # not aborted or preempted since
                chunk.request.num_computed_tokens = chunk.start + chunk.num_tokens

    def publish(self, request: Request) -> None:
        """Offer the whole pages `request` has computed to the prefix cache; to be called when results were finite."""
        whole = request.num_computed_tokens // self.pool.page_size
        if whole > request.num_published_pages and request.state is RequestState.RUNNING:
            pages = request.pages[:whole]
            request.num_published_pages = self.cache.insert(request.token_ids, pages, request.num_published_pages)
            request.pages[:whole] = pages

    def append_token(self, request: Request, token: int) -> None:
        """The next token of a running request whose tokens are all computed."""
        assert request.state is RequestState.RUNNING, f"request {request.request_id} is {request.state.value}"
        assert request.num_computed_tokens == len(request.token_ids), f"request {request.request_id} is not computed"
        assert request.num_output_tokens < request.max_tokens, f"request {request.request_id} has max_tokens tokens"
        request.token_ids.append(token)

    def finish(self, request: Request, reason: str) -> None:
        """End a request in whatever state it is: it leaves the queues and gives back its pages."""
        assert self.requests.get(request.request_id) is request, f"request {request.request_id} is not here"
        if request.state is RequestState.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self._give_back(request)
        del self.requests[request.request_id]
        request.state, request.finish_reason = RequestState.FINISHED, reason

    def abort(self, request_id: str) -> bool:
        """Finish a request with reason "abort". Returns False when there is none of that id (any more)."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        self.finish(request, "abort")
        return True

    def preempt(self, request_id: str) -> bool:
        """Take the pages of a running request, which resumes later to the same bits. False when it is not running."""
        request = self.requests.get(request_id)
        if request is None or request.state is not RequestState.RUNNING:
            return False
        self._preempt(request)
        return True

    def _preempt(self, request: Request) -> None:
        """Back to the queue, in order of arrival; sampled tokens are kept, pages are found again if still cached."""
        self.running.remove(request)
        self._give_back(request)
        request.state = RequestState.PREEMPTED
        request.num_preemptions += 1
        self._num_preemptions += 1
        place = next((i for i, other in enumerate(self.waiting) if other.arrival > request.arrival), len(self.waiting))
        self.waiting.insert(place, request)

    def _give_back(self, request: Request) -> None:
        self.cache.release(request.pages)
        request.pages = []
        request.num_computed_tokens = request.num_published_pages = 0

    def flush_cache(self) -> bool:
        """Forget all cached prefixes. Returns False, and changes nothing, while a running request uses one."""
        return self.cache.flush()

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            len(self.running), len(self.waiting), self._num_preemptions, self._num_cached_tokens,
            self.pool.num_pages, self.pool.num_free, self.cache.num_pages, self.cache.num_evicted_pages,
        )  # fmt: skip

    def check_integrity(self) -> None:
        """Raise AssertionError unless queues, pages and reference counts agree. To be called between steps."""
        self.pool.check_integrity()
        self.cache.check_integrity()
        for queue, states in (
            (self.running, {RequestState.RUNNING}), (self.waiting, {RequestState.WAITING, RequestState.PREEMPTED}),
        ):  # fmt: skip
            arrivals = [request.arrival for request in queue]
            assert arrivals == sorted(set(arrivals)), f"requests are out of order: {arrivals}"
            assert {request.state for request in queue} <= states, "a request is in the wrong queue"
        queued = {request.request_id: request for request in (*self.running, *self.waiting)}
        assert queued == self.requests, "queues and request ids differ"
        assert len(self.running) <= self.max_running_requests, f"{len(self.running)} requests are running"
        self._check_pages()

    def _check_pages(self) -> None:
        size = self.pool.page_size
        holders = Counter(page for request in self.running for page in request.pages)
        published: set[int] = set()
        for request in self.running:
            name, pages = request.request_id, request.pages
            assert len(set(pages)) == len(pages), f"request {name} has a page twice"
            assert len(pages) >= self.pool.pages_for(request.num_computed_tokens), f"request {name} lacks pages"
            assert request.num_published_pages <= request.num_computed_tokens // size, f"request {name} published early"
            shared = pages[: request.num_published_pages]
            assert shared == self.cache.find(request.token_ids, len(shared)), f"request {name} lost its pages"
            published.update(shared)
        for page in range(self.pool.num_pages):
            expected = holders[page] + (page in self.cache)
            assert self.pool.num_references(page) == expected, f"page {page}: {expected} holders, not the count it has"
            assert holders[page] <= 1 or page in published, f"page {page} is shared but not published"
        total = self.pool.num_free + self.cache.num_evictable + len(holders)
        assert total == self.pool.num_pages, f"{total} pages free, cached or in use, of {self.pool.num_pages}"
        for request in self.waiting:
            kept = (len(request.pages), request.num_computed_tokens, request.num_published_pages)
            assert kept == (0, 0, 0), f"request {request.request_id} waits, but has {kept} pages, tokens, cached pages"
