"""Qwen3 dense (Qwen technical report 2025): the Llama arithmetic with an RMSNorm on every q and k head before rope.

`model_config` sets `qk_norm` and reads the explicit `head_dim`, which need not be hidden_size / num_heads.
"""

from __future__ import annotations

from isobit.models.llama import LlamaForCausalLM


class Qwen3ForCausalLM(LlamaForCausalLM):
    """Llama with q and k head norms."""
