"""Weights in a folder of safetensors: one file, or shards named by model.safetensors.index.json.

Knows the index and the safetensors library (which maps files into memory), nothing of models. Every file and every
name is checked when the folder is opened: a missing or cut shard, or an index that disagrees with its shards, is a
ValueError then and not a wrong answer later.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from isobit.checkpoint import read_json_object
from isobit.model_config import ModelConfig
from isobit.weights.source import WeightSource

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


class SafetensorsWeights(WeightSource):
    """Tensors of a checkpoint folder. A file is mapped only while a tensor of it is in use: what was read and packed
    leaves memory, so loading never holds the checkpoint twice."""

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        super().__init__(str(folder), config)
        self._files: dict[str, Path] = {}  # by tensor name
        self._shapes: dict[str, tuple[int, ...]] = {}
        weight_map = _weight_map(folder)
        for file in sorted(set(weight_map.values())) if weight_map else [_single_file(folder)]:
            reader = _open(folder / file)
            names = set(reader.keys())
            if weight_map:
                _check_shard(folder / file, names, {name for name, shard in weight_map.items() if shard == file})
            for name in names:
                stored = reader.get_slice(name).get_dtype()
                if stored not in _DTYPES:
                    raise ValueError(f"{folder / file}: {name} is {stored}; supported: {', '.join(_DTYPES)}")
                self._files[name] = folder / file
                self._shapes[name] = tuple(reader.get_slice(name).get_shape())
        self._names = tuple(sorted(self._files))

    def names(self) -> tuple[str, ...]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        self._check_name(name)
        return self._shapes[name]

    def get(self, name: str) -> torch.Tensor:
        self._check_name(name)
        tensor: torch.Tensor = _open(self._files[name]).get_tensor(name)
        return tensor

    def stored(self) -> Iterator[tuple[str, str, tuple[int, ...], memoryview]]:
        for name in self._names:
            tensor = self.get(name)
            data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
            yield name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data

    def _check_name(self, name: str) -> None:
        if name not in self._files:
            raise ValueError(f"{self.description} has no tensor {name}")


def _weight_map(folder: Path) -> dict[str, str]:
    """Shard of every tensor, {} for a folder with one file (which wins, as in transformers, when both are there)."""
    if (folder / _SINGLE).is_file():
        return {}
    index = folder / _INDEX
    if not index.is_file():
        return {}
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} has no weight_map")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(f"{index}: the shard of {name} must be a file name in the folder, got {file!r}")
    missing = sorted({file for file in weight_map.values() if not (folder / file).is_file()})
    if missing:
        raise ValueError(f"{folder} lacks {len(missing)} of the files its index names: {', '.join(missing[:10])}")
    return weight_map


def _single_file(folder: Path) -> str:
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    if _SINGLE in files:
        return _SINGLE
    if len(files) == 1:
        return files[0]
    if files:
        raise ValueError(f"{folder} has {len(files)} .safetensors files but no {_INDEX} that says what they hold")
    raise ValueError(f"{folder} has no .safetensors file; convert the checkpoint to safetensors (.bin is not read)")


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except Exception as error:  # the library raises its own type, OSError or a Rust panic type, by version
        raise ValueError(f"{path} is not a readable safetensors file (cut short or damaged?): {error}") from error


def _check_shard(path: Path, held: set[str], indexed: set[str]) -> None:
    absent = sorted(indexed - held)
    if absent:
        raise ValueError(f"{path} lacks {len(absent)} of the tensors the index places there: {', '.join(absent[:10])}")
    strays = sorted(held - indexed)
    if strays:
        raise ValueError(f"{path} holds {len(strays)} tensors the index does not place there: {', '.join(strays[:10])}")
