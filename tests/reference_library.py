"""The reference behind the methods of a kernel library, so that claims can be made, and broken, without C.

Reads weights and pages as kernels do. `num_threads` is there to be seen by fakes that misuse it.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from isobit.kernels.interface import AttentionInputs, AttentionShape, HeadNorms, RopeTables
from isobit.kernels.reference import ops
from isobit.kernels.registry import Kernel
from isobit.order import Order, norm_order

PAGE_SIZE = 64


@dataclass(frozen=True)
class PlainWeight:
    """A weight [N, K] as it came, and its bias."""

    weight: torch.Tensor
    bias: torch.Tensor | None


def declare(library: Any, op: str, name: str | None = None, **changes: Any) -> Kernel:
    kernel = Kernel(name or library.name, op, ("cpu",), ("only",), library.source_hash, lambda order: None, library)
    return dataclasses.replace(kernel, **changes)


class ReferenceLibrary:
    """Computes `order`, whichever Order is claimed: handing it another Order makes a wrong kernel."""

    name = "reference"
    source_hash = "1"

    def __init__(self, order: Order) -> None:
        self.order: Any = order
        self.num_threads = 1
        self.num_calls = 0

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PlainWeight:
        return PlainWeight(weight, bias)

    def linear(
        self,
        x: torch.Tensor,
        packed: PlainWeight,
        activation_dtype: str,
        schedule: str,
        addend: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self.num_calls += 1
        assert activation_dtype == self.order.activation_dtype
        bias, more = (None if t is None else t.numpy() for t in (packed.bias, addend))
        y = torch.from_numpy(ops.linear(self.order, x.numpy(), packed.weight.float().numpy(), bias, more))
        return y if out is None else out.copy_(y)

    def embedding(self, packed: PlainWeight, ids: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return packed.weight.float()[ids]

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        self.num_calls += 1
        return torch.from_numpy(ops.rms_norm(self.order, x.numpy(), weight.numpy(), eps))

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return torch.from_numpy(ops.silu_mul(gate_up.numpy()))

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
        num_heads, num_kv_heads, head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        rows = qkv.numpy().reshape(-1, num_heads + 2 * num_kv_heads, head_dim)
        q, k, v = np.split(rows, (num_heads, num_heads + num_kv_heads), axis=1)
        if head_norms is not None:
            norm, eps = norm_order(head_dim, "cpu"), head_norms.eps
            q = ops.rms_norm(norm, q, head_norms.q.numpy(), eps)
            k = ops.rms_norm(norm, k, head_norms.k.numpy(), eps)
        cos, sin = (table[positions.long()].numpy() for table in (rope.cos, rope.sin))
        q, k = (ops.rope(x, cos, sin, rope.interleaved) for x in (q, k))
        for i, slot in enumerate(slots.tolist()):
            page, offset = divmod(slot, PAGE_SIZE)
            key, value = (torch.from_numpy(ops.round_to(self.order.kv_dtype, x[i])) for x in (k, v))
            kv_layer[0, page].view(num_kv_heads, head_dim, PAGE_SIZE)[:, :, offset] = key
            kv_layer[1, page].view(num_kv_heads, PAGE_SIZE, head_dim)[:, offset] = value
        return torch.from_numpy(np.ascontiguousarray(q.reshape(len(rows), -1)))

    def attention(
        self,
        q: torch.Tensor,
        kv_layer: torch.Tensor,
        inputs: AttentionInputs,
        shape: AttentionShape,
        scale: float,
        schedule: str = "auto",
    ) -> torch.Tensor:
        query_starts, start_positions, page_tables = inputs.query_starts, inputs.start_positions, inputs.page_tables
        num_kv_heads, head_dim = shape.num_kv_heads, shape.head_dim
        outputs = []
        bounds = query_starts.tolist()
        for request, (first, last) in enumerate(itertools.pairwise(bounds)):
            start = int(start_positions[request])
            pages = page_tables[request, : -(-(start + last - first) // PAGE_SIZE)].long()
            k = kv_layer[0, pages].float().view(-1, num_kv_heads, head_dim, PAGE_SIZE).permute(0, 3, 1, 2)
            v = kv_layer[1, pages].float().view(-1, num_kv_heads, PAGE_SIZE, head_dim).permute(0, 2, 1, 3)
            k, v = (x.reshape(-1, num_kv_heads, head_dim).numpy() for x in (k, v))
            outputs.append(ops.attention(self.order, q[first:last].numpy(), k, v, start, shape.num_heads, scale))
        return torch.from_numpy(np.concatenate(outputs))

    def argmax(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ids, finite = ops.argmax(logits.numpy())
        return torch.from_numpy(ids), torch.from_numpy(finite)

    def logprobs(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        maxima, lse = ops.logprobs(self.order, logits.numpy())
        return torch.from_numpy(maxima), torch.from_numpy(lse)

    def top_logits(self, row: torch.Tensor, n: int) -> torch.Tensor:
        return torch.from_numpy(ops.top_logits(row.numpy(), n))

    def sample(
        self, row: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float, seed: int, position: int
    ) -> int:
        return ops.sample(self.order, row.numpy(), temperature, top_k, top_p, min_p, seed, position)
