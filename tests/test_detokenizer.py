"""Incremental text equals the whole text for both kinds of tokenizer, whatever the tokens; stop strings cut exactly."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from isobit.detokenizer import IncrementalDetokenizer, StopStrings, token_label, token_texts
from isobit.output import OutputProcessor
from isobit.request import RequestOutput, SamplingParams, TokenLogprob
from isobit.server.serving import Prompt, echo_texts
from isobit.tokenizer import Tokenizer
from tests.fake_engine import VOCAB, fake_tokenizer

TEXTS = ("plain words", "Příliš žluťoučký kůň", "日本語のテキスト。", "😀👩‍👩‍👧‍👦🏳️‍🌈", "a\n\tb  c", "ก็ดี", "e\u0301")


def sentencepiece_tokenizer() -> Tokenizer:
    """Pieces with the space mark and byte fallback, as Llama 2 and Mistral have them."""
    words = ["▁plain", "▁words", "▁", "a", "b", "c", "p", "l", "▁日", "本", "e"]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{byte:02X}>": 3 + byte for byte in range(256)}}
    vocab |= {word: len(vocab) + index for index, word in enumerate(words)}
    backend = Backend(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(text, special=True) for text in ("<unk>", "<s>", "</s>")])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>"))


BYTE_LEVEL = fake_tokenizer()
PIECES = sentencepiece_tokenizer()


def streamed(tokenizer: Tokenizer, ids: list[int], skip_special_tokens: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens)
    return [*(detokenizer.push(token) for token in ids), detokenizer.finish()]


@pytest.mark.parametrize("text", TEXTS)
def test_stream_is_whole_text(text: str) -> None:
    ids = BYTE_LEVEL.encode(text, add_special_tokens=False)
    pieces = streamed(BYTE_LEVEL, ids)
    assert "".join(pieces) == BYTE_LEVEL.decode(ids) == text
    assert "\ufffd" not in "".join(pieces)
    ids = PIECES.encode(text, add_special_tokens=False)
    assert "".join(streamed(PIECES, ids)) == " " + PIECES.decode(ids) == " " + text


def test_characters_were_split_over_tokens() -> None:
    ids = BYTE_LEVEL.encode("😀", add_special_tokens=False)
    assert len(ids) == 4
    assert streamed(BYTE_LEVEL, ids) == ["", "", "", "😀", ""]
    naive = "".join(BYTE_LEVEL.decode([token]) for token in ids)
    assert "\ufffd" in naive  # the control: decoding each token alone


def test_a_token_may_end_one_character_and_begin_the_next() -> None:
    class Halves:
        special_token_ids = frozenset[int]()

        def token_bytes(self, token_id: int) -> bytes:
            return [b"\xe6", b"\x97\xa5\xe6", b"\x9c", b"\xac!"][token_id]

    detokenizer = IncrementalDetokenizer(Halves())
    assert [detokenizer.push(token) for token in range(4)] == ["", "日", "", "本!"]


@given(st.lists(st.integers(0, VOCAB - 1), max_size=60), st.booleans())
def test_any_tokens_stream_as_the_library_decodes_them(ids: list[int], skip: bool) -> None:
    whole = BYTE_LEVEL.decode(ids, skip_special_tokens=skip)
    if skip or not BYTE_LEVEL.special_token_ids.intersection(ids):
        assert "".join(streamed(BYTE_LEVEL, ids, skip)) == whole
    assert "".join(token_texts(BYTE_LEVEL, ids, skip)) == "".join(streamed(BYTE_LEVEL, ids, skip))


@pytest.mark.parametrize("text", [*TEXTS, " led by a space"])
def test_echoed_tokens_join_to_the_prompt(text: str) -> None:  # case 97
    for tokenizer, bos in ((BYTE_LEVEL, 0), (PIECES, 1)):
        ids = tokenizer.encode(text, add_special_tokens=False)
        for prompt in (Prompt(ids, text), Prompt([bos, *ids], text)):
            texts = echo_texts(tokenizer, prompt, skip_special_tokens=True)
            assert "".join(texts) == text and len(texts) == len(prompt.token_ids)


def test_output_cut_inside_a_character_ends_in_one_replacement() -> None:
    ids = BYTE_LEVEL.encode("ab😀", add_special_tokens=False)[:-1]
    assert "".join(streamed(BYTE_LEVEL, ids)) == BYTE_LEVEL.decode(ids) == "ab\ufffd"


def test_special_tokens_are_left_out_or_shown() -> None:
    ids = [0, *BYTE_LEVEL.encode("sum", add_special_tokens=False), 3]
    assert "".join(streamed(BYTE_LEVEL, ids)) == "sum"
    assert "".join(streamed(BYTE_LEVEL, ids, skip_special_tokens=False)) == "<|bos|>sum<|im_end|>"


def test_labels_are_distinct_and_never_markers() -> None:
    labels = [token_label(BYTE_LEVEL, token) for token in range(VOCAB)]
    assert len(set(labels)) == VOCAB
    assert not any("Ġ" in label or "\ufffd" in label for label in labels)
    assert token_label(PIECES, 259) == " plain"
    assert token_label(PIECES, 3 + 0xF0) == "bytes:\\xf0"


def cut(stops: list[str], pieces: list[str], include: bool = False) -> tuple[list[str], str | None]:
    matcher = StopStrings(stops, include)
    shown = []
    for piece in pieces:
        text, found = matcher.push(piece)
        shown.append(text)
        if found is not None:
            return shown, found
    return [*shown, matcher.finish()], None


@pytest.mark.parametrize(
    ("stops", "pieces", "shown", "found"),
    [
        (["DEFGHIJ"], ["ABC", "DEF", "GHI", "JKL"], "ABC", "DEFGHIJ"),
        (["beta gamma"], ["alpha", " beta", " gamma", " delta"], "alpha ", "beta gamma"),
        (["mm"], ["ga", "mma"], "ga", "mm"),
        (["aab"], ["a", "a", "a", "b"], "a", "aab"),
        (["abcd", "c"], ["ab", "cd"], "ab", "c"),
        (["cd", "bcd"], ["ab", "cd"], "a", "bcd"),
        (["zz"], ["a", "z", "b"], "azb", None),
        (["xyz"], ["ab", "xy"], "abxy", None),
    ],
)
def test_stop_strings(stops: list[str], pieces: list[str], shown: str, found: str | None) -> None:
    texts, stop = cut(stops, pieces)
    assert ("".join(texts), stop) == (shown, found)


def test_the_stop_string_itself_can_be_kept() -> None:
    assert cut(["bc"], ["ab", "cd"], include=True) == (["a", "bc"], "bc")


def test_only_what_could_become_a_stop_is_held_back() -> None:
    texts, _ = cut(["<" + "x" * 19], ["one", " two", " <xx", "y", " three"])
    assert texts == ["one", " two", " ", "<xxy", " three", ""]


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3), st.data())
def test_the_cut_does_not_depend_on_the_pieces(text: str, stops: list[str], data: st.DataObject) -> None:
    pieces, at = [], 0
    while at < len(text):
        size = data.draw(st.integers(1, 4))
        pieces.append(text[at : at + size])
        at += size
    by_piece, by_character = cut(stops, pieces), cut(stops, list(text))
    assert ("".join(by_piece[0]), by_piece[1]) == ("".join(by_character[0]), by_character[1])
    if by_piece[1] is None:
        assert "".join(by_piece[0]) == text and not any(stop in text for stop in stops)


def step(token: int, finish: str | None = None, stop: int | None = None) -> RequestOutput:
    return RequestOutput("r", (token,), (TokenLogprob(token, -1.0),), finish, stop, None, 0, None)


def test_pieces_of_a_sample_join_to_its_result() -> None:
    rng = random.Random(0)
    for _ in range(50):
        ids = [rng.randrange(4, VOCAB) for _ in range(20)]
        params = SamplingParams(stop=(chr(rng.randrange(97, 123)), "the"), logprobs=0)
        processor = OutputProcessor(BYTE_LEVEL, params)
        deltas = []
        for position, token in enumerate(ids):
            deltas.append(processor.process(step(token, "length" if position == 19 else None)))
            if processor.finished:
                break
        result = processor.result(seed=1)
        assert "".join(delta.text for delta in deltas) == result.text
        assert tuple(token for delta in deltas for token in delta.token_ids) == result.token_ids
        assert result.logprobs is not None and len(result.logprobs) == len(result.token_ids)
        assert not any(stop in result.text for stop in params.stop)
        if result.finish_reason == "length":
            assert result.text == BYTE_LEVEL.decode(ids) == "".join(result.token_texts)


def test_the_token_that_ends_the_output_has_no_text() -> None:
    token = BYTE_LEVEL.encode("sum", add_special_tokens=False)[0]
    for include, text in ((False, "sum"), (True, "sumsum")):
        params = SamplingParams(stop_token_ids=(token,), include_stop_str_in_output=include, min_tokens=2)
        processor = OutputProcessor(BYTE_LEVEL, params)
        processor.process(step(token))
        processor.process(step(token, "stop", token))
        assert (processor.result(1).text, processor.result(1).stop_reason) == (text, token)
    processor = OutputProcessor(BYTE_LEVEL, SamplingParams())
    processor.process(step(token))
    processor.process(step(1, "stop", 1))
    assert (processor.result(1).text, processor.result(1).stop_reason) == ("sum", None)


def test_min_tokens_holds_stop_strings_off() -> None:
    token = BYTE_LEVEL.encode("sum", add_special_tokens=False)[0]
    processor = OutputProcessor(BYTE_LEVEL, SamplingParams(stop=("sum",), min_tokens=2))
    for _ in range(3):
        processor.process(step(token))
    assert processor.finished and processor.result(1).text == "sumsum"
