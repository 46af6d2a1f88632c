"""Ids equal to Hugging Face's, chats with one BOS, templates that refuse (bug cases 133, 134, 136).

Three tokenizers: a folder whose post-processor and template both write BOS, the same read through a folder without
one, and SmolLM2's inside its GGUF, whose transformers reading is the reference.
"""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Tokenizer as TokenizersTokenizer
from tokenizers import decoders, models, normalizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from isobit.checkpoint import embedded_checkpoint
from isobit.gguf_file import read_gguf
from isobit.gguf_tokenizer import gguf_tokenizer
from isobit.model_config import load_model_config
from isobit.tokenizer import Tokenizer, load_tokenizer
from tests.tiny import make_tiny, tiny_checkpoint

TEXTS = [
    "the sum of parts", "  two  spaces, tabs\tand\n\n lines ", "12345 and 3.14", "it's WE'LL don't",
    "héllo 日本語 🎉 e\u0301",
    "<|im_start|>user\nhi<|im_end|>", "", " ", "\x00\x7f\u200b", "x" * 300,
]  # fmt: skip
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "the sum of 2 parts"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "héllo 🎉"}],
    [
        {"role": "user", "content": "  spaces \n"},
        {"role": "assistant", "content": "order"},
        {"role": "user", "content": "<|im_end|>again 123"},
    ],
]


@pytest.fixture(scope="module")
def tiny() -> Tokenizer:
    return load_tokenizer(tiny_checkpoint("llama"))


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return load_tokenizer("smollm2")


