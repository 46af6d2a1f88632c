"""What a request gives back: the engine's step outputs of one sample become text, and end where a stop string says.

Knows tokens and text, no HTTP and no scheduling. Invariant: the pieces of `SampleDelta.text` joined are the text of
the `CompletionOutput`, and every token id and log-prob appears in exactly one piece, in order.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from isobit.detokenizer import IncrementalDetokenizer, StopStrings, TokenBytes
from isobit.request import RequestOutput, SamplingParams, TokenLogprob


@dataclass(frozen=True)
class SampleDelta:
    """What became certain with one step. `token_texts` has the text of each token in `token_ids`, joined the raw text
    before any cut. `finish_reason` is set on the last piece only: stop, length, abort or error."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    token_texts: tuple[str, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None


@dataclass(frozen=True)
class CompletionOutput:
    """One sample. `logprobs` holds one entry for each token id when asked for, else None. `stop_reason` is the stop
    string, or the id from `stop_token_ids`, that ended it. `seed` replays this sample alone with n=1."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    token_texts: tuple[str, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: str
    stop_reason: int | str | None
    seed: int | None
    error: str | None = None


@dataclass(frozen=True)
class RequestResult:
    """A finished request: its prompt and `n` samples. `prompt_logprobs` has None for the first token, which has no
    prefix; it is None when not asked for. `num_cached_tokens` counts prompt tokens served from the prefix cache."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    num_cached_tokens: int
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None

    def bits_digest(self) -> str:
        """SHA-256 over prompt and output token ids and the float32 bits of every log-prob."""
        digest = hashlib.sha256()
        _hash_tokens(digest, self.prompt_token_ids)
        _hash_logprobs(digest, self.prompt_logprobs)
        for output in self.outputs:
            _hash_tokens(digest, output.token_ids)
            _hash_logprobs(digest, output.logprobs)
        return digest.hexdigest()


def _hash_tokens(digest: hashlib._Hash, token_ids: Sequence[int]) -> None:
    digest.update(struct.pack(f"<q{len(token_ids)}q", len(token_ids), *token_ids))


def _hash_logprobs(digest: hashlib._Hash, logprobs: Sequence[TokenLogprob | None] | None) -> None:
    digest.update(struct.pack("<q", -1 if logprobs is None else len(logprobs)))
    for entry in logprobs or ():
        if entry is None:
            digest.update(b"none")
            continue
        pairs = ((entry.token_id, entry.logprob), *entry.top)
        digest.update(b"".join(struct.pack("<qf", token, value) for token, value in pairs))


class OutputProcessor:
    """Collects one sample. `process` takes the engine's outputs in order and returns what may be shown."""

    def __init__(self, tokenizer: TokenBytes, params: SamplingParams, index: int = 0) -> None:
        self._params = params
        self._index = index
        self._tokenizer = tokenizer
        self._detokenizer = IncrementalDetokenizer(tokenizer, params.skip_special_tokens)
        self._stops = StopStrings(params.stop, params.include_stop_str_in_output)
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._token_texts: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._last = SampleDelta()
        self.prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
        self.num_cached_tokens = 0

    @property
    def finished(self) -> bool:
        return self._last.finish_reason is not None

    @property
    def num_output_tokens(self) -> int:
        return len(self._token_ids)

    def process(self, output: RequestOutput) -> SampleDelta:
        """Add one engine output. After a stop string the sample is finished while the engine may still run it: the
        caller then aborts the request (`finished` is True and `output.finish_reason` None)."""
        assert not self.finished, f"request {output.request_id} got an output after its end"
        self.num_cached_tokens = output.num_cached_tokens
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        texts: list[str] = []
        first = len(self._token_ids)
        found = None
        for position, token in enumerate(output.new_token_ids):
            is_last = position == len(output.new_token_ids) - 1
            certain, found = self._add_token(token, ends=is_last and output.finish_reason == "stop")
            texts.append(certain)
            if found is not None:
                break
        self._logprobs += output.new_logprobs[: len(self._token_ids) - first]
        finish_reason = "stop" if found is not None else output.finish_reason
        if finish_reason is not None and found is None:
            texts.append(self._finish_text(first))
        self._last = SampleDelta(
            "".join(texts), tuple(self._token_ids[first:]), tuple(self._token_texts[first:]),
            tuple(self._logprobs[first:]), finish_reason, found or self._stop_token(output), output.error,
        )  # fmt: skip
        self._texts.append(self._last.text)
        return self._last

    def _stop_token(self, output: RequestOutput) -> int | None:
        """The stop token id if the request named it; the model's own end of text is no reason worth telling."""
        return output.stop_reason if output.stop_reason in self._params.stop_token_ids else None

    def _add_token(self, token: int, ends: bool) -> tuple[str, str | None]:
        """(certain text, stop string found). The token that `ends` the output (end of text, a stop id) has no text
        unless `include_stop_str_in_output` asks for it."""
        self._token_ids.append(token)
        if ends and not self._params.include_stop_str_in_output:
            self._token_texts.append(self._special_text(token))
            return "", None
        text = self._detokenizer.push(token)
        self._token_texts.append(text or self._special_text(token))
        if len(self._token_ids) <= self._params.min_tokens:
            return text, None
        return self._stops.push(text)

    def _special_text(self, token: int) -> str:
        """A token shown in the list of tokens though it adds no text; "" for a piece of an unfinished character."""
        special = token in self._tokenizer.special_token_ids
        return self._tokenizer.token_bytes(token).decode("utf-8", "replace") if special else ""

    def _finish_text(self, first: int) -> str:
        rest = self._detokenizer.finish()
        if rest and len(self._token_texts) > first:
            self._token_texts[-1] += rest
        return self._stops.finish() + rest

    def result(self, seed: int | None) -> CompletionOutput:
        """The whole sample; call when `finished`."""
        finish_reason = self._last.finish_reason
        assert finish_reason is not None, "the sample is not finished"
        return CompletionOutput(
            index=self._index,
            text="".join(self._texts),
            token_ids=tuple(self._token_ids),
            token_texts=tuple(self._token_texts),
            logprobs=tuple(self._logprobs) if self._params.logprobs is not None else None,
            finish_reason=finish_reason,
            stop_reason=self._last.stop_reason,
            seed=seed,
            error=self._last.error,
        )
