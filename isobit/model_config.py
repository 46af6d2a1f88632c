"""What a model is: dimensions, rope, norms, special tokens, read from a checkpoint's config. No torch, no weights.

Knows Hugging Face `config.json` (old keys and transformers 5's `rope_parameters`) and GGUF metadata. Refuses what it
does not know: an unknown key that changes arithmetic is an error, never a guess.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isobit.architectures import ARCHITECTURES, Architecture, find_architecture
from isobit.checkpoint import read_json_object, resolve_checkpoint
from isobit.gguf_config import hf_config_from_gguf
from isobit.gguf_file import read_gguf
from isobit.hf_config import check_arithmetic_keys, checkpoint_dtype, eos_token_ids, generation_defaults, sliding_window
from isobit.rope_config import RopeConfig, parse_rope

__all__ = ["ModelConfig", "RopeConfig", "check_context_length", "context_limit", "load_model_config"]


@dataclass(frozen=True)
class ModelConfig:
    """Dimensions of a decoder-only model. `attention_kind` is a capability the plan reads, not an architecture name."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    dtype: str  # dtype of the checkpoint: "float32" | "bfloat16" | "float16" | "quantized"
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    attention_kind: str = "gqa"
    generation_defaults: tuple[tuple[str, float], ...] = field(default=())  # generation_config.json, sorted

    def arithmetic(self) -> str:
        """Everything beside weights and Orders that enters a logit: two models that differ here differ in bits."""
        names = (
            "architecture", "num_layers", "num_heads", "num_kv_heads", "head_dim", "rms_norm_eps", "rope",
            "tie_word_embeddings", "qkv_bias", "o_bias", "mlp_bias", "qk_norm", "attention_kind",
        )  # fmt: skip
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)

    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """(N, K) of every linear layer, by name: qkv, o, gate_up, down, lm_head."""
        heads = self.num_heads * self.head_dim
        kv_heads = self.num_kv_heads * self.head_dim
        return {
            "qkv": (heads + 2 * kv_heads, self.hidden_size),
            "o": (self.hidden_size, heads),
            "gate_up": (2 * self.intermediate_size, self.hidden_size),
            "down": (self.hidden_size, self.intermediate_size),
            "lm_head": (self.vocab_size, self.hidden_size),
        }

    def linear_biases(self) -> dict[str, bool]:
        """Which of `linear_shapes` have a bias."""
        mlp = self.mlp_bias
        return {"qkv": self.qkv_bias, "o": self.o_bias, "gate_up": mlp, "down": mlp, "lm_head": False}


