"""One step on the device: run the model over a batch, then give logits of chosen rows in bounded pieces.

Knows tensors only: no request, no scheduling. Logits are never built for more than `LOGITS_ROWS` rows at once, so that
prompt log-probs of a long prompt cost a fixed amount of memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from isobit.batch import Batch
from isobit.kv_cache import KVCache
from isobit.models import CausalLM
from isobit.ops import Ops

LOGITS_ROWS = {"cpu": 64, "cuda": 256}  # by the kind of device


class Runner:
    """Owns the model and the KV cache of one engine."""

    def __init__(self, ops: Ops, model: CausalLM, kv_cache: KVCache) -> None:
        self.ops = ops
        self.model = model
        self.kv_cache = kv_cache

    def forward(self, batch: Batch) -> torch.Tensor:
        """Residual stream of every row, float32 [M, D]; the rows' K and V are in the cache afterwards."""
        token_ids, inputs = self.ops.begin_step(batch.arrays)
        return self.model.forward(token_ids, inputs, self.kv_cache)

    def logits(self, hidden: torch.Tensor, rows: Sequence[int]) -> Iterator[tuple[Sequence[int], torch.Tensor]]:
        """Yield (rows, logits float32 [len(rows), V]) in order, at most LOGITS_ROWS rows at a time."""
        most = LOGITS_ROWS[hidden.device.type]
        for start in range(0, len(rows), most):
            piece = rows[start : start + most]
            yield piece, self.model.logits(self.ops.take_rows(hidden, piece))
