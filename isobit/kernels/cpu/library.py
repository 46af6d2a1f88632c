"""The Python face of the C kernels: torch CPU tensors in and out, one ctypes call a method.

Does not know Orders, models or requests, and validates only what is cheap: shapes and dtypes are fixed when a model is
loaded. Invariant: `name`, `num_threads` and `schedule` choose how something is computed, never what.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from isobit.kernels.cpu.build import file_digest, find_library, source_hash
from isobit.kernels.cpu.features import available_cores, choose_library
from isobit.kernels.cpu.ladder import TimedLinear, choose_ladder
from isobit.kernels.cpu.tensors import HostTensors
from isobit.kernels.interface import AttentionInputs, AttentionShape, Draws, HeadNorms, Ladder, RopeTables
from isobit.order import LinearOrder, Order

__all__ = ["CpuLibrary", "PackedLinear"]

MAX_THREADS = 64  # of src/pool.h
LINEAR_SCHEDULES = {"stream": 0, "tile": 1, "stream-dp": 2, "tile-dp": 3}  # enum schedule of src/linear.c
ATTENTION_SCHEDULES = {"auto": 0, "tiles": 1, "pages": 2}  # enum of src/attention.c

_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
_DOUBLE, _WORD = ctypes.c_double, ctypes.c_uint64
_DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
# name -> (result, arguments); the C definitions say what each is
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "isobit_packed_bytes": (_LONG, [_LONG, _LONG, _INT]),
    "isobit_pack_linear": (None, [_POINTER, _POINTER, _LONG, _LONG, _INT, _INT]),
    "isobit_embedding": (_LONG, [_POINTER] * 3 + [_LONG] * 3 + [_INT] * 2),
    "isobit_linear": (_INT, [_POINTER] * 5 + [_LONG] * 3 + [_INT] * 4),
    "isobit_linear_schedules": (_INT, [_INT, _INT]),
    "isobit_rms_norm": (None, [_POINTER] * 3 + [_LONG] * 2 + [_FLOAT, _INT]),
    "isobit_silu_mul": (None, [_POINTER] * 2 + [_LONG] * 2 + [_INT]),
    "isobit_rope_and_cache": (None, [_POINTER] * 9 + [_LONG] * 2 + [_FLOAT] + [_INT] * 7),
    "isobit_attention": (
        _INT,
        [_POINTER] * 3 + [_INT] + [_POINTER] * 3 + [_LONG] * 3 + [_INT] * 3 + [_FLOAT] + [_INT] * 2,
    ),
    "isobit_argmax": (None, [_POINTER] + [_LONG] * 2 + [_POINTER] * 2 + [_INT]),
    "isobit_logprobs": (None, [_POINTER] + [_LONG] * 2 + [_POINTER] * 2 + [_INT]),
    "isobit_top_logits": (_INT, [_POINTER] + [_LONG] * 2 + [_POINTER]),
    "isobit_sample": (_INT, [_POINTER, _LONG, _DOUBLE, _LONG, _DOUBLE, _DOUBLE, _WORD, _WORD, _INT]),
    "isobit_gumbel_from_word": (_DOUBLE, [_WORD]),
}


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A weight [n, k] in the layout of the library that packed it, and its bias.

    `weight_dtype` is "float32" or "bfloat16"; `data` holds the packed bytes; the last three are what C is given.
    """

    n: int
    k: int
    weight_dtype: str
    data: torch.Tensor
    bias: torch.Tensor | None
    is_bf16: bool
    data_pointer: int
    bias_pointer: int | None


