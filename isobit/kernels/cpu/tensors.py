"""Tensors of a library whose device is the host: inputs of a step, the KV cache, chosen rows and values of logits.

Nothing is computed here, and nothing is copied that can be viewed. Row by row through numpy: torch would wake its
OpenMP threads, which hang a forked child.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import fields

import numpy as np
import numpy.typing as npt
import torch

from isobit.kernels.interface import TORCH_DTYPES, AttentionInputs, AttentionShape, StepArrays

__all__ = ["HostTensors"]


class HostTensors:
    """The part of a KernelLibrary that moves data, on the CPU."""

    device = torch.device("cpu")

    def upload(self, values: torch.Tensor) -> torch.Tensor:
        """The tensor itself."""
        return values

    def begin_step(self, arrays: StepArrays) -> tuple[torch.Tensor, AttentionInputs]:
        """(token_ids int32 [M], attention inputs): views of the host's arrays."""
        token_ids, *others = (torch.from_numpy(getattr(arrays, spec.name)) for spec in fields(arrays))
        return token_ids, AttentionInputs(*others)

    def new_kv_layers(
        self, num_layers: int, num_pages: int, page_size: int, shape: AttentionShape, kv_dtype: str
    ) -> tuple[torch.Tensor, ...]:
        """Layers [2 (K, V), num_pages, KV * D * page_size]: a K page of one head is [D, page_size keys], a V page
        [page_size keys, D]. Memory is taken as pages are touched."""
        dtype = TORCH_DTYPES[kv_dtype]
        size = (num_layers, 2, num_pages, shape.num_kv_heads * shape.head_dim * page_size)
        # Zeros that cost nothing until they are written; private, or a forked process would write into ours.
        memory = mmap.mmap(-1, math.prod(size) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(memory, dtype=dtype).view(size).unbind(0)

    def take_rows(self, x: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Copy of chosen rows of [M, ...]."""
        return torch.from_numpy(x.numpy()[list(rows)])

    def take_values(self, x: torch.Tensor, rows: Sequence[int], columns: Sequence[int]) -> npt.NDArray[np.float32]:
        """x[rows[i], columns[i]] of [M, N]."""
        values: npt.NDArray[np.float32] = x.numpy()[list(rows), list(columns)]
        return values

    def put_values(
        self, x: torch.Tensor, rows: Sequence[int], columns: Sequence[int], values: npt.NDArray[np.float32]
    ) -> torch.Tensor:
        """A copy of [M, N] in which x[rows[i], columns[i]] is values[i]."""
        changed = x.numpy().copy()
        changed[list(rows), list(columns)] = values
        return torch.from_numpy(changed)
