"""One request: how to sample it, what it has so far, what it gives back. Plain Python, no torch, no batch.

Keeps the invariant that everything which decides a token is here (token ids, params, seed, position): nothing about
the company a request runs in is known to it.
"""

from __future__ import annotations

import enum
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

MAX_N = 128
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 4096  # characters; looking for longer ones in a long output would keep a server from its work
MAX_STOP_TOKEN_IDS = 1024
MAX_TOKEN_ID = 2**31 - 1
_MASK64 = (1 << 64) - 1
_NUMBER_RANGES = (
    ("temperature", 0.0, 1e6), ("top_p", 0.0, 1.0), ("min_p", 0.0, 1.0), ("repetition_penalty", 1e-6, 1e6),
    ("frequency_penalty", -2.0, 2.0), ("presence_penalty", -2.0, 2.0),
)  # fmt: skip
_INTEGER_RANGES = (
    ("top_k", -1, 2**63), ("min_tokens", 0, 2**63), ("n", 1, MAX_N), ("max_tokens", 0, 2**63), ("seed", 0, 2**63 - 1),
    ("logprobs", 0, 2**31), ("prompt_logprobs", 0, 2**31),
)  # fmt: skip
_OPTIONAL = ("max_tokens", "seed", "logprobs", "prompt_logprobs")


def mix64(z: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014) on 64-bit integers."""
    z &= _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def derive_seed(seed: int, index: int) -> int:
    """Seed of sample `index` of a request with `n` > 1; sample 0 keeps the request's own seed."""
    return seed if index == 0 else mix64(seed + index * 0x9E3779B97F4A7C15) >> 1


def _shown(value: object) -> str:
    """`value` for an error message: short, and possible for every value (Python refuses to print huge ints)."""
    try:
        text = repr(value)
    except ValueError:
        text = f"a {type(value).__name__} too large to print"
    return text if len(text) <= 80 else text[:77] + "..."


def _number(name: str, value: object, low: float, high: float, open_low: bool = False) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"{name} must be a number, got {_shown(value)}")
    try:
        number = float(value) + 0.0  # no -0.0
    except OverflowError:  # a whole number beyond all floats
        number = math.inf
    if not (low < number if open_low else low <= number) or not number <= high:  # also for NaN
        raise ValueError(f"{name}={_shown(value)} is outside {'(' if open_low else '['}{low}, {high}]")
    return number


def _integer(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ValueError(f"{name} must be a whole number, got {_shown(value)}")
    number = int(value)
    if not low <= number <= high:
        raise ValueError(f"{name}={_shown(value)} is outside [{low}, {high}]")
    return number


@dataclass(frozen=True)
class SamplingParams:
    """How to pick tokens; names and meanings as in the OpenAI API and vLLM.

    temperature 0 is greedy (ties to the lowest id). top_k 0 or -1: no limit. repetition_penalty (Keskar et al. 2019)
    looks at prompt and output, frequency_penalty and presence_penalty (OpenAI) at the output. logprobs: None, or the
    number of alternatives (0: the chosen token alone); prompt_logprobs likewise for the prompt. Log-probs are those of
    the raw model: no temperature, penalty, bias or filter enters them. seed None: a random one is chosen and reported;
    seeds are whole numbers from 0 to 2**63 - 1. max_tokens 0 scores the prompt and generates nothing. A single string
    is a list of one for `stop`; None is an empty `stop`, `stop_token_ids` or `logit_bias`. The object keeps copies.

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
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        for name, low, high in _NUMBER_RANGES:
            self._set(name, _number(name, getattr(self, name), low, high, open_low=name == "top_p"))
        for name, lowest, highest in _INTEGER_RANGES:
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                self._set(name, _integer(name, value, lowest, highest))
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, got {_shown(getattr(self, name))}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}")
        self._check_stop()
        self._check_logit_bias()

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # frozen for everyone else

    def _check_stop(self) -> None:
        stop: Any = self.stop
        token_ids: Any = self.stop_token_ids
        stop = (stop,) if isinstance(stop, str) else () if stop is None else stop
        token_ids = () if token_ids is None else token_ids
        for name, value, most in (
            ("stop", stop, MAX_STOP_STRINGS), ("stop_token_ids", token_ids, MAX_STOP_TOKEN_IDS),
        ):  # fmt: skip
            if not isinstance(value, (list, tuple)):
                raise ValueError(f"{name} must be a list, got {_shown(value)}")
            if len(value) > most:
                raise ValueError(f"{name} takes up to {most} entries, got {len(value)}")
        for text in stop:
            if not isinstance(text, str) or not text:
                raise ValueError(f"stop must hold only non-empty strings, got {_shown(text)}")
            if len(text) > MAX_STOP_LENGTH:
                raise ValueError(f"stop takes strings of up to {MAX_STOP_LENGTH} characters, got one of {len(text)}")
        self._set("stop", tuple(stop))
        self._set(
            "stop_token_ids", tuple(_integer("stop_token_ids entry", token, 0, MAX_TOKEN_ID) for token in token_ids)
        )

    def _check_logit_bias(self) -> None:
        biases: Any = self.logit_bias
        biases = {} if biases is None else biases
        if not isinstance(biases, Mapping):
            raise ValueError(f"logit_bias must map token ids to numbers, got {_shown(biases)}")
        checked = {}
        for token, bias in biases.items():
            token_id = _integer("logit_bias token id", token, 0, MAX_TOKEN_ID)
            checked[token_id] = _number(f"logit_bias[{token_id}]", bias, -100.0, 100.0)
        self._set("logit_bias", checked)  # a copy: the caller's mapping may change

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


@dataclass(eq=False)
class Request:
    """State of one request in the engine. `token_ids` is the prompt followed by the output.

    The first `num_computed_tokens` tokens have their keys and values in `pages` (page i holds positions i * page_size
    onwards), and the first `num_published_pages` pages are in the prefix cache. Only the scheduler changes these, and
    `state`, `arrival` and the two counts below them. Two requests are never equal, whatever they hold.
    """

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
    num_published_pages: int = 0
    finish_reason: str | None = None
    error: str | None = None
    pages: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)  # one a prompt token, the first is None

    def __post_init__(self) -> None:
        if not self.token_ids:
            self.token_ids = list(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_token_ids) :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether logits of prompt positions are still wanted, so that no prompt position may come from the cache."""
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < len(self.prompt_token_ids)


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
