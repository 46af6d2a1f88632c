"""Checkpoint folders for GPU tests: tiny real weights of each family, and full-size shapes with random weights."""

from __future__ import annotations

import json
from pathlib import Path

# The published shape of Qwen3-8B (config.json of the model card).
QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096,
    "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "hidden_act": "silu", "attention_bias": False,
    "bos_token_id": 151643, "eos_token_id": 151645,
}  # fmt: skip

# of the tiny models of `tests/tiny.py`, where their own have no kernel: heads are multiples of 16 features
TENSOR_CORE_SIZES = {"mistral": {"head_dim": 16}}


def write_config(folder: Path, **changes: object) -> Path:
    """A folder with the config of Qwen3-8B, changed as asked, and no weights: for load_format=dummy."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**QWEN3_8B, **changes}), encoding="utf-8")
    return folder
