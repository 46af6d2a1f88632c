"""The scheduler against a fake model that notices any wrong page, without a device.

The fake cache stores, for each slot of each page, the hash of the token prefix it was written for; pages are not
cleared on reuse. A step writes its rows, then demands that every slot a row would attend to holds the right prefix:
a wrong page table, a stale or stolen page, wrong sharing or a skipped position cannot go unseen. The next token is a
hash of the prefix, so each request has one right output whatever the schedule; and each scenario proves what happened.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from isobit.order import KV_BLOCK as PAGE_SIZE
from isobit.pages import PagePool
from isobit.prefix_cache import PrefixCache
from isobit.request import Request, RequestState, SamplingParams, TokenLogprob, mix64
from isobit.scheduler import ScheduledChunk, ScheduledStep, Scheduler
from tests.weak_cache import ForgetfulCache

CONTEXT = 4096
VOCABULARY = 1000


def extend_hashes(hashes: list[int], token_ids: list[int]) -> None:
    """Bring `hashes` up to `token_ids`: entry i is a hash of `token_ids[: i + 1]`."""
    for token in token_ids[len(hashes) :]:
        hashes.append(mix64((hashes[-1] if hashes else 0) * 31 + token + 1))


def next_token(prefix_hash: int) -> int:
    return prefix_hash % VOCABULARY


def solo_output(prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    """What the fake model says to `prompt`, by definition: no scheduler, no pages."""
    token_ids = list(prompt)
    hashes: list[int] = []
    for _ in range(max_tokens):
        extend_hashes(hashes, token_ids)
        token_ids.append(next_token(hashes[-1]))
    return token_ids[len(prompt) :]


class WrongPageError(Exception):
    """The fake model met a slot that does not hold what the row needs."""


class FakeEngine:
    """Drives a scheduler as the engine does. Invariant: a slot is written only in a page held by one request alone."""

    def __init__(
        self, num_pages: int, budget: int = 512, max_running: int = 64, enabled: bool = True,
        cache_type: type[PrefixCache] = PrefixCache, context: int = CONTEXT,
    ) -> None:  # fmt: skip
        self.pool = PagePool(num_pages, PAGE_SIZE)
        self.cache = cache_type(self.pool, enabled)
        self.scheduler = Scheduler(self.pool, self.cache, max_running, budget, context)
        self.slots: list[list[int | None]] = [[None] * PAGE_SIZE for _ in range(num_pages)]
        self.hashes: dict[Request, list[int]] = {}
        self.finished: list[Request] = []
        self.num_steps = 0
        self.num_cut_chunks = 0

    def add(self, name: str, prompt: tuple[int, ...], max_tokens: int, prompt_logprobs: bool = False) -> Request:
        params = SamplingParams(prompt_logprobs=0 if prompt_logprobs else None)
        request = Request(name, prompt, params, max_tokens)
        if prompt_logprobs:
            request.prompt_logprobs.append(None)
        self.scheduler.add(request)
        self.hashes[request] = []
        extend_hashes(self.hashes[request], request.token_ids)
        return request

    def step(self) -> ScheduledStep:
        scheduler = self.scheduler
        step = scheduler.schedule()
        self.num_steps += 1
        assert bool(step.chunks) == scheduler.has_unfinished(), "no progress"
        assert step.num_tokens <= scheduler.chunked_prefill_size
        assert len({chunk.request for chunk in step.chunks}) == len(step.chunks)
        for chunk in step.chunks:
            self.write(chunk)
        for chunk in step.chunks:
            self.read(chunk)
        scheduler.commit(step)
        for chunk in step.chunks:
            self.take(chunk)
        scheduler.check_integrity()
        return step

    def write(self, chunk: ScheduledChunk) -> None:
        request, hashes = chunk.request, self.hashes[chunk.request]
        assert chunk.start == request.num_computed_tokens and chunk.num_tokens > 0
        assert chunk.token_ids == request.token_ids[chunk.start : chunk.start + chunk.num_tokens]
        for position in range(chunk.start, chunk.start + chunk.num_tokens):
            page = chunk.pages[position // PAGE_SIZE]
            if self.pool.num_references(page) != 1:
                raise WrongPageError(f"page {page} is written while {self.pool.num_references(page)} hold it")
            self.slots[page][position % PAGE_SIZE] = hashes[position]

    def read(self, chunk: ScheduledChunk) -> None:
        hashes, end = self.hashes[chunk.request], chunk.start + chunk.num_tokens
        for first in range(0, end, PAGE_SIZE):
            wanted = hashes[first : min(end, first + PAGE_SIZE)]
            page = chunk.pages[first // PAGE_SIZE]
            if self.slots[page][: len(wanted)] != wanted:
                raise WrongPageError(f"request {chunk.request.request_id} reads page {page} of another prefix")

    def take(self, chunk: ScheduledChunk) -> None:
        request, scheduler = chunk.request, self.scheduler
        scheduler.publish(request)
        self.score(chunk)
        ends = chunk.start + chunk.num_tokens == len(request.token_ids)
        assert chunk.needs_logits == ends
        if not ends:
            self.num_cut_chunks += 1
            return
        if request.max_tokens > 0:
            token = next_token(self.hashes[request][-1])
            scheduler.append_token(request, token)
            extend_hashes(self.hashes[request], request.token_ids)
        if request.num_output_tokens == request.max_tokens:
            scheduler.finish(request, "length")
            self.finished.append(request)

    def score(self, chunk: ScheduledChunk) -> None:
        """Prompt log-probs as the engine takes them: row p scores token p + 1; no position may be skipped."""
        request = chunk.request
        if request.params.prompt_logprobs is None:
            return
        known = len(request.prompt_logprobs)
        assert chunk.start <= known - 1 or known == len(request.prompt_token_ids), "a wanted row is never computed"
        for position in range(known, min(chunk.start + chunk.num_tokens + 1, len(request.prompt_token_ids))):
            request.prompt_logprobs.append(TokenLogprob(request.prompt_token_ids[position], 0.0))

    def run(self, limit: int = 100_000) -> None:
        while self.scheduler.has_unfinished():
            self.step()
            assert self.num_steps < limit, "livelock"
        self.check_idle()

    def check_idle(self) -> None:
        """Nothing leaks: all pages are free or cached, and all can be had back."""
        self.scheduler.check_integrity()
        assert self.pool.num_free + self.cache.num_evictable == self.pool.num_pages
        assert not self.scheduler.running and not self.scheduler.waiting

    def check_outputs(self) -> None:
        for request in self.finished:
            assert request.output_token_ids == solo_output(request.prompt_token_ids, request.max_tokens)
            assert request.finish_reason == "length" and request.state is RequestState.FINISHED and not request.pages
            if request.params.prompt_logprobs is not None:
                scored = [entry.token_id for entry in request.prompt_logprobs if entry is not None]
                assert scored == list(request.prompt_token_ids[1:])


def prompt_of(length: int, family: int = 0, suffix: int = 0, shared: int = 0) -> tuple[int, ...]:
    """`length` tokens; prompts of one family agree in the first `shared` of them."""
    head = [mix64(family * 7919 + i) % VOCABULARY for i in range(min(shared, length))]
    return (*head, *(mix64((suffix + 1) * 104729 + i) % VOCABULARY for i in range(len(head), length)))


# ---- explicit cases


@pytest.mark.parametrize("pages", [1, 2, 4])
def test_whole_page_prompt_sent_twice(pages: int) -> None:
    """Case 13: a fully cached prompt still computes its last token, and a strict prefix of a cached one works."""
    engine = FakeEngine(16)
    length = pages * PAGE_SIZE
    prompt = prompt_of(length)
    first, second = engine.add("a", prompt, 3), None
    engine.run()
    second = engine.add("b", prompt, 3)
    engine.run()
    assert first.num_cached_tokens == 0 and second.num_cached_tokens == length - PAGE_SIZE
    for shorter in (length - 1, length // 2, 1):
        third = engine.add(f"c{shorter}", prompt[:shorter], 3)
        engine.run()
        assert third.num_cached_tokens == (shorter - 1) // PAGE_SIZE * PAGE_SIZE
    engine.check_outputs()
    assert len(engine.finished) == 5


@pytest.mark.parametrize("shared", [1, 15, 63, 64, 65, 127, 128, 129, 511, 512, 513])
def test_shared_prefix_of_any_length(shared: int) -> None:
    """Case 12: ten suffixes after one prefix, in a crowd and warm; hits are exactly the whole shared pages."""
    engine = FakeEngine(200, budget=100)
    engine.add("warm", prompt_of(shared + 70, shared=shared), 2)
    engine.run()
    requests = [engine.add(f"r{i}", prompt_of(shared + 9 + i, suffix=i + 1, shared=shared), 5) for i in range(10)]
    engine.run()
    assert {request.num_cached_tokens for request in requests} == {shared // PAGE_SIZE * PAGE_SIZE}
    assert engine.scheduler.stats().num_cached_tokens == 10 * (shared // PAGE_SIZE * PAGE_SIZE)
    engine.check_outputs()


def test_colliding_hashes_do_not_share_pages() -> None:
    """Case 16, through the scheduler: prompts whose pages all have the same Python hash."""
    period = 2**61 - 1
    prompts = [tuple(7 + period * (index if i == 3 else 0) for i in range(100)) for index in range(50)]
    assert len({hash(prompt[:PAGE_SIZE]) for prompt in prompts}) == 1
    engine = FakeEngine(200)
    requests = [engine.add(f"r{index}", prompt, 4) for index, prompt in enumerate(prompts)]
    engine.run()
    assert all(request.num_cached_tokens == 0 for request in requests)
    engine.check_outputs()


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("after", [0, 1, 50])
def test_preempted_after_k_tokens(after: int, enabled: bool) -> None:
    """Cases 26 and 27: preempted mid-prefill (0) or after 1 or 50 tokens, resumed to the same output."""
    engine = FakeEngine(16, budget=100, enabled=enabled)
    request = engine.add("a", prompt_of(200), 60)
    while request.num_output_tokens < after or not request.num_computed_tokens:
        engine.step()
    kept = list(request.token_ids)
    assert engine.scheduler.preempt("a") and not engine.scheduler.preempt("a")
    assert request.state is RequestState.PREEMPTED and request.num_computed_tokens == 0 and not request.pages
    engine.scheduler.check_integrity()
    step = engine.step()
    cached = (max(after - 1, 0) + (200 if after else 100)) // PAGE_SIZE * PAGE_SIZE if enabled else 0
    assert step.chunks[0].start == cached and request.token_ids[: len(kept)] == kept
    engine.run()
    engine.check_outputs()
    assert request.num_preemptions == engine.scheduler.stats().num_preemptions == 1 and request.num_cached_tokens == 0


def test_a_small_pool_preempts_and_changes_nothing() -> None:
    """Case 26: 8 requests of 300 tokens in a pool for two of them."""
    engine = FakeEngine(12, enabled=False)
    for index in range(8):
        engine.add(f"r{index}", prompt_of(40, suffix=index), 260)
    engine.run()
    engine.check_outputs()
    assert engine.scheduler.stats().num_preemptions >= 3 and len(engine.finished) == 8


def test_the_latest_arrived_is_preempted_and_comes_back_first() -> None:
    engine = FakeEngine(6, enabled=False)
    a, b, c = (engine.add(name, prompt_of(60, suffix=index), 200) for index, name in enumerate("abc"))
    d = engine.add("d", prompt_of(60, suffix=9), 200)
    order: list[str] = []
    while engine.scheduler.has_unfinished():
        latest = [request.request_id for request in reversed(engine.scheduler.running)]
        preempted = engine.step().preempted
        assert preempted == latest[: len(preempted)]
        order += preempted
        if c.num_preemptions and not b.num_preemptions:
            assert a.state is b.state is RequestState.RUNNING
            assert [request.request_id for request in engine.scheduler.waiting] == ["c", "d"]
    assert order[0] == "c" and len(order) == b.num_preemptions + c.num_preemptions + d.num_preemptions
    assert a.num_preemptions == 0 and b.state is RequestState.FINISHED
    assert [request.request_id for request in engine.finished] == ["a", "b", "c", "d"]
    engine.check_outputs()


def test_a_prefill_takes_pages_of_a_later_decode_that_is_scheduled_already() -> None:
    """Decodes are served first, so the victim may have its chunk in the step: the chunk must go with the pages."""
    engine = FakeEngine(5, budget=2, enabled=False)
    engine.add("early", prompt_of(150), 20)
    late = engine.add("late", prompt_of(10, suffix=1), 300)
    while late.num_output_tokens < 5:
        engine.step()
    engine.scheduler.preempt("early")  # comes back with a long prefill beside the decode of the later one
    lost = 0
    while engine.scheduler.has_unfinished():
        fits = late.num_computed_tokens < len(late.pages) * PAGE_SIZE
        step = engine.step()
        assert not set(step.preempted) & {chunk.request.request_id for chunk in step.chunks}
        lost += fits and step.preempted == ["late"]
    assert lost == 1
    engine.check_outputs()


def test_decodes_come_before_prefills() -> None:
    """A long prompt cannot hold up a running decode, and gets the rest of every step."""
    engine = FakeEngine(100, budget=16)
    short = engine.add("short", prompt_of(5), 30)
    engine.add("long", prompt_of(400, suffix=1), 2)
    engine.step()
    for produced in range(2, 27):
        step = engine.step()
        assert step.chunks[0].request is short and short.num_output_tokens == produced
        assert step.chunks[1].num_tokens == 15 and step.num_tokens == 16
    engine.run()
    engine.check_outputs()


def test_budget_below_the_number_of_requests() -> None:
    engine = FakeEngine(100, budget=1)
    requests = [engine.add(f"r{index}", prompt_of(3, suffix=index), 3) for index in range(3)]
    engine.run()
    assert engine.finished == requests and engine.num_cut_chunks > 0
    engine.check_outputs()


def test_at_most_max_running_requests() -> None:
    engine = FakeEngine(100, max_running=2)
    for index in range(5):
        engine.add(f"r{index}", prompt_of(10, suffix=index), 4)
    step = engine.step()
    stats = engine.scheduler.stats()
    assert len(step.chunks) == stats.num_running == 2 and stats.num_waiting == 3
    engine.run()
    engine.check_outputs()


def test_impossible_requests_are_refused_and_nothing_changes() -> None:
    engine = FakeEngine(4, context=300)
    scheduler = engine.scheduler
    engine.add("a", prompt_of(250), 7)  # 256 computed tokens: exactly the pool
    with pytest.raises(ValueError, match=r"250 prompt tokens and max_tokens=8 need 5 pages.*has 4"):
        engine.add("b", prompt_of(250), 8)
    with pytest.raises(ValueError, match=r"290 prompt tokens and max_tokens=11 make 301.*context length 300"):
        engine.add("b", prompt_of(290), 11)
    with pytest.raises(ValueError, match="prompt is empty"):
        engine.add("b", (), 1)
    with pytest.raises(ValueError, match="'a' is in use"):
        engine.add("a", prompt_of(3), 1)
    assert list(scheduler.requests) == ["a"] and len(scheduler.waiting) == 1
    engine.run()
    engine.check_outputs()
    engine.add("a", prompt_of(256), 0)  # the id is free again; scoring alone
    engine.run()
    assert engine.finished[-1].output_token_ids == []


@pytest.mark.parametrize("phase", ["waiting", "prefill", "decode", "preempted prefill", "preempted decode"])
def test_abort_in_any_state(phase: str) -> None:
    engine = FakeEngine(16, budget=50, max_running=1 if phase == "waiting" else 8)
    other = engine.add("other", prompt_of(30), 40)
    engine.step()
    request = engine.add("x", prompt_of(200, suffix=1), 40)
    engine.step()
    if phase.endswith("decode"):
        while request.num_output_tokens < 3:
            engine.step()
    if phase.startswith("preempted"):
        engine.scheduler.preempt("x")
    states = {"waiting": RequestState.WAITING, "prefill": RequestState.RUNNING, "decode": RequestState.RUNNING}
    assert request.state is states.get(phase, RequestState.PREEMPTED)
    assert (0 < request.num_computed_tokens < 200) == (phase == "prefill")
    assert engine.scheduler.abort("x") and not engine.scheduler.abort("x")
    assert request.finish_reason == "abort" and not request.pages and request.state is RequestState.FINISHED
    engine.scheduler.check_integrity()
    engine.run()
    assert engine.finished == [other]
    engine.check_outputs()


def test_abort_between_schedule_and_commit() -> None:
    engine = FakeEngine(16)
    request = engine.add("x", prompt_of(100), 4)
    step = engine.scheduler.schedule()
    engine.scheduler.abort("x")
    engine.scheduler.commit(step)
    engine.scheduler.publish(request)
    assert request.num_computed_tokens == 0 and engine.cache.num_pages == 0
    engine.check_idle()


def test_a_failed_step_can_be_repeated() -> None:
    """When the forward pass raises, nothing was committed: the same chunk is scheduled again."""
    engine = FakeEngine(16)
    engine.add("x", prompt_of(100), 4)
    lost = engine.scheduler.schedule().chunks[0]
    chunk = engine.step().chunks[0]
    assert (chunk.start, chunk.num_tokens) == (lost.start, lost.num_tokens) == (0, 100)
    engine.run()
    engine.check_outputs()


def test_unpublished_pages_are_never_found() -> None:
    """A request that ends in an error before `publish` leaves nothing in the cache."""
    engine = FakeEngine(16)
    request = engine.add("x", prompt_of(200), 4)
    engine.scheduler.commit(engine.scheduler.schedule())
    engine.scheduler.finish(request, "error")
    assert engine.cache.num_pages == 0 and engine.pool.num_free == 16 and request.finish_reason == "error"
    again = engine.add("x", prompt_of(200), 4)
    engine.run()
    assert again.num_cached_tokens == 0


def test_prompt_logprobs_never_skip_a_position() -> None:
    """Neither at admission nor when preempted half way; once complete, the cache may be used again."""
    engine = FakeEngine(16, budget=70)
    engine.add("warm", prompt_of(200), 2)
    engine.run()
    request = engine.add("x", prompt_of(200), 20, prompt_logprobs=True)
    assert engine.step().chunks[0].start == 0 and request.needs_prompt_logprobs
    engine.scheduler.preempt("x")
    assert engine.step().chunks[0].start == 0
    while request.num_output_tokens < 2:
        engine.step()
    assert not request.needs_prompt_logprobs and request.num_cached_tokens == 0
    engine.scheduler.preempt("x")
    assert engine.step().chunks[0].start == 3 * PAGE_SIZE
    engine.run()
    engine.check_outputs()


def test_concurrent_twins_end_up_on_the_same_pages() -> None:
    engine = FakeEngine(20, budget=1000)
    engine.add("a", prompt_of(300), 30)
    engine.add("b", prompt_of(300), 30)
    engine.step()
    a, b = engine.scheduler.running
    assert a.pages[:4] == b.pages[:4] and a.pages[4] != b.pages[4] and engine.pool.num_free == 20 - 6
    engine.run()
    engine.check_outputs()


def test_flush_between_requests() -> None:
    engine = FakeEngine(16)
    engine.add("a", prompt_of(200), 40)
    engine.step()
    assert not engine.scheduler.flush_cache()
    engine.run()
    assert engine.scheduler.flush_cache() and engine.pool.num_free == 16
    again = engine.add("b", prompt_of(200), 4)
    engine.run()
    assert again.num_cached_tokens == 0
    engine.check_outputs()


def test_misuse_is_refused() -> None:
    engine = FakeEngine(16)
    request = engine.add("a", prompt_of(10), 2)
    with pytest.raises(AssertionError, match="waiting"):
        engine.scheduler.append_token(request, 1)
    engine.scheduler.commit(engine.scheduler.schedule())
    with pytest.raises(AssertionError, match="nothing to compute"):
        engine.scheduler.schedule()
    engine.scheduler.finish(request, "stop")
    with pytest.raises(AssertionError, match="not here"):
        engine.scheduler.finish(request, "stop")


@pytest.mark.parametrize(("count", "limit"), [(1, 100e-6), (64, 3e-3)])
def test_scheduling_decodes_is_cheap(count: int, limit: float) -> None:
    """The best of many calls, so that a busy machine does not matter; the limits are far above what is measured."""
    engine = FakeEngine(count * 4, budget=1000)
    for index in range(count):
        engine.add(f"r{index}", prompt_of(10, suffix=index), 100)
    engine.step()
    best = 1.0
    for _ in range(50):
        begin = time.perf_counter()
        step = engine.scheduler.schedule()
        best = min(best, time.perf_counter() - begin)
        assert len(step.chunks) == count
    assert best < limit, f"{best * 1e6:.0f} us for {count} decodes"


# ---- random schedules


@dataclass(frozen=True)
class Job:
    """One request of a scenario: when it comes, what it asks, when (if ever) it is aborted or forced out."""

    arrival: int
    length: int
    family: int
    shared: int
    max_tokens: int
    prompt_logprobs: bool
    abort_after: int | None
    preempt_after: int | None


@dataclass(frozen=True)
class Scenario:
    jobs: tuple[Job, ...]
    budget: int
    max_running: int
    spare_pages: int  # beyond what the largest request needs
    enabled: bool

    def pages(self) -> int:
        return max(-(-max(job.length, job.length + job.max_tokens - 1) // PAGE_SIZE) for job in self.jobs)


@dataclass
class Evidence:
    """What really happened, so that a green run cannot be a vacuous one."""

    finished: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    evicted_pages: int = 0
    cut_chunks: int = 0
    aborted: dict[str, int] = field(default_factory=dict)


def play(scenario: Scenario, engine_type: Callable[..., FakeEngine] = FakeEngine) -> Evidence:
    """Run a scenario to its end and check everything: outputs, integrity after each step, progress, no leak."""
    engine = engine_type(
        scenario.pages() + scenario.spare_pages, scenario.budget, scenario.max_running, scenario.enabled
    )
    scheduler, evidence = engine.scheduler, Evidence()
    todo = sorted(enumerate(scenario.jobs), key=lambda item: item[1].arrival)
    live: dict[str, tuple[Job, Request]] = {}
    forced = any(job.preempt_after is not None for job in scenario.jobs)
    clock = 0
    while todo or scheduler.has_unfinished():
        while todo and todo[0][1].arrival <= clock:
            index, job = todo.pop(0)
            prompt = prompt_of(job.length, job.family, index, job.shared)
            live[f"r{index}"] = (job, engine.add(f"r{index}", prompt, job.max_tokens, job.prompt_logprobs))
        for name, (job, request) in live.items():
            if job.preempt_after is not None and clock == job.arrival + job.preempt_after:
                scheduler.preempt(name)
            if job.abort_after is not None and clock == job.arrival + job.abort_after:
                phase = request.state.value + (" before output" if request.num_output_tokens == 0 else " decode")
                if scheduler.abort(name):
                    evidence.aborted[phase] = evidence.aborted.get(phase, 0) + 1
        earliest = min(scheduler.requests.values(), key=lambda request: request.arrival, default=None)
        step = engine.step()
        if earliest is not None and not forced:
            assert any(chunk.request is earliest for chunk in step.chunks), "the earliest request did not advance"
        clock += 1
        assert clock < 20_000, "livelock"
    engine.check_idle()
    engine.check_outputs()
    evidence.finished = len(engine.finished)
    assert evidence.finished + sum(evidence.aborted.values()) == len(scenario.jobs)
    stats = scheduler.stats()
    evidence.preemptions, evidence.cached_tokens = stats.num_preemptions, stats.num_cached_tokens
    evidence.evicted_pages, evidence.cut_chunks = stats.num_evicted_pages, engine.num_cut_chunks
    assert scenario.enabled or evidence.cached_tokens == 0
    return evidence


LENGTHS = st.one_of(st.sampled_from([1, 2, 63, 64, 65, 127, 128, 129, 256, 257]), st.integers(1, 400))
STEPS = st.one_of(st.none(), st.none(), st.integers(0, 40))


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    budget = draw(st.one_of(st.sampled_from([1, 7, 17, 64, 65, 100]), st.integers(1, 600)))
    longest = min(400, budget * 40)
    jobs = tuple(
        Job(
            arrival=draw(st.integers(0, 30)), length=min(draw(LENGTHS), longest), family=draw(st.integers(0, 1)),
            shared=draw(LENGTHS), max_tokens=draw(st.one_of(st.integers(0, 5), st.integers(0, 90))),
            prompt_logprobs=draw(st.integers(0, 4)) == 0, abort_after=draw(STEPS), preempt_after=draw(STEPS),
        )
        for _ in range(draw(st.integers(1, 8)))
    )  # fmt: skip
    return Scenario(
        jobs, budget, draw(st.sampled_from([1, 2, 3, 64])), draw(st.one_of(st.integers(0, 4), st.integers(0, 60))),
        draw(st.integers(0, 3)) > 0,
    )  # fmt: skip


@settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(scenarios())
def test_any_schedule_gives_the_solo_output(scenario: Scenario) -> None:
    evidence = play(scenario)
    event(f"preempted: {evidence.preemptions > 0}, cached: {evidence.cached_tokens > 0}")


def random_scenario(seed: int) -> Scenario:
    """Heavier than hypothesis likes to be: long outputs in a small pool, and many aborts; forced preemption for odd
    seeds, so that preempted requests are there to be aborted.
    """
    draw = random.Random(seed)

    def job() -> Job:
        return Job(
            draw.randrange(6), draw.randrange(1, 250), draw.randrange(2), draw.randrange(150), draw.randrange(80, 200),
            draw.random() < 0.2, draw.randrange(draw.choice([8, 100])) if draw.random() < 0.4 else None,
            draw.choice([None, draw.randrange(60)]) if seed % 2 else None,
        )  # fmt: skip

    jobs = tuple(job() for _ in range(8))
    return Scenario(jobs, draw.choice([17, 64, 100, 257, 600]), draw.choice([4, 64]), draw.randrange(2, 8), True)


def test_what_the_random_schedules_reach() -> None:
    """Proof that preemption, hits, eviction, cuts and aborts in every state do happen, and change no output."""
    total = Evidence()
    unforced = 0
    for seed in range(150):
        evidence = play(random_scenario(seed))
        unforced += evidence.preemptions if seed % 2 == 0 else 0
        total.cached_tokens += evidence.cached_tokens
        total.evicted_pages += evidence.evicted_pages
        total.cut_chunks += evidence.cut_chunks
        total.aborted.update(evidence.aborted)
    assert unforced > 20 and total.cached_tokens > 20 * PAGE_SIZE, (unforced, total)
    assert total.evicted_pages > 100 and total.cut_chunks > 100, total
    assert set(total.aborted) >= {
        "waiting before output",
        "running before output",
        "running decode",
        "preempted decode",
    }


# ---- controls: planted faults that the fake model must notice


class GreedyCache(PrefixCache):
    """Covers the last token too (case 13): no row would be left to compute."""

    def match(self, token_ids: list[int]) -> list[int]:  # type: ignore[override]
        return self.find(token_ids, len(token_ids) // PAGE_SIZE)


class LeakyEngine(FakeEngine):
    """Gives a request's page to someone else while it is in use."""

    def step(self) -> ScheduledStep:
        for request in self.scheduler.running:
            if len(request.pages) > 1 and self.pool.num_references(request.pages[-1]) == 1:
                self.pool.release(request.pages[-1:])
        return super().step()


