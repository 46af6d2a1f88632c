"""Random weights of a model's shapes, made on the device: for measuring at full size without a checkpoint.

The bits depend on name, shape and position alone (splitmix64 of an index), so they are the same on every device. Does
not know layers; reads no file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import torch

from isobit.kernels.device_bits import hash_words, shift_right
from isobit.model_config import ModelConfig
from isobit.weights.source import WeightSource

_PIECE = 1 << 24  # values made at a time; bounds the int64 temporaries
_VERSION = 1  # raised when other values come out


class DummyWeights(WeightSource):
    """Values uniform in (-s, s) with s = 1.7 / sqrt(K), so that activations keep their size; norms are near 1."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        super().__init__("random weights (load_format=dummy)", config)
        self.device = device
        self._shapes: dict[str, tuple[int, ...]] = {}

    def check_complete(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Takes the shapes a model needs as its own; nothing can be missing."""
        self._shapes = dict(expected)

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._shapes))

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._shapes:
            raise ValueError(f"{self.description}: {name} is no tensor of this model")
        return self._shapes[name]

    def get(self, name: str) -> torch.Tensor:
        shape = self.shape(name)
        seed = int.from_bytes(hashlib.sha256(f"{_VERSION} {name}".encode()).digest()[:7], "little")
        values = torch.empty(shape, dtype=torch.bfloat16, device=self.device)
        flat, is_norm = values.view(-1), len(shape) == 1 and name.endswith(".weight")
        middle, spread = (1.0, 0.25) if is_norm else (0.0, 1.7 * shape[-1] ** -0.5)
        for start in range(0, flat.numel(), _PIECE):
            piece = flat[start : start + _PIECE]
            piece.copy_(_uniform(seed + start, piece.numel(), self.device) * spread + middle)
        return values

    def stored(self) -> Iterator[tuple[str, str, tuple[int, ...], memoryview]]:
        for name in self.names():
            yield name, "dummy", self._shapes[name], memoryview(str(_VERSION).encode())


def _uniform(start: int, count: int, device: torch.device) -> torch.Tensor:
    """float32 in (-1, 1) from the upper 24 bits of the words of start, start + 1, ..."""
    upper = shift_right(hash_words(start, count, device), 40)
    return (upper.to(torch.float32) + 0.5) * 2.0**-23 - 1.0
