"""/v1/completions: from its body to a run, and from a run to its JSON, whole or streamed.

Knows shapes only; `serving` does the work. Invariant: the chunks of a stream, joined, are the whole answer: text,
token ids and log-probs alike; each choice has exactly one chunk with a finish_reason, its last.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from isobit.request import TokenLogprob
from isobit.server.errors import ApiError
from isobit.server.logprobs import completion_logprobs, prompt_logprobs_json
from isobit.server.protocol import CompletionRequest, split_prompts
from isobit.server.serving import PendingDelta, Prompt, Run, Serving, echo_texts

DEFAULT_MAX_TOKENS = 16  # as in OpenAI's API


async def start_completion(serving: Serving, body: CompletionRequest) -> tuple[Run, CompletionFormat]:
    """Queue what the body asks for. Raises ApiError before anything runs."""
    serving.check_model(body.model)
    body.check_stream()
    given = split_prompts(body.prompt)
    prompt_logprobs = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        prompt_logprobs = max(body.logprobs, prompt_logprobs or 0)
    params = body.sampling_params(
        serving.defaults.values,
        logprobs=body.logprobs,
        prompt_logprobs=prompt_logprobs,
        max_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
    )
    limit = serving.engine.engine.config.max_queued_requests
    if len(given) * params.n > limit:
        raise ApiError(400, f"{len(given)} prompts times n={params.n} is above the limit of {limit} requests "
                            "(max_queued_requests)", "prompt")  # fmt: skip
    prompts = []
    for item in given:
        if isinstance(item, str):
            prompts.append(Prompt(await serving.encode(item), item))
        else:
            prompts.append(Prompt(item))
    for prompt in prompts:
        if not prompt.token_ids:
            raise ApiError(400, "the prompt is empty, and this model's tokenizer puts no begin-of-text token in front; "
                                "nothing can be computed from no tokens", "prompt")  # fmt: skip
    run = await serving.run(prompts, params)
    return run, CompletionFormat(serving, body, run)


class CompletionFormat:
    """Shapes one run for one body."""

    def __init__(self, serving: Serving, body: CompletionRequest, run: Run) -> None:
        self._serving = serving
        self._tokenizer = serving.tokenizer
        self._body = body
        self._run = run
        self._head: dict[str, Any] = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": serving.model_name,
            "system_fingerprint": serving.fingerprint,
        }

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        choices = []
        for index, output in enumerate(await self._run.results()):
            text, token_texts, entries = output.text, list(output.token_texts), list(output.logprobs or ())
            choice = self._choice(index, output.text, token_texts, entries, output.finish_reason)
            if self._body.echo:
                self._put_echo(index, choice, text, token_texts, entries)
            choice["stop_reason"], choice["seed"] = output.stop_reason, output.seed
            if self._body.return_token_ids:
                choice["prompt_token_ids"] = list(self._run.prompt_of(index).token_ids)
                choice["token_ids"] = list(output.token_ids)
            if self._body.prompt_logprobs is not None:
                choice["prompt_logprobs"] = prompt_logprobs_json(
                    self._tokenizer, self._prompt_entries(index), self._body.prompt_logprobs
                )
            choices.append(choice)
        return {**self._head, "choices": choices, "usage": self._run.usage()}

    def _choice(
        self,
        index: int,
        text: str,
        texts: Sequence[str],
        entries: Sequence[TokenLogprob | None],
        finish_reason: str | None,
        text_offset: int = 0,
    ) -> dict[str, Any]:
        wanted = self._body.logprobs
        logprobs = None
        if wanted is not None:
            logprobs = completion_logprobs(self._tokenizer, texts, entries, wanted, text_offset)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def _echo(self, index: int) -> tuple[str, list[str]]:
        prompt = self._run.prompt_of(index)
        skip = self._run.samples[index].params.skip_special_tokens
        texts = echo_texts(self._tokenizer, prompt, skip)
        return "".join(texts) if prompt.text is None else prompt.text, texts

    def _prompt_entries(self, index: int) -> Sequence[TokenLogprob | None]:
        entries = self._run.processors[index - index % self._run.n].prompt_logprobs
        assert entries is not None, "prompt log-probs were asked for and did not come"
        return entries

    def _put_echo(
        self,
        index: int,
        choice: dict[str, Any],
        text: str,
        texts: list[str],
        entries: list[TokenLogprob],
    ) -> None:
        prompt_text, prompt_texts = self._echo(index)
        choice["text"] = prompt_text + text
        if self._body.logprobs is not None:
            both = [*self._prompt_entries(index), *entries]
            choice["logprobs"] = completion_logprobs(
                self._tokenizer, prompt_texts + texts, both, self._body.logprobs, 0
            )

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """The answer in pieces; a usage chunk with no choices at the end if asked for."""
        pending = [PendingDelta() for _ in self._run.samples]
        async for index, delta in self._run.deltas():
            pending[index].add(delta)
            first = index - index % self._run.n
            if self._needs_prompt_entries and self._run.processors[first].prompt_logprobs is None:
                continue  # the first sample of a prompt scores it for all; its siblings wait
            for sibling in range(first, first + self._run.n):
                if pending[sibling].ready:
                    if self._body.echo and not pending[sibling].started:
                        yield self._chunk(self._echo_choice(sibling, pending[sibling]))
                    yield self._chunk(self._delta_choice(sibling, pending[sibling]))
        if self._body.include_usage:
            yield {**self._head, "choices": [], "usage": self._run.usage()}

    @property
    def _needs_prompt_entries(self) -> bool:
        return bool(self._body.echo) and self._body.logprobs is not None

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        usage = {"usage": None} if self._body.include_usage else {}
        return {**self._head, "choices": [choice], **usage}

    def _echo_choice(self, index: int, state: PendingDelta) -> dict[str, Any]:
        """The prompt as first piece of a choice."""
        text, texts = self._echo(index)
        entries = self._prompt_entries(index) if self._needs_prompt_entries else ()
        state.text_offset = len(text)
        choice = self._choice(index, text, texts, entries, None)
        if self._body.return_token_ids:
            choice["prompt_token_ids"], choice["token_ids"] = list(self._run.prompt_of(index).token_ids), []
        return choice

    def _delta_choice(self, index: int, state: PendingDelta) -> dict[str, Any]:
        is_first = not state.started
        delta, offset = state.take()
        choice = self._choice(index, delta.text, delta.token_texts, delta.logprobs, delta.finish_reason, offset)
        if self._body.return_token_ids:
            if is_first and not self._body.echo:
                choice["prompt_token_ids"] = list(self._run.prompt_of(index).token_ids)
            choice["token_ids"] = list(delta.token_ids)
        if delta.finish_reason is not None:
            choice["stop_reason"], choice["seed"] = delta.stop_reason, self._run.samples[index].params.seed
        return choice
