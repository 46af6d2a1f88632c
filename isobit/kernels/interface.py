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

import torch

__all__ = ["TORCH_DTYPES", "AttentionShape", "HeadNorms", "KernelLibrary", "Ladder", "RopeTables"]

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}  # by the names Orders use

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


class KernelLibrary(Protocol):
    """The kernels of one technology on one device; `registry.py` lists its ops, the Orders say what they compute.

    Tensors are contiguous and on the library's device; activations are float32 [M, ...]. `num_threads` may be set.
    """

    name: str
    source_hash: str
    num_threads: int

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        """weight [N, K] float32 or bfloat16, bias float32 [N] -> a handle for `linear` and `embedding`."""

    def linear_schedules(self, weight_dtype: str, activation_dtype: str) -> tuple[str, ...]:
        """Schedules of `linear` for a pair of dtypes; empty for a pair without an Order."""

    def linear_ladder(self, weight_dtype: str, activation_dtype: str, admitted: Sequence[str]) -> Ladder:
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
        """x [M, K], addend [M, N] -> [M, N] (LinearOrder); `out` may be `addend`, not `x`."""

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

        qkv [M, (H + 2 KV) * D]; positions, slots int32 [M], slot = physical page * page size + offset; kv_layer as
        `kv_cache.KVCache` lays it out. NormOrder, PointwiseOrder.
        """

    def attention(
        self,
        q: torch.Tensor,
        kv_layer: torch.Tensor,
        query_starts: torch.Tensor,
        start_positions: torch.Tensor,
        page_tables: torch.Tensor,
        shape: AttentionShape,
        scale: float,
        schedule: str = "auto",
    ) -> torch.Tensor:
        """Causal attention of q [M, H*D] over paged K and V -> [M, H*D] (AttentionOrder).

        Rows query_starts[b] .. query_starts[b + 1] (int32 [B + 1]) belong to request b, the first of them at position
        start_positions[b] (int32 [B]); page_tables int32 [B, pages]. "auto": the library chooses among its schedules.
        """

    def argmax(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """logits [R, V] -> (lowest id of the largest value int32 [R], bool [R]: no NaN or infinity in the row)."""

    def logprobs(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """logits [R, V] -> (maxima float32 [R], lse float64 [R]) (LogprobsOrder)."""

    def top_logits(self, row: torch.Tensor, n: int) -> torch.Tensor:
        """Ids int32 [n] of the n largest of a row [V], by (value descending, id ascending)."""

    def sample(
        self, row: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float, seed: int, position: int
    ) -> int:
        """Token drawn from a row [V] of adjusted logits for absolute `position` (SamplingOrder); temperature > 0."""