class CpuLibrary(HostTensors):
    """The kernels of one instruction set. All tensors are contiguous CPU tensors; activations are float32 [M, ...].

    `name` is "avx512bf16", "avx512", "avx2", "neon" or "scalar". Raises ValueError when this CPU cannot run `name` or
    `num_threads` is out of range, KernelBuildError when the library is neither there nor can be compiled.
    """

    def __init__(self, name: str = "auto", num_threads: int | None = None) -> None:
        if num_threads is None:
            num_threads = min(available_cores(), MAX_THREADS)
        if not 1 <= num_threads <= MAX_THREADS:
            raise ValueError(f"num_threads={num_threads}: from 1 to {MAX_THREADS} is supported")
        self.name = choose_library(name)
        self.num_threads = num_threads
        path = find_library(self.name)
        self.source_hash = f"{source_hash()} {file_digest(path)}"  # what another compiler made must be proven anew
        self._c = ctypes.CDLL(str(path))
        for function, (result, arguments) in _SIGNATURES.items():
            symbol = getattr(self._c, function)
            symbol.restype, symbol.argtypes = result, arguments

    # ---- linear

    def make_weight(self, order: Order, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
        """`pack_linear`: on a CPU the handle is the same for every Order."""
        return self.pack_linear(weight, bias)

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
        """weight [N, K] float32 or bfloat16, bias [N] float32. The packed weight is a copy; the bias is kept."""
        dtype = _DTYPE_NAMES.get(weight.dtype)
        if dtype is None or weight.dim() != 2 or weight.numel() == 0:
            raise ValueError(f"a weight is [N, K] of float32 or bfloat16, got {list(weight.shape)} of {weight.dtype}")
        (n, k), is_bf16 = weight.shape, dtype == "bfloat16"
        if bias is not None:
            if bias.shape != (n,) or bias.dtype != torch.float32:
                raise ValueError(f"the bias of a weight {[n, k]} is [{n}] float32, got {list(bias.shape)} {bias.dtype}")
            bias = bias.contiguous()
        weight = weight.contiguous()
        data = torch.empty(self._c.isobit_packed_bytes(n, k, is_bf16), dtype=torch.uint8)
        self._c.isobit_pack_linear(weight.data_ptr(), data.data_ptr(), n, k, is_bf16, self.num_threads)
        pointer = None if bias is None else bias.data_ptr()
        return PackedLinear(n, k, dtype, data, bias, is_bf16, data.data_ptr(), pointer)

    def linear_schedules(self, weight_dtype: str, activation_dtype: str) -> tuple[str, ...]:
        """Schedules of `linear` for a pair of dtypes; all give the same bits. None for a pair without an Order."""
        if weight_dtype == "float32" and activation_dtype == "bfloat16":
            return ()
        bits = self._c.isobit_linear_schedules(weight_dtype == "bfloat16", activation_dtype == "bfloat16")
        return tuple(name for name, number in LINEAR_SCHEDULES.items() if bits >> number & 1)

    def linear_ladder(self, order: Order, admitted: Sequence[str]) -> Ladder:
        """(most rows, schedule) among the `admitted`: stream the weight for a few rows, tiles for many."""
        assert isinstance(order, LinearOrder), f"{self.name} has no linear for {order}"

        def make_linear(weight: torch.Tensor) -> TimedLinear:
            packed = self.pack_linear(weight)
            return lambda x, schedule: self.linear(x, packed, order.activation_dtype, schedule)

        return choose_ladder(admitted, make_linear, order.weight_dtype)

    def linear(
        self,
        x: torch.Tensor,
        packed: PackedLinear,
        activation_dtype: str,
        schedule: str,
        addend: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [M, K], addend [M, N] -> [M, N] (LinearOrder); `out` may be `addend`, not `x`.

        "stream" is fastest for a few rows, "tile" for many. Raises ValueError for a schedule this library lacks.
        """
        rows, k = x.shape
        assert k == packed.k and x.is_contiguous(), f"x {list(x.shape)} {x.stride()} for a weight of K={packed.k}"
        if out is None:
            out = torch.empty((rows, packed.n), dtype=torch.float32)
        status = self._c.isobit_linear(
            x.data_ptr(), packed.data_pointer, packed.bias_pointer, None if addend is None else addend.data_ptr(),
            out.data_ptr(), rows, packed.n, k, packed.is_bf16, activation_dtype == "bfloat16",
            LINEAR_SCHEDULES.get(schedule, -1), self.num_threads,
        )  # fmt: skip
        if status:
            self._refuse_linear(status, packed, activation_dtype, schedule)
        return out

    def _refuse_linear(self, status: int, packed: PackedLinear, activation_dtype: str, schedule: str) -> None:
        if status == -1:
            raise MemoryError("no memory to pack the activations of a linear")
        offered = ", ".join(self.linear_schedules(packed.weight_dtype, activation_dtype)) or "none"
        raise ValueError(
            f"linear on {self.name} with {packed.weight_dtype} weights and {activation_dtype} activations has no "
            f"schedule {schedule!r}; it has: {offered}"
        )

    def embedding(self, packed: PackedLinear, ids: torch.Tensor) -> torch.Tensor:
        """Rows `ids` (int32 [M]) of the weight, float32 [M, K]. Raises ValueError for an id outside [0, N)."""
        assert ids.dtype == torch.int32 and ids.is_contiguous(), f"ids are contiguous int32, got {ids.dtype}"
        rows = ids.shape[0]
        out = torch.empty((rows, packed.k), dtype=torch.float32)
        bad = self._c.isobit_embedding(
            packed.data_pointer, ids.data_ptr(), out.data_ptr(), rows, packed.n, packed.k, packed.is_bf16,
            self.num_threads,
        )  # fmt: skip
        if bad >= 0:
            raise ValueError(f"token id {int(ids[bad])} is outside [0, {packed.n})")
        return out

    # ---- pointwise

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x [M, D], weight [D] float32 -> [M, D] (NormOrder)."""
        rows, width = x.shape
        assert weight.shape[0] == width and x.is_contiguous(), f"x {list(x.shape)}, weight {list(weight.shape)}"
        out = torch.empty((rows, width), dtype=torch.float32)
        self._c.isobit_rms_norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, width, eps, self.num_threads)
        return out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up [M, 2F] (gate, then up) -> [M, F] (PointwiseOrder)."""
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        assert gate_up.is_contiguous(), f"gate_up has strides {gate_up.stride()}"
        out = torch.empty((rows, width), dtype=torch.float32)
        self._c.isobit_silu_mul(gate_up.data_ptr(), out.data_ptr(), rows, width, self.num_threads)
        return out

    def rope_and_cache(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        rope: RopeTables,
        head_norms: HeadNorms | None,
        kv_layer: torch.Tensor,
        shape: AttentionShape,
    ) -> torch.Tensor:
        """Norm the heads of q and k if asked, rotate them, write K and V to the cache; returns q [M, H*D].

        qkv [M, (H + 2 KV) * D]; positions, slots int32 [M], slot = physical page * 64 + offset. NormOrder,
        PointwiseOrder.
        """
        rows, heads, kv_heads, width = qkv.shape[0], shape.num_heads, shape.num_kv_heads, shape.head_dim
        assert qkv.shape[1] == (heads + 2 * kv_heads) * width and qkv.is_contiguous(), list(qkv.shape)
        assert positions.dtype == slots.dtype == torch.int32, f"{positions.dtype}, {slots.dtype}: int32 is needed"
        out = torch.empty((rows, heads * width), dtype=torch.float32)
        q_norm, k_norm, eps = (None, None, 0.0) if head_norms is None else (
            head_norms.q.data_ptr(), head_norms.k.data_ptr(), head_norms.eps
        )  # fmt: skip
        self._c.isobit_rope_and_cache(
            qkv.data_ptr(), positions.data_ptr(), slots.data_ptr(), rope.cos.data_ptr(), rope.sin.data_ptr(),
            q_norm, k_norm, out.data_ptr(), kv_layer.data_ptr(), rows, kv_layer.shape[1], eps, heads, kv_heads, width,
            2 * rope.cos.shape[1], rope.interleaved, kv_layer.dtype == torch.bfloat16, self.num_threads,
        )  # fmt: skip
        return out

    # ---- attention

    def attention(
        self,
        q: torch.Tensor,
        kv_layer: torch.Tensor,
        inputs: AttentionInputs,
        shape: AttentionShape,
        scale: float,
        schedule: str = "auto",
    ) -> torch.Tensor:
        """Causal attention of q [M, H*D] over paged K and V -> [M, H*D] (AttentionOrder)."""
        query_starts, start_positions, page_tables = inputs.query_starts, inputs.start_positions, inputs.page_tables
        num_requests, num_tables = page_tables.shape
        width = shape.num_heads * shape.head_dim
        assert q.shape[1] == width and q.is_contiguous(), f"q {list(q.shape)}, strides {q.stride()}"
        assert kv_layer.is_contiguous() and page_tables.is_contiguous(), "the pages and page tables are contiguous"
        assert query_starts.shape[0] == num_requests + 1, f"{query_starts.shape[0]} starts, {num_requests} requests"
        for indices in (query_starts, start_positions, page_tables):
            assert indices.dtype == torch.int32, f"{indices.dtype}: int32 is needed"
        out = torch.empty_like(q)
        status = self._c.isobit_attention(
            q.data_ptr(), out.data_ptr(), kv_layer.data_ptr(), kv_layer.dtype == torch.bfloat16,
            query_starts.data_ptr(), start_positions.data_ptr(), page_tables.data_ptr(), num_requests, num_tables,
            kv_layer.shape[1], shape.num_heads, shape.num_kv_heads, shape.head_dim, scale,
            ATTENTION_SCHEDULES[schedule], self.num_threads,
        )  # fmt: skip
        if status:
            raise MemoryError("no memory for the scores of attention")
        return out

    # ---- from logits to tokens

    def argmax(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """logits [R, V] -> (lowest id of the largest value int32 [R], bool [R]: no NaN or infinity in the row)."""
        rows, vocab_size = logits.shape
        assert logits.is_contiguous(), f"logits have strides {logits.stride()}"
        ids, finite = torch.empty(rows, dtype=torch.int32), torch.empty(rows, dtype=torch.bool)
        self._c.isobit_argmax(logits.data_ptr(), rows, vocab_size, ids.data_ptr(), finite.data_ptr(), self.num_threads)
        return ids, finite

    def logprobs(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """logits [R, V] -> (maxima float32 [R], lse float64 [R]); logprob i is float32(float64(x[i]) - lse)."""
        rows, vocab_size = logits.shape
        assert logits.is_contiguous(), f"logits have strides {logits.stride()}"
        maxima, lse = torch.empty(rows, dtype=torch.float32), torch.empty(rows, dtype=torch.float64)
        self._c.isobit_logprobs(
            logits.data_ptr(), rows, vocab_size, maxima.data_ptr(), lse.data_ptr(), self.num_threads
        )
        return maxima, lse

    def top_logits(self, row: torch.Tensor, n: int) -> torch.Tensor:
        """Ids int32 [n] of the n largest of a row [V], by (value descending, id ascending); NaN comes last."""
        assert 0 <= n <= row.shape[0] and row.is_contiguous(), f"{n} of {list(row.shape)}, strides {row.stride()}"
        ids = torch.empty(n, dtype=torch.int32)
        if n > 0 and self._c.isobit_top_logits(row.data_ptr(), row.shape[0], n, ids.data_ptr()):
            raise MemoryError("no memory to sort a row of logits")
        return ids

    def sample(
        self, row: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float, seed: int, position: int
    ) -> int:
        """Token drawn from a row [V] of adjusted logits for absolute `position` (SamplingOrder); temperature > 0."""
        vocab_size = row.shape[0]
        assert temperature > 0 and row.is_contiguous(), f"temperature {temperature}, strides {row.stride()}"
        token: int = self._c.isobit_sample(
            row.data_ptr(), vocab_size, temperature, min(top_k, vocab_size), top_p, min_p, seed, position,
            self.num_threads,
        )  # fmt: skip
        if token < 0:
            raise MemoryError("no memory to draw a token")
        return token

    def top_rows(self, logits: torch.Tensor, n: int) -> torch.Tensor:
        """`top_logits` of each row of [R, V], int32 [R, n]."""
        return torch.stack([self.top_logits(row, n) for row in logits])

    def sample_rows(self, logits: torch.Tensor, draws: Draws) -> torch.Tensor:
        """`sample` of each row of [R, V], int32 [R]."""
        settings = zip(*(getattr(draws, spec.name).tolist() for spec in fields(draws)), strict=True)
        drawn = [self.sample(row, *of_row) for row, of_row in zip(logits, settings, strict=True)]
        return torch.tensor(drawn, dtype=torch.int32)

    def gumbel_from_word(self, word: int) -> float:
        """The sampling noise that a 64-bit hash stands for."""
        noise: float = self._c.isobit_gumbel_from_word(word)
        return noise
