"""Tensors of a checkpoint by Hugging Face name, wherever they lie: safetensors (single, sharded) or GGUF.

Knows files, names, shapes and dtypes, no arithmetic of models. Keeps the invariant that a checkpoint is either whole
(every file, every tensor, every shape) or refused before serving, and that it is read tensor by tensor, never copied.
"""

from __future__ import annotations

from pathlib import Path

import torch

from isobit.checkpoint import resolve_checkpoint
from isobit.model_config import ModelConfig
from isobit.weights.dummy import DummyWeights
from isobit.weights.gguf import GGUFWeights
from isobit.weights.safetensors import SafetensorsWeights
from isobit.weights.source import WeightSource

__all__ = ["DummyWeights", "GGUFWeights", "SafetensorsWeights", "WeightSource", "open_weights"]


def open_weights(
    model: str | Path, config: ModelConfig, load_format: str = "auto", device: torch.device | None = None
) -> WeightSource:
    """Open the weights of a checkpoint folder, a .gguf file or "smollm2"; nothing is read yet but headers.

    `load_format` "dummy": random weights, made on `device`; no file is opened. Raises ValueError naming the file for a
    missing, cut or foreign one.
    """
    if load_format == "dummy":
        return DummyWeights(config, device or torch.device("cpu"))
    path = resolve_checkpoint(model)
    return SafetensorsWeights(path, config) if path.is_dir() else GGUFWeights(path, config)
