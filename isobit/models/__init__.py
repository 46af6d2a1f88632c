"""The models, one readable file a family; `architectures.py` lists them. Built from config, ops, weights and rope."""

from __future__ import annotations

import importlib
from typing import Protocol, cast

import torch

from isobit.architectures import find_architecture
from isobit.kernels.interface import RopeTables
from isobit.kv_cache import KVCache
from isobit.model_config import ModelConfig
from isobit.ops import AttentionInputs, Ops
from isobit.weights import WeightSource


class CausalLM(Protocol):
    """What the runner needs of a model."""

    def forward(self, token_ids: torch.Tensor, inputs: AttentionInputs, kv_cache: KVCache) -> torch.Tensor:
        """int32 [M] -> residual stream float32 [M, D]; writes the KV cache."""

    def logits(self, x_RD: torch.Tensor) -> torch.Tensor:
        """Residual rows float32 [R, D] -> logits float32 [R, V]."""


def build_model(config: ModelConfig, ops: Ops, weights: WeightSource, rope: RopeTables) -> CausalLM:
    """Build the model of `config.architecture`. Raises ValueError if it is unknown or its checkpoint incomplete."""
    module = importlib.import_module(f"isobit.models.{find_architecture(config.architecture).module}")
    return cast(CausalLM, getattr(module, config.architecture)(config, ops, weights, rope))
