"""The tokenizer inside a GGUF file, rebuilt with the `tokenizers` library.

Knows the byte-level BPE vocabularies GGUF stores (`tokenizer.ggml.model` gpt2) and which text splitting each name of
`tokenizer.ggml.pre` stands for. A name it does not know is refused: a near miss would give other token ids silently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from isobit.gguf_file import read_gguf

_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _split(digits: str) -> Any:
    split = pre_tokenizers.Split(Regex(_WORDS % digits), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _single_digits() -> Any:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])


# how text is cut before merging, by tokenizer.ggml.pre; what the original tokenizer.json files of these models say
_PRE_TOKENIZERS: Mapping[str, Callable[[], Any]] = {
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": _single_digits,
    "llama-bpe": lambda: _split(r"\p{N}{1,3}"),
    "qwen2": lambda: _split(r"\p{N}"),
}
_ADDS_BOS = {"llama-bpe"}  # where the file does not say


def gguf_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """Tokenizer, special tokens and chat template of the GGUF file `path`.

    Raises ValueError naming the kind of tokenizer when it is not supported or the file holds none.
    """
    metadata = read_gguf(path).metadata
    settings = {key[15:]: value for key, value in metadata.items() if key.startswith("tokenizer.ggml.")}
    kind, pre = settings.get("model"), settings.get("pre")
    if kind != "gpt2":
        raise ValueError(f"{path}: GGUF tokenizer model {kind!r} is not supported (gpt2 is); use the original folder")
    if not isinstance(pre, str) or pre not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise ValueError(f"{path}: GGUF tokenizer.ggml.pre={pre!r} is not supported ({known} are)")
    missing = [key for key in ("tokens", "merges", "token_type") if not isinstance(settings.get(key), list)]
    if missing:
        raise ValueError(f"{path} has no tokenizer.ggml.{missing[0]}")
    tokens: list[str] = settings["tokens"]
    backend = _bpe(tokens, settings["merges"], settings["token_type"], pre)
    special: dict[str, str] = {}
    for name, key in (("bos_token", "bos_token_id"), ("eos_token", "eos_token_id"), ("pad_token", "padding_token_id")):
        if settings.get(key) is not None and 0 <= settings[key] < len(tokens):
            special[name] = tokens[settings[key]]
    if settings.get("add_bos_token", pre in _ADDS_BOS) and "bos_token" in special:
        bos = special["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", "$B"], special_tokens=[(bos, settings["bos_token_id"])]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=metadata.get("tokenizer.chat_template"), **special
    )


def _bpe(tokens: list[str], merges: list[str], token_types: list[int], pre: str) -> Tokenizer:
    pairs = [(left, right) for left, right in (merge.split(" ", 1) for merge in merges)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    backend.decoder = decoders.ByteLevel()
    kept = (_CONTROL, _USER_DEFINED)
    kept_whole = [(token, kind) for token, kind in zip(tokens, token_types, strict=True) if kind in kept]
    backend.add_tokens([AddedToken(token, special=kind == _CONTROL, normalized=False) for token, kind in kept_whole])
    return backend
