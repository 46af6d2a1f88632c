"""Turns what the scheduler picked into the tensors of one step: flat rows, positions, slots, page tables.

The only place where requests become rows. Rows of one request are consecutive and in order; requests may come in any
order, which the relations tests permute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from isobit.ops import AttentionInputs
from isobit.scheduler import ScheduledChunk


@dataclass(frozen=True)
class Batch:
    """One step: `token_ids` int32 [M], where each row lives, and the first row of each chunk."""

    chunks: tuple[ScheduledChunk, ...]
    token_ids: torch.Tensor
    inputs: AttentionInputs
    first_rows: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        return self.token_ids.shape[0]


def build_batch(chunks: Sequence[ScheduledChunk], page_size: int) -> Batch:
    """Flatten the scheduled chunks, in the given order; `page_size` is the plan's."""
    token_ids: list[int] = []
    positions: list[int] = []
    first_rows: list[int] = []
    widest = max(-(-(chunk.start + chunk.num_tokens) // page_size) for chunk in chunks)
    page_tables = np.zeros((len(chunks), widest), dtype=np.int32)
    table_rows: list[int] = []
    for index, chunk in enumerate(chunks):
        end = chunk.start + chunk.num_tokens
        pages = chunk.request.pages[: -(-end // page_size)]
        first_rows.append(len(token_ids))
        token_ids.extend(chunk.request.token_ids[chunk.start : end])
        positions.extend(range(chunk.start, end))
        page_tables[index, : len(pages)] = pages
        table_rows.extend([index] * chunk.num_tokens)
    at = np.array(positions, dtype=np.int32)
    slots = page_tables[table_rows, at // page_size] * page_size + at % page_size
    inputs = AttentionInputs(
        positions=torch.from_numpy(at),
        slots=torch.from_numpy(slots),
        query_starts=torch.tensor([*first_rows, len(token_ids)], dtype=torch.int32),
        start_positions=torch.tensor([chunk.start for chunk in chunks], dtype=torch.int32),
        page_tables=torch.from_numpy(page_tables),
    )
    return Batch(tuple(chunks), torch.tensor(token_ids, dtype=torch.int32), inputs, tuple(first_rows))
