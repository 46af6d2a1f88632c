"""Which tiles and splits an attention step consists of, worked out on the host from numbers the host has.

Rows of a request are (token, head of the group) pairs in the order token * group + head, once per KV head. Requests
with many rows are cut into tiles that walk all their splits; those with few into tiles of 16 rows whose splits run
beside each other and are combined. Knows positions and counts; knows no pages and no numbers. Invariant: what a tile
sums for a row depends on the row alone; the plan only says where.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["SPLIT_TILE_ROWS", "AttentionPlan", "cut_into_tiles"]

SPLIT_TILE_ROWS = 16
_Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """`words` (int32) goes to the device with the batch: tiles [num_tiles, 2], items [num_items, 4] and combined rows
    [num_rows, 4], as the kernels of `attention_tiles` read them, each starting at a multiple of 4 words."""

    schedule: str
    words: _Int32s
    num_tiles: int
    num_items: int
    num_rows: int
    partial_rows: int

    @property
    def items_at(self) -> int:
        """Word of `words` where items begin."""
        return (2 * self.num_tiles + 3) // 4 * 4

    @property
    def rows_at(self) -> int:
        """Word of `words` where combined rows begin."""
        return self.items_at + 4 * self.num_items

    def padded(self, num_tiles: int, num_items: int, num_rows: int, partial_rows: int) -> AttentionPlan:
        """The same plan with room for so many entries, for a graph whose grids are fixed; the added ones do nothing.

        Raises ValueError where the plan is larger than that.
        """
        room = (num_tiles, num_items, num_rows, partial_rows)
        needed = (self.num_tiles, self.num_items, self.num_rows, self.partial_rows)
        if any(n > r for n, r in zip(needed, room, strict=True)):
            raise ValueError(f"a plan of (tiles, items, rows, partial rows) {needed} has no room in {room}")
        plan = AttentionPlan(self.schedule, np.empty(0, np.int32), *room)
        words = np.full(plan.rows_at + 4 * num_rows, -1, np.int32)
        words[: 2 * self.num_tiles] = self.words[: 2 * self.num_tiles]
        words[plan.items_at : plan.items_at + 4 * self.num_items] = self.words[self.items_at : self.rows_at]
        words[plan.rows_at : plan.rows_at + 4 * self.num_rows] = self.words[self.rows_at :]
        return AttentionPlan(self.schedule, words, *room)


def cut_into_tiles(
    query_starts: _Int32s,
    start_positions: _Int32s,
    group: int,
    split_size: int,
    schedule: str,
    tile_rows: int,
    most_split_rows: int,
) -> AttentionPlan:
    """Plan of a step. A request of at most `most_split_rows` rows (0: none) is split, any other walks in tiles of
    `tile_rows`, the longest walk first, so that no long one is left for the end."""
    requests = np.arange(len(start_positions))
    counts = np.diff(query_starts).astype(np.int64) * group
    is_split = counts <= most_split_rows
    tiles, last = _tiles(requests[~is_split], counts, start_positions, group, tile_rows)
    tiles = tiles[np.argsort(-last, kind="stable")]
    items, rows, partial_rows = _split_tiles(
        requests[is_split], counts, query_starts, start_positions, group, split_size
    )
    plan = AttentionPlan(schedule, np.empty(0, np.int32), len(tiles), len(items), len(rows), partial_rows)
    words = np.full(plan.rows_at + 4 * len(rows), -1, np.int32)
    words[: 2 * len(tiles)] = tiles.ravel()
    words[plan.items_at : plan.rows_at] = items.ravel()
    words[plan.rows_at :] = rows.ravel()
    return AttentionPlan(schedule, words, len(tiles), len(items), len(rows), partial_rows)


def _ramp(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """0 .. counts[0] - 1, 0 .. counts[1] - 1, ..."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def _tiles(
    requests: npt.NDArray[np.int64], counts: npt.NDArray[np.int64], start_positions: _Int32s, group: int, tile_rows: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(request, first row) of each tile, and the position of its last row."""
    per_request = -(-counts[requests] // tile_rows)
    request = np.repeat(requests, per_request)
    first = _ramp(per_request) * tile_rows
    last = start_positions[request] + (np.minimum(first + tile_rows, counts[request]) - 1) // group
    return np.stack([request, first], 1), last


def _split_tiles(
    requests: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
    query_starts: _Int32s,
    start_positions: _Int32s,
    group: int,
    split_size: int,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], int]:
    """(items, combined rows, rows of partial results); a tile of one split needs no combining."""
    tiles, last = _tiles(requests, counts, start_positions, group, SPLIT_TILE_ROWS)
    request, first = tiles[:, 0], tiles[:, 1]
    splits = last // split_size + 1
    heights = np.minimum(SPLIT_TILE_ROWS, counts[request] - first)
    partials = np.where(splits > 1, splits * heights, 0)
    base = np.cumsum(partials) - partials
    of = np.repeat(np.arange(len(tiles)), splits)
    split = _ramp(splits)
    partial = np.where(splits[of] > 1, base[of] + split * heights[of], -1)
    items = np.stack([request[of], first[of], split, partial], 1)
    combined = np.where(splits > 1, heights, 0)
    of = np.repeat(np.arange(len(tiles)), combined)
    row = _ramp(combined)
    place = first[of] + row
    own_splits = (start_positions[request[of]] + place // group) // split_size + 1
    rows = np.stack([query_starts[request[of]] * group + place, base[of] + row, heights[of], own_splits], 1)
    return items, rows, int(partials.sum())
