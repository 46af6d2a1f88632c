"""Bodies of the OpenAI routes: which fields there are, what they may hold, and what they mean as SamplingParams.

Knows no engine. Invariant: a field is used, or ignored because it is in IGNORED_FIELDS (it cannot change an answer),
or the request is refused with its name: nothing that would change the answer is dropped silently.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from isobit.request import SamplingParams
from isobit.server.errors import ApiError

IGNORED_FIELDS = frozenset(
    ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
     "parallel_tool_calls", "priority", "request_id")
)  # fmt: skip
MAX_NESTING = 64
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_UNSUPPORTED = {
    "best_of": "best_of is not supported unless it equals n: choices are never ranked",
    "suffix": "suffix is not supported: the models here continue a text, they do not fill a gap",
    "tools": "tools are not supported",
    "tool_choice": "tool_choice is not supported",
    "functions": "functions are not supported",
    "function_call": "function_call is not supported",
    "audio": "audio is not supported",
    "prediction": "prediction is not supported",
    "web_search_options": "web_search_options is not supported",
}


class StreamOptions(BaseModel):
    """`stream_options`; usage comes as a last chunk when asked for. Obfuscation is padding, and there is none here."""

    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class CommonRequest(BaseModel):
    """Fields of both routes. null means not given."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    seed: int | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    prompt_logprobs: int | None = None

    def sampling_params(self, defaults: Mapping[str, Any], **fixed: Any) -> SamplingParams:
        """SamplingParams from what was given, over `defaults`, with `fixed` last. Raises ApiError 400."""
        names = SamplingParams.__dataclass_fields__.keys() & type(self).model_fields.keys()
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        given.pop("logprobs", None)
        if self.logit_bias is not None:
            given["logit_bias"] = _token_keys(self.logit_bias)
        try:
            return SamplingParams(**{**defaults, **given, **fixed})
        except (ValueError, OverflowError) as error:
            raise ApiError(400, str(error), _field_named(str(error), names)) from error

    def check_stream(self) -> None:
        """Raise ApiError 400 for stream options without a stream, and prompt log-probs in one."""
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream=true", "stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise ApiError(400, "prompt_logprobs cannot be streamed; use stream=false", "prompt_logprobs")

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionRequest(CommonRequest):
    """Body of /v1/completions; `prompt` is read by `split_prompts`."""

    prompt: Any = None
    echo: bool | None = None
    logprobs: int | None = None


class ChatRequest(CommonRequest):
    """Body of /v1/chat/completions; `messages` is read by `clean_messages`."""

    messages: Any = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeRequest(BaseModel):
    """Body of /tokenize: a `prompt`, or `messages` for the chat template."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str | None = None
    prompt: str | None = None
    messages: Any = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True


class DetokenizeRequest(BaseModel):
    """Body of /detokenize."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str | None = None
    tokens: list[int]
    skip_special_tokens: bool = False


Body = TypeVar("Body", bound=BaseModel)


def parse_body(kind: type[Body], data: bytes) -> Body:
    """Read a JSON body strictly. Raises ApiError 400 naming the field and what it may hold."""
    try:
        text = data.decode("utf-8")
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ApiError(400, f"the body must be a JSON object, got {type(value).__name__}")
    _refuse_nesting(value, text)
    value = {name: item for name, item in value.items() if name not in IGNORED_FIELDS}
    for name in [name for name in _UNSUPPORTED if name in value and name not in kind.model_fields]:
        _refuse_unsupported(name, value.pop(name), value)
    _refuse_formats(value)
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise _describe(error, kind) from error


def _refuse_nesting(value: Any, text: str) -> None:
    """Refuse what is nested so deeply that reading, comparing or printing it could exhaust Python's stack."""
    if text.count("[") + text.count("{") <= MAX_NESTING:
        return
    level = [value]
    for _ in range(MAX_NESTING):
        level = [
            item
            for outer in level
            for item in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(item, (dict, list))
        ]
        if not level:
            return
    raise ApiError(400, f"the body is nested more than {MAX_NESTING} levels deep")


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not allowed")


