"""One request: how to sample it, what it has so far, what it gives back. Plain Python, no torch, no batch.

Keeps the invariant that everything which decides a token is here (token ids, params, seed, position): nothing about
the company a request runs in is known to it.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

MAX_N = 128
MAX_STOP_STRINGS = 64
_MASK64 = (1 << 64) - 1


def mix64(z: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014) on 64-bit integers."""
    z &= _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def derive_seed(seed: int, index: int) -> int:
    """Seed of sample `index` of a request with `n` > 1; sample 0 keeps the request's own seed."""
    return seed if index == 0 else mix64(seed + index * 0x9E3779B97F4A7C15) >> 1


def _number(name: str, value: object, low: float, high: float, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} must be a number, got {value!r}")
    below = value <= low if open_low else value < low
    if not math.isfinite(value) or below or value > high:
        raise ValueError(f"{name}={value!r} is outside {'(' if open_low else '['}{low}, {high}]")


def _integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be a whole number, got {value!r}")
    if not low <= value <= high:
        raise ValueError(f"{name}={value} is outside [{low}, {high}]")


@dataclass(frozen=True)
class SamplingParams:
    """How to pick tokens; names and meanings as in the OpenAI API and vLLM.

    temperature 0 is greedy (ties to the lowest id). top_k 0 or -1: no limit. repetition_penalty (Keskar et al. 2019)
    looks at prompt and output, frequency_penalty and presence_penalty (OpenAI) at the output. logprobs: None, or the
    number of alternatives (0: the chosen token alone); prompt_logprobs likewise for the prompt. Log-probs are those of
    the raw model: no temperature, penalty, bias or filter enters them. seed None: a random one is chosen and reported.

    Raises ValueError naming the field, the value and the range.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0.0, 1e6)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 1e6, open_low=True)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _integer("top_k", self.top_k, -1, 2**63)
        _integer("min_tokens", self.min_tokens, 0, 2**63)
        _integer("n", self.n, 1, MAX_N)
        for name, low, high in (
            ("max_tokens", 0, 2**63), ("seed", 0, 2**63 - 1), ("logprobs", 0, 2**31), ("prompt_logprobs", 0, 2**31),
        ):  # fmt: skip
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), low, high)
        self._check_lists()

    def _check_lists(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name, kind in (("stop", str), ("stop_token_ids", int)):
            value = getattr(self, name)
            if not isinstance(value, (list, tuple)):
                raise ValueError(f"{name} must be a list, got {value!r}")
            bad = [item for item in value if not isinstance(item, kind) or isinstance(item, bool)]
            if bad:
                raise ValueError(f"{name} must hold only {kind.__name__}, got {bad[0]!r}")
            object.__setattr__(self, name, tuple(value))
        if len(self.stop) > MAX_STOP_STRINGS or any(not text for text in self.stop):
            raise ValueError(f"stop takes up to {MAX_STOP_STRINGS} non-empty strings")
        if not isinstance(self.logit_bias, Mapping):
            raise ValueError(f"logit_bias must map token ids to numbers, got {self.logit_bias!r}")
        for token, bias in self.logit_bias.items():
            _integer("logit_bias token id", token, 0, 2**31)
            _number(f"logit_bias[{token}]", bias, -100.0, 100.0)

    def child(self, index: int) -> SamplingParams:
        """Params of sample `index` alone; `seed` must already be set."""
        if self.seed is None:
            raise ValueError("seed must be set before the samples are told apart")
        return replace(self, n=1, seed=derive_seed(self.seed, index))


class RequestState(enum.Enum):
    """Explicit life of a request; nothing is inferred from counters."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(frozen=True)
class TokenLogprob:
    """Raw model log-prob of one token, and the best alternatives as (token id, logprob), best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass
class Request:
    """State of one request in the engine. `token_ids` is the prompt followed by the output."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    arrival: int = 0
    token_ids: list[int] = field(default_factory=list)
    state: RequestState = RequestState.WAITING
    num_computed_tokens: int = 0
    num_cached_tokens: int | None = None  # of the first admission; what `usage` reports
    num_preemptions: int = 0
    finish_reason: str | None = None
    error: str | None = None
    pages: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.token_ids:
            self.token_ids = list(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_token_ids) :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)


@dataclass(frozen=True)
class RequestOutput:
    """What one step added to one request. `finish_reason`: None while running, else stop, length, abort or error."""

    request_id: str
    new_token_ids: tuple[int, ...]
    new_logprobs: tuple[TokenLogprob, ...]
    finish_reason: str | None
    stop_reason: int | None  # the stop token id that ended the output, if one did
    error: str | None
    num_cached_tokens: int
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None  # with the first output, when asked for
    extra: Mapping[str, Any] = field(default_factory=dict)
