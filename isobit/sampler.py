"""Picks the next token of each request from its own row of logits, and reads raw log-probs.

A row's token depends on the row, the request's params, its own tokens, its seed and the position: never on other rows.
Log-probs are the raw model's: penalties, biases, temperature and filters do not enter them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from isobit.kernels.logits import LogitChanges
from isobit.ops import Ops, take_rows
from isobit.request import Request, TokenLogprob

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
        wants = [row for row, request in enumerate(requests) if request.params.logprobs is not None and finite[row]]
        normalisers = self._normalisers(logits, wants)
        sampled: list[SampledToken | None] = []
        for row, request in enumerate(requests):
            if not finite[row]:
                sampled.append(None)
                continue
            token_id = self._pick(logits[row], best[row], request)
            logprob = None
            if row in normalisers:
                assert request.params.logprobs is not None
                logprob = self._token_logprob(logits[row], normalisers[row], token_id, request.params.logprobs)
            sampled.append(SampledToken(token_id, logprob))
        return sampled

    def score(self, logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprob | None]:
        """Raw log-probs of given next tokens, one a row of logits float32 [R, V]; None where a row is not finite."""
        finite = self.ops.argmax(logits)[1].tolist()
        normalisers = self.ops.logprobs(logits).tolist()
        return [
            self._token_logprob(logits[row], normalisers[row], token_id, num_top) if finite[row] else None
            for row, token_id in enumerate(token_ids)
        ]

    def _normalisers(self, logits: torch.Tensor, rows: Sequence[int]) -> dict[int, float]:
        if not rows:
            return {}
        chosen = logits if len(rows) == logits.shape[0] else take_rows(logits, rows)
        return dict(zip(rows, self.ops.logprobs(chosen).tolist(), strict=True))

    def _token_logprob(self, row: torch.Tensor, normaliser: float, token_id: int, num_top: int) -> TokenLogprob:
        top = self.ops.top_logits(row, min(num_top, row.shape[0])).tolist() if num_top else []
        own, *others = self.ops.token_logprobs(row, normaliser, [token_id, *top])
        return TokenLogprob(token_id, own, tuple(zip(top, others, strict=True)))

    def _pick(self, row: torch.Tensor, best: int, request: Request) -> int:
        params = request.params
        changes = self._changes(request)
        greedy = params.temperature < SMALLEST_TEMPERATURE or params.top_k == 1
        if greedy and changes is None:
            return best
        values = row if changes is None else self.ops.changed_logits(row, changes)
        if greedy:
            return int(self.ops.top_logits(values, 1)[0])
        assert params.seed is not None, "a sampled request has a seed"
        return self.ops.sample(
            values, params.temperature, params.top_k, params.top_p, params.min_p, params.seed, len(request.token_ids)
        )

    def _changes(self, request: Request) -> LogitChanges | None:
        """What the params ask to change in the request's row; None when nothing does."""
        params = request.params
        forbid_end = request.num_output_tokens < params.min_tokens
        penalised = params.frequency_penalty != 0 or params.presence_penalty != 0
        if not (params.logit_bias or params.repetition_penalty != 1 or penalised or forbid_end):
            return None
        return LogitChanges(
            bias=params.logit_bias,
            repetition_penalty=params.repetition_penalty,
            seen=request.token_ids,
            frequency_penalty=params.frequency_penalty,
            presence_penalty=params.presence_penalty,
            counts=Counter(request.output_token_ids) if penalised else {},
            banned=(*self.eos_token_ids, *params.stop_token_ids) if forbid_end else (),
        )
