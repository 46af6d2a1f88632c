"""A fast engine for server and API tests: the real LLMEngine, scheduler and sampler code over made-up logits.

The logits of a row are random numbers seeded by the token prefix alone, so that answers keep the promise by
construction and any mix-up of requests shows. A test can script the output of a prompt, poison a prompt with NaN, slow
the steps down, or make a step fail.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from isobit.batch import Batch
from isobit.config import EngineConfig
from isobit.engine import EngineStats, LLMEngine
from isobit.kernels.interface import Draws
from isobit.kernels.logits import LogitChanges, changed_logits, token_logprobs
from isobit.kernels.reference import ops as reference
from isobit.model_config import ModelConfig, RopeConfig
from isobit.order import LogprobsOrder, SamplingOrder
from isobit.plan import DeviceFacts, resolve_plan
from isobit.request import RequestOutput
from isobit.tokenizer import Tokenizer
from tests.tiny import tiny_tokenizer

VOCAB = 480
EOS = (1, 3)
SCRIPTED = np.float32(60.0)


def fake_tokenizer() -> Tokenizer:
    """Byte-level BPE of 480 tokens with BOS and a chat template that refuses roles out of turn."""
    return Tokenizer(tiny_tokenizer())


class FakeRunner:
    """Logits per row from the prefix; `hidden` is those logits."""

    def __init__(self) -> None:
        self.scripts: dict[tuple[int, ...], Sequence[int]] = {}
        self.nan_prompts: set[tuple[int, ...]] = set()

    def forward(self, batch: Batch) -> torch.Tensor:
        rows = []
        for chunk in batch.chunks:
            request = chunk.request
            for position in range(chunk.start, chunk.start + chunk.num_tokens):
                rows.append(self._row(request.prompt_token_ids, request.token_ids[: position + 1]))
        return torch.from_numpy(np.stack(rows))

    def _row(self, prompt: tuple[int, ...], prefix: Sequence[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
        seed = np.array(prefix[-64:] + [len(prefix)], dtype=np.uint32)
        row = np.random.default_rng(seed).normal(size=VOCAB).astype(np.float32) * np.float32(2)
        done = len(prefix) - len(prompt)
        if prompt in self.scripts and done >= 0:
            script = self.scripts[prompt]
            row[script[done] if done < len(script) else EOS[0]] = SCRIPTED
        if prompt in self.nan_prompts:
            row[7] = np.nan
        return row

    def logits(self, hidden: torch.Tensor, rows: Sequence[int]) -> Iterator[tuple[Sequence[int], torch.Tensor]]:
        for start in range(0, len(rows), 64):
            yield rows[start : start + 64], hidden[torch.tensor(rows[start : start + 64])]


class FakeOps:
    """The sampler's ops, from the reference."""

    def argmax(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ids, finite = reference.argmax(logits.numpy())
        return torch.from_numpy(ids), torch.from_numpy(finite)

    def logprobs(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(reference.logprobs(LogprobsOrder(VOCAB), logits.numpy())[1])

    def take_rows(self, x: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        return x[list(rows)]

    def token_logprobs(
        self, logits: torch.Tensor, rows: Sequence[int], token_ids: Sequence[int], normalisers: Sequence[float]
    ) -> list[float]:
        return token_logprobs(logits.numpy()[list(rows), list(token_ids)], normalisers)

    def changed_logits(self, logits: torch.Tensor, changes: Sequence[LogitChanges]) -> torch.Tensor:
        rows = [changed_logits(row, of_row) for row, of_row in zip(logits.numpy(), changes, strict=True)]
        return torch.from_numpy(np.stack(rows))

    def top_logits(self, logits: torch.Tensor, n: int) -> torch.Tensor:
        return torch.from_numpy(np.stack([reference.top_logits(row, n) for row in logits.numpy()]))

    def sample(self, logits: torch.Tensor, draws: Draws) -> torch.Tensor:
        settings = zip(*(getattr(draws, spec.name).tolist() for spec in fields(draws)), strict=True)
        rows = zip(logits.numpy(), settings, strict=True)
        return torch.tensor([reference.sample(SamplingOrder(VOCAB), row, *of_row) for row, of_row in rows])

    def describe(self) -> dict[str, str]:
        return {"all": "made up"}


class FakeEngine(LLMEngine):
    """`fail_steps`: that many next steps raise; `step_seconds` slows every step; `leak` fails the integrity check."""

    def __init__(self, context_length: int = 256, defaults: Sequence[tuple[str, float]] = (), **options: Any) -> None:
        rope = RopeConfig("default", 10000.0, 16)
        model = ModelConfig(
            "FakeForCausalLM", VOCAB, 64, 64, 1, 4, 4, 16, 1e-5, rope, 4096, False, "float32",
            bos_token_id=0, eos_token_ids=EOS, generation_defaults=tuple(defaults),
        )  # fmt: skip
        config = EngineConfig(model="folder/fake", context_length=context_length, **options)
        plan = resolve_plan(config, model, DeviceFacts("cpu", ("scalar",), 2, 1 << 33))
        ops: Any = FakeOps()
        loaded: Any = SimpleNamespace(
            model_config=model, plan=plan, fingerprint=plan.fingerprint("made up"), model=None, ops=ops,
            new_kv_cache=lambda: None,
        )  # fmt: skip
        super().__init__(config, loaded)
        self.fake = FakeRunner()
        self.runner: Any = self.fake
        self.fail_steps = 0
        self.step_seconds = 0.0
        self.leak = False

    def step(self) -> list[RequestOutput]:
        if self.step_seconds:
            time.sleep(self.step_seconds)
        if self.fail_steps:
            self.fail_steps -= 1
            raise RuntimeError("a made-up failure")
        return super().step()

    def check_integrity(self) -> None:
        assert not self.leak, "a made-up leak"
        super().check_integrity()

    def script(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Make `prompt` continue with `output`, then end of text."""
        self.fake.scripts[tuple(prompt)] = list(output)

    def poison(self, prompt: Sequence[int]) -> None:
        """Make the model give NaN after `prompt`."""
        self.fake.nan_prompts.add(tuple(prompt))


__all__ = ["EOS", "VOCAB", "EngineStats", "FakeEngine", "fake_tokenizer"]
