"""GGUF metadata and tensor names in the words of Hugging Face. No torch, no tensor data (rope factors excepted).

Turns the header of a llama, qwen2 or qwen3 GGUF into the config.json it was made from, so that one parser
(`model_config`) reads both. Keeps the invariant that a metadata key of the architecture that is not understood is
refused by name.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from typing import Any

from isobit.architectures import gguf_architecture
from isobit.gguf_file import GGUFFile

_SIZES = {
    "block_count": "num_hidden_layers", "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads", "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps", "attention.sliding_window": "sliding_window",
}  # fmt: skip
_CHECKED = {"attention.value_length", "rope.dimension_count", "rope.freq_base", "vocab_size", "expert_count"}
_ROPE_SCALING = {"type", "factor", "original_context_length", "attn_factor", "finetuned"}
_PARTS = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}  # fmt: skip
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ROPE_FACTORS = "rope_freqs.weight"
_FLOAT_TYPES = {0: "float32", 1: "float16", 30: "bfloat16"}  # ggml types that are not quantised


def hf_tensor_name(name: str) -> str | None:
    """Hugging Face name of a GGUF tensor, None for rope factors (they are config); unknown names stay as they are."""
    if name == _ROPE_FACTORS:
        return None
    stem, _, suffix = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{suffix}"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if match and match[2] in _PARTS:
        return f"model.layers.{match[1]}.{_PARTS[match[2]]}.{suffix}"
    return name


def hf_config_from_gguf(file: GGUFFile) -> dict[str, Any]:
    """The config.json the GGUF was made from. Raises ValueError for what it cannot express."""
    kind: Any = file.metadata.get("general.architecture")
    try:
        architecture = gguf_architecture(kind, f"{kind}.attention.sliding_window" in file.metadata)
    except ValueError as error:
        raise ValueError(f"{file.path}: {error}") from error
    own = {key[len(kind) + 1 :]: value for key, value in file.metadata.items() if key.startswith(f"{kind}.")}
    scaling = {key[13:]: own.pop(key) for key in list(own) if key.startswith("rope.scaling.")}
    unknown = sorted(set(own) - set(_SIZES) - _CHECKED)
    if unknown:
        raise ValueError(f"{file.path}: metadata {', '.join(f'{kind}.{key}' for key in unknown)} is not understood")
    if own.get("expert_count"):
        raise ValueError(f"{file.path}: {kind}.expert_count={own['expert_count']}: mixtures of experts not supported")
    config: dict[str, Any] = {"architectures": [architecture], "hidden_act": "silu"}
    config |= {_SIZES[key]: value for key, value in own.items() if key in _SIZES}
    config["rope_parameters"] = _rope_parameters(file, own, scaling)
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    config["mlp_bias"] = "blk.0.ffn_down.bias" in file.tensors
    config["dtype"] = _dtype(file)
    embedding = file.tensors.get("token_embd.weight")
    config["vocab_size"] = embedding.shape[0] if embedding else own.get("vocab_size")
    for name in ("bos_token_id", "eos_token_id"):
        config[name] = file.metadata.get(f"tokenizer.ggml.{name}")
    turn_end = file.metadata.get("tokenizer.ggml.eot_token_id")
    if turn_end is not None:
        config["eos_token_id"] = [config["eos_token_id"], turn_end]
    _check_head_dim(file, own, config)
    return config


def _check_head_dim(file: GGUFFile, own: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    head_dim = config.get("head_dim")
    if head_dim is None and isinstance(config.get("hidden_size"), int) and config.get("num_attention_heads"):
        head_dim = config["hidden_size"] // config["num_attention_heads"]
    for key in ("attention.value_length", "rope.dimension_count"):
        if own.get(key, head_dim) != head_dim:
            raise ValueError(f"{file.path}: {key}={own[key]} differs from the head width {head_dim}; not supported")


def _rope_parameters(file: GGUFFile, own: Mapping[str, Any], scaling: Mapping[str, Any]) -> dict[str, Any]:
    unknown = sorted(set(scaling) - _ROPE_SCALING)
    if unknown:
        raise ValueError(f"{file.path}: rope.scaling.{unknown[0]}={scaling[unknown[0]]!r} is not understood")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": own.get("rope.freq_base")}
    kind = scaling.get("type", "none")
    if kind in ("linear", "yarn"):
        rope |= {"rope_type": kind, "factor": scaling.get("factor")}
    elif kind != "none":
        raise ValueError(f"{file.path}: rope.scaling.type={kind!r} is not supported; none, linear, yarn are")
    if kind == "yarn":
        rope["original_max_position_embeddings"] = scaling.get("original_context_length")
    if scaling.get("attn_factor", 1.0) != 1.0:
        raise ValueError(f"{file.path}: rope.scaling.attn_factor={scaling['attn_factor']} is not supported")
    if _ROPE_FACTORS in file.tensors:
        if kind != "none":
            raise ValueError(f"{file.path}: both {_ROPE_FACTORS} and rope.scaling.type={kind!r} are given")
        rope["rope_type"] = "factors"
        rope |= {f"factor_{i:04d}": value for i, value in enumerate(_read_factors(file))}
    return rope


def _read_factors(file: GGUFFile) -> tuple[float, ...]:
    """The divisors of the inverse frequencies that Llama 3's scaling was baked into, float32 [rotary_dim / 2]."""
    tensor = file.tensors[_ROPE_FACTORS]
    if _FLOAT_TYPES.get(tensor.ggml_type) != "float32" or len(tensor.shape) != 1:
        raise ValueError(f"{file.path}: {_ROPE_FACTORS} must be one row of float32")
    with file.path.open("rb") as stream:
        stream.seek(tensor.offset)
        data = stream.read(4 * tensor.shape[0])
    if len(data) != 4 * tensor.shape[0]:
        raise ValueError(f"{file.path} is cut short: {_ROPE_FACTORS} lies beyond its end")
    return struct.unpack(f"<{tensor.shape[0]}f", data)


def _dtype(file: GGUFFile) -> str:
    """Dtype of the matrices (norms are float32 in every GGUF); "quantized" when any of them is."""
    kinds = {_FLOAT_TYPES.get(t.ggml_type, "quantized") for t in file.tensors.values() if len(t.shape) > 1}
    return kinds.pop() if len(kinds) == 1 else "quantized"
