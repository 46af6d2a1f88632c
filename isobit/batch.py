"""Turns what the scheduler picked into the arrays of one step: flat rows, positions, slots, page tables.

The only place where requests become rows. Rows of one request are consecutive and in order; requests may come in any
order, which the relations tests permute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from isobit.ops import StepArrays
from isobit.scheduler import ScheduledChunk


@dataclass(frozen=True)
class Batch:
    """One step: token ids and where each row lives, on the host, and the first row of each chunk."""

    chunks: tuple[ScheduledChunk, ...]
    arrays: StepArrays
    first_rows: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        return len(self.arrays.token_ids)


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
    arrays = StepArrays(
        token_ids=np.array(token_ids, dtype=np.int32),
        positions=at,
        slots=slots,
        query_starts=np.array([*first_rows, len(token_ids)], dtype=np.int32),
        start_positions=np.array([chunk.start for chunk in chunks], dtype=np.int32),
        page_tables=page_tables,
    )
    return Batch(tuple(chunks), arrays, tuple(first_rows))