def _refuse_unsupported(name: str, given: Any, body: Mapping[str, Any]) -> None:
    """Let pass what asks for nothing: null, an empty list, "none", best_of equal to n."""
    harmless: tuple[Any, ...] = (None, [], "")
    if name in ("tool_choice", "function_call"):
        harmless = (None, "none", "auto")
    if name == "best_of" and not isinstance(given, bool) and given == (body.get("n") or 1):
        return
    if given not in harmless:
        raise ApiError(400, _UNSUPPORTED[name], name)


def _refuse_formats(value: dict[str, Any]) -> None:
    if value.pop("response_format", None) not in (None, {"type": "text"}):
        raise ApiError(400, 'response_format is not supported except {"type": "text"}', "response_format")
    if value.pop("modalities", None) not in (None, ["text"]):
        raise ApiError(400, 'modalities is not supported except ["text"]', "modalities")


def _describe(error: ValidationError, kind: type[BaseModel]) -> ApiError:
    problems = error.errors(include_url=False, include_input=False)
    unknown = sorted(str(item["loc"][-1]) for item in problems if item["type"] == "extra_forbidden")
    if unknown:
        known = ", ".join(sorted(kind.model_fields))
        return ApiError(400, f"unknown field {', '.join(unknown)}; known: {known}", unknown[0])
    lines = [f"{'.'.join(str(part) for part in item['loc'])}: {item['msg']}" for item in problems[:5]]
    return ApiError(400, "; ".join(lines), str(problems[0]["loc"][0]) if problems[0]["loc"] else None)


def _field_named(message: str, names: set[str]) -> str | None:
    return next((name for name in sorted(names, key=len, reverse=True) if message.startswith(name)), None)


def _token_keys(logit_bias: Mapping[str, float]) -> dict[int, float]:
    biases: dict[int, float] = {}
    for key, bias in logit_bias.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise ApiError(400, f"logit_bias key {key[:40]!r} is not a token id", "logit_bias")
        if int(key) in biases:
            raise ApiError(400, f"logit_bias names token {int(key)} twice", "logit_bias")
        biases[int(key)] = bias
    return biases


def split_prompts(prompt: Any) -> list[str | list[int]]:
    """The prompts of a completions body: a string, strings, ids, or lists of ids. Raises ApiError 400."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise ApiError(400, "prompt must be a string, a list of strings, token ids, or a list of token id lists; "
                            "an empty list holds nothing to complete", "prompt")  # fmt: skip
    if all(_is_integer(item) for item in prompt):
        return [prompt]
    if all(isinstance(item, str) for item in prompt):
        return list(prompt)
    for index, item in enumerate(prompt):
        if not isinstance(item, list) or not item or not all(_is_integer(token) for token in item):
            raise ApiError(400, f"prompt[{index}] must be a non-empty list of token ids, as all are, or all must be "
                                "strings", "prompt")  # fmt: skip
    return list(prompt)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def clean_messages(messages: Any) -> list[dict[str, Any]]:
    """Messages for the chat template: null fields dropped, text parts joined. Raises ApiError 400."""
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "messages must be a non-empty list", "messages")
    return [_clean_message(f"messages[{index}]", message) for index, message in enumerate(messages)]


def _clean_message(where: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise ApiError(400, f"{where} must be an object with role and content", "messages")
    message = {name: value for name, value in message.items() if value is not None}
    role = message.get("role")
    if role not in ROLES:
        raise ApiError(400, f"{where}.role must be one of {', '.join(ROLES)}, got {role!r}", "messages")
    unknown = sorted(set(message) - {"role", "content", "name", "tool_call_id"})
    if unknown:
        raise ApiError(400, f"{where}.{unknown[0]} is not supported", "messages")
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_part_text(f"{where}.content[{index}]", part) for index, part in enumerate(content))
    if not isinstance(content, str):
        raise ApiError(400, f"{where}.content is required: a string or a list of text parts", "messages")
    return {**message, "content": content}


def _part_text(where: str, part: Any) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise ApiError(400, f"{where} has type {kind!r}; only text parts are supported", "messages")
