"""Checks of attention and of rope with its cache writes: decode, chunks, whole prompts, mixed and reordered batches.

The truth of attention is the plainest kernel of its Order on this card, run on each request whole. Unused tails of
pages and unowned pages hold NaN: rows must not notice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from isobit.kernels.gpu.checks import Check, device_floats
from isobit.kernels.interface import AttentionInputs, AttentionShape, HeadNorms, RopeTables, StepArrays
from isobit.kernels.probe_data import bits, floats
from isobit.kernels.reference import ops as reference
from isobit.order import MmaAttentionOrder, norm_order

__all__ = ["attention_checks", "rope_and_cache_checks"]

_HEADS = ((8, 2), (3, 1), (7, 1), (2, 2))  # (query heads, kv heads): ratios that fill a tile and that do not
_LENGTHS = (1, 64, 65, 700, 1100, 130)
_UNTOUCHED = 7.0

Piece = tuple[int, int, int]  # request, its first row, the row after its last


class _Pages:
    """Keys and values of some requests in scattered pages; everything they do not own is NaN."""

    def __init__(self, library: Any, order: MmaAttentionOrder, shape: AttentionShape, seed: int) -> None:
        self.library, self.order, self.shape = library, order, shape
        size = order.kv_block
        counts = [-(-length // size) for length in _LENGTHS]
        num_pages = int(np.add.reduce(counts)) + 3
        numbers = iter((np.arange(num_pages) * 7 + 3) % num_pages if num_pages % 7 else np.arange(num_pages)[::-1])
        self.tables = np.zeros((len(_LENGTHS), max(counts)), np.int32)
        layers = library.new_kv_layers(1, num_pages, size, shape, order.kv_dtype)
        self.layer = layers[0].fill_(torch.nan)
        for request, length in enumerate(_LENGTHS):
            data = device_floats(
                seed + request, (2, shape.num_kv_heads, length, shape.head_dim), library.dtype, library.device, high=1
            )
            for page in range(counts[request]):
                own = data[:, :, page * size : (page + 1) * size]
                self.tables[request, page] = number = next(numbers)
                self.layer[:, number, :, : own.shape[2]] = own
        self.q = [
            device_floats(seed + 50 + i, (length, shape.num_heads * shape.head_dim), library.dtype, library.device)
            for i, length in enumerate(_LENGTHS)
        ]

    def inputs(self, pieces: Sequence[Piece]) -> tuple[torch.Tensor, AttentionInputs]:
        """(q, attention inputs) of a batch of pieces."""
        positions = np.concatenate([np.arange(start, stop) for _, start, stop in pieces]).astype(np.int32)
        ends = np.cumsum([0] + [stop - start for _, start, stop in pieces]).astype(np.int32)
        owners = [request for request, _, _ in pieces]
        widest = max(-(-stop // self.order.kv_block) for _, _, stop in pieces)
        arrays = StepArrays(
            positions, positions, positions, ends, np.array([start for _, start, _ in pieces], np.int32),
            np.ascontiguousarray(self.tables[owners, :widest]),
        )  # fmt: skip
        return torch.cat([self.q[i][start:stop] for i, start, stop in pieces]), self.library.begin_step(arrays)[1]


def _batches() -> list[list[Piece]]:
    """Whole requests together and alone, decode of all (both orders), chunks at odd places, and mixtures."""
    whole = [(i, 0, length) for i, length in enumerate(_LENGTHS)]
    last = [(i, length - 1, length) for i, length in enumerate(_LENGTHS)]
    batches = [whole, whole[::-1], last, last[::-1], *([piece] for piece in last), [whole[3]], [whole[4]]]
    batches += [[(3, start, start + 7)] for start in (0, 60, 505, 690)]
    batches += [[(4, start, start + 1) for start in (63, 64, 127, 511, 512, 1023, 1024)]]
    batches += [[(4, 100, 371)], [(4, 512, 1030), last[0], last[5]], [last[4], (3, 3, 133), last[2], (5, 1, 130)]]
    batches += [[(3, 40, 40 + rows)] for rows in (2, 5, 16, 17, 33, 64, 65, 129)]
    return batches


def attention_checks(library: Any, order: MmaAttentionOrder, schedule: str, shared: dict[Any, Any]) -> Iterator[Check]:
    for at, (num_heads, num_kv_heads) in enumerate(_HEADS):
        shape, scale = AttentionShape(num_heads, num_kv_heads, order.head_dim), order.head_dim**-0.5
        if at not in shared:
            pages = _Pages(library, order, shape, 1000 + 100 * at)
            whole = [(i, 0, length) for i, length in enumerate(_LENGTHS)]
            truth = []
            for piece in whole:
                q, inputs = pages.inputs([piece])
                truth.append(library.reference_attention(q, pages.layer, inputs, shape, scale))
            shared[at] = (pages, truth)
        pages, truth = shared[at]
        for pieces in _batches():

            def run(pages: Any = pages, pieces: Any = pieces, shape: Any = shape, scale: float = scale) -> Any:
                q, inputs = pages.inputs(pieces)
                return {"y": library.attention(q, pages.layer, inputs, shape, scale, schedule)}

            expected = torch.cat([truth[i][start:stop] for i, start, stop in pieces])
            yield Check(f"H={num_heads} KV={num_kv_heads} rows {pieces}", run, {"y": expected})


def rope_and_cache_checks(library: Any, order: MmaAttentionOrder, schedule: str, _: Any) -> Iterator[Check]:
    """Both pairings, whole and partial rotation, with and without norms of the heads."""
    width = order.head_dim
    partial = max(2, width // 4 * 2)
    for at, (rotary_dim, interleaved, with_norms) in enumerate(
        ((width, False, False), (width, False, True), (width, True, False), (partial, False, True))
    ):
        case = _Rotation(library, order, 2000 + 20 * at, rotary_dim, interleaved, with_norms)
        for count in (33, 1, 2, 8):
            label = f"R={rotary_dim}{' interleaved' * interleaved}{' norms' * with_norms}, {count} rows"
            run: Any = lambda case=case, count=count: case.run(count)  # noqa: E731
            yield Check(label, run, case.expected(count))


class _Rotation:
    """33 rows of qkv, their positions and slots, tables and norms; what must come out."""

    def __init__(
        self, library: Any, order: MmaAttentionOrder, seed: int, rotary_dim: int, interleaved: bool, with_norms: bool
    ) -> None:
        self.library, self.order = library, order
        width = order.head_dim
        self.shape = AttentionShape(6, 2, width)
        device = library.device
        self.qkv = torch.from_numpy(floats(seed, 33, 10 * width, low=-16, high=6)).to(library.dtype)
        self.positions = (bits(seed + 2, 33) % np.uint64(90)).astype(np.int32)
        cos, sin = (floats(seed + i, 90, rotary_dim // 2, low=-12, high=-1) for i in (3, 4))
        self.slots = ((np.arange(33) * 37 + 11) % (3 * order.kv_block)).astype(np.int32)
        self.rope = RopeTables(torch.from_numpy(cos).to(device), torch.from_numpy(sin).to(device), interleaved)
        q, k, v = np.split(self.qkv.float().numpy().reshape(33, 10, width), (6, 8), axis=1)
        self.norms = None
        if with_norms:
            weights = [floats(seed + i, width, low=-3, high=1) for i in (7, 8)]
            q_weight, k_weight = (torch.from_numpy(w).to(device) for w in weights)
            self.norms = HeadNorms(q_weight, k_weight, 1e-6)
            norm = norm_order(width, library.name)
            q, k = (reference.rms_norm(norm, x, w, 1e-6) for x, w in zip((q, k), weights, strict=True))
        at = cos[self.positions], sin[self.positions]
        q, k = (reference.rope(x, *at, interleaved) for x in (q, k))
        self.truth = [torch.from_numpy(np.ascontiguousarray(x)).to(library.dtype).to(device) for x in (q, k, v)]

    def expected(self, count: int) -> dict[str, torch.Tensor]:
        q, k, v = (x[:count] for x in self.truth)
        cache = self._empty_cache()
        for row, slot in enumerate(self.slots[:count].tolist()):
            page, offset = divmod(slot, self.order.kv_block)
            cache[0, page, :, offset], cache[1, page, :, offset] = k[row], v[row]
        return {"q": q.reshape(count, -1), "cache": cache}

    def run(self, count: int) -> dict[str, torch.Tensor]:
        device, cache = self.library.device, self._empty_cache()
        positions, slots = (torch.from_numpy(x[:count]).to(device) for x in (self.positions, self.slots))
        qkv = self.qkv[:count].to(device)
        q = self.library.rope_and_cache(qkv, positions, slots, self.rope, self.norms, cache, self.shape)
        return {"q": q, "cache": cache}

    def _empty_cache(self) -> torch.Tensor:
        layers = self.library.new_kv_layers(1, 3, self.order.kv_block, self.shape, self.order.kv_dtype)
        cache: torch.Tensor = layers[0].fill_(_UNTOUCHED)
        return cache
