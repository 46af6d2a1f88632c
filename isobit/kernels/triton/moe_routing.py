"""Which pairs each expert has, cut into tiles: made on the device from the router's choice, without asking it anything.

A pair p = token * top_k + slot. Pairs are listed by expert, ascending inside an expert; a tile is `block`
neighbours of one expert in that list, an expert's last one what is left: up to `more` beyond a block. Integers only:
counts, sums and places have no rounding and so no order. Does not know weights. Invariant: sizes that the host needs
follow from shapes alone; an id that names no expert has no tile.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from isobit.kernels.triton.moe_kernels import TILE_FIELDS

__all__ = ["MAX_EXPERTS", "MoeRouting", "align"]

MAX_EXPERTS = 512


@dataclass(frozen=True, slots=True)
class MoeRouting:
    """`ids` int32 [T, top_k] and their tiles of `block` pairs; with block 1 every pair is a tile and nothing is sorted.

    pairs int32 [T * top_k], tiles int32 [max_tiles, 4] of (expert, first, count, 0) with expert -1 past the last tile,
    num_tiles int32 [1].
    """

    ids: torch.Tensor
    num_experts: int
    block: int
    more: int
    max_tiles: int
    pairs: torch.Tensor | None = None
    tiles: torch.Tensor | None = None
    num_tiles: torch.Tensor | None = None

    @property
    def num_pairs(self) -> int:
        return self.ids.numel()


@triton.jit
def _known_ids(ids, at, num_pairs, num_experts):
    found = tl.load(ids + at, mask=at < num_pairs, other=-1)
    return tl.where((found >= 0) & (found < num_experts), found, -1)


@triton.jit(do_not_specialize=("num_pairs", "num_experts", "max_tiles", "block", "more"))
def _align_kernel(ids, pairs, tiles, num_tiles, num_pairs, num_experts, max_tiles, block, more, CHUNK: tl.constexpr,
                  BINS: tl.constexpr):  # fmt: skip
    """A program an expert: all of them count all pairs, each then lists its own. One launch, no atomics between
    programs, so that a step with few rows does not wait for a chain of small kernels."""
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    chunk = tl.arange(0, CHUNK)
    counts = tl.zeros([BINS], tl.int32)
    for start in range(0, num_pairs, CHUNK):
        found = _known_ids(ids, start + chunk, num_pairs, num_experts)
        counts += tl.histogram(tl.maximum(found, 0), BINS, mask=found >= 0)
    tiles_of = tl.minimum(counts, tl.maximum(1, (counts - more + block - 1) // block))  # none for no pair
    first = tl.sum(tl.where(bins < expert, counts, 0))
    count = tl.sum(tl.where(bins == expert, counts, 0))
    first_tile = tl.sum(tl.where(bins < expert, tiles_of, 0))
    own_tiles = tl.sum(tl.where(bins == expert, tiles_of, 0))
    all_tiles = tl.sum(tiles_of)
    place = first
    for start in range(0, tl.where(count > 0, num_pairs, 0), CHUNK):
        at = start + chunk
        mine = _known_ids(ids, at, num_pairs, num_experts) == expert
        ahead = tl.cumsum(mine.to(tl.int32), 0)
        tl.store(pairs + place + ahead - 1, at, mask=mine)
        place += tl.max(ahead, 0)
    _list_tiles(tiles, expert, first, count, first_tile, own_tiles, block, CHUNK)
    if expert == num_experts - 1:
        tl.store(num_tiles, all_tiles)
        _list_tiles(tiles, -1, 0, 0, all_tiles, max_tiles - all_tiles, block, CHUNK)


@triton.jit
def _list_tiles(tiles, expert, first, count, first_tile, how_many, block, CHUNK: tl.constexpr):
    for start in range(0, how_many, CHUNK):
        tile = start + tl.arange(0, CHUNK)
        entry = tiles + (first_tile + tile) * TILE_FIELDS
        listed = tile < how_many
        tl.store(entry, expert + tile * 0, mask=listed)
        tl.store(entry + 1, first + tile * block, mask=listed)
        left = count - tile * block
        tl.store(entry + 2, tl.where(tile < how_many - 1, block, left), mask=listed)
        tl.store(entry + 3, tile * 0, mask=listed)


def align(ids: torch.Tensor, num_experts: int, block: int, more: int = 0) -> MoeRouting:
    """Tiles for ids int32 [T, top_k]; `block` and `more` are a schedule's. One launch, or none for a block of 1.

    Raises ValueError for ids of another type or shape, or more than 512 experts.
    """
    if ids.dtype != torch.int32 or ids.dim() != 2 or not ids.is_contiguous():
        raise ValueError(f"expert ids must be contiguous int32 [tokens, top_k], got {ids.dtype} {tuple(ids.shape)}")
    if not 1 <= num_experts <= MAX_EXPERTS or block < 1 or not 0 <= more < block:
        raise ValueError(
            f"1 to {MAX_EXPERTS} experts, tiles of 1 or more pairs and fewer beyond, got {num_experts}, {block}, {more}"
        )
    num_pairs = ids.numel()
    if block == 1 or num_pairs == 0:
        return MoeRouting(ids, num_experts, block, more, num_pairs)
    # as many experts as can begin a tile of their own do so, with one pair each; the rest of the pairs fill tiles
    max_tiles = (num_pairs + min(num_experts, num_pairs) * (block - 1)) // block
    pairs = torch.empty(num_pairs, dtype=torch.int32, device=ids.device)
    tiles = torch.empty((max_tiles, TILE_FIELDS.value), dtype=torch.int32, device=ids.device)
    num_tiles = torch.empty(1, dtype=torch.int32, device=ids.device)
    chunk = 256 if num_pairs <= 256 else 2048
    _align_kernel[(num_experts,)](
        ids, pairs, tiles, num_tiles, num_pairs, num_experts, max_tiles, block, more, CHUNK=chunk,
        BINS=max(32, triton.next_power_of_2(num_experts)), num_warps=4 if chunk == 256 else 8,
    )  # fmt: skip
    return MoeRouting(ids, num_experts, block, more, max_tiles, pairs, tiles, num_tiles)
