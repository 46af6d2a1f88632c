"""cuBLASLt without split-K as schedules of MmaLinearOrder, through ctypes on a handle of its own.

An algorithm is asked for once per (n, k, output, row bucket), at the bucket's most rows, and used for the whole bucket.
Touches no torch setting. Knows no admission: that a split was forbidden proves nothing, bytes do. Invariant: nothing
here depends on how many rows there are, except the bucket and the sizes handed to the library.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import sys
from collections.abc import Callable
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p, sizeof
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from isobit.kernels.interface import TORCH_DTYPES
from isobit.kernels.triton.linear_call import ALIGNMENT, LinearWorkspace, checked_output
from isobit.order import MmaLinearOrder

__all__ = ["BUCKETS", "CublasLt", "VendorSchedule"]

BUCKETS = (16, 32, 64, 128, 256, 512, 1024, 2048, sys.maxsize)  # most rows of each
_LARGEST_ASKED = 4096  # rows the algorithm of the last bucket is asked for
_RANKS = 3  # algorithms of a bucket worth proving and timing
_LIBRARIES = ("libcublasLt.so.13", "libcublasLt.so.12")
_ONE, _ZERO = c_float(1.0), c_float(0.0)
# from cublasLt.h: types, then attributes of matmul descriptors, preferences and algorithms
_CUDA_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
_COMPUTE_32F, _TRANSPOSE = 68, 1
_DESC_TRANSA = 3
_PREF_MAX_WORKSPACE, _PREF_REDUCTION_SCHEMES, _PREF_ALIGNMENTS = 1, 3, (5, 6, 7, 8)
_ALGO_SPLIT_K = 2
_ALL_REDUCTION_SCHEMES, _NO_REDUCTION_SCHEME = 7, 0


@dataclass(frozen=True)
class VendorSchedule:
    """The `rank`-th best algorithm, by the library's own estimate, for min_rows..max_rows rows."""

    name: str
    min_rows: int
    max_rows: int
    rank: int = 0


class _Algorithm(ctypes.Structure):
    _fields_ = (("data", c_uint64 * 8),)


class _Heuristic(ctypes.Structure):
    _fields_ = (
        ("algorithm", _Algorithm), ("workspace", c_size_t), ("state", c_int), ("waves", c_float),
        ("reserved", c_int * 4),
    )  # fmt: skip


