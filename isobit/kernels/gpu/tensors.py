"""Tensors of a library on a GPU: static buffers for the inputs of a step, the KV cache, chosen rows and values.

A step's integers go up in one copy from pinned memory into buffers whose addresses never change, so that a captured
graph can read them. Nothing is computed here; only `take_values` waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import numpy as np
import numpy.typing as npt
import torch

from isobit.kernels.interface import TORCH_DTYPES, AttentionShape, StepArrays

__all__ = ["GpuTensors", "StepBuffers"]

_ALIGN = 64  # int32 entries: every array starts on a 256-byte boundary


class StepBuffers:
    """int32 arrays by name, each of a fixed largest size, in one device tensor with a pinned twin on the host."""

    def __init__(self, sizes: dict[str, int], device: torch.device) -> None:
        self._starts: dict[str, int] = {}
        end = 0
        for name, size in sizes.items():
            self._starts[name] = end
            end += -(-size // _ALIGN) * _ALIGN
        self._sizes = sizes
        self._device = torch.zeros(end, dtype=torch.int32, device=device)
        self._pinned = torch.zeros(end, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._host = self._pinned.numpy()
        self._used = 0
        self._copied: torch.cuda.Event | None = torch.cuda.Event() if device.type == "cuda" else None

    def begin(self) -> None:
        """Start filling the next step: waits until the last step's copy has left the pinned twin."""
        if self._copied is not None:
            self._copied.synchronize()
        self._used = 0

    def put(self, name: str, values: npt.NDArray[np.int32]) -> torch.Tensor:
        """Fill the front of an array and return its view on the device, shaped as `values`."""
        flat = np.ascontiguousarray(values).reshape(-1)
        assert flat.size <= self._sizes[name], f"{name} holds {self._sizes[name]} integers, a step has {flat.size}"
        start = self._starts[name]
        end = start + flat.size
        self._host[start:end] = flat
        self._used = max(self._used, end)
        return self._device[start:end].view(values.shape)

    def send(self) -> None:
        """Copy what was put, without waiting."""
        self._device[: self._used].copy_(self._pinned[: self._used], non_blocking=True)
        if self._copied is not None:
            self._copied.record()


def step_sizes(max_rows: int, max_requests: int, max_pages: int) -> dict[str, int]:
    """Largest sizes of the arrays of a step."""
    sizes = dict.fromkeys((spec.name for spec in fields(StepArrays)), max_rows)
    sizes.update(query_starts=max_requests + 1, start_positions=max_requests, page_tables=max_requests * max_pages)
    return sizes


class GpuTensors:
    """The part of a KernelLibrary that moves data, on a GPU."""

    device: torch.device

    def upload(self, values: torch.Tensor) -> torch.Tensor:
        """A copy on the device."""
        return values.to(self.device)

    def new_kv_layers(
        self, num_layers: int, num_pages: int, page_size: int, shape: AttentionShape, kv_dtype: str
    ) -> tuple[torch.Tensor, ...]:
        """Layers [2 (K, V), num_pages, KV, page_size, D], taken at once."""
        size = (num_layers, 2, num_pages, shape.num_kv_heads, page_size, shape.head_dim)
        return torch.empty(size, dtype=TORCH_DTYPES[kv_dtype], device=self.device).unbind(0)

    def take_rows(self, x: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Copy of chosen rows of [M, ...]."""
        return x.index_select(0, self._indices(rows))

    def take_values(self, x: torch.Tensor, rows: Sequence[int], columns: Sequence[int]) -> npt.NDArray[np.float32]:
        """x[rows[i], columns[i]] of [M, N], on the host; waits for the device."""
        values: npt.NDArray[np.float32] = x[self._indices(rows), self._indices(columns)].cpu().numpy()
        return values

    def put_values(
        self, x: torch.Tensor, rows: Sequence[int], columns: Sequence[int], values: npt.NDArray[np.float32]
    ) -> torch.Tensor:
        """A copy of [M, N] in which x[rows[i], columns[i]] is values[i]."""
        changed = x.clone()
        changed[self._indices(rows), self._indices(columns)] = torch.from_numpy(values).to(self.device)
        return changed

    def _indices(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int64).to(self.device)
