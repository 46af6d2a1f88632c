"""What a model is: dimensions, rope, norms, special tokens, read from a checkpoint's config. No torch, no weights.

Knows Hugging Face `config.json` (old keys and transformers 5's `rope_parameters`) and GGUF metadata. Refuses what it
does not know: an unknown key that changes arithmetic is an error, never a guess.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021) and its scaling; fields as in Hugging Face `rope_parameters`."""

    rope_type: str  # "default" | "linear" | "llama3" | "yarn" | "dynamic"
    theta: float
    rotary_dim: int
    parameters: tuple[tuple[str, float | bool], ...] = ()  # the scaling's own keys, sorted: factor, low_freq_factor, ...


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


def load_model_config(model: str | Path) -> ModelConfig:
    raise NotImplementedError
