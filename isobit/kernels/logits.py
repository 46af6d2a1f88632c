"""Pointwise arithmetic on one row of logits, on the host: what changes it before a token is drawn, and its log-probs.

Numpy, element by element, every operation rounded once; nothing is summed over a row, so there is no schedule to admit.
The formulas are part of SamplingOrder and LogprobsOrder (docs/numerics-cpu.md, sections 7 and 8). Knows no requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

__all__ = ["LogitChanges", "changed_logits", "compact_changes", "token_logprobs"]

Row = npt.NDArray[np.float32]


@dataclass(frozen=True)
class LogitChanges:
    """What is done to a row before a token is drawn from it, in the order of the fields; ids are inside the vocabulary.

    `bias` by token id; `repetition_penalty` over the ids in `seen`; `frequency_penalty` and `presence_penalty` over the
    ids in `counts`, which says how often each was generated; ids in `banned` can no longer be drawn.
    """

    bias: Mapping[int, float]
    repetition_penalty: float
    seen: Sequence[int]
    frequency_penalty: float
    presence_penalty: float
    counts: Mapping[int, int]
    banned: Sequence[int]


def changed_logits(row: Row, changes: LogitChanges) -> Row:
    """A changed copy of a row, float32 [V] -> [V]; penalties and biases are rounded to float32 first.

    x + bias; then x / r where x > 0 and x * r elsewhere (Keskar et al. 2019); then x - (frequency * count + presence).
    """
    values = row.copy()
    for token_id, bias in changes.bias.items():
        values[token_id] += np.float32(bias)
    if changes.repetition_penalty != 1:
        ids = np.unique(np.array(changes.seen))
        seen, factor = values[ids], np.float32(changes.repetition_penalty)
        values[ids] = np.where(seen > 0, seen / factor, seen * factor)
    if changes.counts and (changes.frequency_penalty != 0 or changes.presence_penalty != 0):
        ids = np.fromiter(changes.counts.keys(), dtype=np.int64)
        times = np.fromiter(changes.counts.values(), dtype=np.float32)
        values[ids] -= np.float32(changes.frequency_penalty) * times + np.float32(changes.presence_penalty)
    values[list(changes.banned)] = -np.inf
    return values


def compact_changes(changes: LogitChanges) -> tuple[list[int], LogitChanges]:
    """(the ids that may change, ascending; the same changes in a row that holds just those ids).

    No value depends on another, so a row need not be at hand, or be copied, as a whole.
    """
    ids = sorted({*changes.bias, *changes.seen, *changes.counts, *changes.banned})
    at = {token_id: index for index, token_id in enumerate(ids)}
    return ids, replace(
        changes,
        bias={at[token_id]: value for token_id, value in changes.bias.items()},
        seen=[at[token_id] for token_id in changes.seen],
        counts={at[token_id]: count for token_id, count in changes.counts.items()},
        banned=[at[token_id] for token_id in changes.banned],
    )


def token_logprobs(values: Row, normalisers: Sequence[float]) -> list[float]:
    """float32(float64(values[i]) - normalisers[i]), as floats that hold the float32 exactly."""
    pairs = zip(values.tolist(), normalisers, strict=True)
    return [float(np.float32(value - normaliser)) for value, normaliser in pairs]
