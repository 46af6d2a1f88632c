"""Mistral 7B (Jiang et al. 2023): the Llama arithmetic.

Its sliding window changes nothing as long as no sequence is longer than the window; longer contexts are refused when
the plan is resolved (`model_config.check_context_length`).
"""

from __future__ import annotations

from isobit.models.llama import LlamaForCausalLM


class MistralForCausalLM(LlamaForCausalLM):
    """Llama with Mistral's configuration."""
