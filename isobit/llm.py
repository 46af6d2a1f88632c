"""The offline API: lists of prompts in, results out, over the same engine and the same text as the server.

Knows prompts and results; the engine schedules. Invariant: everything is checked before anything runs, so one bad
item costs no work; and what an item gives does not depend on the others in its list.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tqdm import tqdm

from isobit.config import EngineConfig
from isobit.engine import LLMEngine
from isobit.model_config import load_model_config
from isobit.output import OutputProcessor, RequestResult
from isobit.request import SamplingParams
from isobit.sampling_defaults import resolve_defaults
from isobit.tokenizer import Tokenizer, load_tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
Params = SamplingParams | Sequence[SamplingParams] | None
Messages = Sequence[Mapping[str, Any]]


@dataclass
class _Job:
    """One item of a list: its prompt, the params of its samples, and what they gave so far."""

    name: str
    prompt: str | None
    token_ids: tuple[int, ...]
    samples: list[SamplingParams]
    processors: list[OutputProcessor] = field(default_factory=list)

    @property
    def request_ids(self) -> list[str]:
        return [f"{self.name}-{index}" for index in range(len(self.samples))]

    def result(self) -> RequestResult:
        first = self.processors[0]
        outputs = tuple(
            processor.result(params.seed) for processor, params in zip(self.processors, self.samples, strict=True)
        )
        return RequestResult(
            self.name, self.prompt, self.token_ids, outputs, first.num_cached_tokens, first.prompt_logprobs
        )


class LLM:
    """A model to call from Python.

    `options` are those of EngineConfig by name. Raises ValueError for a checkpoint or option that cannot be served,
    saying why and what is possible. `engine`, `tokenizer`, `default_sampling_params` (and `default_values`,
    what of them the checkpoint sets) are there to look at.
    """

    def __init__(self, model: str = "smollm2", **options: Any) -> None:
        config = EngineConfig.from_options({"model": model, **options})
        load_model_config(config.model, config.parsed_overrides())  # its faults are told before the tokenizer's
        tokenizer = load_tokenizer(config.model, chat_template=config.chat_template)
        self._set(LLMEngine(config), tokenizer)

    @classmethod
    def from_engine(cls, engine: LLMEngine, tokenizer: Tokenizer) -> LLM:
        """An LLM over an engine that is already there; nothing else may drive that engine."""
        llm = cls.__new__(cls)
        llm._set(engine, tokenizer)
        return llm

    def _set(self, engine: LLMEngine, tokenizer: Tokenizer) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        defaults = resolve_defaults(engine.model_config.generation_defaults)
        self.default_values = dict(defaults.values)
        self.default_sampling_params = SamplingParams(**self.default_values)
        self._names = itertools.count()

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None, use_tqdm: bool = True
    ) -> list[RequestResult]:
        """Continue each prompt: a text, token ids, or a list of such. Results in the order of the prompts.

        `sampling_params`: one for all, or one for each; None: the checkpoint's defaults. A sample whose logits were
        not finite has finish_reason "error" and its `error` says so. Raises ValueError, before anything runs, naming
        the item that cannot be served.
        """
        items = [self._encode(index, prompt) for index, prompt in enumerate(_as_list(prompts))]
        return self._run(items, self._params_for(sampling_params, len(items)), use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        **template_options: Any,
    ) -> list[RequestResult]:
        """Answer one conversation, or each of a list; messages are {"role", "content"}. Otherwise as `generate`.

        Raises ValueError with the chat template's own message where it refuses the conversation.
        """
        listed: list[Any] = list(messages)
        conversations = [listed] if listed and isinstance(listed[0], Mapping) else listed
        items: list[tuple[str | None, tuple[int, ...]]] = []
        for index, conversation in enumerate(conversations):
            try:
                ids = self.tokenizer.apply_chat_template(
                    conversation, add_generation_prompt=add_generation_prompt, **template_options
                )
            except ValueError as error:
                raise ValueError(f"conversation {index}: {error}") from error
            items.append((None, tuple(ids)))
        return self._run(items, self._params_for(sampling_params, len(items)), use_tqdm)

    def score(self, texts: Prompt | Sequence[Prompt], use_tqdm: bool = True) -> list[list[float | None]]:
        """Raw log-prob of every token of each text (or list of ids) given those before it; None for the first.

        The same bits as the log-probs given while generating. Raises ValueError for a bad item before anything runs,
        RuntimeError if the model gave NaN or infinity.
        """
        results = self.generate(texts, SamplingParams(max_tokens=0, prompt_logprobs=0), use_tqdm)
        scores: list[list[float | None]] = []
        for index, result in enumerate(results):
            if result.prompt_logprobs is None:
                raise RuntimeError(f"text {index}: {result.outputs[0].error}")
            scores.append([None if entry is None else entry.logprob for entry in result.prompt_logprobs])
        return scores

    def _encode(self, index: int, prompt: Prompt) -> tuple[str | None, tuple[int, ...]]:
        given: Any = prompt
        if isinstance(given, Mapping):
            if set(given) not in ({"prompt"}, {"prompt_token_ids"}):
                raise ValueError(f"prompt {index}: a dict must hold either 'prompt' or 'prompt_token_ids'")
            given = next(iter(given.values()))
        if isinstance(given, str):
            try:
                return given, tuple(self.tokenizer.encode(given))
            except ValueError as error:
                raise ValueError(f"prompt {index}: {error}") from error
        if not isinstance(given, Sequence):
            raise ValueError(f"prompt {index} must be a text or a list of token ids, got {type(given).__name__}")
        return None, tuple(given)

    def _params_for(self, given: Params, count: int) -> list[SamplingParams]:
        if given is None or isinstance(given, SamplingParams):
            return [given or self.default_sampling_params] * count
        if len(given) != count:
            raise ValueError(f"{len(given)} sampling_params for {count} prompts: give one, or one for each")
        return list(given)

    def _run(
        self, items: Sequence[tuple[str | None, tuple[int, ...]]], params: Sequence[SamplingParams], use_tqdm: bool
    ) -> list[RequestResult]:
        jobs = [self._job(index, *item, one) for index, (item, one) in enumerate(zip(items, params, strict=True))]
        processors = {
            request_id: processor
            for job in jobs
            for request_id, processor in zip(job.request_ids, job.processors, strict=True)
        }
        waiting = ((request_id, job.token_ids, one) for job in jobs
                   for request_id, one in zip(job.request_ids, job.samples, strict=True))  # fmt: skip
        try:
            with tqdm(total=len(processors), desc="generate", unit="request", disable=not use_tqdm) as progress:
                self._drive(waiting, processors, progress)
        finally:
            for request_id in processors:
                self.engine.abort(request_id)
        return [job.result() for job in jobs]

    def _job(self, index: int, prompt: str | None, token_ids: tuple[int, ...], params: SamplingParams) -> _Job:
        seeded = replace(params, seed=self.engine.new_seed() if params.seed is None else params.seed)
        samples = [seeded.child(sample) for sample in range(params.n)]
        try:
            self.engine.check_request(token_ids, samples[0])
        except ValueError as error:
            raise ValueError(f"prompt {index}: {error}") from error
        samples[1:] = [replace(sample, prompt_logprobs=None) for sample in samples[1:]]
        processors = [OutputProcessor(self.tokenizer, sample, number) for number, sample in enumerate(samples)]
        return _Job(f"llm-{next(self._names)}", prompt, token_ids, samples, processors)

    def _drive(
        self,
        waiting: Iterator[tuple[str, tuple[int, ...], SamplingParams]],
        processors: Mapping[str, OutputProcessor],
        progress: tqdm[Any],
    ) -> None:
        """Step until all are finished, keeping the engine's queue full but never over its limit."""
        open_ids: set[str] = set()
        limit = self.engine.config.max_queued_requests
        while True:
            for request_id, token_ids, params in itertools.islice(waiting, limit - len(open_ids)):
                self.engine.add_request(request_id, token_ids, params)
                open_ids.add(request_id)
            if not open_ids:
                return
            for output in self.engine.step():
                processor = processors[output.request_id]
                processor.process(output)
                if processor.finished:
                    if output.finish_reason is None:
                        self.engine.abort(output.request_id)
                    open_ids.discard(output.request_id)
                    progress.update()


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several: a list of whole numbers is one prompt of token ids."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise ValueError(f"prompts must be a text, token ids, or a list of such, got {type(prompts).__name__}")
    listed: list[Any] = list(prompts)
    return [listed] if listed and all(isinstance(item, int) for item in listed) else listed
