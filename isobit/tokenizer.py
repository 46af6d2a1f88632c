"""Text to token ids and back, and the chat template: transformers' tokenizer behind a small face.

Knows where a checkpoint keeps its tokenizer (a folder's files, or inside a .gguf) and nothing of models or requests.
Keeps three invariants: ids equal those of Hugging Face; the ids of a chat are the template's text encoded without
adding special tokens (the template writes its own BOS); what a template refuses is a ValueError with its message, and
a model without a template never gets a substitute. Safe to call from several threads.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from isobit.checkpoint import resolve_checkpoint
from isobit.gguf_tokenizer import gguf_tokenizer

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
_SPACE = "▁"  # SentencePiece's mark for a space
_TEMPLATE_ARGUMENTS = {"tools", "documents", "continue_final_message"}  # of apply_chat_template, free for callers
_RESERVED_ARGUMENTS = (
    set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - _TEMPLATE_ARGUMENTS
)


def load_tokenizer(model: str | Path, chat_template: str | Path | None = None) -> Tokenizer:
    """Tokenizer of a checkpoint folder, a .gguf file or "smollm2"; `chat_template` is a file replacing its template.

    Raises ValueError naming the file that is missing, unreadable or not supported.
    """
    path = resolve_checkpoint(model)
    backend = _folder_tokenizer(path) if path.is_dir() else gguf_tokenizer(path)
    if chat_template is not None:
        try:
            backend.chat_template = Path(chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"chat_template file {str(chat_template)!r} is not readable: {error}") from error
    return Tokenizer(backend)


def _folder_tokenizer(folder: Path) -> Any:
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise ValueError(f"{folder} holds no tokenizer ({', '.join(_TOKENIZER_FILES)})")
    try:
        backend = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the library raises many types for a damaged or unknown tokenizer
        raise ValueError(f"{folder}: its tokenizer cannot be loaded (config.json is read with it): {error}") from error
    if not getattr(backend, "is_fast", False):
        raise ValueError(f"{folder}: {type(backend).__name__} has no tokenizers backend; a tokenizer.json is needed")
    return backend


class Tokenizer:
    """Encoding, decoding and chat of one checkpoint.

    `vocab_size`: number of ids it can decode, added tokens included; a model's vocabulary is often padded beyond it.
    `special_token_ids`: control tokens, left out of text by `skip_special_tokens`.
    """

    def __init__(self, backend: Any) -> None:
        self._transformers = backend
        self._backend = backend.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        added = self._backend.get_added_tokens_decoder()
        self.vocab_size: int = self._backend.get_vocab_size(with_added_tokens=True)
        self.special_token_ids = frozenset(index for index, token in added.items() if token.special)
        self.bos_token_id: int | None = backend.bos_token_id
        self.eos_token_id: int | None = backend.eos_token_id
        self._added: dict[int, str] = {index: token.content for index, token in added.items()}
        self._byte_of_character = _byte_level_alphabet() if self._is_byte_level() else None

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` can work at all."""
        return bool(self._transformers.chat_template)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; `add_special_tokens` puts a BOS (or what else) there as the tokenizer says, once.

        Raises ValueError for a lone surrogate: half a character, or a byte of a command line that is no UTF-8.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the text holds a lone surrogate, {text[error.start]!r} at {error.start}, which is no character; "
                "give valid Unicode text"
            ) from error
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`, spaces as they are; bytes that are no character become U+FFFD, unknown ids nothing."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_variables: Any,
    ) -> list[int]:
        """Token ids of a conversation, equal to Hugging Face's `apply_chat_template(tokenize=True)`.

        Raises ValueError without a template, for a malformed message, and with the template's words when it refuses.
        """
        return self.encode(
            self.render_chat(messages, add_generation_prompt, tools, **template_variables), add_special_tokens=False
        )

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_variables: Any,
    ) -> str:
        """The text `apply_chat_template` encodes. Raises as it does."""
        if not self.has_chat_template:
            raise ValueError(
                "the model has no chat template; give one with chat_template=FILE, or send a plain completion"
            )
        reserved = sorted(_RESERVED_ARGUMENTS & set(template_variables))
        if reserved:
            raise ValueError(f"chat template variable {reserved[0]!r} is reserved")
        _check_messages(messages)
        try:
            text: str = self._transformers.apply_chat_template(
                [dict(message) for message in messages],
                tools=None if tools is None else [dict(tool) for tool in tools],
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **template_variables,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError,
                RecursionError) as error:  # fmt: skip
            raise ValueError(f"the chat template refused the messages: {error}") from error
        return text

    def token_text(self, token_id: int) -> str:
        """Name of one token: its text, U+FFFD where its bytes are no whole characters."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes one token stands for: a leading space included, a special token's text, b"" for an unknown id."""
        if token_id in self._added:
            return self._added[token_id].encode()
        piece: Any = self._backend.id_to_token(token_id) if token_id >= 0 else None
        if piece is None:
            return b""
        if self._byte_of_character is not None:
            return bytes(self._byte_of_character[character] for character in piece)
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return str(piece).replace(_SPACE, " ").encode()

    def _is_byte_level(self) -> bool:
        """True for byte-level BPE, False for SentencePiece pieces; other decoders are a ValueError."""
        state = json.loads(self._backend.decoder.__getstate__()) if self._backend.decoder is not None else {}
        kinds = {part.get("type") for part in state.get("decoders", [state])}
        if "ByteLevel" in kinds:
            return True
        if kinds & {"ByteFallback", "Metaspace"}:
            return False
        raise ValueError(
            f"tokenizer decoder {sorted(map(str, kinds))} is not supported; byte-level and SentencePiece are"
        )


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    if not isinstance(messages, (list, tuple)) or not messages:
        raise ValueError("messages must be a list of at least one message")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"messages[{index}] must be an object with a role, got {message!r}")
        if message.get("content") is None and not message.get("tool_calls"):
            raise ValueError(f"messages[{index}] ({message['role']}) has no content")


def _byte_level_alphabet() -> dict[str, int]:
    """Byte each character of a byte-level piece stands for (Radford et al. 2019): printable Latin-1 is itself, the
    other bytes in order are U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}
