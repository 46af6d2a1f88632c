"""Tensors of a library on a GPU: static buffers for the inputs of a step, the KV cache, chosen rows and values.

A step's integers go up in one copy from pinned memory into buffers whose addresses never change, so that a captured
graph can read them. Nothing is computed here; only `take_values` waits for the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from isobit.kernels.interface import TORCH_DTYPES, AttentionShape

__all__ = ["GpuTensors", "StepBuffers"]

_ALIGN = 64  # int32 entries: every array starts on a 256-byte boundary


class StepBuffers:
    """int32 arrays by name in one device tensor with a pinned twin on the host.

    Addresses change only when an array outgrows its room; `reserve` takes the room that a captured graph relies on.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._room: dict[str, int] = {}
        self._starts: dict[str, int] = {}
        self._copied = torch.cuda.Event() if device.type == "cuda" else None
        self._allocate()

    def reserve(self, sizes: Mapping[str, int]) -> None:
        """Room for at least this many integers by name."""
        if any(size > self._room.get(name, 0) for name, size in sizes.items()):
            grown = {name: 1 << max(0, size - 1).bit_length() for name, size in sizes.items()}
            self._room = {name: max(grown.get(name, 0), self._room.get(name, 0)) for name in {**self._room, **grown}}
            self._allocate()

    def send(self, arrays: Mapping[str, npt.NDArray[np.int32]]) -> dict[str, torch.Tensor]:
        """Copy a step's arrays up without waiting; views on the device, shaped as the arrays, good until the next."""
        self.reserve({name: values.size for name, values in arrays.items()})
        if self._copied is not None:
            self._copied.synchronize()  # the last step's copy has left the pinned twin
        views, used = {}, 0
        for name, values in arrays.items():
            start = self._starts[name]
            end = start + values.size
            self._host[start:end] = values.reshape(-1)
            views[name] = self._device[start:end].view(values.shape)
            used = max(used, end)
        self._device[:used].copy_(self._pinned[:used], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        return views

    def _allocate(self) -> None:
        end = 0
        for name, size in self._room.items():
            self._starts[name] = end
            end += -(-size // _ALIGN) * _ALIGN
        self._device = torch.zeros(end, dtype=torch.int32, device=self.device)
        self._pinned = torch.zeros(end, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        self._host = self._pinned.numpy()


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
