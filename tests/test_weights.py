"""Checkpoints whole or refused: shards, ties, names, shapes, digests, GGUF (bug cases 139, 140, 142).

Tensors are compared by bytes with what transformers wrote, or with what transformers reads from the same GGUF.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from isobit.kernels.device_bits import hash_words, shift_right
from isobit.kernels.probe_data import bits
from isobit.model_config import ModelConfig, load_model_config
from isobit.models.llama import LlamaForCausalLM
from isobit.weights import WeightSource, open_weights
from isobit.weights import gguf as gguf_weights
from tests.tiny import KINDS, make_tiny, tiny_checkpoint


def open_checkpoint(model: Path | str) -> tuple[ModelConfig, WeightSource]:
    config = load_model_config(model)
    return config, open_weights(model, config)


def check(model: Path | str) -> WeightSource:
    config, weights = open_checkpoint(model)
    weights.check_complete(LlamaForCausalLM.expected_weights(config))
    return weights


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def edit(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace, add or (None) remove tensors of a one-file checkpoint; "__" in a name stands for "."."""
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    for name, tensor in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if tensor is not None:
            tensors[name.replace("__", ".")] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("kind", KINDS)
def test_every_family_is_complete_and_read_by_bytes(kind: str) -> None:
    folder = tiny_checkpoint(kind)
    weights, written = check(folder), load_file(folder / "model.safetensors")
    assert weights.names() == tuple(sorted(written))
    for name, tensor in written.items():
        assert weights.shape(name) == tuple(tensor.shape) and same_bytes(weights.get(name), tensor)
    with pytest.raises(ValueError, match="no tensor model\\.nothing"):
        weights.get("model.nothing")


def test_bfloat16_stays_bfloat16() -> None:
    folder = tiny_checkpoint("qwen2", dtype="bfloat16")
    config, weights = open_checkpoint(folder)
    assert config.dtype == "bfloat16"
    assert all(weights.get(name).dtype == torch.bfloat16 for name in weights.names())


def test_digest_is_of_the_tensors_not_of_the_files(tmp_path: Path) -> None:
    whole, sharded = tiny_checkpoint("qwen3"), tiny_checkpoint("qwen3", sharded=True)
    assert len(list(sharded.glob("*.safetensors"))) > 2, "the checkpoint was really cut"
    digest = check(whole).digest()
    assert digest == check(sharded).digest() == check(whole).digest()
    assert digest != check(tiny_checkpoint("qwen3", seed=1)).digest()
    assert digest != check(tiny_checkpoint("qwen3", dtype="bfloat16")).digest()
    folder = make_tiny("qwen3", tmp_path / "changed")
    norm = load_file(folder / "model.safetensors")["model.norm.weight"]
    norm[3] = torch.nextafter(norm[3], torch.tensor(2.0))  # one unit in the last place of one value
    edit(folder, model__norm__weight=norm)
    assert digest != check(folder).digest()


def test_missing_unexpected_and_misshapen_tensors_are_listed_together(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "model")
    check(folder)
    edit(
        folder,
        model__layers__1__mlp__up_proj__weight=None,
        model__layers__1__self_attn__q_norm__weight=torch.ones(16),
        model__norm__weight=torch.ones(65),
        model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8),  # harmless: old checkpoints carry it
    )
    with pytest.raises(ValueError) as caught:
        check(folder)
    message = str(caught.value)
    assert "missing model.layers.1.mlp.up_proj.weight [172, 64]" in message
    assert "unexpected model.layers.1.self_attn.q_norm.weight [16]" in message
    assert "model.norm.weight has shape [65], expected [64]" in message
    assert "inv_freq" not in message and len(message.splitlines()) == 4


def test_long_lists_are_cut_at_ten(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "model")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "num_hidden_layers": 4}))
    with pytest.raises(ValueError, match="and 8 more") as caught:
        check(folder)
    assert str(caught.value).count("missing") == 10


def test_case_139_tied_model_with_a_head_in_the_file(tmp_path: Path) -> None:
    folder = make_tiny("llama3", tmp_path / "model")
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    edit(folder, lm_head__weight=embedding.clone())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(folder)  # an equal head is no cause for a warning
    edit(folder, lm_head__weight=embedding + 1)
    with pytest.warns(UserWarning, match=r"lm_head\.weight differs.*the embedding is used"):
        check(folder)


def test_case_140_tied_and_untied_models_without_a_head(tmp_path: Path) -> None:
    tied = tiny_checkpoint("llama3")
    assert "lm_head.weight" not in check(tied).names()
    untied = make_tiny("llama", tmp_path / "model")
    edit(untied, lm_head__weight=None)
    with pytest.raises(ValueError, match=r"missing lm_head\.weight \[503, 64\]"):
        check(untied)


