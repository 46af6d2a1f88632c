"""Which program attends what, for absorbed MLA: made on the host from the batch, before the step.

A tile is ROWS consecutive (token, head) pairs of one request, in the order token * H + head: all heads read the same
keys, so tiles are full. An item is a tile with either all of its splits (folded in the program) or one of them (merged
by the combine kernel). Knows row counts and positions; does not know scores. Invariant: nothing here can move a bit,
because both ways of merging are the same formula applied left to right; it may therefore look at the whole batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from isobit.order import MmaAttentionOrder

__all__ = ["MlaPlan", "MlaTables", "mla_plan", "pad_plan", "upload_plan"]

Int32 = npt.NDArray[np.int32]
_ITEM_COST = 3  # blocks that fetching q and writing the result of an item are worth
_ITEM_FIELDS = 6


@dataclass(frozen=True, slots=True)
class MlaPlan:
    """items [T, 6]: (request, first row, first split, end split, partial row, 0); a partial row below 0: the item
    writes the output itself. programs [P + 1]: program p runs items programs[p] .. programs[p + 1]. merges [R, 4]:
    (row, partial row of its split 0, partial rows between splits, splits), a row being token * H + head."""

    rows_per_tile: int
    partial_rows: int
    items: Int32
    programs: Int32
    merges: Int32


@dataclass(frozen=True, slots=True)
class MlaTables:
    """A plan and the batch it was made for, on the device; counts that size a grid stay on the host."""

    rows_per_tile: int
    partial_rows: int
    items: torch.Tensor
    programs: torch.Tensor
    merges: torch.Tensor
    query_starts: torch.Tensor
    start_positions: torch.Tensor
    page_tables: torch.Tensor


def mla_plan(
    query_starts: Int32,
    start_positions: Int32,
    num_heads: int,
    order: MmaAttentionOrder,
    rows_per_tile: int,
    num_programs: int,
    walk: bool | None = None,
) -> MlaPlan:
    """Tiles of a batch spread over `num_programs`. `walk` True: every tile folds its own splits; False: every split is
    an item; None: a tile is taken apart if it alone would take longer than a program's fair share of the batch."""
    counts = np.diff(query_starts).astype(np.int64)
    tiles_of = -(-counts * num_heads // rows_per_tile)
    request = np.repeat(np.arange(len(counts)), tiles_of)
    first_row = (np.arange(len(request)) - np.repeat(np.cumsum(tiles_of) - tiles_of, tiles_of)) * rows_per_tile
    last_row = np.minimum(first_row + rows_per_tile, (counts * num_heads)[request]) - 1
    blocks = (start_positions.astype(np.int64)[request] + last_row // num_heads) // order.kv_block + 1
    per_split = order.kv_split_size // order.kv_block
    splits = -(-blocks // per_split)
    apart = splits > 1
    if walk is None:
        apart &= (blocks + _ITEM_COST) * num_programs > int(np.add.reduce(blocks + _ITEM_COST))
    elif walk:
        apart[:] = False
    parts = np.where(apart, splits, 1)
    tile = np.repeat(np.arange(len(parts)), parts)
    split = np.arange(len(tile)) - np.repeat(np.cumsum(parts) - parts, parts)
    slots = np.where(apart, parts, 0)
    first_slot = np.cumsum(slots) - slots
    items = np.zeros((len(tile), _ITEM_FIELDS), np.int64)
    items[:, 0], items[:, 1], items[:, 2] = request[tile], first_row[tile], split
    items[:, 3] = np.where(apart[tile], split + 1, splits[tile])
    items[:, 4] = np.where(apart[tile], (first_slot[tile] + split) * rows_per_tile, -1)
    cost = np.minimum(blocks[tile], items[:, 3] * per_split) - split * per_split + _ITEM_COST
    order_of, programs = _spread(cost, num_programs)
    first_output = query_starts.astype(np.int64)[request] * num_heads + first_row
    merges = _merges(rows_per_tile, first_output, last_row - first_row + 1, apart, first_slot, parts)
    total_slots = int(np.add.reduce(slots))
    return MlaPlan(rows_per_tile, total_slots * rows_per_tile, items[order_of].astype(np.int32), programs, merges)


def _spread(cost: npt.NDArray[np.int64], num_programs: int) -> tuple[npt.NDArray[np.int64], Int32]:
    """(items in the order of their programs, programs): dearest first, dealt out forwards and backwards in turn."""
    used = max(1, min(num_programs, len(cost)))
    dealt = np.argsort(-cost, kind="stable")
    turn, seat = np.divmod(np.arange(len(cost)), used)
    program = np.where(turn % 2 == 0, seat, used - 1 - seat)
    by_program = np.argsort(program, kind="stable")
    ends = np.cumsum(np.bincount(program, minlength=used))
    return dealt[by_program], np.concatenate([[0], ends]).astype(np.int32)


def _merges(
    rows_per_tile: int,
    first_output: npt.NDArray[np.int64],
    height: npt.NDArray[np.int64],
    apart: npt.NDArray[np.bool_],
    first_slot: npt.NDArray[np.int64],
    parts: npt.NDArray[np.int64],
) -> Int32:
    """One entry for each row of the tiles that were taken apart; all by tile."""
    tiles = np.flatnonzero(apart)
    heights = height[tiles]
    tile = np.repeat(tiles, heights)
    within = np.arange(len(tile)) - np.repeat(np.cumsum(heights) - heights, heights)
    merges = np.empty((len(tile), 4), np.int64)
    merges[:, 0] = first_output[tile] + within
    merges[:, 1] = first_slot[tile] * rows_per_tile + within
    merges[:, 2] = rows_per_tile
    merges[:, 3] = parts[tile]
    return merges.astype(np.int32)


def pad_plan(plan: MlaPlan, num_items: int, num_programs: int, num_merges: int) -> MlaPlan:
    """The plan in arrays of fixed sizes, for a graph that is replayed over them: idle programs, entries to skip.

    Raises ValueError for a plan that does not fit.
    """
    sizes = len(plan.items), len(plan.programs) - 1, len(plan.merges)
    room = num_items, num_programs, num_merges
    if any(size > limit for size, limit in zip(sizes, room, strict=True)):
        raise ValueError(f"a plan of {sizes} items, programs and merges does not fit into {room}")
    items = np.full((num_items, _ITEM_FIELDS), -1, np.int32)
    programs = np.full(num_programs + 1, plan.programs[-1], np.int32)
    merges = np.full((num_merges, 4), -1, np.int32)
    items[: sizes[0]], programs[: sizes[1] + 1], merges[: sizes[2]] = plan.items, plan.programs, plan.merges
    return replace(plan, items=items, programs=programs, merges=merges)


def upload_plan(
    plan: MlaPlan, query_starts: Int32, start_positions: Int32, page_tables: Int32, device: torch.device
) -> MlaTables:
    """The plan and the batch as tensors on `device`, in one copy; each starts at a multiple of 16 bytes, for a pointer
    that is aligned in one step and not in the next would compile a kernel twice."""
    arrays = (plan.items, plan.programs, plan.merges, query_starts, start_positions, page_tables)
    starts = np.cumsum([0, *(-(-a.size // 4) * 4 for a in arrays)]).tolist()
    flat = np.zeros(starts[-1], np.int32)
    for a, start in zip(arrays, starts, strict=False):
        flat[start : start + a.size] = a.ravel()
    on_device = torch.from_numpy(flat).to(device)
    tensors = [on_device[start : start + a.size].view(a.shape) for a, start in zip(arrays, starts, strict=False)]
    return MlaTables(plan.rows_per_tile, plan.partial_rows, *tensors)
