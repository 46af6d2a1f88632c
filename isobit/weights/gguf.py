"""Weights in a GGUF file, by Hugging Face name: mapped, and dequantised to float32 one tensor at a time.

Knows the file's blocks through the `gguf` library and the one difference of layout: for the llama architecture GGUF
keeps q and k with the rows of each head interleaved (pairs of rotary features adjacent); here they get the rotate-half
order of Hugging Face back. Dequantising is elementwise, so it gives the same bits on every machine; that the
installed `gguf` gives the bits which fingerprints stand for is checked when a file is opened.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from isobit.gguf_config import hf_tensor_name
from isobit.gguf_file import GGUFTensor, read_gguf
from isobit.model_config import ModelConfig
from isobit.weights.source import WeightSource

# What each kind of block must give in `_digest_of_probe`. The digest of the weights covers the blocks as stored, so
# equal fingerprints need equal dequantising. Made with gguf 0.19.0.
_DEQUANTISED = {
    "Q4_0": "7b39b3272408671c", "Q4_1": "4235251286cf20b3", "Q5_0": "bd6964dc478f15f1",
    "Q5_1": "2224dc3d5fb9be14", "Q8_0": "6a5d67bd187483a3", "Q2_K": "f805382744c83416",
    "Q3_K": "b53741b4160bce04", "Q4_K": "c92275f05c2472a6", "Q5_K": "f2a8bf7f39547117",
    "Q6_K": "43b1598c1984944b", "IQ2_XXS": "7143d79a34fdbba6", "IQ2_XS": "ff96f5e17d8c5b61",
    "IQ3_XXS": "19b47498b071f99d", "IQ1_S": "110a259f09e7be79", "IQ4_NL": "ba7ffb2c86b478e6",
    "IQ3_S": "197f1ed7bc730232", "IQ2_S": "86904593666dd739", "IQ4_XS": "e03b3a595dc171c6",
    "IQ1_M": "7c64ef800f594d2c", "TQ1_0": "13ca6972c95b060b", "TQ2_0": "efd2606f0f0476d7",
    "MXFP4": "9b7a556f6bb9594f", "NVFP4": "f94773a4b945ed07",
}  # fmt: skip
_PIECE_BYTES = 2**18  # of blocks dequantised at once
_FLOATS = {GGMLQuantizationType.F32: np.float32, GGMLQuantizationType.F16: np.float16}


class GGUFWeights(WeightSource):
    """Tensors of one GGUF file."""

    def __init__(self, path: Path, config: ModelConfig) -> None:
        super().__init__(str(path), config)
        header = read_gguf(path)
        self._permuted = header.metadata.get("general.architecture") == "llama"
        self._tensors: dict[str, GGUFTensor] = {}
        for tensor in header.tensors.values():
            name = hf_tensor_name(tensor.name)
            if name is not None:
                self._tensors[name] = tensor
        self._names = tuple(sorted(self._tensors))
        self._data = np.memmap(path, dtype=np.uint8, mode="r")
        self._check_file()

    def names(self) -> tuple[str, ...]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).shape

    def get(self, name: str) -> torch.Tensor:
        tensor = self._tensor(name)
        kind, blocks = GGMLQuantizationType(tensor.ggml_type), self._blocks(tensor)
        if kind == GGMLQuantizationType.BF16:
            value = torch.from_numpy(blocks.view(np.int16).copy()).view(torch.bfloat16)
        elif kind in _FLOATS:
            value = torch.from_numpy(blocks.view(_FLOATS[kind]).copy())
        else:
            value = torch.from_numpy(_dequantised(blocks, kind))
        value = value.reshape(tensor.shape)
        return self._rotate_half_rows(name, value) if self._permuted else value

    def stored(self) -> Iterator[tuple[str, str, tuple[int, ...], memoryview]]:
        layout = "interleaved" if self._permuted else "rotate-half"
        for name in self._names:
            tensor = self._tensors[name]
            kind = GGMLQuantizationType(tensor.ggml_type).name
            yield name, f"gguf-{layout}-{kind}", tensor.shape, self._blocks(tensor).reshape(-1).data

    def _tensor(self, name: str) -> GGUFTensor:
        if name not in self._tensors:
            raise ValueError(f"{self.description} has no tensor {name}")
        return self._tensors[name]

    def _blocks(self, tensor: GGUFTensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The bytes of a tensor, uint8 [rows, bytes of a row], a view of the file."""
        rows, row_bytes = _rows_and_bytes(tensor)
        return self._data[tensor.offset : tensor.offset + rows * row_bytes].reshape(rows, row_bytes)

    def _rotate_half_rows(self, name: str, value: torch.Tensor) -> torch.Tensor:
        num_heads = {"q_proj": self.config.num_heads, "k_proj": self.config.num_kv_heads}.get(name.split(".")[-2])
        if num_heads is None or value.shape[0] % (2 * num_heads):
            return value  # not q or k; a wrong shape is reported by check_complete
        per_head = value.reshape(num_heads, value.shape[0] // num_heads // 2, 2, *value.shape[1:])
        return per_head.transpose(1, 2).reshape(value.shape).contiguous()

    def _check_file(self) -> None:
        for name, tensor in self._tensors.items():
            if tensor.ggml_type not in GGMLQuantizationType._value2member_map_:
                raise ValueError(f"{self.description}: {name} has unknown GGUF type {tensor.ggml_type}")
            rows, row_bytes = _rows_and_bytes(tensor)
            if tensor.offset + rows * row_bytes > self._data.size:
                raise ValueError(f"{self.description} is cut short: {name} lies beyond its {self._data.size} bytes")
        for kind in {GGMLQuantizationType(tensor.ggml_type) for tensor in self._tensors.values()}:
            if kind not in _FLOATS and kind != GGMLQuantizationType.BF16:
                if kind.name not in _DEQUANTISED:
                    raise ValueError(f"{self.description}: GGUF type {kind.name} cannot be dequantised")
                if _digest_of_probe(kind) != _DEQUANTISED[kind.name]:
                    raise ValueError(
                        f"{self.description}: the installed gguf {version('gguf')} dequantises {kind.name} to other "
                        "bits than isobit's fingerprints stand for; install the version in constraints.txt"
                    )


def _dequantised(blocks: np.ndarray[Any, np.dtype[np.uint8]], kind: GGMLQuantizationType) -> Any:
    """float32 [rows, width], some rows at a time: `dequantize` takes several times the memory of its result."""
    rows, row_bytes = blocks.shape
    at_once = max(1, _PIECE_BYTES // max(1, row_bytes))
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    value = np.empty((rows, row_bytes // block_bytes * block_size), np.float32)
    for start in range(0, rows, at_once):
        value[start : start + at_once] = dequantize(blocks[start : start + at_once], kind)
    return value


def _digest_of_probe(kind: GGMLQuantizationType) -> str:
    """Digest of what three blocks of fixed bytes, whose scales are finite in any reading, are dequantised to."""
    num_bytes = GGML_QUANT_SIZES[kind][1]
    probe = ((np.arange(3 * num_bytes) * 37 + 11) % 120).astype(np.uint8).reshape(3, num_bytes)
    return hashlib.sha256(np.ascontiguousarray(dequantize(probe, kind), dtype="<f4").tobytes()).hexdigest()[:16]


def _rows_and_bytes(tensor: GGUFTensor) -> tuple[int, int]:
    block_size, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.ggml_type)]
    width = tensor.shape[-1] if tensor.shape else 1
    if width % block_size:
        raise ValueError(f"{tensor.name} has rows of {width} values, not a multiple of its block of {block_size}")
    rows = 1
    for size in tensor.shape[:-1]:
        rows *= size
    return rows, width // block_size * block_bytes
