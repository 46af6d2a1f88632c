"""One script of many requests, replayed under several chunk budgets and KV pools: the SHA-256 over all that came out.

`python -m tests.gpu.replay --model MODEL [--load-format dummy] [--control]` prints one line a run. Requests arrive
staggered, some are cancelled, sampling is mixed, and small pools force preemptions, which are counted. `--control`
runs the linears through torch's default BLAS, whose reduction order moves with the number of rows.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from dataclasses import replace
from typing import Any

import torch

from isobit.config import EngineConfig
from isobit.engine import LLMEngine
from isobit.loading import LoadedModel, load_model
from isobit.request import SamplingParams
from tests.harness import Arrival, Run, make_prompt, run_script

NUM_REQUESTS = 200
LONGEST = 700
BUDGETS = (64, 333, 2048)
POOLS = (900, 4096, 60_000)  # tokens; the smallest holds one long request and little else


def make_script(vocab_size: int, num_requests: int = NUM_REQUESTS) -> list[Arrival]:
    """Prompts of 1 to about 500 tokens, every third one sharing a prefix; every tenth request is cancelled."""
    shared = make_prompt(200, vocab_size, salt=1)
    script = []
    for index in range(num_requests):
        own = make_prompt(1 + (index * 37) % 290, vocab_size, salt=1000 + index)
        prompt = (*shared, *own) if index % 3 == 0 else own
        abort_at = index // 3 + 4 if index % 10 == 9 else None
        script.append(Arrival(f"r{index}", prompt, _params(index), at_step=index // 3, abort_at=abort_at))
    return script


def _params(index: int) -> SamplingParams:
    common: dict[str, Any] = {"max_tokens": 8 + index % 25, "ignore_eos": True, "logprobs": index % 4}
    mixed: tuple[dict[str, Any], ...] = (
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": index},
        {"temperature": 0.8, "seed": index, "top_p": 0.9},
        {"temperature": 1.2, "seed": index, "top_k": 50, "repetition_penalty": 1.1},
        {"temperature": 0.7, "seed": index, "min_p": 0.02, "frequency_penalty": 0.3, "presence_penalty": 0.1},
        {"temperature": 0.0, "logit_bias": {5: 1.5, 7: -3.0}},
        {"temperature": 1.0, "seed": index, "prompt_logprobs": 2},
    )
    return SamplingParams(**common, **mixed[index % len(mixed)])


def digest(run: Run, script: list[Arrival]) -> str:
    """SHA-256 over tokens and log-prob bits of every request that was not cancelled, in the script's order."""
    sha = hashlib.sha256()
    for arrival in script:
        if arrival.abort_at is None:
            sha.update(arrival.name.encode() + b"\0" + run.results[arrival.name].bits + b"\0")
    return sha.hexdigest()


def replay(loaded: LoadedModel, config: EngineConfig, script: list[Arrival], budget: int, pool: int) -> dict[str, Any]:
    """One run; cancelled requests are cut wherever they stand, which differs from run to run."""
    changed = replace(config, chunked_prefill_size=budget, max_total_tokens=pool)
    start = time.monotonic()
    run = run_script(LLMEngine(changed, loaded.reconfigured(changed)), script)
    ended = [run.results[arrival.name] for arrival in script if arrival.abort_at is None]
    assert all(result.finish_reason == "length" and result.error is None for result in ended), "a request did not end"
    return {
        "budget": budget, "pool": pool, "sha256": digest(run, script), "preemptions": run.stats.num_preemptions,
        "cached": run.stats.num_cached_tokens, "steps": run.stats.num_steps, "requests": len(ended),
        "most_in_a_step": run.stats.max_step_requests, "seconds": round(time.monotonic() - start, 1),
    }  # fmt: skip


def combinations(start: int | None) -> list[tuple[int, int]]:
    """All nine, or for one of three starts every budget and every pool once (a Latin square)."""
    if start is None:
        return [(budget, pool) for pool in POOLS for budget in BUDGETS]
    return [(budget, POOLS[(start + index) % len(POOLS)]) for index, budget in enumerate(BUDGETS)]


def unconstrained(loaded: LoadedModel) -> None:
    """Exchange the linears for torch's, as no engine of ours would: the control."""

    def linear(x: torch.Tensor, packed: Any, dtype: str, schedule: str, addend: Any = None, out: Any = None) -> Any:
        y = torch.nn.functional.linear(x, packed.weight)
        y = y if packed.bias is None else y + packed.bias.to(y.dtype)
        if addend is not None:
            return addend + y.float()
        return y.float() if packed.order.output_dtype == "float32" else y

    loaded.ops.library.linear = linear  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--requests", type=int, default=NUM_REQUESTS)
    parser.add_argument("--control", action="store_true")
    parser.add_argument("--start", type=int, choices=range(len(POOLS)), help="a fresh start: a third of all")
    args = parser.parse_args()
    config = EngineConfig(
        model=args.model, load_format=args.load_format, device="cuda", context_length=LONGEST, random_seed=0,
        max_total_tokens=POOLS[-1],
    )  # fmt: skip
    start = time.monotonic()
    loaded = load_model(config)
    seconds = round(time.monotonic() - start, 1)
    print(json.dumps({"load_seconds": seconds, "fingerprint": loaded.fingerprint}), flush=True)
    if args.control:
        unconstrained(loaded)
    script = make_script(loaded.model_config.vocab_size, args.requests)
    digests = set()
    for budget, pool in combinations(args.start):
        found = replay(loaded, config, script, budget, pool)
        digests.add(found["sha256"])
        print(json.dumps({**found, "control": args.control}), flush=True)
    print(json.dumps({"distinct": len(digests)}), flush=True)


if __name__ == "__main__":
    main()
