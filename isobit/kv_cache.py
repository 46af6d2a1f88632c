"""The paged KV cache: one tensor, cut into pages of tokens anchored at absolute positions.

Knows layout and dtype; does not know which request owns a page. Pages are not cleared on reuse: the unused tail of a
page may hold anything, and the attention kernels prove (admission) that it has no effect.
"""

from __future__ import annotations

import math
import mmap

import torch

from isobit.kernels.interface import TORCH_DTYPES
from isobit.model_config import ModelConfig


class KVCache:
    """`data` [num_layers, 2 (K, V), num_pages, num_kv_heads * head_dim * page_size], float32 or bfloat16.

    A K page of one head is [head_dim, page_size keys], a V page [page_size keys, head_dim]. Memory
    is taken as pages are touched.
    """

    def __init__(self, model: ModelConfig, num_pages: int, page_size: int, kv_dtype: str) -> None:
        page_elements = model.num_kv_heads * model.head_dim * page_size
        shape = (model.num_layers, 2, num_pages, page_elements)
        dtype = TORCH_DTYPES[kv_dtype]
        # Zeros that cost nothing until they are written; private, or a forked process would write into ours.
        memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.data = torch.frombuffer(memory, dtype=dtype).view(shape)
        self.layers: tuple[torch.Tensor, ...] = tuple(self.data.unbind(0))
        self.num_pages = num_pages
