"""Chat ids for three kinds of tokenizer through the server, and every end of turn of every file (cases 133 and 136).

The tokenizers: byte-level BPE whose template and post-processor both write BOS, byte-level BPE without BOS, and a
SentencePiece-like one with space marks and byte fallback, as Llama 2's. transformers is the reference for each.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, processors
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from isobit import LLM, SamplingParams
from isobit.model_config import load_model_config
from isobit.tokenizer import Tokenizer, load_tokenizer
from tests.fake_engine import VOCAB, FakeEngine
from tests.server_harness import Server, running_server
from tests.tiny import make_tiny, tiny_tokenizer

CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "the sum of parts"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "  two  spaces, žluťoučký 😀\n"}],
    [
        {"role": "user", "content": "order"}, {"role": "assistant", "content": " of addition"},
        {"role": "user", "content": "again"},
    ],
]  # fmt: skip
LLAMA_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'assistant' %}{{ m['content'] + eos_token }}"
    "{% else %}{{ '[INST] ' + m['content'] + ' [/INST]' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ ' ' }}{% endif %}"
)


def byte_level_without_bos() -> PreTrainedTokenizerFast:
    backend = Backend.from_str(tiny_tokenizer().backend_tokenizer.to_str())
    backend.post_processor = None
    bare = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|eos|>")
    bare.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    return bare


def sentencepiece() -> PreTrainedTokenizerFast:
    """Llama 2's pipeline: a space mark in front, spaces to marks, BPE with byte fallback, BOS by post-processor."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{byte:02X}>": 3 + byte for byte in range(256)}}
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("o", "r"), ("d", "e"), ("de", "r"), ("▁", "or"), ("▁or", "der")]
    pieces = [*"▁abcdefghijklmnoprstuvwxyzBINST[]/,.", *(left + right for left, right in merges)]
    vocabulary |= {piece: 259 + index for index, piece in enumerate(dict.fromkeys(pieces))}
    backend = Backend(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<unk>", "<s>", "</s>")])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=LLAMA_TEMPLATE
    )


TOKENIZERS = {
    "byte-level with BOS": (tiny_tokenizer, 0), "byte-level without BOS": (byte_level_without_bos, None),
    "sentencepiece": (sentencepiece, 1),
}  # fmt: skip


def chat_ids(server: Server, chat: list[dict[str, Any]]) -> list[int]:
    answer = server.post("/v1/chat/completions", messages=chat, max_tokens=1, seed=1, return_token_ids=True)
    assert server.post("/tokenize", messages=chat)["tokens"] == answer["prompt_token_ids"]
    ids: list[int] = answer["prompt_token_ids"]
    return ids


@pytest.mark.parametrize("name", TOKENIZERS)
def test_case_133_prompt_ids_of_both_routes(name: str, tmp_path: Path) -> None:
    """Chat: transformers' apply_chat_template. Plain: one BOS exactly where the tokenizer adds one."""
    make, bos = TOKENIZERS[name]
    make().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path)
    assert ours.vocab_size <= VOCAB
    with running_server(FakeEngine(), ours) as server:
        for chat in CHATS:
            expected = theirs.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
            assert chat_ids(server, chat) == expected
            assert bos is None or (expected[0] == bos and expected.count(bos) == 1)
        for text in ("the sum", " two  spaces", "žluťoučký 😀", "order\n"):
            plain = server.complete(prompt=text, max_tokens=1, seed=1, return_token_ids=True, echo=True, logprobs=0)
            [choice] = plain["choices"]
            assert choice["prompt_token_ids"] == theirs(text)["input_ids"]
            assert bos is None or (choice["prompt_token_ids"][0] == bos and choice["prompt_token_ids"].count(bos) == 1)
            assert "▁" not in "".join(choice["logprobs"]["tokens"])
    if bos is not None:
        rendered = ours.render_chat(CHATS[0])
        assert ours.encode(rendered).count(bos) == 2, "control: a rendered chat encoded as plain text has two"


def test_case_133_the_sentencepiece_tokenizer_is_one() -> None:
    """The condition: space marks, merges, and bytes where a character has no piece."""
    tokenizer = Tokenizer(sentencepiece())
    pieces = [tokenizer._backend.id_to_token(token) for token in tokenizer.encode("the order ž")]
    assert pieces == ["<s>", "▁the", "▁order", "▁", "<0xC5>", "<0xBE>"]
    assert tokenizer.decode(tokenizer.encode("the order ž")) == "the order ž"


def test_case_136_each_files_end_of_turn_stops(tmp_path: Path) -> None:
    """generation_config has a list, config another, the tokenizer a fourth; each is forced and ends the answer."""
    folder = make_tiny("llama", tmp_path / "model")
    ends = {"generation, first": 310, "generation, second": 311, "config": 312, "tokenizer": 1}
    for file, value in (("generation_config.json", [310, 311]), ("config.json", 312)):
        raw = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps({**raw, "eos_token_id": value}))
    assert load_model_config(folder).eos_token_ids == (310, 311, 312, 1)
    llm = LLM(model=str(folder), context_length=256)
    free = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    [plain] = llm.generate("the sum of", free, use_tqdm=False)
    for end in ends.values():
        params = SamplingParams(max_tokens=12, temperature=0.0, logit_bias={end: 100.0}, min_tokens=5)
        [output] = llm.generate("the sum of", params, use_tqdm=False)[0].outputs
        assert output.finish_reason == "stop" and output.token_ids[-1] == end and len(output.token_ids) == 6
        assert output.token_ids[:5] == plain.outputs[0].token_ids[:5], "before min_tokens the ends are banned"
        assert output.text == llm.tokenizer.decode(output.token_ids[:5]), "its text is not in the answer"
    other = SamplingParams(max_tokens=12, temperature=0.0, logit_bias={313: 100.0})
    [output] = llm.generate("the sum of", other, use_tqdm=False)[0].outputs
    assert output.finish_reason == "length", "control: another token ends nothing"
