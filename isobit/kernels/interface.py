"""What a library of kernels offers, whatever it is made of: one method an op, and the small objects they are given.

`ops.py` and the probes know this interface only, so another technology is another class with these methods, its
declarations (`registry.Kernel`) and its Orders. How a packed weight lies in memory is the library's own business. Does
not know models or requests. Invariant: nothing here but tensors and settings that are part of the op; what may not move
a bit (`name`, `num_threads`, `schedule`) is never needed to say what is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from isobit.order import Order

__all__ = [
    "TORCH_DTYPES", "AttentionInputs", "AttentionShape", "Draws", "HeadNorms", "KernelLibrary", "Ladder", "RopeTables",
    "StepArrays",
]  # fmt: skip

# by the names Orders use
TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Ladder = tuple[tuple[int, str], ...]  # (most rows, schedule), ascending; the last step takes any number of rows


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads of grouped-query attention: query head h reads key/value head h // (num_heads / num_kv_heads)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class RopeTables:
    """cos and sin, float32 [positions, rotary_dim / 2]; pairs are (i, i + rotary_dim / 2), or (2i, 2i + 1)."""

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMSNorm of every q and k head before rope: weights float32 [head_dim]."""

    q: torch.Tensor
    k: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class StepArrays:
    """Where the rows of a step live, on the host: int32, contiguous.

    token_ids [M], positions [M], slots [M] (physical page * page size + offset), query_starts [B+1] (rows
    query_starts[b] .. query_starts[b + 1] belong to request b), start_positions [B] (of the request's first row),
    page_tables [B, pages].
    """

    token_ids: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int32]
    slots: npt.NDArray[np.int32]
    query_starts: npt.NDArray[np.int32]
    start_positions: npt.NDArray[np.int32]
    page_tables: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """The arrays of a step as tensors on the library's device; `schedule` is the library's own, made from them."""

    positions: torch.Tensor
    slots: torch.Tensor
    query_starts: torch.Tensor
    start_positions: torch.Tensor
    page_tables: torch.Tensor
    schedule: Any = None


@dataclass(frozen=True, slots=True)
class Draws:
    """Settings of `sample_rows`, one entry a row, on the host; temperature > 0, position absolute."""

    temperature: npt.NDArray[np.float64]
    top_k: npt.NDArray[np.int64]
    top_p: npt.NDArray[np.float64]
    min_p: npt.NDArray[np.float64]
    seed: npt.NDArray[np.uint64]
    position: npt.NDArray[np.int64]


class KernelLibrary(Protocol):
    """The kernels of one technology on one device; `registry.py` lists its ops, the Orders say what they compute.

    Tensors are contiguous and on the library's device. The residual stream, linears added to it and logits are float32
    [M, ...]; what a linear reads is float32 too, or already in the activations' dtype. `num_threads` may be set.
    """

    name: str
    source_hash: str
    num_threads: int
    device: torch.device

    def upload(self, values: torch.Tensor) -> torch.Tensor:
        """A host tensor on the library's device; itself where that is the host."""

    def begin_step(self, arrays: StepArrays) -> tuple[torch.Tensor, AttentionInputs]:
        """(token_ids int32 [M], attention inputs) on the device; valid until the next step begins."""

    def new_kv_layers(
        self, num_layers: int, num_pages: int, page_size: int, shape: AttentionShape, kv_dtype: str
    ) -> tuple[torch.Tensor, ...]:
        """The KV cache of each layer, in the layout that this library's `rope_and_cache` and `attention` share."""

    def make_weight(self, order: Order, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        """weight [N, K] in the Order's dtype, bias float32 [N] -> a handle for `linear` and `embedding`."""

    def linear_ladder(self, order: Order, admitted: Sequence[str]) -> Ladder:
        """Which of the `admitted` schedules (at least one) to run for how many rows: a matter of speed alone.

        May measure; the answer may differ from start to start and cannot move a bit.
        """

    def linear(
        self,
        x: torch.Tensor,
        packed: Any,
        activation_dtype: str,
        schedule: str,
        addend: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [M, K], addend float32 [M, N] -> [M, N] (the weight's Order); `out` may be `addend`, not `x`."""

    def embedding(self, packed: Any, ids: torch.Tensor) -> torch.Tensor:
        """Rows `ids` (int32 [M]) of the weight, float32 [M, K]. Raises ValueError for an id outside [0, N)."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x [M, D], weight [D] float32 -> [M, D] (NormOrder)."""

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up [M, 2F] (gate, then up) -> [M, F] (PointwiseOrder)."""

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
        """Norm the heads of q and k, rotate them, write K and V to the cache; returns q [M, H*D].

        qkv [M, (H + 2 KV) * D]; positions, slots int32 [M], slot = physical page * page size + offset; kv_layer is one
        of `new_kv_layers`. NormOrder, PointwiseOrder.
        """

    def attention(
        self,
        q: torch.Tensor,
        kv_layer: torch.Tensor,
        inputs: AttentionInputs,
        shape: AttentionShape,
        scale: float,
        schedule: str = "auto",
    ) -> torch.Tensor:
        """Causal attention of q [M, H*D] over paged K and V -> [M, H*D] (AttentionOrder, MmaAttentionOrder).

        "auto": the library chooses among its schedules.
        """

    def argmax(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """logits [R, V] -> (lowest id of the largest value int32 [R], bool [R]: no NaN or infinity in the row).

        The id means nothing beside a NaN.
        """

    def logprobs(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """logits [R, V] -> (maxima float32 [R], lse float64 [R]) (LogprobsOrder)."""

    def top_rows(self, logits: torch.Tensor, n: int) -> torch.Tensor:
        """Ids int32 [R, n] of the n largest of each row of [R, V], by (value descending, id ascending)."""

    def sample_rows(self, logits: torch.Tensor, draws: Draws) -> torch.Tensor:
        """Tokens int32 [R] drawn from rows [R, V] of adjusted logits (SamplingOrder)."""

    def take_rows(self, x: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Copy of chosen rows of [M, ...]."""

    def take_values(self, x: torch.Tensor, rows: Sequence[int], columns: Sequence[int]) -> npt.NDArray[np.float32]:
        """x[rows[i], columns[i]] of a float32 [M, N], on the host."""

    def put_values(
        self, x: torch.Tensor, rows: Sequence[int], columns: Sequence[int], values: npt.NDArray[np.float32]
    ) -> torch.Tensor:
        """A copy of a float32 [M, N] in which x[rows[i], columns[i]] is values[i]; no pair comes twice."""
