"""Property: under any schedule of arrivals, lengths, budgets, pool sizes, cache settings and aborts, every request that
ends gives exactly the bytes of its solo run on a fresh engine.

Runs the real engine on a tiny checkpoint. What happened over all examples (batches, preemptions, cache hits, aborts) is
counted and asserted, so that the property cannot hold vacuously.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isobit.config import EngineConfig
from isobit.loading import load_model
from isobit.request import SamplingParams
from tests.harness import Arrival, make_prompt, run_with
from tests.tiny import make_tiny

MAX_EXAMPLES = 60
CONTEXT = 320

params_strategy = st.builds(
    SamplingParams,
    max_tokens=st.sampled_from([3, 7, 24, 70, 110]),  # short ones, and ones that outgrow their pages
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 5, 50]),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    min_p=st.sampled_from([0.0, 0.05]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.7]),
    presence_penalty=st.sampled_from([0.0, -0.4]),
    min_tokens=st.sampled_from([0, 3]),
    seed=st.integers(0, 3),
    logprobs=st.sampled_from([None, 0, 3]),
    prompt_logprobs=st.sampled_from([None, None, None, 1]),
)


@st.composite
def arrivals(draw: st.DrawFn) -> list[Arrival]:
    """Up to eight requests; prompts share prefixes of odd lengths, so that the cache has something to find."""
    script = []
    for index in range(draw(st.integers(2, 8))):
        shared = draw(st.sampled_from([0, 1, 40, 64, 65, 130]))
        prompt = make_prompt(shared, 500) + make_prompt(draw(st.integers(1, 90)), 500, salt=draw(st.integers(1, 3)))
        abort_at = draw(st.sampled_from([None] * 14 + [0, 1, 2, 5, 12, 60]))
        script.append(Arrival(f"r{index}", prompt, draw(params_strategy), draw(st.integers(0, 10)), abort_at))
    return script


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_request_equals_its_solo_run(dtype: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = make_tiny("qwen3", tmp_path_factory.mktemp("qwen3"))
    config = EngineConfig(
        model=str(folder), dtype=dtype, context_length=CONTEXT, max_total_tokens=4096, disable_radix_cache=True,
        random_seed=0,
    )  # fmt: skip
    loaded = load_model(config)
    solo_bits: dict[tuple[tuple[int, ...], str], bytes] = {}
    happened: Counter[str] = Counter()

    def solo(arrival: Arrival) -> bytes:
        key = (arrival.prompt, repr(arrival.params))
        if key not in solo_bits:
            alone = replace(arrival, at_step=0, abort_at=None)
            solo_bits[key] = run_with(loaded, config, [alone]).results[arrival.name].bits
        return solo_bits[key]

    @settings(max_examples=MAX_EXAMPLES)
    @given(
        script=arrivals(),
        budget=st.sampled_from([1, 7, 17, 64, 100, 333]),
        max_running=st.sampled_from([1, 3, 64, 64]),
        pool_pages=st.sampled_from([5, 6, 7, 8, 24]),
        cache_off=st.booleans(),
        threads=st.integers(1, 3),
    )
    def check(
        script: list[Arrival], budget: int, max_running: int, pool_pages: int, cache_off: bool, threads: int
    ) -> None:
        run = run_with(
            loaded, config, script, chunked_prefill_size=budget, max_running_requests=max_running,
            max_total_tokens=pool_pages * 64, disable_radix_cache=cache_off, num_threads=threads,
        )  # fmt: skip
        happened["batches"] += run.stats.max_step_requests > 1
        happened["preemptions"] += run.stats.num_preemptions > 0
        happened["cache hits"] += run.stats.num_cached_tokens > 0
        for arrival in script:
            result = run.results[arrival.name]
            if result.finish_reason is None:
                assert arrival.abort_at is not None, f"{arrival.name} never ended"
                happened["aborts"] += 1
                continue
            assert result.bits == solo(arrival), arrival

    check()
    expect_everything(happened)


def expect_everything(happened: Counter[str]) -> None:
    """All conditions the property speaks of must have occurred."""
    for condition in ("batches", "preemptions", "cache hits", "aborts"):
        assert happened[condition] >= 3, f"{condition}: {happened[condition]} times in {MAX_EXAMPLES} schedules"
