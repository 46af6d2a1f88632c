"""Keys of config.json beside the dimensions: what must be neutral, dtype, window, special tokens. No torch.

Does not know architectures' arithmetic beyond these keys. Keeps the invariant that a key which would change a logit
and is not implemented is refused by name, with its value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isobit.architectures import Architecture
from isobit.checkpoint import read_json_object
from isobit.rope_config import LARGEST

_DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16", "quantized": "quantized"}
_STORED_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_GENERATION_KEYS = ("min_p", "repetition_penalty", "temperature", "top_k", "top_p")

# keys that change the arithmetic of these architectures or their relatives, and the values that leave it alone
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attn_logit_softcapping": (None, 0), "final_logit_softcapping": (None, 0), "logit_scale": (None, 1),
    "logits_scaling": (None, 1), "logits_scale": (None, 1), "embedding_multiplier": (None, 1), "scale_emb": (None, 1),
    "residual_multiplier": (None, 1), "attention_multiplier": (None,), "scale_depth": (None,),
    "query_pre_attn_scalar": (None,), "use_qk_norm": (None, False), "qk_norm": (None, False),
    "qk_layernorm": (None, False), "clip_qkv": (None,), "pretraining_tp": (None, 1), "num_experts": (None, 0, 1),
    "num_local_experts": (None, 0, 1), "n_routed_experts": (None, 0), "moe_intermediate_size": (None, 0),
    "kv_lora_rank": (None,), "partial_rotary_factor": (None, 1), "no_rope_layers": (None, []),
    "no_rope_layer_interval": (None, 0), "attention_chunk_size": (None,), "attention_sink": (None, False),
    "attn_output_gate": (None, False), "use_mrope": (None, False), "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False), "position_embedding_type": (None, "rope", "rotary"),
    "alibi": (None, False), "cross_layer_sharing": (None,), "num_kv_shared_layers": (None, 0),
    "hidden_act": (None, "silu"), "hidden_activation": (None, "silu"), "activation_function": (None, "silu"),
    "sparse_attention": (None, False), "is_causal": (None, True),
}  # fmt: skip


def check_arithmetic_keys(raw: Mapping[str, Any]) -> None:
    """Raises ValueError for quantised checkpoints and for keys that ask for arithmetic isobit does not have."""
    for key in ("quantization_config", "compression_config"):
        if raw.get(key) is not None:
            method = raw[key].get("quant_method") if isinstance(raw[key], Mapping) else raw[key]
            raise ValueError(
                f"{key} (quant_method {method!r}): quantised safetensors are not supported; "
                "use the unquantised checkpoint or a .gguf file"
            )
    for key, neutral in _NEUTRAL.items():
        if key in raw and raw[key] not in neutral:
            allowed = " or ".join(json.dumps(value) for value in neutral)
            raise ValueError(f"{key}={raw[key]!r} changes the arithmetic and is not supported; only {allowed} is")
    kinds = raw.get("layer_types")
    if kinds is not None and not isinstance(kinds, list):
        raise ValueError(f"layer_types must be a list, got {kinds!r}")
    others = sorted({str(kind) for kind in kinds or ()} - {"full_attention", "sliding_attention"})
    if others:
        raise ValueError(f"layer_types has {', '.join(others)}; supported: full_attention, sliding_attention")


def sliding_window(raw: Mapping[str, Any], architecture: Architecture) -> int | None:
    """Window of the layers that have one, None when none has; absent and null keys as transformers reads them."""
    if architecture.window == "ignored":
        return None
    window = raw.get("sliding_window", architecture.default_window)
    if architecture.window == "switch":
        if not raw.get("use_sliding_window"):
            return None
        layer_types = raw.get("layer_types")
        if layer_types is not None:
            window = window if "sliding_attention" in layer_types else None
        elif raw.get("max_window_layers", 28) >= raw["num_hidden_layers"]:
            window = None
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise ValueError(f"sliding_window must be null or a whole number of at least 1, got {window!r}")
    return window


def checkpoint_dtype(raw: Mapping[str, Any], path: Path) -> str:
    """The dtype the config names (`dtype`, or `torch_dtype` before transformers 5), else that of the first tensor."""
    named = raw.get("dtype") if raw.get("dtype") is not None else raw.get("torch_dtype")
    if named is None or named == "auto":
        return _stored_dtype(path)
    dtype = _DTYPES.get(str(named).removeprefix("torch."))
    if dtype is None:
        raise ValueError(f"dtype {named!r} is not supported; supported: float32, bfloat16, float16")
    return dtype


def _stored_dtype(folder: Path) -> str:
    from safetensors import safe_open

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError("the config names no dtype and the folder has no .safetensors file to read it from")
    try:
        with safe_open(files[0], framework="numpy") as reader:
            stored = reader.get_slice(next(iter(reader.keys()))).get_dtype()
    except Exception as error:
        raise ValueError(f"{files[0].name} is not a readable safetensors file: {error}") from error
    if stored not in _STORED_DTYPES:
        raise ValueError(f"{files[0].name} holds {stored} tensors; supported: {', '.join(_STORED_DTYPES)}")
    return _STORED_DTYPES[stored]


def generation_defaults(generation: Mapping[str, Any]) -> tuple[tuple[str, float], ...]:
    """Sampling values of generation_config.json, sorted by name; who applies them is not decided here."""
    found = {key: generation.get(key) for key in _GENERATION_KEYS}
    for key, value in found.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) > LARGEST:
            raise ValueError(f"generation_config.json: {key} must be a number, got {value!r}")
        if key == "top_k" and value != value // 1:
            raise ValueError(f"generation_config.json: top_k must be a whole number, got {value!r}")
    return tuple((key, float(value)) for key, value in sorted(found.items()) if value is not None)


def eos_token_ids(
    raw: Mapping[str, Any], generation: Mapping[str, Any], path: Path, vocab_size: int
) -> tuple[int, ...]:
    """Every id that ends a turn: those of generation_config, then config, then the tokenizer, without repeats."""
    ids: dict[int, None] = {}
    for source in (generation, raw, {"eos_token_id": _tokenizer_eos(path)}):
        value = source.get("eos_token_id")
        for item in value if isinstance(value, list) else [] if value is None else [value]:
            if isinstance(item, bool) or not isinstance(item, int):
                raise ValueError(f"eos_token_id must hold whole numbers, got {value!r}")
            if 0 <= item < vocab_size:  # an id outside the vocabulary can never be drawn
                ids[item] = None
    return tuple(ids)


def _tokenizer_eos(path: Path) -> int | None:
    """Id of tokenizer_config.json's eos_token, from its own table or from tokenizer.json's added tokens."""
    if not path.is_dir():
        return None
    settings = read_json_object(path / "tokenizer_config.json")
    token = settings.get("eos_token")
    text = token.get("content") if isinstance(token, Mapping) else token
    if not isinstance(text, str):
        return None
    table = settings.get("added_tokens_decoder")
    for key, entry in table.items() if isinstance(table, Mapping) else ():
        if isinstance(entry, Mapping) and entry.get("content") == text and key.isdigit():
            return int(key)
    tokenizer = read_json_object(path / "tokenizer.json")
    added, model = tokenizer.get("added_tokens"), tokenizer.get("model")
    for entry in added if isinstance(added, list) else ():
        if isinstance(entry, Mapping) and entry.get("content") == text and isinstance(entry.get("id"), int):
            return int(entry["id"])
    vocabulary = model.get("vocab") if isinstance(model, Mapping) else None
    found = vocabulary.get(text) if isinstance(vocabulary, Mapping) else None
    return found if isinstance(found, int) else None