def test_control_a_cache_that_compares_too_little_is_caught() -> None:
    engine = FakeEngine(16, cache_type=ForgetfulCache)
    engine.add("a", (5, *prompt_of(100, suffix=1)), 2)
    engine.run()
    engine.add("b", (5, *prompt_of(100, suffix=2)), 2)
    with pytest.raises(WrongPageError, match="another prefix"):
        engine.run()


def test_control_covering_the_last_token_is_caught() -> None:
    engine = FakeEngine(16, cache_type=GreedyCache)
    engine.add("a", prompt_of(128), 2)
    engine.run()
    engine.add("b", prompt_of(128), 2)
    with pytest.raises(AssertionError, match="nothing to compute"):
        engine.run()


def test_control_publishing_uncomputed_pages_is_caught() -> None:
    engine = FakeEngine(16)
    lost = engine.add("a", prompt_of(200), 2)
    engine.scheduler.commit(engine.scheduler.schedule())  # but nothing was written
    engine.scheduler.publish(lost)
    engine.scheduler.finish(lost, "error")
    engine.add("b", prompt_of(200), 2)
    with pytest.raises(WrongPageError, match="another prefix"):
        engine.run()


def test_control_a_stolen_page_is_caught() -> None:
    with pytest.raises((WrongPageError, AssertionError)):
        play(random_scenario(0), LeakyEngine)
