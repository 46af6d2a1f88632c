"""The engine: add, step, abort. The only place that knows both the control plane and the device.

One step is schedule -> batch -> forward -> sample -> commit. What a request gets never depends on what else is in the
step: every row is a pure function of its own prefix, so the scheduler may cut, pause and resume as it likes. Not
thread-safe: one thread drives it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from isobit.batch import Batch, build_batch
from isobit.config import EngineConfig
from isobit.loading import LoadedModel, load_model
from isobit.pages import PagePool
from isobit.prefix_cache import PrefixCache
from isobit.request import Request, RequestOutput, SamplingParams, TokenLogprob
from isobit.runner import Runner
from isobit.sampler import Sampler
from isobit.scheduler import ScheduledChunk, Scheduler, SchedulerStats

NOT_FINITE = (
    "the model produced NaN or infinity for this request (overflow in the weights' dtype, or a damaged checkpoint); "
    "no token is chosen from such logits"
)


class QueueFullError(ValueError):
    """More requests than `max_queued_requests` are waiting or running; try again later."""


@dataclass(frozen=True)
class EngineStats(SchedulerStats):
    """Counters since start, and the state now; what `/metrics` shows and what tests use as proof."""

    num_steps: int
    last_step_rows: int
    last_step_requests: int
    max_step_rows: int
    max_step_requests: int
    num_prompt_tokens: int
    num_generation_tokens: int


class LLMEngine:
    """Serves one model. Raises ValueError for options, checkpoints and requests it cannot serve as asked."""

    def __init__(self, config: EngineConfig, loaded: LoadedModel | None = None) -> None:
        self.config = config
        self.loaded = load_model(config) if loaded is None else loaded
        self.model_config = self.loaded.model_config
        self.plan = self.loaded.plan
        self.fingerprint = self.loaded.fingerprint
        self.runner = Runner(self.loaded.ops, self.loaded.model, self.loaded.new_kv_cache())
        self.sampler = Sampler(self.loaded.ops, self.model_config.eos_token_ids)
        pool = PagePool(self.plan.num_pages, self.plan.page_size)
        self.scheduler = Scheduler(
            pool,
            PrefixCache(pool, enabled=not config.disable_radix_cache),
            self.plan.max_running_requests,
            self.plan.chunked_prefill_size,
            self.plan.context_length,
        )
        self._seeds = random.SystemRandom() if config.random_seed is None else random.Random(config.random_seed)
        self._counters = dict.fromkeys(
            ("num_steps", "last_step_rows", "last_step_requests", "max_step_rows", "max_step_requests",
             "num_prompt_tokens", "num_generation_tokens"), 0,
        )  # fmt: skip

    def new_seed(self) -> int:
        """A seed for a request that came without one; from `random_seed`'s stream if that is set."""
        return self._seeds.getrandbits(63)

    def add_request(self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        """Queue a request. Raises ValueError naming what cannot be served; nothing that runs is touched by it."""
        num_queued = len(self.scheduler.requests)
        if num_queued >= self.config.max_queued_requests:
            raise QueueFullError(f"{num_queued} requests are queued, the limit (max_queued_requests)")
        max_tokens = self.check_request(prompt_token_ids, params)
        if params.seed is None:
            params = replace(params, seed=self.new_seed())
        request = Request(request_id, tuple(prompt_token_ids), params, max_tokens)
        self.scheduler.add(request)

    def check_request(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> int:
        """Validate without queueing; returns max_tokens clamped to the room left. Raises ValueError."""
        vocab, context = self.model_config.vocab_size, self.plan.context_length
        if params.n != 1:
            raise ValueError("the engine takes one sample a request; fan out with SamplingParams.child")
        if not prompt_token_ids:
            raise ValueError("the prompt holds no tokens")
        room = context - len(prompt_token_ids)
        wants_output = params.max_tokens is None or params.max_tokens > 0
        if room < (1 if wants_output else 0):
            raise ValueError(
                f"the prompt has {len(prompt_token_ids)} tokens and the context length is {context}: "
                f"{'no room to generate' if room == 0 else 'shorten it'}"
            )
        _check_ids("prompt token id", prompt_token_ids, vocab)
        _check_ids("logit_bias token id", params.logit_bias, vocab)
        _check_ids("stop_token_ids entry", params.stop_token_ids, vocab)
        for name in ("logprobs", "prompt_logprobs"):
            asked = getattr(params, name)
            if asked is not None and asked > self.config.max_logprobs:
                raise ValueError(f"{name}={asked} is above the limit of {self.config.max_logprobs} (max_logprobs)")
        return room if params.max_tokens is None else min(params.max_tokens, room)

    def has_unfinished(self) -> bool:
        """True while a request waits or runs."""
        return self.scheduler.has_unfinished()

    def abort(self, request_id: str) -> bool:
        """Drop a request in any state, freeing its pages; no output follows. False if it is not there."""
        return self.scheduler.abort(request_id)

    @torch.inference_mode()
    def step(self) -> list[RequestOutput]:
        """Compute one batch and return what each of its requests gained; [] when there is nothing to do."""
        scheduled = self.scheduler.schedule()
        if not scheduled.chunks:
            assert not self.has_unfinished(), "the scheduler made no progress with requests queued"
            return []
        batch = build_batch(scheduled.chunks, self.plan.page_size)
        hidden = self.runner.forward(batch)
        self.scheduler.commit(scheduled)
        self._count(batch)
        broken = self._score_prompts(batch, hidden)
        outputs = self._sample(batch, hidden, broken)
        if not self.has_unfinished():
            self.check_integrity()
        return outputs

    def _count(self, batch: Batch) -> None:
        counters, rows, requests = self._counters, batch.num_rows, len(batch.chunks)
        counters["num_steps"] += 1
        counters["last_step_rows"], counters["last_step_requests"] = rows, requests
        counters["max_step_rows"] = max(counters["max_step_rows"], rows)
        counters["max_step_requests"] = max(counters["max_step_requests"], requests)

    def _score_prompts(self, batch: Batch, hidden: torch.Tensor) -> set[str]:
        """Append the prompt log-probs this step made known; returns the ids of requests with non-finite logits."""
        broken: set[str] = set()
        for chunk, first_row in zip(batch.chunks, batch.first_rows, strict=True):
            request, num_top = chunk.request, chunk.request.params.prompt_logprobs
            if num_top is None:
                continue
            if not request.prompt_logprobs:
                request.prompt_logprobs.append(None)  # the first token has no prefix to be scored from
            # The row of position p gives the log-prob of the token at p + 1.
            end = min(chunk.start + chunk.num_tokens, len(request.prompt_token_ids) - 1)
            wanted = range(max(chunk.start, len(request.prompt_logprobs) - 1), end)
            rows = [first_row + position - chunk.start for position in wanted]
            for piece, logits in self.runner.logits(hidden, rows):
                start = len(request.prompt_logprobs)
                targets = request.prompt_token_ids[start : start + len(piece)]
                scored = self.sampler.score(logits, targets, num_top)
                if any(entry is None for entry in scored):
                    broken.add(request.request_id)
                    break
                request.prompt_logprobs.extend(scored)
        return broken

    def _sample(self, batch: Batch, hidden: torch.Tensor, broken: set[str]) -> list[RequestOutput]:
        ends: list[tuple[ScheduledChunk, int]] = []
        outputs: list[RequestOutput] = []
        for chunk, first_row in zip(batch.chunks, batch.first_rows, strict=True):
            if chunk.request.request_id in broken:
                outputs.append(self._fail(chunk.request))
            elif chunk.needs_logits:
                ends.append((chunk, first_row + chunk.num_tokens - 1))
        rows = [row for _, row in ends]
        at = 0
        for piece, logits in self.runner.logits(hidden, rows):
            requests = [chunk.request for chunk, _ in ends[at : at + len(piece)]]
            at += len(piece)
            for request, sampled in zip(requests, self.sampler.sample(logits, requests), strict=True):
                if sampled is None:
                    outputs.append(self._fail(request))
                else:
                    outputs.append(self._commit(request, sampled.token_id, sampled.logprob))
        return outputs

    def _commit(self, request: Request, token_id: int, logprob: TokenLogprob | None) -> RequestOutput:
        """Take the sampled token (unless none is wanted), publish full pages, and finish the request if it ends."""
        self.scheduler.publish(request)
        first = request.num_output_tokens == 0
        if first:
            self._counters["num_prompt_tokens"] += len(request.prompt_token_ids)
        tokens: tuple[int, ...] = ()
        stop_reason: int | None = None
        if request.max_tokens > 0:
            tokens = (token_id,)
            self.scheduler.append_token(request, token_id)
            self._counters["num_generation_tokens"] += 1
            if self._ends(request, token_id):
                stop_reason = token_id
        if stop_reason is not None:
            self._finish(request, "stop")
        elif request.num_output_tokens >= request.max_tokens:
            self._finish(request, "length")
        return self._output(request, tokens, logprob, stop_reason, first)

    def _ends(self, request: Request, token_id: int) -> bool:
        params = request.params
        if request.num_output_tokens < params.min_tokens:
            return False
        is_eos = token_id in self.model_config.eos_token_ids and not params.ignore_eos
        return is_eos or token_id in params.stop_token_ids

    def _fail(self, request: Request) -> RequestOutput:
        request.error = NOT_FINITE
        self._finish(request, "error")
        return self._output(request, (), None, None, False)

    def _finish(self, request: Request, reason: str) -> None:
        self.scheduler.finish(request, reason)

    def _output(
        self,
        request: Request,
        tokens: tuple[int, ...],
        logprob: TokenLogprob | None,
        stop_reason: int | None,
        first: bool,
    ) -> RequestOutput:
        give_prompt = first and request.params.prompt_logprobs is not None
        return RequestOutput(
            request_id=request.request_id,
            new_token_ids=tokens,
            new_logprobs=(logprob,) if tokens and logprob is not None else (),
            finish_reason=request.finish_reason,
            stop_reason=stop_reason,
            error=request.error,
            num_cached_tokens=request.num_cached_tokens or 0,
            prompt_logprobs=tuple(request.prompt_logprobs) if give_prompt else None,
        )

    def flush_cache(self) -> bool:
        """Forget cached prefixes. False (and nothing done) while a running request uses one."""
        return self.scheduler.flush_cache()

    def check_integrity(self) -> None:
        """Assert that every page is accounted for; called whenever the engine becomes idle."""
        self.scheduler.check_integrity()

    def stats(self) -> EngineStats:
        """A snapshot of counters and state."""
        return EngineStats(**asdict(self.scheduler.stats()), **self._counters)

    def server_info(self) -> dict[str, Any]:
        """What was resolved: plan, Orders, fingerprint, sizes."""
        return {
            "plan": self.plan.as_dict(),
            "fingerprint": self.fingerprint,
            "architecture": self.model_config.architecture,
            "context_length": self.plan.context_length,
            "vocab_size": self.model_config.vocab_size,
            "chunked_prefill_size": self.plan.chunked_prefill_size,
            "kernels": self.loaded.ops.describe(),
        }


def _check_ids(name: str, ids: Any, vocab_size: int) -> None:
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise ValueError(f"{name} must be a whole number, got {token_id!r}")
        if not 0 <= token_id < vocab_size:
            raise ValueError(f"{name} {token_id} is outside the vocabulary [0, {vocab_size})")
