"""Runs scripts of requests through an engine and keeps what came out as bytes. Shared by the relations tests.

A script says when each request arrives and whether it is aborted; a `Result` is everything a user could see of one
request. Two runs agree when `Result.bits` agree: tokens, log-prob bits, alternatives, finish reason.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from isobit.batch import build_batch
from isobit.config import EngineConfig
from isobit.engine import EngineStats, LLMEngine
from isobit.loading import LoadedModel
from isobit.request import Request, SamplingParams, TokenLogprob
from isobit.runner import Runner
from isobit.scheduler import ScheduledChunk


@dataclass(frozen=True)
class Arrival:
    """One request of a script: it is added before step `at_step`, and aborted before step `abort_at` if given."""

    name: str
    prompt: tuple[int, ...]
    params: SamplingParams
    at_step: int = 0
    abort_at: int | None = None


@dataclass
class Result:
    """What one request gave, and how many of its prompt tokens came from the cache."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: str | None = None
    error: str | None = None
    num_cached_tokens: int = 0

    @property
    def bits(self) -> bytes:
        """Tokens, log-prob bits with alternatives, finish reason."""
        parts = [struct.pack(f"<{len(self.token_ids)}i", *self.token_ids), str(self.finish_reason).encode()]
        for entry in (*self.logprobs, *(self.prompt_logprobs or ())):
            parts.append(b"none" if entry is None else logprob_bits(entry))
        return b"|".join(parts)


def logprob_bits(entry: TokenLogprob) -> bytes:
    """The float32 bits of a log-prob and of its alternatives."""
    pairs = ((entry.token_id, entry.logprob), *entry.top)
    return b"".join(struct.pack("<if", token_id, value) for token_id, value in pairs)


@dataclass(frozen=True)
class Run:
    """Results by request name, and the engine's counters as proof of what happened."""

    results: dict[str, Result]
    stats: EngineStats
    engine: LLMEngine


def run_script(engine: LLMEngine, script: Sequence[Arrival]) -> Run:
    """Drive the engine until the script is over; requests are added in the order given."""
    results = {arrival.name: Result() for arrival in script}
    waiting = list(script)
    to_abort = [arrival for arrival in script if arrival.abort_at is not None]
    step = 0
    while waiting or engine.has_unfinished():
        for arrival in [arrival for arrival in waiting if arrival.at_step <= step]:
            engine.add_request(arrival.name, arrival.prompt, arrival.params)
            waiting.remove(arrival)
        for arrival in [arrival for arrival in to_abort if arrival.abort_at is not None and arrival.abort_at <= step]:
            if arrival not in waiting:
                engine.abort(arrival.name)
                to_abort.remove(arrival)
        for output in engine.step():
            result = results[output.request_id]
            result.token_ids.extend(output.new_token_ids)
            result.logprobs.extend(output.new_logprobs)
            result.finish_reason, result.error = output.finish_reason, output.error
            result.num_cached_tokens = output.num_cached_tokens
            if output.prompt_logprobs is not None:
                result.prompt_logprobs = output.prompt_logprobs
        step += 1
        assert step < 100_000, "the script does not end"
    engine.check_integrity()
    return Run(results, engine.stats(), engine)


def run_with(loaded: LoadedModel, config: EngineConfig, script: Sequence[Arrival], **changes: object) -> Run:
    """A fresh engine over already loaded weights, with some options changed, run over the script."""
    changed = replace(config, **changes)  # type: ignore[arg-type]
    return run_script(LLMEngine(changed, loaded.reconfigured(changed)), script)


def make_prompt(length: int, vocab_size: int, salt: int = 0) -> tuple[int, ...]:
    """Token ids from an integer generator: the same everywhere, no two salts alike."""
    state, ids = 0x9E3779B9 * (salt + 1) & 0xFFFFFFFF, []
    for _ in range(length):
        state = (state * 1664525 + 1013904223) & 0xFFFFFFFF
        ids.append((state >> 8) % vocab_size)
    return tuple(ids)


def all_logits(loaded: LoadedModel, sequences: Sequence[Sequence[int]], page_order: int = 1) -> list[torch.Tensor]:
    """Logits of every position of each sequence, computed in one step: float32 [len(sequence), V] each.

    `page_order` -1 hands the pages out from the other end of the cache: a page layout must not show.
    """
    kv_cache, page_size = loaded.new_kv_cache(), loaded.plan.page_size
    pages = iter(range(kv_cache.num_pages)[::page_order])
    chunks = []
    for index, token_ids in enumerate(sequences):
        request = Request(f"r{index}", tuple(token_ids), SamplingParams(), max_tokens=0)
        request.pages = [next(pages) for _ in range(-(-len(token_ids) // page_size))]
        chunks.append(ScheduledChunk(request, 0, len(token_ids), True))
    batch = build_batch(chunks, page_size)
    runner = Runner(loaded.ops, loaded.model, kv_cache)
    with torch.inference_mode():
        hidden = runner.forward(batch)
        logits = torch.cat([piece for _, piece in runner.logits(hidden, range(batch.num_rows))])
    return list(logits.split([len(token_ids) for token_ids in sequences]))