class CublasLt:
    """A handle of cuBLASLt and the algorithms chosen so far. `split_k` is for tests: a control that must be caught."""

    def __init__(self, device: torch.device, path: str | None = None, split_k: bool = False) -> None:
        """Raises ValueError where the library is not found or does not start."""
        self._library = _load(path)
        self._device = device
        self._schemes = _ALL_REDUCTION_SCHEMES if split_k else _NO_REDUCTION_SCHEME
        self._workspace_bytes = (32 << 20) if split_k else 0  # without one no faster algorithm was missing
        self._handle = c_void_p()
        with torch.cuda.device(device):
            self._call("cublasLtCreate", byref(self._handle))
        self._algorithms: dict[Any, list[_Heuristic]] = {}
        self._layouts: dict[Any, c_void_p] = {}
        self._descriptor = c_void_p()
        self._call("cublasLtMatmulDescCreate", byref(self._descriptor), _COMPUTE_32F, _CUDA_TYPES[torch.float32])
        transpose = c_int32(_TRANSPOSE)
        self._call("cublasLtMatmulDescSetAttribute", self._descriptor, _DESC_TRANSA, byref(transpose), c_size_t(4))

    @property
    def version(self) -> int:
        """As cublasLtGetVersion tells it, such as 130100."""
        return int(self._library.cublasLtGetVersion())

    def schedules(self, order: MmaLinearOrder, ranks: int = _RANKS) -> tuple[VendorSchedule, ...]:
        """One schedule a bucket and rank; none with K slices or a bias, or where rows are not whole 16 bytes."""
        if order.k_slices > 1 or order.has_bias or order.k % 8 or order.n % 8:
            return ()
        found, least = [], 1
        for most in BUCKETS:
            rows = f"{least}-{most}" if most != sys.maxsize else f"{least}+"
            for rank, choice in enumerate(self._choose(order, most)[:ranks]):
                # The name tells algorithm and version: what another start is recommended must be proven anew.
                digest = hashlib.sha256(f"{self.version} ".encode() + bytes(choice.algorithm)).hexdigest()[:8]
                found.append(VendorSchedule(f"cublaslt {rows} #{rank + 1} {digest}", least, most, rank))
            least = most + 1
        return tuple(found)

    def split_k(self, order: MmaLinearOrder, schedule: VendorSchedule) -> int:
        """How many parts the schedule's algorithm cuts K into, as the library tells it."""
        parts, written = c_int32(), c_size_t()
        algorithm = self._choose(order, schedule.max_rows)[schedule.rank].algorithm
        get = "cublasLtMatmulAlgoConfigGetAttribute"
        self._call(get, byref(algorithm), _ALGO_SPLIT_K, byref(parts), c_size_t(4), byref(written))
        return parts.value

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        order: MmaLinearOrder,
        schedule: VendorSchedule,
        workspace: LinearWorkspace,
        bias: torch.Tensor | None = None,
        addend: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `isobit.kernels.triton.linear.linear`. Raises ValueError for a bias: the library adds none in float32."""
        if bias is not None:
            raise ValueError(f"schedule {schedule.name!r} takes no bias; take one of linear_schedules() under {order}")
        out = checked_output(x, weight, order, bias, addend, out)
        if x.shape[0]:
            self._run(x, weight, order, schedule, workspace, addend, out)
        return out

    def _run(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        order: MmaLinearOrder,
        schedule: VendorSchedule,
        workspace: LinearWorkspace,
        addend: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """out^T = weight . x^T in the library's column-major view."""
        chosen = self._choose(order, schedule.max_rows)[schedule.rank]
        workspace.reserve(chosen.workspace // 4, 0)
        rows = x.shape[0]
        w_layout = self._layout(weight.dtype, order.k, order.n, order.k)
        x_layout = self._layout(x.dtype, order.k, rows, x.stride(0))
        layout = self._layout(out.dtype, order.n, rows, order.n)
        source = out if addend is None else addend
        self._call(
            "cublasLtMatmul", self._handle, self._descriptor, byref(_ONE),
            c_void_p(weight.data_ptr()), w_layout, c_void_p(x.data_ptr()), x_layout,
            byref(_ZERO if addend is None else _ONE), c_void_p(source.data_ptr()), layout,
            c_void_p(out.data_ptr()), layout, byref(chosen.algorithm), c_void_p(workspace.partials.data_ptr()),
            c_size_t(chosen.workspace), c_void_p(torch.cuda.current_stream(self._device).cuda_stream),
        )  # fmt: skip

    def _choose(self, order: MmaLinearOrder, most: int) -> list[_Heuristic]:
        """The library's ranking at the most rows of a bucket, whether there will be an addend or not."""
        key = (order, most)
        if key not in self._algorithms:
            self._algorithms[key] = self._ask(order, min(most, _LARGEST_ASKED))
        return self._algorithms[key]

    def _ask(self, order: MmaLinearOrder, rows: int, wanted: int = 8) -> list[_Heuristic]:
        preference = c_void_p()
        self._call("cublasLtMatmulPreferenceCreate", byref(preference))
        settings: list[tuple[int, Any]] = [
            (_PREF_MAX_WORKSPACE, c_uint64(self._workspace_bytes)), (_PREF_REDUCTION_SCHEMES, c_uint32(self._schemes))
        ]  # fmt: skip
        settings += [(which, c_uint32(ALIGNMENT)) for which in _PREF_ALIGNMENTS]
        for which, value in settings:
            size = c_size_t(sizeof(value))
            self._call("cublasLtMatmulPreferenceSetAttribute", preference, which, byref(value), size)
        weight_dtype, output_dtype = TORCH_DTYPES[order.weight_dtype], TORCH_DTYPES[order.output_dtype]
        layout = self._layout(output_dtype, order.n, rows, order.n)
        results, count = (_Heuristic * wanted)(), c_int()
        status = self._library.cublasLtMatmulAlgoGetHeuristic(
            self._handle, self._descriptor, self._layout(weight_dtype, order.k, order.n, order.k),
            self._layout(weight_dtype, order.k, rows, order.k), layout, layout, preference, wanted, results,
            byref(count),
        )  # fmt: skip
        self._call("cublasLtMatmulPreferenceDestroy", preference)
        return [result for result in results[: count.value] if result.state == 0] if status == 0 else []

    def _layout(self, dtype: torch.dtype, rows: int, columns: int, stride: int) -> c_void_p:
        key = (dtype, rows, columns, stride)
        if key not in self._layouts:
            layout = c_void_p()
            sizes = (c_uint64(rows), c_uint64(columns), c_int64(stride))
            self._call("cublasLtMatrixLayoutCreate", byref(layout), _CUDA_TYPES[dtype], *sizes)
            self._layouts[key] = layout
        return self._layouts[key]

    def _call(self, name: str, *arguments: Any) -> None:
        function: Callable[..., int] = getattr(self._library, name)
        status = function(*arguments)
        if status:
            raise RuntimeError(f"{name} of {self._library._name} returned status {status}")


def _load(path: str | None) -> ctypes.CDLL:
    """The library that torch has loaded, or one on the loader's path."""
    tried = [path] if path else [*_mapped(), *_LIBRARIES]
    for name in tried:
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        library.cublasLtGetVersion.restype = c_size_t
        return library
    raise ValueError(f"no cuBLASLt: none of {', '.join(tried)} can be loaded; install nvidia-cublas, or go without")


def _mapped() -> list[str]:
    maps = Path("/proc/self/maps")
    text = maps.read_text() if maps.exists() else ""
    return sorted(set(re.findall(r"/\S*/libcublasLt\.so\.\d+\S*", text)), reverse=True)
