"""What models call. Every op runs an admitted (kernel, schedule) of its Order, or nothing runs.

Knows the plan's Orders and the admission table; does not know models, requests or pages. Which schedule runs may look
at the number of rows, because admission proved that the schedules of one Order give equal bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from isobit.kernels.admission import AdmissionTable
from isobit.kernels.cpu.library import CpuLibrary, PackedLinear
from isobit.kernels.registry import OPS_OF_ORDER
from isobit.model_config import ModelConfig
from isobit.order import LinearOrder, Order

_TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FEW_ROWS = 16  # up to this many rows the weights are streamed (dev/LOG.md); a speed choice, it cannot move a bit


@dataclass(frozen=True)
class Linear:
    """A packed linear layer, its Order, and the admitted schedules for few and for many rows."""

    packed: PackedLinear
    order: LinearOrder
    few: str
    many: str


@dataclass(frozen=True)
class AttentionInputs:
    """Where the rows of a step live: all int32, contiguous.

    positions [M], slots [M] (physical page * 64 + offset), query_starts [B+1], start_positions [B],
    page_tables [B, max_pages].
    """

    positions: torch.Tensor
    slots: torch.Tensor
    query_starts: torch.Tensor
    start_positions: torch.Tensor
    page_tables: torch.Tensor


class Ops:
    """The ops of one model on one device. Construction raises ValueError when an op has no admitted kernel."""

    def __init__(self, library: CpuLibrary, orders: Mapping[str, Order], admitted: AdmissionTable) -> None:
        self.library = library
        self.orders = orders
        self.admitted = admitted
        for order in dict.fromkeys(orders.values()):
            for op in OPS_OF_ORDER[type(order)]:
                if op == "linear":  # `make_linear` picks among its admitted schedules
                    admitted.require_any(op, order, library.name)
                else:
                    admitted.require_all(op, order, library.name)

    def make_linear(self, name: str, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """Pack `weight` [N, K] (rounded to the Order's weight dtype) and `bias` [N]; `name` as in "linear.qkv"."""
        order = self.orders[name]
        assert isinstance(order, LinearOrder), f"{name} has the Order {order}"
        schedules = self.admitted.require_any("linear", order, self.library.name)
        few = _preferred(schedules, ("stream-dp", "stream"))
        many = _preferred(schedules, ("tile-dp", "tile"))
        weight = weight.to(_TORCH_DTYPES[order.weight_dtype]).contiguous()
        bias = None if bias is None else bias.to(torch.float32).contiguous()
        return Linear(self.library.pack_linear(weight, bias), order, few, many)

    def linear(self, x: torch.Tensor, layer: Linear, addend: torch.Tensor | None = None) -> torch.Tensor:
        """x float32 [M, K] -> float32 [M, N]; `addend` [M, N] is added last (LinearOrder)."""
        schedule = layer.few if x.shape[0] <= FEW_ROWS else layer.many
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
        rope: tuple[torch.Tensor, torch.Tensor],
        head_norms: tuple[torch.Tensor, torch.Tensor] | None,
        kv_layer: torch.Tensor,
        config: ModelConfig,
    ) -> torch.Tensor:
        """Norm the heads of q and k if asked, rotate them, write K and V into the pages; returns q [M, H*head_dim]."""
        q_norm, k_norm = head_norms if head_norms is not None else (None, None)
        return self.library.rope_and_cache(
            qkv, inputs.positions, inputs.slots, rope[0], rope[1], q_norm, k_norm, config.rms_norm_eps, kv_layer,
            config.num_heads, config.num_kv_heads, config.head_dim, config.rope.rotary_dim, False,
        )  # fmt: skip

    def attention(
        self, q: torch.Tensor, kv_layer: torch.Tensor, inputs: AttentionInputs, config: ModelConfig
    ) -> torch.Tensor:
        """Causal attention of every query row over its own pages, float32 [M, H*head_dim] (AttentionOrder)."""
        return self.library.attention(
            q, kv_layer, inputs.query_starts, inputs.start_positions, inputs.page_tables,
            config.num_heads, config.num_kv_heads, config.head_dim, config.head_dim**-0.5,
        )  # fmt: skip

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up, float32 [M, 2F] -> [M, F] (PointwiseOrder)."""
        return self.library.silu_mul(gate_up)

    def argmax(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 [R, V] -> (ids int32 [R], ties to the lowest id; bool [R], False where a row holds NaN or inf)."""
        return self.library.argmax(logits)

    def logprobs(self, logits: torch.Tensor) -> torch.Tensor:
        """Normaliser of each row, float64 [R]: logprob of i is float32(float64(logits[i]) - it) (LogprobsOrder)."""
        return self.library.logprobs(logits)[1]

    def top_logits(self, row: torch.Tensor, n: int) -> torch.Tensor:
        """The n largest of a row [V] by (value descending, id ascending), int32 [n]."""
        return self.library.top_logits(row, n)

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


def _preferred(schedules: tuple[str, ...], wishes: tuple[str, ...]) -> str:
    """The first admitted wish, else any admitted schedule: all give the same bits, one is fastest."""
    return next((wish for wish in wishes if wish in schedules), schedules[0])
