"""What models call. Every op runs an admitted (kernel, schedule) of its Order, or nothing runs.

Knows the plan's Orders and the admission table; does not know models, requests or pages. Which schedule runs may look
at the number of rows, because admission proved that the schedules of one Order give equal bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from isobit.kernels.admission import AdmissionTable
from isobit.kernels.interface import (
    TORCH_DTYPES,
    AttentionInputs,
    AttentionShape,
    Draws,
    HeadNorms,
    KernelLibrary,
    Ladder,
    RopeTables,
    StepArrays,
)
from isobit.kernels.logits import LogitChanges, changed_logits, compact_changes, token_logprobs
from isobit.kernels.registry import OPS_OF_ORDER
from isobit.order import LinearOrder, MmaLinearOrder, Order

__all__ = ["AttentionInputs", "Linear", "Ops", "StepArrays"]


@dataclass(frozen=True)
class Linear:
    """A linear layer as its library packed it, its Order, and which admitted schedule runs for how many rows."""

    packed: Any
    order: LinearOrder | MmaLinearOrder
    ladder: Ladder

    def schedule(self, num_rows: int) -> str:
        """The first step of the ladder that takes `num_rows` rows."""
        for most, schedule in self.ladder:
            if num_rows <= most:
                return schedule
        raise AssertionError(f"{self.ladder} has no step for {num_rows} rows")


class Ops:
    """The ops of one model on one device. Construction raises ValueError when an op has no admitted kernel."""

    def __init__(self, library: KernelLibrary, orders: Mapping[str, Order], admitted: AdmissionTable) -> None:
        self.library = library
        self.orders = orders
        self.admitted = admitted
        self._ladders: dict[Order, Ladder] = {}
        for order in dict.fromkeys(orders.values()):
            if isinstance(order, (LinearOrder, MmaLinearOrder)):
                self._ladders[order] = self._ladder(order)
            for op in OPS_OF_ORDER[type(order)]:
                if op != "linear":  # of which the ladder holds admitted schedules only
                    admitted.require_all(op, order, library.name)

    def _ladder(self, order: Order) -> Ladder:
        schedules = self.admitted.require_any("linear", order, self.library.name)
        ladder = self.library.linear_ladder(order, schedules)
        assert {schedule for _, schedule in ladder} <= set(schedules), f"{ladder} leaves the admitted {schedules}"
        return ladder

    # ---- what a model keeps

    def make_linear(
        self, name: str, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor] | None = None
    ) -> Linear:
        """Pack weights [N_i, K], laid one after the other along N and rounded to the Order's dtype, with biases [N_i].

        `name` as in "linear.qkv".
        """
        order = self.orders[name]
        assert isinstance(order, (LinearOrder, MmaLinearOrder)), f"{name} has the Order {order}"
        dtype = TORCH_DTYPES[order.weight_dtype]
        weight = torch.cat([weight.to(dtype) for weight in weights]) if len(weights) > 1 else weights[0].to(dtype)
        bias = None if biases is None else torch.cat([bias.to(torch.float32) for bias in biases])
        return Linear(self.library.make_weight(order, weight.contiguous(), bias), order, self._ladders[order])

    def parameter(self, values: torch.Tensor) -> torch.Tensor:
        """The weights of a norm, or a table: float32 on the device."""
        return self.library.upload(values.to(torch.float32).contiguous())

    def rope_tables(self, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False) -> RopeTables:
        """cos and sin, float32 [positions, rotary_dim / 2], on the device."""
        return RopeTables(self.parameter(cos), self.parameter(sin), interleaved)

    def new_kv_layers(
        self, num_layers: int, num_pages: int, page_size: int, shape: AttentionShape, kv_dtype: str
    ) -> tuple[torch.Tensor, ...]:
        """The KV cache of each layer, laid out as the library's attention reads it."""
        return self.library.new_kv_layers(num_layers, num_pages, page_size, shape, kv_dtype)

    # ---- what a model runs

    def begin_step(self, arrays: StepArrays) -> tuple[torch.Tensor, AttentionInputs]:
        """(token_ids int32 [M], attention inputs) on the device; valid until the next step begins."""
        return self.library.begin_step(arrays)

    def linear(self, x: torch.Tensor, layer: Linear, addend: torch.Tensor | None = None) -> torch.Tensor:
        """x [M, K] -> [M, N]; `addend` float32 [M, N] is added last (LinearOrder, MmaLinearOrder)."""
        schedule = layer.schedule(x.shape[0])
        dtype = layer.order.activation_dtype if isinstance(layer.order, LinearOrder) else layer.order.weight_dtype
        return self.library.linear(x, layer.packed, dtype, schedule, addend)

    def embedding(self, layer: Linear, token_ids: torch.Tensor) -> torch.Tensor:
        """Rows of the packed weight, int32 [M] -> float32 [M, K]."""
        return self.library.embedding(layer.packed, token_ids)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """float32 [M, D] -> [M, D] (NormOrder)."""
        return self.library.rms_norm(x, weight, eps)

    def rope_and_cache(
        self,
        qkv: torch.Tensor,
        inputs: AttentionInputs,
        rope: RopeTables,
        head_norms: HeadNorms | None,
        kv_layer: torch.Tensor,
        shape: AttentionShape,
    ) -> torch.Tensor:
        """Norm the heads of q and k if asked, rotate them, write K and V into the pages; returns q [M, H*head_dim]."""
        return self.library.rope_and_cache(qkv, inputs.positions, inputs.slots, rope, head_norms, kv_layer, shape)

    def attention(
        self, q: torch.Tensor, kv_layer: torch.Tensor, inputs: AttentionInputs, shape: AttentionShape, scale: float
    ) -> torch.Tensor:
        """Causal attention of every query row over its own pages, [M, H*head_dim] (AttentionOrder)."""
        return self.library.attention(q, kv_layer, inputs, shape, scale)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up, [M, 2F] -> [M, F] (PointwiseOrder)."""
        return self.library.silu_mul(gate_up)

    # ---- from logits to tokens

    def take_rows(self, x: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Copy of chosen rows of [M, ...]."""
        return self.library.take_rows(x, rows)

    def argmax(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 [R, V] -> (ids int32 [R], ties to the lowest id; bool [R], False where a row holds NaN or inf)."""
        return self.library.argmax(logits)

    def logprobs(self, logits: torch.Tensor) -> torch.Tensor:
        """Normaliser of each row, float64 [R], for `token_logprobs` (LogprobsOrder)."""
        return self.library.logprobs(logits)[1]

    def token_logprobs(
        self, logits: torch.Tensor, rows: Sequence[int], token_ids: Sequence[int], normalisers: Sequence[float]
    ) -> list[float]:
        """Log-prob of token_ids[i] in row rows[i] of [R, V]: float32(float64(x) - normalisers[i]) (LogprobsOrder)."""
        return token_logprobs(self.library.take_values(logits, rows, token_ids), normalisers)

    def top_logits(self, logits: torch.Tensor, n: int) -> torch.Tensor:
        """The n largest of each row of [R, V] by (value descending, id ascending), int32 [R, n]."""
        return self.library.top_rows(logits, n)

    def changed_logits(self, logits: torch.Tensor, changes: Sequence[LogitChanges]) -> torch.Tensor:
        """A copy of [R, V] after the bias, penalties and banned ids of each row, float32 (SamplingOrder)."""
        compact = [compact_changes(of_row) for of_row in changes]
        columns = [token_id for ids, _ in compact for token_id in ids]
        rows = [row for row, (ids, _) in enumerate(compact) for _ in ids]
        values = self.library.take_values(logits, rows, columns)
        ends = list(itertools.accumulate((len(ids) for ids, _ in compact), initial=0))
        new = [changed_logits(values[ends[i] : ends[i + 1]], small) for i, (_, small) in enumerate(compact)]
        return self.library.put_values(logits, rows, columns, np.concatenate(new))

    def sample(self, logits: torch.Tensor, draws: Draws) -> torch.Tensor:
        """Draw a token from each row [R, V] of adjusted logits, int32 [R] (SamplingOrder)."""
        return self.library.sample_rows(logits, draws)

    def describe(self) -> dict[str, str]:
        """Kernel and admitted schedules by Order name, for /server_info."""
        return {
            name: f"{self.library.name}: " + ", ".join(
                f"{op} ({' | '.join(self.admitted.require_any(op, order, self.library.name))})"
                for op in OPS_OF_ORDER[type(order)]
            )
            for name, order in self.orders.items()
        }  # fmt: skip
