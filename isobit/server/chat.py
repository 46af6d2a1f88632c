"""/v1/chat/completions: from messages to a run, and from a run to its JSON, whole or streamed.

Knows shapes only; the chat template is the tokenizer's. Invariant: as `completions`: chunks joined are the whole
answer, the first chunk of a choice names the role, and exactly one, its last, has a finish_reason.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from isobit.output import CompletionOutput, SampleDelta
from isobit.server.errors import ApiError
from isobit.server.logprobs import chat_logprobs, prompt_logprobs_json
from isobit.server.protocol import ChatRequest, clean_messages
from isobit.server.serving import PendingDelta, Prompt, Run, Serving


async def start_chat(serving: Serving, body: ChatRequest) -> tuple[Run, ChatFormat]:
    """Queue what the body asks for. Raises ApiError before anything runs."""
    serving.check_model(body.model)
    body.check_stream()
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs=true", "top_logprobs")
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise ApiError(400, "max_tokens and max_completion_tokens are one limit and differ; give one", "max_tokens")
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    params = body.sampling_params(
        serving.defaults.values, logprobs=(body.top_logprobs or 0) if body.logprobs else None, max_tokens=limit
    )
    token_ids = await encode_chat(
        serving, body.messages, body.add_generation_prompt is not False, body.chat_template_kwargs or {}
    )
    run = await serving.run([Prompt(token_ids)], params)
    return run, ChatFormat(serving, body, run)


async def encode_chat(
    serving: Serving, messages: Any, add_generation_prompt: bool, template_kwargs: dict[str, Any]
) -> list[int]:
    """Token ids of a conversation. Raises ApiError 400 with the template's own message where it refuses."""
    cleaned = clean_messages(messages)
    taken = sorted({"self", "messages", "add_generation_prompt", "tools"} & set(template_kwargs))
    if taken:
        raise ApiError(400, f"chat_template_kwargs may not hold {taken[0]!r}", "chat_template_kwargs")
    text = "".join(message["content"] for message in cleaned)
    serving.check_text(text, "messages")
    return await serving.in_text_thread(
        lambda: serving.tokenizer.apply_chat_template(
            cleaned, add_generation_prompt=add_generation_prompt, **template_kwargs
        )
    )


class ChatFormat:
    """Shapes one run for one body."""

    def __init__(self, serving: Serving, body: ChatRequest, run: Run) -> None:
        self._tokenizer = serving.tokenizer
        self._body = body
        self._run = run
        self._head: dict[str, Any] = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": serving.model_name,
            "system_fingerprint": serving.fingerprint,
        }

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        outputs = await self._run.results()
        answer: dict[str, Any] = {
            **self._head,
            "choices": [self._whole_choice(index, output) for index, output in enumerate(outputs)],
            "usage": self._run.usage(),
        }
        if self._body.return_token_ids:
            answer["prompt_token_ids"] = list(self._run.prompts[0].token_ids)
        if self._body.prompt_logprobs is not None:
            entries = self._run.processors[0].prompt_logprobs
            assert entries is not None, "prompt log-probs were asked for and did not come"
            answer["prompt_logprobs"] = prompt_logprobs_json(self._tokenizer, entries, self._body.prompt_logprobs)
        return answer

    def _whole_choice(self, index: int, output: CompletionOutput) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "message": {"role": "assistant", "content": output.text, "refusal": None},
            "logprobs": None,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
            "seed": output.seed,
        }
        if output.logprobs is not None:
            choice["logprobs"] = chat_logprobs(
                self._tokenizer, output.token_texts, output.logprobs, self._body.top_logprobs or 0
            )
        if self._body.return_token_ids:
            choice["token_ids"] = list(output.token_ids)
        return choice

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """The answer in pieces; a usage chunk with no choices at the end if asked for."""
        pending = [PendingDelta() for _ in self._run.samples]
        async for index, delta in self._run.deltas():
            state = pending[index]
            state.add(delta)
            if not state.ready:
                continue
            if not state.started:
                yield self._first_chunk(index)
            yield self._chunk(self._delta_choice(index, state.take()[0]))
        if self._body.include_usage:
            yield {**self._head, "choices": [], "usage": self._run.usage()}

    def _first_chunk(self, index: int) -> dict[str, Any]:
        chunk = self._chunk({"index": index, "delta": {"role": "assistant"}, "logprobs": None, "finish_reason": None})
        if self._body.return_token_ids:
            chunk["prompt_token_ids"] = list(self._run.prompts[0].token_ids)
        return chunk

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        usage = {"usage": None} if self._body.include_usage else {}
        return {**self._head, "choices": [choice], **usage}

    def _delta_choice(self, index: int, delta: SampleDelta) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "delta": {"content": delta.text} if delta.text else {},
            "logprobs": None,
            "finish_reason": delta.finish_reason,
        }
        if self._body.logprobs and delta.token_ids:
            choice["logprobs"] = chat_logprobs(
                self._tokenizer, delta.token_texts, delta.logprobs, self._body.top_logprobs or 0
            )
        if self._body.return_token_ids:
            choice["token_ids"] = list(delta.token_ids)
        if delta.finish_reason is not None:
            choice["stop_reason"], choice["seed"] = delta.stop_reason, self._run.samples[index].params.seed
        return choice