def test_case_142_damaged_shards(tmp_path: Path) -> None:
    folder = make_tiny("mistral", tmp_path / "model", sharded=True)
    check(folder)
    shard, index = sorted(folder.glob("*.safetensors"))[1], folder / "model.safetensors.index.json"
    content, table = shard.read_bytes(), json.loads(index.read_text())
    for length in (len(content) - 1, len(content) // 2, 5, 0):
        shard.write_bytes(content[:length])
        with pytest.raises(ValueError, match=rf"{shard.name} is not a readable safetensors file"):
            open_checkpoint(folder)
    shard.unlink()
    with pytest.raises(ValueError, match=rf"lacks 1 of the files its index names: {shard.name}"):
        open_checkpoint(folder)
    shard.write_bytes(content)

    def rewrite(weight_map: object) -> None:
        index.write_text(json.dumps({**table, "weight_map": weight_map}))

    rewrite({**table["weight_map"], "model.ghost.weight": shard.name})
    with pytest.raises(ValueError, match=r"lacks 1 of the tensors the index places there: model\.ghost\.weight"):
        open_checkpoint(folder)
    name = next(name for name, file in table["weight_map"].items() if file == shard.name)
    rewrite({key: file for key, file in table["weight_map"].items() if key != name})
    with pytest.raises(ValueError, match=rf"holds 1 tensors the index does not place there: {name}"):
        open_checkpoint(folder)
    rewrite({**table["weight_map"], name: "../elsewhere.safetensors"})
    with pytest.raises(ValueError, match="must be a file name in the folder"):
        open_checkpoint(folder)
    index.unlink()
    with pytest.raises(ValueError, match=r"no model\.safetensors\.index\.json"):
        open_checkpoint(folder)
    rewrite(table["weight_map"])
    check(folder)  # control: restored, it loads again


def test_folders_without_readable_weights(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "model")
    edit(folder, model__norm__weight=torch.ones(64, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"model\.norm\.weight is F64; supported: F32, BF16, F16"):
        open_checkpoint(folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"no \.safetensors file; convert"):
        open_checkpoint(folder)


# GGUF ---------------------------------------------------------------------------------------------------------------

_GGUF_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def interleave(tensor: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's order of q and k rows: feature i of a head's first half next to feature i of its second half."""
    rows = tensor.shape[0] // num_heads
    order = [
        head * rows + half * (rows // 2) + i for head in range(num_heads) for i in range(rows // 2) for half in (0, 1)
    ]
    return np.ascontiguousarray(tensor[order])


def write_gguf(
    folder: Path, path: Path, kind: gguf.GGMLQuantizationType, rope_factors: np.ndarray | None = None, **extra: int
) -> Path:
    """The tiny checkpoint in `folder` as a GGUF; matrices as `kind`, where its blocks fit, everything else float32."""
    config = load_model_config(folder)
    architecture = {"Llama": "llama", "Qwen2": "qwen2", "Qwen3": "qwen3"}[
        config.architecture.removesuffix("ForCausalLM")
    ]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_vocab_size(config.vocab_size)
    for key, value in extra.items():
        writer.add_uint32(key.replace("__", "."), value)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors)
    for name, tensor in load_file(folder / "model.safetensors").items():
        stem, suffix = name.rsplit(".", 1)
        parts = stem.split(".", 3)
        layered = stem.startswith("model.layers.")
        own = f"blk.{parts[2]}.{_GGUF_NAMES[parts[3]]}" if layered else _GGUF_NAMES[stem]
        data = tensor.float().numpy()
        if architecture == "llama" and stem.endswith(("q_proj", "k_proj")):
            data = interleave(data, config.num_heads if stem.endswith("q_proj") else config.num_kv_heads)
        fits = data.ndim == 2 and data.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0
        stored = kind if fits else gguf.GGMLQuantizationType.F32
        writer.add_tensor(f"{own}.{suffix}", gguf.quants.quantize(data, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_library_that_dequantises_otherwise_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tiny_checkpoint("llama"), tmp_path / "model.gguf", gguf.GGMLQuantizationType.Q8_0)
    open_checkpoint(path)  # the installed one is fine
    real = gguf_weights.dequantize
    monkeypatch.setattr(
        gguf_weights, "dequantize", lambda blocks, kind: np.nextafter(real(blocks, kind), np.float32(9))
    )
    with pytest.raises(ValueError, match=r"gguf .* dequantises Q8_0 to other bits .* constraints\.txt"):
        open_checkpoint(path)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_float_gguf_gives_back_the_tensors_it_was_made_from(kind: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(kind)
    path = write_gguf(folder, tmp_path / "model.gguf", gguf.GGMLQuantizationType.F32)
    weights, original = check(path), load_file(folder / "model.safetensors")
    assert weights.names() == tuple(sorted(original))
    assert all(same_bytes(weights.get(name), tensor) for name, tensor in original.items())
    ours, theirs = load_model_config(path), load_model_config(folder)
    for field in ("architecture", "head_dim", "num_kv_heads", "rope", "qkv_bias", "qk_norm", "tie_word_embeddings"):
        assert getattr(ours, field) == getattr(theirs, field)
    assert ours.dtype == "float32"


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("F16", torch.float16), ("BF16", torch.bfloat16), ("Q8_0", torch.float32), ("Q4_1", torch.float32)],
)
def test_gguf_tensors_are_those_transformers_reads(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama")
    path = write_gguf(folder, tmp_path / "model.gguf", getattr(gguf.GGMLQuantizationType, kind))
    config, weights = open_checkpoint(path)
    assert config.dtype == {"F16": "float16", "BF16": "bfloat16"}.get(kind, "quantized")
    empty = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    theirs = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=empty)["tensors"]
    assert set(weights.names()) == set(theirs)
    for name in weights.names():
        assert torch.equal(weights.get(name).float(), theirs[name]), name
    assert weights.get("model.layers.0.self_attn.q_proj.weight").dtype == dtype


def test_llama3_factors_inside_a_gguf_give_the_tables_of_the_scaling(tmp_path: Path) -> None:
    from isobit.rope import inverse_frequencies

    folder = tiny_checkpoint("llama3")
    scaled = inverse_frequencies(load_model_config(folder).rope)
    plain = inverse_frequencies(load_model_config(folder, {"rope_scaling": None}).rope)
    path = write_gguf(folder, tmp_path / "model.gguf", gguf.GGMLQuantizationType.F32, rope_factors=plain / scaled)
    config, weights = open_checkpoint(path)
    assert config.rope.rope_type == "factors" and "rope_freqs.weight" not in weights.names()
    assert np.allclose(inverse_frequencies(config.rope), scaled, rtol=2.0**-22, atol=0)
    assert not np.allclose(plain, scaled, rtol=0.1, atol=0), "control: the factors matter"


def test_gguf_refusals(tmp_path: Path) -> None:
    folder, path = tiny_checkpoint("qwen2"), tmp_path / "model.gguf"
    write_gguf(folder, path, gguf.GGMLQuantizationType.F32)
    content = path.read_bytes()
    path.write_bytes(content[:-1000])
    with pytest.raises(ValueError, match="is cut short: model"):
        open_checkpoint(path)
    path.write_bytes(content[:300])
    with pytest.raises(ValueError, match="the file ends inside its header"):
        open_checkpoint(path)
    for extra, words in (
        ({"qwen2__expert_count": 8}, "expert_count=8"),
        ({"qwen2__attention__mystery": 1}, r"qwen2\.attention\.mystery is not understood"),
        ({"qwen2__rope__dimension_count": 8}, r"rope\.dimension_count=8 differs from the head width 16"),
        ({"split__count": 2}, "one part of a split model"),
    ):
        write_gguf(folder, path, gguf.GGMLQuantizationType.F32, **extra)
        with pytest.raises(ValueError, match=words):
            open_checkpoint(path)


def test_smollm2_is_complete() -> None:
    weights = check("smollm2")
    assert len(weights.names()) == 272
    assert weights.digest() == "6bacaabb275b14ed00c4767231794a0edcadbff2253b0d26c9cd2ba4d979d3aa"
    value = weights.get("model.layers.29.self_attn.k_proj.weight")
    assert value.shape == (192, 576) and value.dtype == torch.float32 and bool(torch.isfinite(value).all())


def test_dummy_weights_depend_on_name_and_place_alone(tmp_path: Path) -> None:
    folder = make_tiny("qwen3", tmp_path)
    config = load_model_config(folder)
    weights = [open_weights(folder, config, "dummy") for _ in range(2)]
    expected = {"a.weight": (7, 300), "b.weight": (7, 300), "norm.weight": (64,)}
    for source in weights:
        source.check_complete(expected)
    first, again = (source.get("a.weight") for source in weights)
    assert torch.equal(first, again) and not torch.equal(first, weights[0].get("b.weight"))
    assert first.float().abs().max() <= 1.7 * 300**-0.5 and 0.8 < first.float().std() * 300**0.5 < 1.2
    assert (weights[0].get("norm.weight").float() - 1).abs().max() <= 0.26
    assert weights[0].digest() == weights[1].digest()
    with pytest.raises(ValueError, match=r"c\.weight is no tensor of this model"):
        weights[0].get("c.weight")


def test_words_of_a_device_are_those_of_the_host() -> None:
    words = hash_words(5 << 32 | 1, 1000, torch.device("cpu"))
    last = (words ^ shift_right(words, 31)).numpy().view(np.uint64)
    assert np.array_equal(last, bits(5, 1000))
    assert not np.array_equal(last, bits(6, 1000)), "control: another seed"
