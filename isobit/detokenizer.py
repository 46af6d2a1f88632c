"""From token ids to text, one token at a time: whole characters only, stop strings cut exactly.

A token stands for bytes, and text is the UTF-8 of all bytes in order: a token may end one character and begin the
next, so bytes are held back until a character is whole. Text that could still become a stop string is held back too,
and nothing more. Knows no engine and no server. Invariant: the pieces joined are the text of the whole, however the
tokens arrive; U+FFFD appears only where the whole text has it (an invalid byte, or an output cut inside a character).
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Protocol


class TokenBytes(Protocol):
    """The part of a tokenizer that text is made of."""

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids of control tokens such as end of text."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token, a leading space included; of a special token, its text."""
        ...


class IncrementalDetokenizer:
    """Feeds tokens to a UTF-8 decoder that keeps an unfinished character to itself.

    Invalid bytes become U+FFFD as the Unicode standard recommends (one for each maximal invalid part), which is also
    what the `tokenizers` library does for a whole byte-level text.
    """

    def __init__(self, tokenizer: TokenBytes, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Text that became certain with this token; often "" while a character is unfinished."""
        if token_id in self._skipped:
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        """What is left when no token follows: U+FFFD for an unfinished character, else ""."""
        return self._decoder.decode(b"", final=True)


def token_texts(tokenizer: TokenBytes, token_ids: Iterable[int], skip_special_tokens: bool) -> list[str]:
    """Text of each token in its place; joined they are the text of the whole (a held character counts for its last)."""
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens)
    texts = [detokenizer.push(token) for token in token_ids]
    if texts:
        texts[-1] += detokenizer.finish()
    return texts


def token_label(tokenizer: TokenBytes, token_id: int) -> str:
    """Name of a token on its own: its text, or `bytes:\\xf0\\x9f` where its bytes are no whole characters."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class StopStrings:
    """Finds the first stop string in text that arrives in pieces.

    Of several, the one that is complete first wins, and of those the longest; so the cut does not depend on how the
    text was cut into tokens. Only the longest tail that is a proper beginning of some stop string is held back.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """(text now certain to be output, the stop string found or None). After a find nothing more may be pushed."""
        if not self._stops or not text:
            return text, None
        buffer = self._held + text
        found = [(buffer.find(stop) + len(stop), -len(stop), stop) for stop in self._stops if stop in buffer]
        if found:
            end, negative_length, stop = min(found)
            self._held = ""
            return buffer[: end if self._include else end + negative_length], stop
        held = self._possible_start(buffer)
        self._held = buffer[len(buffer) - held :]
        return buffer[: len(buffer) - held], None

    def finish(self) -> str:
        """The text held back, when no more text can follow."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self, buffer: str) -> int:
        """Length of the longest tail of `buffer` that is a proper beginning of a stop string."""
        longest = min(len(buffer), max(len(stop) for stop in self._stops) - 1)
        for length in range(longest, 0, -1):
            tail = buffer[-length:]
            if any(len(stop) > length and stop.startswith(tail) for stop in self._stops):
                return length
        return 0
