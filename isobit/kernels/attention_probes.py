"""Probes of attention and of rope with its cache writes: decode, chunks, whole prompts, mixed and reordered batches.

The unused tails of pages and unowned pages are NaN (`calls.paged`), and one request holds NaN and inf at a late
position: rows before it must not notice. Knows nothing of how kernels cut their work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from isobit.kernels.probe_data import THREADS, Probe, Run, bits, floats, row_runs, with_specials
from isobit.kernels.reference.ops import round_to

__all__ = ["attention_probes", "rope_and_cache_probes"]

# (query heads, kv heads, ((keys, first computed position) of each request, ...)); pages are 64 keys
_LAYOUTS = (
    (3, 1, ((1, 0), (64, 0), (65, 40), (150, 100), (200, 192))),
    (8, 2, ((3, 0), (63, 50), (130, 126))),
    (2, 2, ((17, 0), (129, 125), (1100, 1098))),
)


def attention_probes(order: Any) -> list[Probe]:
    """Grouped heads of several ratios; requests at both sides of page ends; one long context."""
    return [_attention_probe(order, 700 + 50 * i, *layout) for i, layout in enumerate(_LAYOUTS)]


def _attention_probe(
    order: Any, seed: int, num_heads: int, num_kv_heads: int, requests: tuple[tuple[int, int], ...]
) -> Probe:
    width = order.head_dim
    owners = np.concatenate([np.full(keys - first, i) for i, (keys, first) in enumerate(requests)])
    positions = np.concatenate([np.arange(first, keys) for keys, first in requests])
    q = with_specials(seed, floats(seed + 1, owners.size, num_heads * width, low=-6, high=1), 97)
    q[:, :width] *= np.float32(16)  # one head attends to few keys: the others' weights fall below exp32's zero
    kv = []
    for i, (keys, _) in enumerate(requests):
        k = with_specials(seed + 5 * i + 2, floats(seed + 5 * i + 3, keys, num_kv_heads, width, high=-1), 97)
        v = with_specials(seed + 5 * i + 4, floats(seed + 5 * i + 5, keys, num_kv_heads, width, low=-12, high=6), 97)
        kv.append((round_to(order.kv_dtype, k), round_to(order.kv_dtype, v)))
    if requests[1][1] < (poisoned := requests[1][0] - 5):
        kv[1][0][poisoned, 0, width // 2] = np.nan
        kv[1][1][poisoned, :, 0] = np.inf
    inputs = {
        "q": q, "requests": owners, "positions": positions, "kv": kv, "num_heads": num_heads, "scale": width**-0.5,
    }  # fmt: skip
    rows_of = [np.flatnonzero(owners == i) for i in range(len(requests))]
    label = f"H={num_heads} KV={num_kv_heads} D={width} T={','.join(str(keys) for keys, _ in requests)}"
    return Probe("attention", label, inputs, ("q", "requests", "positions"), _attention_runs(rows_of))


def _attention_runs(rows_of: list[Any]) -> tuple[Run, ...]:
    """Whole requests together and alone, decode of all (both orders), chunks of several sizes, and mixtures."""
    whole = rows_of
    batches: list[Sequence[Any]] = [whole, whole[::-1]]
    batches += [[rows] for rows in whole]
    batches += [[rows[-1:] for rows in whole], [rows[:1] for rows in whole[::-1]]]
    batches += [[rows[start : start + 7]] for rows in whole[1:] for start in range(0, len(rows), 23)]
    batches += [[rows[len(rows) // 3 : len(rows) // 3 + 17]] for rows in whole[1:]]
    batches += [[whole[1][len(whole[1]) // 2 :], whole[2][-1:], whole[0]]]
    return tuple(
        Run(tuple(int(row) for rows in batch for row in rows), threads, (i + threads) % 2 == 0)
        for i, batch in enumerate(batches)
        for threads in THREADS
    )


def rope_and_cache_probes(order: Any) -> list[Probe]:
    """Both pairings, whole and partial rotation, with and without norms of the heads."""
    width, num_rows, num_heads, num_kv_heads = order.head_dim, 33, 6, 2
    probes = []
    for i, (rotary_dim, interleaved, norms) in enumerate(
        ((width, False, False), (width, False, True), (width, True, False), (max(2, width // 4 * 2), False, True))
    ):
        seed = 900 + 20 * i
        qkv = floats(seed, num_rows, (num_heads + 2 * num_kv_heads) * width, low=-16, high=6)
        inputs = {
            "qkv": with_specials(seed + 1, qkv, 41),
            "positions": (bits(seed + 2, num_rows) % np.uint64(90)).astype(np.int32),
            "cos": with_specials(seed + 3, floats(seed + 4, 90, rotary_dim // 2, low=-12, high=-1), 41),
            "sin": with_specials(seed + 5, floats(seed + 6, 90, rotary_dim // 2, low=-12, high=-1), 41),
            "q_norm": floats(seed + 7, width) if norms else None,
            "k_norm": floats(seed + 8, width) if norms else None,
            "eps": 1e-6,
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "interleaved": interleaved,
        }
        label = f"D={width} R={rotary_dim}{' interleaved' if interleaved else ''}{' norms' if norms else ''}"
        probes.append(Probe("rope_and_cache", label, inputs, ("qkv", "positions"), row_runs(num_rows)))
    return probes