def load_model_config(model: str | Path, overrides: Mapping[str, Any] | None = None) -> ModelConfig:
    """Config of a checkpoint folder, a .gguf file, or the embedded "smollm2", with `overrides` laid over its keys.

    Overrides are spelled as config.json keys, for GGUF too. Raises ValueError naming file, key, value and remedy.
    """
    path = resolve_checkpoint(model)
    if path.is_dir():
        raw, generation = read_json_object(path / "config.json"), read_json_object(path / "generation_config.json")
        where = path / "config.json"
    else:
        raw, generation, where = hf_config_from_gguf(read_gguf(path)), {}, path
    try:
        return _parse(_overlay(raw, overrides or {}), generation, path)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _overlay(raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`raw` with `overrides` on top; an old-style rope key also replaces what `rope_parameters` says."""
    merged = {**raw, **overrides}
    old = raw.get("rope_parameters")
    new_keys = {"rope_theta", "rope_scaling"} & set(overrides)
    if isinstance(old, Mapping) and "rope_parameters" not in overrides and new_keys:
        merged["rope_theta"] = overrides.get("rope_theta", old.get("rope_theta"))
        merged["rope_parameters"] = {**old, "rope_theta": merged["rope_theta"]}
        if "rope_scaling" in overrides:
            del merged["rope_parameters"]
    if "rope_parameters" in overrides:
        merged.pop("rope_scaling", None)
        if isinstance(overrides["rope_parameters"], Mapping) and "rope_theta" in overrides["rope_parameters"]:
            merged.pop("rope_theta", None)
    return merged


def _parse(raw: Mapping[str, Any], generation: Mapping[str, Any], path: Path) -> ModelConfig:
    name, architecture = _architecture(raw)
    check_arithmetic_keys(raw)
    hidden_size, num_heads = _size(raw, "hidden_size"), _size(raw, "num_attention_heads")
    num_kv_heads = num_heads if raw.get("num_key_value_heads") is None else _size(raw, "num_key_value_heads")
    if num_heads % num_kv_heads:
        raise ValueError(f"num_attention_heads={num_heads} is not a multiple of num_key_value_heads={num_kv_heads}")
    head_dim = _head_dim(raw, architecture, hidden_size, num_heads)
    attention_bias = _flag(raw, "attention_bias")
    vocab_size, bos = _size(raw, "vocab_size"), raw.get("bos_token_id")
    return ModelConfig(
        architecture=name,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=_size(raw, "intermediate_size"),
        num_layers=_size(raw, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=_epsilon(raw),
        rope=parse_rope(raw, head_dim),
        max_position_embeddings=_size(raw, "max_position_embeddings"),
        tie_word_embeddings=_flag(raw, "tie_word_embeddings"),
        dtype=checkpoint_dtype(raw, path),
        qkv_bias=attention_bias if architecture.qkv_bias is None else architecture.qkv_bias,
        o_bias=attention_bias if architecture.o_bias is None else architecture.o_bias,
        mlp_bias=architecture.reads_mlp_bias and _flag(raw, "mlp_bias"),
        qk_norm=architecture.qk_norm,
        sliding_window=sliding_window(raw, architecture),
        bos_token_id=bos if isinstance(bos, int) else None,
        eos_token_ids=eos_token_ids(raw, generation, path, vocab_size),
        attention_kind=architecture.attention_kind,
        generation_defaults=generation_defaults(generation),
    )


def _architecture(raw: Mapping[str, Any]) -> tuple[str, Architecture]:
    named = raw.get("architectures")
    if not isinstance(named, list) or len(named) != 1:
        supported = ", ".join(ARCHITECTURES)
        raise ValueError(f"architectures must be a list of one name, got {named!r}; supported: {supported}")
    return str(named[0]), find_architecture(named[0])


def _size(raw: Mapping[str, Any], key: str) -> int:
    value = raw.get(key)
    if value is None:
        raise ValueError(f"the config has no {key}; add it with hf_overrides")
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
        raise ValueError(f"{key} must be a whole number of at least 1, got {value!r}")
    return value


def _flag(raw: Mapping[str, Any], key: str) -> bool:
    value = raw.get(key)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{key} must be true or false, got {value!r}")
    return bool(value)


def _head_dim(raw: Mapping[str, Any], architecture: Architecture, hidden_size: int, num_heads: int) -> int:
    if raw.get("head_dim") is not None:
        return _size(raw, "head_dim")
    if architecture.default_head_dim is not None:
        return architecture.default_head_dim
    if hidden_size % num_heads:
        raise ValueError(f"hidden_size={hidden_size} is not a multiple of num_attention_heads={num_heads}")
    return hidden_size // num_heads


def _epsilon(raw: Mapping[str, Any]) -> float:
    value = raw.get("rms_norm_eps")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 < value < 1.0:
        raise ValueError(f"rms_norm_eps must be a number between 0 and 1, got {value!r}; give it with hf_overrides")
    return float(value)


def context_limit(config: ModelConfig) -> int:
    """Longest sequence whose every row is the model's own pure function of its prefix; the default context length."""
    limit = config.max_position_embeddings
    original = config.rope.parameter("original_max_position_embeddings")
    if config.rope.rope_type == "yarn" and original is not None:
        limit = max(limit, int(original * (config.rope.parameter("factor") or 1.0)))
    if config.rope.rope_type == "dynamic" and original is not None:
        limit = min(limit, int(original))
    return limit if config.sliding_window is None else min(limit, config.sliding_window)


def check_context_length(config: ModelConfig, context_length: int) -> None:
    """Raises ValueError, naming the cause and the largest possible value, when `context_length` is beyond the model."""
    limit = context_limit(config)
    if context_length <= limit:
        return
    if config.sliding_window == limit:
        reason = (
            f"the model attends through a sliding window of {config.sliding_window} tokens, which isobit supports only "
            "where it hides nothing"
        )
    elif config.rope.rope_type == "dynamic":
        reason = (
            "beyond the trained length dynamic rope scaling makes every row depend on the length of the sequence, not "
            "only on its prefix"
        )
    else:
        reason = "the model has no more positions; hf_overrides with max_position_embeddings or rope_scaling add some"
    raise ValueError(f"context_length={context_length} is above {limit}: {reason}; use context_length <= {limit}")
