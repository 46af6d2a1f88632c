"""The header of a GGUF file: metadata and tensor table, read in milliseconds. No torch, no tensor data.

Knows the container format (version 2 and 3, little endian; docs/gguf.md of ggml) and nothing of models. Written here
because the `gguf` library's reader takes seconds for a vocabulary. A cut or foreign file is a ValueError.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4


@dataclass(frozen=True)
class GGUFTensor:
    """One row of the tensor table. `shape` is row-major as in PyTorch; `offset` counts from the start of the file."""

    name: str
    ggml_type: int
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class GGUFFile:
    """What the header says: metadata as plain Python values, tensors by their GGUF name."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]


class _Cursor:
    """Reads little-endian values off the start of the file; running out of bytes is a ValueError."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("rb")

    def bytes(self, count: int) -> bytes:
        data = self.file.read(count)
        if len(data) != count:
            raise ValueError("the file ends inside its header")
        return data

    def scalars(self, code: str, count: int = 1) -> tuple[Any, ...]:
        return struct.unpack(f"<{count}{code}", self.bytes(count * struct.calcsize(f"<{code}")))

    def count(self) -> int:
        value = int(self.scalars("Q")[0])
        if value >= 2**40:
            raise ValueError(f"the header names a length of {value}")
        return value

    def string(self) -> str:
        return self.bytes(self.count()).decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            (item_kind,), length = self.scalars("I"), self.count()
            if item_kind in _SCALARS:
                return list(self.scalars(_SCALARS[item_kind], length))
            return [self.value(item_kind) for _ in range(length)]
        if kind not in _SCALARS:
            raise ValueError(f"the header has a value of unknown type {kind}")
        return self.scalars(_SCALARS[kind])[0]


def read_gguf(path: Path) -> GGUFFile:
    """Read the header of `path`. Raises ValueError naming the file when it is cut, foreign, or one part of several."""
    cursor = _Cursor(path)
    try:
        return _read(cursor, path)
    except (ValueError, struct.error, MemoryError) as error:
        raise ValueError(f"{path} is not a readable GGUF file: {error}") from error
    finally:
        cursor.file.close()


def _read(cursor: _Cursor, path: Path) -> GGUFFile:
    if cursor.bytes(4) != b"GGUF":
        raise ValueError("it does not start with the letters GGUF")
    version = cursor.scalars("I")[0]
    if version not in (2, 3):
        raise ValueError(f"version {version} is not supported (2 and 3 are), or the file is big endian")
    num_tensors, num_values = cursor.count(), cursor.count()
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalars("I")[0])
    if metadata.get("split.count", 1) > 1:
        raise ValueError("it is one part of a split model; join the parts with llama-gguf-split --merge")
    table = [_tensor_row(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    start = -(-cursor.file.tell() // alignment) * alignment
    tensors = {name: GGUFTensor(name, kind, shape, start + offset) for name, kind, shape, offset in table}
    return GGUFFile(path, metadata, tensors)


def _tensor_row(cursor: _Cursor) -> tuple[str, int, tuple[int, ...], int]:
    name = cursor.string()
    num_dimensions = cursor.scalars("I")[0]
    if num_dimensions > _MAX_DIMENSIONS:
        raise ValueError(f"tensor {name!r} has {num_dimensions} dimensions")
    dimensions = cursor.scalars("Q", num_dimensions)
    kind, offset = cursor.scalars("I")[0], cursor.scalars("Q")[0]
    return name, kind, tuple(reversed(dimensions)), offset
