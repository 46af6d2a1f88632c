"""The model registry: the only list of architecture names. One readable file a family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from isobit.kernels.interface import RopeTables
from isobit.kv_cache import KVCache
from isobit.model_config import ModelConfig
from isobit.models.llama import LlamaForCausalLM
from isobit.models.mistral import MistralForCausalLM
from isobit.models.qwen2 import Qwen2ForCausalLM
from isobit.models.qwen3 import Qwen3ForCausalLM
from isobit.ops import AttentionInputs, Ops
from isobit.weights import WeightSource


class CausalLM(Protocol):
    """What the runner needs of a model. `attention_kind` is the capability the plan reads."""

    attention_kind: str

    def forward(self, token_ids: torch.Tensor, inputs: AttentionInputs, kv_cache: KVCache) -> torch.Tensor:
        """int32 [M] -> residual stream float32 [M, D]; writes the KV cache."""

    def logits(self, x_RD: torch.Tensor) -> torch.Tensor:
        """Residual rows float32 [R, D] -> logits float32 [R, V]."""


MODELS: dict[str, Callable[[ModelConfig, Ops, WeightSource, RopeTables], CausalLM]] = {
    model.__name__: model for model in (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
}


def build_model(config: ModelConfig, ops: Ops, weights: WeightSource, rope: RopeTables) -> CausalLM:
    """Build the model of `config.architecture`. Raises ValueError if it is unknown or its checkpoint incomplete."""
    if config.architecture not in MODELS:
        raise ValueError(f"architecture {config.architecture!r} is not supported; supported: {', '.join(MODELS)}")
    return MODELS[config.architecture](config, ops, weights, rope)
