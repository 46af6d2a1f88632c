"""What both OpenAI routes share: prompts to ids, checks before anything is queued, samples run, usage counted.

Knows the tokenizer and the engine, no JSON shape. Invariant: a request is checked whole before any of it is queued,
so a bad one costs nobody else a thing, and no stream begins for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from isobit.detokenizer import token_texts
from isobit.output import CompletionOutput, OutputProcessor, SampleDelta
from isobit.request import SamplingParams
from isobit.sampling_defaults import SamplingDefaults
from isobit.server.async_engine import AsyncEngine, EngineBusyError, EngineDeadError, Sample, Submission
from isobit.server.errors import ApiError

if TYPE_CHECKING:
    from isobit.tokenizer import Tokenizer

T = TypeVar("T")
TEXT_THREADS = 4  # so that one very long text does not keep the others waiting
_NORMALISING_SHRINKS = 3  # at most: Unicode composition makes one Hangul syllable of three letters


@dataclass
class Prompt:
    """One prompt: its ids, and the text it was given as, if it was."""

    token_ids: Sequence[int]
    text: str | None = None


class Run:
    """Samples of one HTTP request, queued. Sample i*n + j is sample j of prompt i. Close it whatever happens."""

    def __init__(
        self, prompts: list[Prompt], samples: list[Sample], processors: list[OutputProcessor], submission: Submission
    ) -> None:
        self.prompts = prompts
        self.samples = samples
        self.processors = processors
        self.n = len(samples) // len(prompts)
        self._submission = submission

    def prompt_of(self, index: int) -> Prompt:
        """The prompt of a sample."""
        return self.prompts[index // self.n]

    async def deltas(self) -> AsyncIterator[tuple[int, SampleDelta]]:
        """(sample, what it gained) as it comes. Raises ApiError 500 when the engine failed a sample."""
        async for index, output in self._submission.outputs():
            delta = self.processors[index].process(output)
            if delta.finish_reason == "error":
                raise ApiError(500, delta.error or "the engine failed this request")
            if delta.finish_reason is not None:
                self._submission.finish(index)
            yield index, delta

    def close(self) -> None:
        """Drop what still runs; harmless when all is done."""
        self._submission.close()

    async def results(self) -> list[CompletionOutput]:
        """Wait for every sample. Raises ApiError 500 as `deltas`."""
        async for _ in self.deltas():
            pass
        return [
            processor.result(sample.params.seed)
            for processor, sample in zip(self.processors, self.samples, strict=True)
        ]

    def usage(self) -> dict[str, Any]:
        """`usage` of OpenAI: each prompt counted once, outputs of all samples, cached tokens of each first sample."""
        prompt_tokens = sum(len(prompt.token_ids) for prompt in self.prompts)
        completion_tokens = sum(processor.num_output_tokens for processor in self.processors)
        cached = sum(processor.num_cached_tokens for processor in self.processors[:: self.n])
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


class PendingDelta:
    """Pieces of one sample that wait until there is text to show, so that no chunk is empty before the last."""

    def __init__(self) -> None:
        self.started = False
        self.text_offset = 0
        self._pieces: list[SampleDelta] = []

    def add(self, delta: SampleDelta) -> None:
        """Append a piece."""
        self._pieces.append(delta)

    @property
    def ready(self) -> bool:
        """True when the pieces hold text, or the end."""
        return any(piece.text or piece.finish_reason is not None for piece in self._pieces)

    def take(self) -> tuple[SampleDelta, int]:
        """(the pieces as one, offset of their first token in the text)."""
        pieces, self._pieces = self._pieces, []
        merged = replace(
            pieces[-1],
            text="".join(piece.text for piece in pieces),
            token_ids=tuple(token for piece in pieces for token in piece.token_ids),
            token_texts=tuple(text for piece in pieces for text in piece.token_texts),
            logprobs=tuple(entry for piece in pieces for entry in piece.logprobs),
        )
        offset = self.text_offset
        self.text_offset += sum(map(len, merged.token_texts))
        self.started = True
        return merged, offset


class Serving:
    """The model as the routes see it."""

    def __init__(self, engine: AsyncEngine, tokenizer: Tokenizer, defaults: SamplingDefaults, model_name: str) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.defaults = defaults
        self.model_name = model_name
        self.fingerprint: str = engine.engine.fingerprint
        self.context_length: int = engine.engine.plan.context_length
        vocab_size = engine.engine.model_config.vocab_size
        self._longest_token = max((len(tokenizer.token_bytes(token)) for token in range(vocab_size)), default=1)
        self._texts = ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="isobit-tokenizer")

    def close(self) -> None:
        """Let go of the tokenizer's threads."""
        self._texts.shutdown(wait=False)

    def check_model(self, name: str | None) -> None:
        """Raise ApiError 404 unless `name` is the served model (or absent)."""
        if name is not None and name not in (self.model_name, self.engine.engine.config.model):
            raise ApiError(404, f"model {name!r} is not served here; it is {self.model_name!r}", "model",
                           "model_not_found")  # fmt: skip

    async def in_text_thread(self, function: Callable[[], T]) -> T:
        """Run tokenizer work beside the event loop; its ValueErrors become ApiError 400."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._texts, function)
        except ValueError as error:
            raise ApiError(400, str(error)) from error

    def check_text(self, text: str, param: str) -> None:
        """Refuse, without tokenising it, a text that is not Unicode or cannot fit whatever its tokens are."""
        try:
            num_bytes = len(text.encode("utf-8"))
        except UnicodeEncodeError as error:
            raise ApiError(400, f"{param} holds a lone surrogate, which is no character", param) from error
        at_least = num_bytes // (_NORMALISING_SHRINKS * self._longest_token)
        if at_least > self.context_length:
            raise ApiError(
                400,
                f"{param} has {len(text)} characters, which is more than {at_least} tokens; "
                f"the context length is {self.context_length}",
                param,
                "context_length_exceeded",
            )

    async def encode(self, text: str, param: str = "prompt", add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Raises ApiError 400 as `check_text`."""
        self.check_text(text, param)
        return await self.in_text_thread(lambda: self.tokenizer.encode(text, add_special_tokens=add_special_tokens))

    async def run(self, prompts: list[Prompt], params: SamplingParams) -> Run:
        """Check everything, then queue everything. Raises ApiError 400 or 503 before anything runs."""
        samples = [sample for index, prompt in enumerate(prompts) for sample in self._samples(prompt, params, index)]
        processors = [OutputProcessor(self.tokenizer, sample.params) for sample in samples]
        try:
            submission = await self.engine.submit(samples)
        except ValueError as error:
            raise ApiError(400, str(error)) from error
        except (EngineBusyError, EngineDeadError) as error:
            raise ApiError(503, str(error)) from error
        return Run(prompts, samples, processors, submission)

    def _samples(self, prompt: Prompt, params: SamplingParams, index: int) -> list[Sample]:
        """The samples of one prompt; only the first computes prompt log-probs, which are the same for all."""
        engine = self.engine.engine
        params = replace(params, seed=engine.new_seed() if params.seed is None else params.seed)
        first = params.child(0)
        try:
            engine.check_request(prompt.token_ids, first)
        except ValueError as error:
            param = "prompt" if str(error).startswith(("the prompt", "prompt token")) else str(error).split("=")[0]
            code = "context_length_exceeded" if "context length" in str(error) else None
            raise ApiError(400, f"prompt {index}: {error}" if index else str(error), param.split()[0], code) from error
        others = [replace(params.child(sample), prompt_logprobs=None) for sample in range(1, params.n)]
        return [Sample(prompt.token_ids, child) for child in (first, *others)]


def echo_texts(tokenizer: Tokenizer, prompt: Prompt, skip_special_tokens: bool) -> list[str]:
    """Text of each prompt token; joined they are the prompt's text.

    A text prompt shows the special tokens that it spells, but not the begin-of-text token that the tokenizer put in
    front, nor the space that it puts before a first word.
    """
    if prompt.text is None:
        return token_texts(tokenizer, prompt.token_ids, skip_special_tokens)
    texts = token_texts(tokenizer, prompt.token_ids, skip_special_tokens=False)
    first = 0
    if prompt.token_ids[0] in tokenizer.special_token_ids and not prompt.text.startswith(texts[0]):
        texts[0] = ""
        first = 1
    if first < len(texts) and texts[first].startswith(" ") and not prompt.text.startswith(" "):
        texts[first] = texts[first][1:]
    return texts