@pytest.fixture(scope="module")
def without_bos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny tokenizer with a post-processor that adds nothing and a template that writes no BOS."""
    folder = make_tiny("llama", tmp_path_factory.mktemp("bare"))
    backend = TokenizersTokenizer.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = None
    bare = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|eos|>")
    bare.chat_template = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + ' ' + m['content'] }}{% endfor %}"
    bare.save_pretrained(folder)
    return folder


def test_text_survives_encoding_and_decoding(tiny: Tokenizer, smollm2: Tokenizer) -> None:
    for tokenizer in (tiny, smollm2):
        for text in TEXTS:
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert tokenizer.decode(ids, skip_special_tokens=False) == text
            assert b"".join(tokenizer.token_bytes(token) for token in ids).decode() == text
        ids = tokenizer.encode("sum<|im_end|> of", add_special_tokens=False)
        assert tokenizer.decode(ids) == "sum of", "special tokens are left out by default"


def test_folder_ids_are_those_of_transformers(tiny: Tokenizer, without_bos: Path) -> None:
    for ours, folder in ((tiny, tiny_checkpoint("llama")), (load_tokenizer(without_bos), without_bos)):
        theirs = AutoTokenizer.from_pretrained(folder)
        for text in TEXTS:
            for special in (True, False):
                assert ours.encode(text, add_special_tokens=special) == theirs.encode(text, add_special_tokens=special)
        assert (ours.eos_token_id, ours.bos_token_id) == (theirs.eos_token_id, theirs.bos_token_id)
        assert ours.vocab_size == len(theirs)


def test_case_133_chat_ids_are_those_of_transformers_with_one_bos(tiny: Tokenizer, without_bos: Path) -> None:
    for ours, folder, bos_count in ((tiny, tiny_checkpoint("llama"), 1), (load_tokenizer(without_bos), without_bos, 0)):
        theirs = AutoTokenizer.from_pretrained(folder)
        for chat in CHATS:
            for prompt in (True, False):
                ids = ours.apply_chat_template(chat, add_generation_prompt=prompt)
                assert ids == theirs.apply_chat_template(
                    chat, add_generation_prompt=prompt, tokenize=True, return_dict=False
                )
                assert ids.count(0) == bos_count and ids[:bos_count] == [0] * bos_count
    rendered = tiny.render_chat(CHATS[0])
    assert tiny.encode(rendered)[:2] == [0, 0], "control: encoding a rendered chat as plain text doubles the BOS"
    assert tiny.encode("sum")[0] == 0 and tiny.encode("sum").count(0) == 1, "a plain completion gets one BOS"
    assert load_tokenizer(without_bos).encode("sum").count(0) == 0, "and none where the tokenizer adds none"


def test_case_133_smollm2_inside_its_gguf_equals_transformers(smollm2: Tokenizer) -> None:
    path = embedded_checkpoint()
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for text in TEXTS:
        assert smollm2.encode(text) == theirs.encode(text), text
    for chat in CHATS:
        expected = theirs.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
        assert smollm2.apply_chat_template(chat) == expected
    assert (smollm2.eos_token_id, smollm2.bos_token_id, smollm2.vocab_size) == (2, 1, 49152)
    assert smollm2.special_token_ids == frozenset(range(17)), "every control token of the file, not only bos and eos"
    assert smollm2.encode("<repo_name>") == [3]


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}], "Conversation roles must alternate"),
        ([{"role": "wizard", "content": "a"}], "Unknown role wizard"),
        ([{"role": "user"}], r"messages\[0\] \(user\) has no content"),
        ([{"role": "user", "content": None}], "has no content"),
        ([{"role": "user", "content": ["a"]}], "the chat template refused the messages: can only concatenate"),
        ([{"content": "a"}], r"messages\[0\] must be an object with a role"),
        (["hi"], r"messages\[0\] must be an object with a role"),
        ([], "at least one message"),
        ("hi", "must be a list"),
    ],
)
def test_case_134_refusals_carry_the_templates_message(tiny: Tokenizer, messages: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        tiny.apply_chat_template(messages)


def test_case_134_no_template_is_no_fallback(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "model")
    (folder / "chat_template.jinja").unlink()
    tokenizer = load_tokenizer(folder)
    assert not tokenizer.has_chat_template
    with pytest.raises(ValueError, match="no chat template; give one"):
        tokenizer.apply_chat_template(CHATS[0])


def test_chat_template_file_replaces_the_checkpoints(tiny: Tokenizer, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0]['content'] }}!{{ suffix }}{% if tools %}{{ tools[0]['name'] }}{% endif %}")
    tokenizer = load_tokenizer(tiny_checkpoint("llama"), chat_template=template)
    assert tokenizer.render_chat(CHATS[0], suffix="?") == "the sum of 2 parts!?"
    assert tokenizer.render_chat(CHATS[0], tools=[{"name": "f"}]) == "the sum of 2 parts!f"
    assert tiny.render_chat(CHATS[0]).startswith("<|bos|><|im_start|>user"), "control: the checkpoint's own is another"
    template.write_text("{% if %}")
    with pytest.raises(ValueError, match="the chat template refused the messages"):
        load_tokenizer(tiny_checkpoint("llama"), chat_template=template).apply_chat_template(CHATS[0])
    with pytest.raises(ValueError, match=r"absent\.jinja' is not readable"):
        load_tokenizer(tiny_checkpoint("llama"), chat_template=tmp_path / "absent.jinja")


@pytest.mark.parametrize("name", ["tokenize", "chat_template", "return_dict", "truncation", "tokenizer_kwargs"])
def test_template_variables_cannot_reach_the_library(tiny: Tokenizer, name: str) -> None:
    with pytest.raises(ValueError, match=f"variable '{name}' is reserved"):
        tiny.apply_chat_template(CHATS[0], **{name: "x"})


def test_case_136_the_turn_end_of_every_file_stops() -> None:
    folder = tiny_checkpoint("llama")
    config, tokenizer = load_model_config(folder), load_tokenizer(folder)
    assert tokenizer.eos_token_id == 1 and config.eos_token_ids == (1, 3)
    assert set(config.eos_token_ids) <= tokenizer.special_token_ids, "their text stays out of the output"


def test_ids_beyond_the_tokenizer_stand_for_nothing(tiny: Tokenizer) -> None:
    assert tiny.vocab_size < load_model_config(tiny_checkpoint("llama")).vocab_size, "control: the model has more ids"
    assert tiny.token_bytes(tiny.vocab_size) == b"" and tiny.token_bytes(-1) == b""
    assert tiny.decode([*tiny.encode("sum", add_special_tokens=False), tiny.vocab_size]) == "sum"
    assert tiny.token_text(3) == "<|im_end|>"


def test_threads_do_not_disturb_each_other(tiny: Tokenizer) -> None:
    texts = [f"row {index} of the batch " * (index % 7 + 1) for index in range(64)]
    alone = [tiny.encode(text) for text in texts]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(tiny.encode, texts)) == alone
        assert list(pool.map(tiny.decode, alone)) == texts


def test_sentencepiece_pieces_give_their_bytes() -> None:
    vocabulary = {"<unk>": 0, "▁sum": 1, "s": 2, "<0xE2>": 3, "<0x82>": 4, "<0xAC>": 5}
    backend = TokenizersTokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert (
        b"".join(map(tokenizer.token_bytes, [1, 2, 3, 4, 5])).decode() == " sums€" == tokenizer.decode([1, 2, 3, 4, 5])
    )
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match="decoder \\['WordPiece'\\] is not supported"):
        Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


def test_folders_without_a_tokenizer(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "model")
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="its tokenizer cannot be loaded"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"holds no tokenizer \(tokenizer.json"):
        load_tokenizer(folder)


def write_gguf_vocabulary(path: Path, pre: str, model: str = "gpt2", add_bos: bool | None = None) -> Path:
    """SmolLM2's first 6000 tokens as the vocabulary of another `pre`, in a file without tensors."""
    settings = read_gguf(embedded_checkpoint()).metadata
    tokens, known = settings["tokenizer.ggml.tokens"][:6000], set(settings["tokenizer.ggml.tokens"][:6000])
    merges = [
        m for m in settings["tokenizer.ggml.merges"] if m.replace(" ", "") in known and set(m.split(" ")) <= known
    ]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_merges(merges)
    writer.add_token_types(settings["tokenizer.ggml.token_type"][:6000])
    writer.add_bos_token_id(1)
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_each_pre_tokenizer_of_gguf_cuts_its_own_way(tmp_path: Path) -> None:
    cuts = {}
    for pre in ("gpt-2", "smollm", "llama-bpe", "qwen2"):
        splitter = gguf_tokenizer(write_gguf_vocabulary(tmp_path / f"{pre}.gguf", pre)).backend_tokenizer.pre_tokenizer
        cuts[pre] = [piece.replace("Ġ", " ") for piece, _ in splitter.pre_tokenize_str("Ab12345's WE'LL\n x")]
    assert cuts == {
        "gpt-2": ["Ab", "12345", "'s", " WE", "'", "LL", "Ċ", " x"],
        "smollm": ["Ab", "1", "2", "3", "4", "5", "'s", " WE", "'", "LL", "Ċ", " x"],
        "llama-bpe": ["Ab", "123", "45", "'s", " WE", "'LL", "Ċ", " x"],
        "qwen2": ["Ab", "1", "2", "3", "4", "5", "'s", " WE", "'LL", "Ċ", " x"],
    }


