"""Qwen2 and Qwen2.5 (Qwen technical reports 2024): the Llama arithmetic with biases on q, k and v.

The biases are a fact of the architecture, not of a config key; `model_config` sets `qkv_bias` for it.
"""

from __future__ import annotations

from isobit.models.llama import LlamaForCausalLM


class Qwen2ForCausalLM(LlamaForCausalLM):
    """Llama with q, k and v biases."""
