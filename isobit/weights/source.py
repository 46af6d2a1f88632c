"""What every kind of checkpoint offers: names, shapes, tensors one at a time, a digest, and the completeness check.

Does not know file formats (the subclasses do) or layers (the model declares what it expects). Keeps the rule for tied
embeddings: with `tie_word_embeddings` the embedding is the head, whatever else the file holds.
"""

from __future__ import annotations

import hashlib
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping

import torch

from isobit.model_config import ModelConfig

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)  # a buffer old checkpoints carry; isobit computes it from the config
_MAX_LISTED = 10


class WeightSource(ABC):
    """Tensors of one checkpoint by Hugging Face name, in the checkpoint's dtype (GGUF blocks become float32)."""

    def __init__(self, description: str, config: ModelConfig) -> None:
        self.description = description
        self.config = config
        self._digest: str | None = None

    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """Names of all tensors, sorted."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor, from the header. Raises ValueError for an unknown name."""

    @abstractmethod
    def get(self, name: str) -> torch.Tensor:
        """One tensor; it may be a read-only view of the file. Raises ValueError for an unknown name."""

    @abstractmethod
    def stored(self) -> Iterator[tuple[str, str, tuple[int, ...], memoryview]]:
        """(name, dtype, shape, bytes) of every tensor as stored, sorted by name."""

    def digest(self) -> str:
        """SHA-256 over (name, dtype, shape, bytes) of every tensor as stored, sorted by name; computed once.

        Files that hold the same tensors have the same digest, however they are sharded.
        """
        if self._digest is None:
            digest = hashlib.sha256()
            for name, dtype, shape, data in self.stored():
                digest.update(f"{name} {dtype} {shape} {data.nbytes}\n".encode())
                digest.update(data)
            self._digest = digest.hexdigest()
        return self._digest

    def check_complete(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Compare with the names and shapes a model needs.

        Raises one ValueError listing missing, unexpected and wrongly shaped tensors (the first 10). Warns when a tied
        model's file also holds another head.
        """
        wanted = dict(expected)
        present = {name for name in self.names() if not name.endswith(_IGNORED_SUFFIXES)}
        if self.config.tie_word_embeddings:
            wanted.pop(_HEAD, None)
            self._check_tied_head(present)
            present.discard(_HEAD)
        problems = [f"missing {name} {list(wanted[name])}" for name in sorted(set(wanted) - present)]
        problems += [f"unexpected {name} {list(self.shape(name))}" for name in sorted(present - set(wanted))]
        problems += [
            f"{name} has shape {list(self.shape(name))}, expected {list(wanted[name])}"
            for name in sorted(present & set(wanted))
            if self.shape(name) != tuple(wanted[name])
        ]
        if problems:
            more = f"\n  and {len(problems) - _MAX_LISTED} more" if len(problems) > _MAX_LISTED else ""
            listed = "".join(f"\n  {problem}" for problem in problems[:_MAX_LISTED])
            raise ValueError(
                f"{self.description} does not hold the tensors of {self.config.architecture} as its config describes "
                f"them:{listed}{more}"
            )

    def _check_tied_head(self, present: set[str]) -> None:
        if _HEAD not in present or _EMBEDDING not in present:
            return
        if not torch.equal(self.get(_HEAD), self.get(_EMBEDDING)):
            warnings.warn(
                f"{self.description}: tie_word_embeddings is true, yet {_HEAD} differs from {_EMBEDDING}; "
                f"the embedding is used as the head and {_HEAD} is ignored",
                stacklevel=3,
            )