@pytest.mark.parametrize(
    ("pre", "add_bos", "expected"), [("smollm", None, 0), ("smollm", True, 1), ("llama-bpe", None, 1)]
)
def test_gguf_bos_is_added_as_the_file_says(tmp_path: Path, pre: str, add_bos: bool | None, expected: int) -> None:
    tokenizer = Tokenizer(gguf_tokenizer(write_gguf_vocabulary(tmp_path / "v.gguf", pre, add_bos=add_bos)))
    ids = tokenizer.encode("hello")
    assert ids.count(1) == expected and ids[expected:] == tokenizer.encode("hello", add_special_tokens=False)


def test_unknown_gguf_tokenizers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"pre='tekken' is not supported \(gpt-2, smollm, llama-bpe, qwen2 are\)"):
        gguf_tokenizer(write_gguf_vocabulary(tmp_path / "v.gguf", "tekken"))
    with pytest.raises(ValueError, match="model 'llama' is not supported"):
        gguf_tokenizer(write_gguf_vocabulary(tmp_path / "v.gguf", "smollm", model="llama"))
    shutil.copy(embedded_checkpoint(), tmp_path / "whole.gguf")
    assert load_tokenizer(tmp_path / "whole.gguf").vocab_size == 49152, "control: a supported one loads"
