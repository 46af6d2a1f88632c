"""The paged KV cache: a tensor a layer, cut into pages of tokens anchored at absolute positions.

Knows how many pages there are; their layout is the kernel library's, and which request owns one is the scheduler's.
Pages are not cleared on reuse: the unused tail of a page may hold anything, and the attention kernels prove (admission)
that it has no effect.
"""

from __future__ import annotations

import torch

from isobit.kernels.interface import AttentionShape
from isobit.model_config import ModelConfig
from isobit.ops import Ops


class KVCache:
    """`layers`: one tensor a layer, in the layout that the library of the ops reads and writes."""

    def __init__(self, ops: Ops, model: ModelConfig, num_pages: int, page_size: int, kv_dtype: str) -> None:
        shape = AttentionShape(model.num_heads, model.num_kv_heads, model.head_dim)
        self.layers: tuple[torch.Tensor, ...] = ops.new_kv_layers(
            model.num_layers, num_pages, page_size, shape, kv_dtype
        )
        self.num_pages = num_pages
