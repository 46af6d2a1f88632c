"""Log-probs in the three shapes of the API: completions, chat, and prompt_logprobs.

Knows tokens and JSON shapes. Invariant: every number is a finite float32 value written so that it reads back to the
same bits; minus infinity, which JSON cannot carry, is written as -9999.0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from isobit.detokenizer import TokenBytes, token_label
from isobit.request import TokenLogprob

MINUS_INFINITY = -9999.0


def json_number(logprob: float) -> float:
    """The log-prob, with minus infinity as -9999.0."""
    return MINUS_INFINITY if logprob == -math.inf else logprob


def completion_logprobs(
    tokenizer: TokenBytes,
    texts: Sequence[str],
    entries: Sequence[TokenLogprob | None],
    num_top: int,
    text_offset: int,
) -> dict[str, Any]:
    """`logprobs` of a completions choice. `top_logprobs` is null when num_top is 0, else a dict for each token with
    the best `num_top` tokens and the chosen one; null for a first prompt token, which has no prefix."""
    offsets: list[int] = []
    for text in texts:
        offsets.append(text_offset)
        text_offset += len(text)
    top: list[dict[str, float] | None] | None = None
    if num_top > 0:
        top = [
            None if entry is None else _top_dict(tokenizer, text, entry, num_top)
            for text, entry in _zip(texts, entries)
        ]
    return {
        "tokens": list(texts),
        "token_logprobs": [None if entry is None else json_number(entry.logprob) for entry in entries],
        "top_logprobs": top,
        "text_offset": offsets,
    }


def _zip(texts: Sequence[str], entries: Sequence[TokenLogprob | None]) -> zip[tuple[str, TokenLogprob | None]]:
    return zip(texts, entries, strict=True)


def _top_dict(tokenizer: TokenBytes, text: str, entry: TokenLogprob, num_top: int) -> dict[str, float]:
    """Best first; the chosen token under the text it has in its place. Of two tokens with one name the better stays."""
    named: dict[str, float] = {}
    top = entry.top[:num_top]  # more were computed where prompt_logprobs asks for more
    for token, logprob in top:
        label = text if token == entry.token_id and text else token_label(tokenizer, token)
        named.setdefault(label, json_number(logprob))
    if all(token != entry.token_id for token, _ in top):
        named.setdefault(text or token_label(tokenizer, entry.token_id), json_number(entry.logprob))
    return named


def chat_logprobs(
    tokenizer: TokenBytes, texts: Sequence[str], entries: Sequence[TokenLogprob], num_top: int
) -> dict[str, Any]:
    """`logprobs` of a chat choice. `bytes` are the token's own bytes, also where it holds a part of a character."""
    content = []
    for text, entry in zip(texts, entries, strict=True):
        top = [_chat_token(tokenizer, token_label(tokenizer, token), token, value) for token, value in entry.top]
        content.append(_chat_token(tokenizer, text, entry.token_id, entry.logprob) | {"top_logprobs": top[:num_top]})
    return {"content": content, "refusal": None}


def _chat_token(tokenizer: TokenBytes, text: str, token_id: int, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": json_number(logprob), "bytes": list(tokenizer.token_bytes(token_id))}


def prompt_logprobs_json(
    tokenizer: TokenBytes, entries: Sequence[TokenLogprob | None], num_top: int
) -> list[dict[str, dict[str, Any]] | None]:
    """`prompt_logprobs` as vLLM shapes it: for each prompt token null or {token id: {logprob, decoded_token}}."""
    shaped: list[dict[str, dict[str, Any]] | None] = []
    for entry in entries:
        if entry is None:
            shaped.append(None)
            continue
        pairs = dict([(entry.token_id, entry.logprob), *entry.top[:num_top]])
        shaped.append(
            {
                str(token): {"logprob": json_number(logprob), "decoded_token": token_label(tokenizer, token)}
                for token, logprob in pairs.items()
            }
        )
    return shaped
