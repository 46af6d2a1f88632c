"""Picks the next token of each request from its own row of logits, and reads raw log-probs.

A row's token depends on the row, the request's params, its own tokens, its seed and the position: never on other rows.
Rows go to the ops together, by what is asked of them. Log-probs are the raw model's: penalties, biases, temperature and
filters do not enter them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from isobit.kernels.interface import Draws
from isobit.kernels.logits import LogitChanges
from isobit.ops import Ops
from isobit.request import Request, TokenLogprob

NO_CHANGES = LogitChanges({}, 1.0, (), 0.0, 0.0, {}, ())
SMALLEST_TEMPERATURE = 1e-100  # below it the division by T could leave float64; such a request is greedy


@dataclass(frozen=True)
class SampledToken:
    """The token drawn for a request, with its log-prob when asked for."""

    token_id: int
    logprob: TokenLogprob | None


class Sampler:
    """Stateless but for the ops and the ids that end a sequence."""

    def __init__(self, ops: Ops, eos_token_ids: Sequence[int]) -> None:
        self.ops = ops
        self.eos_token_ids = tuple(eos_token_ids)

    def sample(self, logits: torch.Tensor, requests: Sequence[Request]) -> list[SampledToken | None]:
        """logits float32 [R, V], one row a request -> tokens; None where the row holds NaN or infinity."""
        best, finite = (tensor.tolist() for tensor in self.ops.argmax(logits))
        tokens = {row: best[row] for row in range(len(requests)) if finite[row]}
        tokens.update(self._drawn(logits, {row: requests[row] for row in tokens}))
        wanted = {row: request.params.logprobs for row, request in enumerate(requests) if row in tokens}
        asked = {row: num_top for row, num_top in wanted.items() if num_top is not None}
        logprobs = self._logprobs(logits, {row: tokens[row] for row in asked}, asked)
        return [
            SampledToken(tokens[row], logprobs.get(row)) if row in tokens else None for row in range(len(requests))
        ]

    def score(self, logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprob | None]:
        """Raw log-probs of given next tokens, one a row of logits float32 [R, V]; None where a row is not finite."""
        finite = self.ops.argmax(logits)[1].tolist()
        tokens = {row: token_id for row, token_id in enumerate(token_ids) if finite[row]}
        logprobs = self._logprobs(logits, tokens, dict.fromkeys(tokens, num_top))
        return [logprobs.get(row) for row in range(len(token_ids))]

    def _logprobs(
        self, logits: torch.Tensor, tokens: Mapping[int, int], num_top: Mapping[int, int]
    ) -> dict[int, TokenLogprob]:
        """By row: the log-prob of its token, and of its `num_top` best."""
        if not tokens:
            return {}
        vocab_size, rows = logits.shape[1], list(tokens)
        chosen = logits if len(rows) == logits.shape[0] else self.ops.take_rows(logits, rows)
        normalisers = self.ops.logprobs(chosen).tolist()
        widest = min(max(num_top.values()), vocab_size)
        best = self.ops.top_logits(chosen, widest).tolist() if widest else [[]] * len(rows)
        ids = [[tokens[row], *best[i][: num_top[row]]] for i, row in enumerate(rows)]
        at = [i for i, of_row in enumerate(ids) for _ in of_row]
        flat = [token_id for of_row in ids for token_id in of_row]
        values = iter(self.ops.token_logprobs(chosen, at, flat, [normalisers[i] for i in at]))
        found = {}
        for row, (own, *top) in zip(rows, ids, strict=True):
            found[row] = TokenLogprob(own, next(values), tuple((token_id, next(values)) for token_id in top))
        return found

    def _drawn(self, logits: torch.Tensor, requests: Mapping[int, Request]) -> dict[int, int]:
        """By row: the token, where it is not simply the row's largest."""
        changes = {row: self._changes(request) for row, request in requests.items()}
        rows = [row for row in requests if changes[row] != NO_CHANGES or not _is_greedy(requests[row])]
        if not rows:
            return {}
        values = logits if len(rows) == logits.shape[0] else self.ops.take_rows(logits, rows)
        picks: dict[int, int] = {}
        if any(changes[row] != NO_CHANGES for row in rows):
            values = self.ops.changed_logits(values, [changes[row] for row in rows])
            picks.update(zip(rows, self.ops.argmax(values)[0].tolist(), strict=True))  # of the greedy among them
        at = [i for i, row in enumerate(rows) if not _is_greedy(requests[row])]
        if at:
            chosen = values if len(at) == len(rows) else self.ops.take_rows(values, at)
            drawn = self.ops.sample(chosen, _draws([requests[rows[i]] for i in at])).tolist()
            picks.update(zip([rows[i] for i in at], drawn, strict=True))
        return picks

    def _changes(self, request: Request) -> LogitChanges:
        """What the params ask to change in the request's row."""
        params = request.params
        forbid_end = request.num_output_tokens < params.min_tokens
        penalised = params.frequency_penalty != 0 or params.presence_penalty != 0
        if not (params.logit_bias or params.repetition_penalty != 1 or penalised or forbid_end):
            return NO_CHANGES
        return LogitChanges(
            bias=params.logit_bias,
            repetition_penalty=params.repetition_penalty,
            seen=request.token_ids if params.repetition_penalty != 1 else (),
            frequency_penalty=params.frequency_penalty,
            presence_penalty=params.presence_penalty,
            counts=Counter(request.output_token_ids) if penalised else {},
            banned=(*self.eos_token_ids, *params.stop_token_ids) if forbid_end else (),
        )


def _is_greedy(request: Request) -> bool:
    return request.params.temperature < SMALLEST_TEMPERATURE or request.params.top_k == 1


def _draws(requests: Sequence[Request]) -> Draws:
    params = [request.params for request in requests]
    seeds = [p.seed for p in params]
    assert None not in seeds, "a sampled request has a seed"
    return Draws(
        temperature=np.array([p.temperature for p in params], np.float64),
        top_k=np.array([p.top_k for p in params], np.int64),
        top_p=np.array([p.top_p for p in params], np.float64),
        min_p=np.array([p.min_p for p in params], np.float64),
        seed=np.array(seeds, np.uint64),
        position=np.array([len(request.token_ids) for request in requests], np.int64),
    )
