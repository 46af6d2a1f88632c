"""Changes to a row of logits and the rounding of a log-prob, against the reference's arithmetic, by bytes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from isobit.kernels.logits import LogitChanges, changed_logits, token_logprobs
from isobit.kernels.reference import ops as reference
from isobit.kernels.reference.math import Float32, add32, div32, mul32, sub32
from isobit.order import LogprobsOrder

VOCAB = 300
ROW = np.random.default_rng(0).normal(scale=5, size=VOCAB).astype(np.float32)
CHANGES = LogitChanges(
    bias={3: 0.1, 200: -7.3, 299: 100.0},
    repetition_penalty=1.3,
    seen=[5, 200, 5, 17, *range(30, 90)],
    frequency_penalty=0.7,
    presence_penalty=0.3,
    counts={17: 3, 200: 1, **{token: 1 + token % 5 for token in range(40, 90)}},
    banned=(299, 8),
)


def expected(row: Float32, changes: LogitChanges, penalties_first: bool = False) -> Float32:
    """One token at a time; `penalties_first` subtracts before the repetition penalty, which nobody asked for."""
    out = row.copy()
    for token in range(row.size):
        x = out[token]
        if token in changes.bias:
            x = add32(x, np.float32(changes.bias[token]))
        count = changes.counts.get(token, 0)
        scaled = mul32(np.float32(changes.frequency_penalty), np.float32(count))
        penalty = add32(scaled, np.float32(changes.presence_penalty)) if count else np.float32(0)
        if penalties_first:
            x = sub32(x, penalty)
        if token in changes.seen:
            factor = np.float32(changes.repetition_penalty)
            x = div32(x, factor) if x > 0 else mul32(x, factor)
        out[token] = x if penalties_first else sub32(x, penalty)
    out[list(changes.banned)] = -np.inf
    return out


def test_changes_are_made_in_order_each_operation_rounded_once() -> None:
    before = ROW.copy()
    got = changed_logits(ROW, CHANGES)
    assert got.tobytes() == expected(ROW, CHANGES).tobytes()
    assert ROW.tobytes() == before.tobytes(), "the row itself, from which log-probs are read, is not touched"
    assert got.tobytes() != expected(ROW, CHANGES, penalties_first=True).tobytes(), "control: another order shows"


@pytest.mark.parametrize(
    ("changes", "ids"),
    [
        ({"bias": CHANGES.bias}, {3, 200, 299}),
        ({"repetition_penalty": 1.3, "seen": CHANGES.seen}, {5, 17, 200, *range(30, 90)}),
        ({"frequency_penalty": 0.7, "counts": CHANGES.counts}, {17, 200, *range(40, 90)}),
        ({"presence_penalty": -0.3, "counts": CHANGES.counts}, {17, 200, *range(40, 90)}),
        ({"banned": (299, 8)}, {299, 8}),
        ({"seen": CHANGES.seen, "counts": CHANGES.counts}, set()),
    ],
)
def test_each_change_touches_its_tokens_only(changes: dict[str, object], ids: set[int]) -> None:
    one = dataclasses.replace(LogitChanges({}, 1.0, (), 0.0, 0.0, {}, ()), **changes)  # type: ignore[arg-type]
    assert set(np.flatnonzero(changed_logits(ROW, one) != ROW).tolist()) == ids


def test_log_probs_of_tokens_are_those_of_the_whole_row() -> None:
    _, normaliser = reference.logprobs(LogprobsOrder(VOCAB), ROW[None])
    whole = reference.token_logprobs(ROW[None], normaliser)[0]
    got = np.array(token_logprobs(ROW, normaliser.tolist() * VOCAB))
    assert np.array_equal(got, whole.astype(np.float64))
    assert not np.array_equal(got, ROW.astype(np.float64) - normaliser[0]), "control: the rounding to float32 shows"
