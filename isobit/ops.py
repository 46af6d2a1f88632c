"""What models call. Every op runs an admitted (kernel, schedule) of its Order, or nothing runs.

Knows the plan's Orders and the admission table; does not know models, requests or pages. Which schedule runs may look
at the number of rows, because admission proved that the schedules of one Order give equal bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from isobit.kernels.admission import AdmissionTable
from isobit.kernels.interface import TORCH_DTYPES, AttentionShape, HeadNorms, KernelLibrary, Ladder, RopeTables
from isobit.kernels.logits import LogitChanges, changed_logits, token_logprobs
from isobit.kernels.registry import OPS_OF_ORDER
from isobit.order import LinearOrder, Order


@dataclass(frozen=True)
class Linear:
    """A linear layer as its library packed it, its Order, and which admitted schedule runs for how many rows."""

    packed: Any
    order: LinearOrder
    ladder: Ladder

    def schedule(self, num_rows: int) -> str:
        """The first step of the ladder that takes `num_rows` rows."""
        for most, schedule in self.ladder:
            if num_rows <= most:
                return schedule
        raise AssertionError(f"{self.ladder} has no step for {num_rows} rows")


@dataclass(frozen=True)
class AttentionInputs:
    """Where the rows of a step live: all int32, contiguous.

    positions [M], slots [M] (physical page * page size + offset), query_starts [B+1], start_positions [B],
    page_tables [B, max_pages].
    """

    positions: torch.Tensor
    slots: torch.Tensor
    query_starts: torch.Tensor
    start_positions: torch.Tensor
    page_tables: torch.Tensor


def take_rows(x: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Copy of chosen rows of a CPU tensor [M, ...]. Torch would wake its OpenMP threads, which hang a forked child."""
    return torch.from_numpy(x.numpy()[list(rows)])


class Ops:
    """The ops of one model on one device. Construction raises ValueError when an op has no admitted kernel."""

    def __init__(self, library: KernelLibrary, orders: Mapping[str, Order], admitted: AdmissionTable) -> None:
        self.library = library
        self.orders = orders
        self.admitted = admitted
        self._ladders: dict[LinearOrder, Ladder] = {}
        for order in dict.fromkeys(orders.values()):
            if isinstance(order, LinearOrder):
                self._ladders[order] = self._ladder(order)
            for op in OPS_OF_ORDER[type(order)]:
                if op != "linear":  # of which the ladder holds admitted schedules only
                    admitted.require_all(op, order, library.name)

    def _ladder(self, order: LinearOrder) -> Ladder:
        schedules = self.admitted.require_any("linear", order, self.library.name)
        ladder = self.library.linear_ladder(order.weight_dtype, order.activation_dtype, schedules)
        assert {schedule for _, schedule in ladder} <= set(schedules), f"{ladder} leaves the admitted {schedules}"
        return ladder

    def make_linear(
        self, name: str, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor] | None = None
    ) -> Linear:
        """Pack weights [N_i, K], laid one after the other along N and rounded to the Order's dtype, with biases [N_i].

        `name` as in "linear.qkv".
        """
        order = self.orders[name]
        assert isinstance(order, LinearOrder), f"{name} has the Order {order}"
        dtype = TORCH_DTYPES[order.weight_dtype]
        weight = torch.cat([weight.to(dtype) for weight in weights]) if len(weights) > 1 else weights[0].to(dtype)
        bias = None if biases is None else torch.cat([bias.to(torch.float32) for bias in biases])
        return Linear(self.library.pack_linear(weight.contiguous(), bias), order, self._ladders[order])

    def linear(self, x: torch.Tensor, layer: Linear, addend: torch.Tensor | None = None) -> torch.Tensor:
        """x float32 [M, K] -> float32 [M, N]; `addend` [M, N] is added last (LinearOrder)."""
        schedule = layer.schedule(x.shape[0])
        return self.library.linear(x, layer.packed, layer.order.activation_dtype, schedule, addend)

    def embedding(self, layer: Linear, token_ids: torch.Tensor) -> torch.Tensor:
        """Rows of the packed weight, int32 [M] -> float32 [M, K]."""
        return self.library.embedding(layer.packed, token_ids)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """float32 [M, D] -> float32 [M, D] (NormOrder)."""
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
        """Causal attention of every query row over its own pages, float32 [M, H*head_dim] (AttentionOrder)."""
        return self.library.attention(
            q, kv_layer, inputs.query_starts, inputs.start_positions, inputs.page_tables, shape, scale
        )

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up, float32 [M, 2F] -> [M, F] (PointwiseOrder)."""
        return self.library.silu_mul(gate_up)

    def argmax(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 [R, V] -> (ids int32 [R], ties to the lowest id; bool [R], False where a row holds NaN or inf)."""
        return self.library.argmax(logits)

    def logprobs(self, logits: torch.Tensor) -> torch.Tensor:
        """Normaliser of each row, float64 [R], for `token_logprobs` (LogprobsOrder)."""
        return self.library.logprobs(logits)[1]

    def token_logprobs(self, row: torch.Tensor, normaliser: float, token_ids: Sequence[int]) -> list[float]:
        """Log-prob of each id of a row [V]: float32(float64(x[i]) - normaliser) (LogprobsOrder)."""
        return token_logprobs(row.numpy(), normaliser, token_ids)

    def top_logits(self, row: torch.Tensor, n: int) -> torch.Tensor:
        """The n largest of a row [V] by (value descending, id ascending), int32 [n]."""
        return self.library.top_logits(row, n)

    def changed_logits(self, row: torch.Tensor, changes: LogitChanges) -> torch.Tensor:
        """A copy of a row [V] after bias, penalties and banned ids, float32 (SamplingOrder)."""
        return torch.from_numpy(changed_logits(row.numpy(), changes))

    def sample(
        self, row: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float, seed: int, position: int
    ) -> int:
        """Draw the token at `position` from a row [V] of adjusted logits (SamplingOrder)."""
        return self.library.sample(row, temperature, top_k, top_p, min_p, seed, position)

    def describe(self) -> dict[str, str]:
        """Kernel and admitted schedules by Order name, for /server_info."""
        return {
            name: f"{self.library.name}: " + ", ".join(
                f"{op} ({' | '.join(self.admitted.require_any(op, order, self.library.name))})"
                for op in OPS_OF_ORDER[type(order)]
            )
            for name, order in self.orders.items()
        }  # fmt: skip
