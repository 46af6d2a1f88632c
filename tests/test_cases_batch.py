"""Company in the batch and the prefix cache, at the sizes public bug reports ask for (bug cases, sections A and B).

The real engine over tiny checkpoints of two families and dtypes. Bytes are compared: tokens, log-prob bits with
alternatives, finish reason. Each test proves from the engine's counters that its condition happened. The controls plant
a cache that compares too little and a kernel that looks at the batch, and must be noticed by the same comparisons.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from isobit import LLM, prefix_cache
from isobit.config import EngineConfig
from isobit.engine import LLMEngine
from isobit.kernels.cpu.library import CpuLibrary
from isobit.loading import LoadedModel, load_model
from isobit.pages import PagePool
from isobit.prefix_cache import PrefixCache
from isobit.request import SamplingParams
from isobit.tokenizer import load_tokenizer
from tests.harness import Arrival, Result, Run, make_prompt, run_script, run_with
from tests.tiny import KINDS, tiny_checkpoint
from tests.weak_cache import ForgetfulCache

PAGE = 64
GREEDY = SamplingParams(max_tokens=128, temperature=0.0, logprobs=2, ignore_eos=True)
SHORT = SamplingParams(max_tokens=8, temperature=1.0, seed=3, logprobs=2, ignore_eos=True)


@dataclass
class Model:
    """Loaded weights, and the options of a plain engine over them: no cache, everything fits."""

    config: EngineConfig
    loaded: LoadedModel

    def run(self, script: Sequence[Arrival], **changes: object) -> Run:
        return run_with(self.loaded, self.config, script, **changes)

    def solo(self, arrival: Arrival) -> bytes:
        """Bytes of a request alone on a fresh engine without a cache."""
        return self.run([replace(arrival, at_step=0)]).results[arrival.name].bits

    def prompt(self, length: int, salt: int = 0) -> tuple[int, ...]:
        return make_prompt(length, self.loaded.model_config.vocab_size, salt)


@pytest.fixture(scope="module", params=[("llama", "float32"), ("qwen3", "bfloat16")], ids=lambda pair: "-".join(pair))
def model(request: pytest.FixtureRequest) -> Model:
    kind, dtype = request.param
    config = EngineConfig(
        model=str(tiny_checkpoint(kind)), dtype=dtype, context_length=4608, max_total_tokens=24 * 1024, random_seed=0,
        num_threads=2, disable_radix_cache=True, chunked_prefill_size=1024,
    )  # fmt: skip
    return Model(config, load_model(config))


def bits_of(results: dict[str, Result], arrivals: Sequence[Arrival]) -> list[bytes]:
    return [results[arrival.name].bits for arrival in arrivals]


@pytest.fixture(scope="module")
def needles(model: Model) -> tuple[list[Arrival], list[bytes]]:
    """32 greedy prompts of mixed lengths, and the bytes of each alone."""
    arrivals = [Arrival(f"needle{i}", model.prompt(1 + i * 7 % 150, salt=i), GREEDY) for i in range(32)]
    solo = [model.solo(arrival) for arrival in arrivals]
    assert len(set(solo)) == 32, "the answers must differ, or a mix-up would not show"
    return arrivals, solo


@pytest.mark.parametrize("size", [2, 4, 16, 32, 64])
def test_case_1_thirty_two_prompts_in_crowds(
    model: Model, needles: tuple[list[Arrival], list[bytes]], size: int
) -> None:
    arrivals, solo = needles
    mates = [Arrival(f"mate{i}", model.prompt(3 + i, salt=200 + i), GREEDY) for i in range(max(0, size - 32))]
    together = min(size, 32)
    for start in range(0, 32, together):
        group = arrivals[start : start + together]
        run = model.run([*mates, *group])
        assert run.stats.max_step_requests == size, "no batch of this size was formed"
        assert bits_of(run.results, group) == solo[start : start + together]


def test_case_1_control_a_kernel_that_looks_at_the_batch_is_noticed(
    model: Model, needles: tuple[list[Arrival], list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same crowd with linears whose result moves by a unit in the last place when there are more than 8 rows."""
    arrivals, _ = needles
    honest = CpuLibrary.linear

    def moves(self: CpuLibrary, x: torch.Tensor, *others: object) -> torch.Tensor:
        y = honest(self, x, *others)  # type: ignore[arg-type]
        return torch.nextafter(y, torch.full_like(y, torch.inf)) if x.shape[0] > 8 else y

    monkeypatch.setattr(CpuLibrary, "linear", moves)
    short = replace(GREEDY, max_tokens=12)
    decodes = [replace(arrival, params=short) for arrival in arrivals[:16]]
    alone = [model.solo(arrival) for arrival in decodes]
    assert len(decodes[0].prompt) == 1 and alone[0] == model.solo(decodes[0])
    assert bits_of(model.run(decodes).results, decodes) != alone


def test_case_4_sixteen_copies_and_fifty_repeats(model: Model) -> None:
    prompt = model.prompt(37)
    params = replace(GREEDY, max_tokens=24)
    solo = model.solo(Arrival("solo", prompt, params))
    copies = [Arrival(f"copy{i}", prompt, params) for i in range(16)]
    run = model.run(copies)
    assert run.stats.max_step_requests == 16
    assert set(bits_of(run.results, copies)) == {solo}
    engine = LLMEngine(model.config, model.loaded.reconfigured(model.config))
    repeats = [run_script(engine, [Arrival("again", prompt, params)]).results["again"].bits for _ in range(50)]
    assert set(repeats) == {solo} and engine.stats().max_step_requests == 1


def test_case_5_one_token_prompts_packed_with_a_long_one(model: Model) -> None:
    params = replace(SHORT, temperature=0.0, logprobs=5, max_tokens=1)
    short = [Arrival(f"short{n}", model.prompt(n), params) for n in (1, 2, 3)]
    run = model.run([short[0], Arrival("long", model.prompt(500, salt=9), params), *short[1:]])
    assert run.stats.max_step_rows == 506 and run.stats.num_steps == 1, "they were not packed into one step"
    assert bits_of(run.results, short) == [model.solo(arrival) for arrival in short]


def test_case_7_prompt_logprobs_alone_and_as_one_list(model: Model) -> None:
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=5, prompt_logprobs=5)
    arrivals = [Arrival(f"p{i}", model.prompt(2 + 11 * i, salt=i), params) for i in range(16)]
    run = model.run(arrivals)
    assert run.stats.max_step_requests >= 8, "no batch was formed"
    assert bits_of(run.results, arrivals) == [model.solo(arrival) for arrival in arrivals]
    for arrival in arrivals:
        scores = run.results[arrival.name].prompt_logprobs
        assert scores is not None and len(scores) == len(arrival.prompt) and scores[0] is None


def test_case_8_two_passes_over_a_data_set(model: Model) -> None:
    """Seeded items repeat whatever the pass looks like; unseeded ones differ, and the reported seed replays each."""
    llm = LLM.from_engine(
        LLMEngine(model.config, model.loaded.reconfigured(model.config)), load_tokenizer(tiny_checkpoint("llama"))
    )
    prompts = [list(model.prompt(5 + i, salt=i)) for i in range(20)]
    seeded = [SamplingParams(max_tokens=60, temperature=0.95, seed=i, logprobs=0) for i in range(20)]
    first = llm.generate(prompts, seeded, use_tqdm=False)
    second = llm.generate(prompts[::-1], seeded[::-1], use_tqdm=False)[::-1]
    assert [result.bits_digest() for result in first] == [result.bits_digest() for result in second]
    assert [len(result.outputs[0].token_ids) for result in first] == [len(r.outputs[0].token_ids) for r in second]
    free = SamplingParams(max_tokens=60, temperature=0.95, logprobs=0)
    passes = [llm.generate(prompts, free, use_tqdm=False) for _ in range(2)]
    outputs = [[result.outputs[0] for result in one] for one in passes]
    assert sum(a.token_ids != b.token_ids for a, b in zip(*outputs, strict=True)) >= 15
    replayed = llm.generate(prompts, [replace(free, seed=output.seed) for output in outputs[0]], use_tqdm=False)
    assert [result.bits_digest() for result in replayed] == [result.bits_digest() for result in passes[0]]


def test_case_10_cache_on_and_off(model: Model) -> None:
    prefix = model.prompt(400)
    arrivals = [
        Arrival(f"p{i}", prefix + model.prompt(1 + 5 * i, salt=i + 1), replace(GREEDY, max_tokens=20), at_step=2 * i)
        for i in range(20)
    ]
    off, on = model.run(arrivals), model.run(arrivals, disable_radix_cache=False)
    assert off.stats.num_cached_tokens == 0 and on.stats.num_cached_tokens >= 15 * 384, "the cache was not used"
    assert bits_of(on.results, arrivals) == bits_of(off.results, arrivals)


def test_case_11_a_long_prompt_six_times_with_traffic_between(model: Model) -> None:
    params = replace(SHORT, max_tokens=30, logprobs=1)
    times = [Arrival(f"time{i}", model.prompt(1464), params, at_step=70 * i) for i in range(6)]
    traffic = [Arrival(f"t{i}", model.prompt(90 + i, salt=50 + i), SHORT, at_step=8 * i) for i in range(50)]
    run = model.run([*times, *traffic], disable_radix_cache=False)
    cached = [run.results[arrival.name].num_cached_tokens for arrival in times]
    assert cached == [0] + [1464 // PAGE * PAGE] * 5, "the first is cold and the others are warm"
    assert set(bits_of(run.results, times)) == {model.solo(replace(times[0], name="off"))}
    sums = {sum(entry.logprob for entry in run.results[arrival.name].logprobs) for arrival in times}
    assert len(sums) == 1


@pytest.mark.parametrize("shared", [1, 15, 16, 17, 63, 64, 65, 511, 512, 513, 2048, 4097])
def test_case_12_shared_prefixes_of_odd_length(model: Model, shared: int) -> None:
    prefix = model.prompt(shared, salt=77)
    suffixed = [Arrival(f"s{i}", prefix + model.prompt(9 + 8 * i, salt=i), SHORT) for i in range(10)]
    solo = bits_of({a.name: model.run([a]).results[a.name] for a in suffixed}, suffixed)
    rng = random.Random(shared)
    order = rng.sample(suffixed, 10)
    warm = Arrival("warm", prefix + model.prompt(70, salt=500), SHORT)
    crowd = [replace(arrival, at_step=30) for arrival in order[:7]]
    late = [replace(arrival, at_step=30 + rng.randrange(12)) for arrival in order[7:]]
    run = model.run([warm, *crowd, *late], disable_radix_cache=False)
    assert run.stats.max_step_requests >= 7, "no crowd was formed"
    assert {run.results[a.name].num_cached_tokens for a in suffixed} == {shared // PAGE * PAGE}
    assert bits_of(run.results, suffixed) == solo and len(set(solo)) == 10


def test_case_12_control_a_cache_that_compares_too_little_is_noticed(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PrefixCache, "find", ForgetfulCache.find)
    mine, other = ((5, *model.prompt(200, salt=salt)) for salt in (1, 2))
    needle = Arrival("needle", mine, SHORT, at_step=20)
    run = model.run([Arrival("other", other, SHORT), needle], disable_radix_cache=False)
    assert run.results["needle"].num_cached_tokens == 64
    assert run.results["needle"].bits != model.solo(needle)


@pytest.mark.parametrize("pages", [1, 2, 4])
def test_case_13_prompts_of_whole_pages_twice_and_their_prefixes(model: Model, pages: int) -> None:
    whole = Arrival("whole", model.prompt(pages * PAGE), SHORT)
    later = [replace(whole, name="twice", at_step=20)] + [
        Arrival(f"first{n}", whole.prompt[:n], SHORT, at_step=20) for n in (pages * PAGE - 1, pages * PAGE // 2, 1)
    ]
    run = model.run([whole, *later], disable_radix_cache=False)
    for arrival in later:
        assert run.results[arrival.name].num_cached_tokens == (len(arrival.prompt) - 1) // PAGE * PAGE
    assert bits_of(run.results, [whole, *later]) == [model.solo(arrival) for arrival in (whole, *later)]


class _ConstantHash(tuple[int, ...]):
    """A key of the cache whose hash says nothing."""

    calls = 0

    def __hash__(self) -> int:
        _ConstantHash.calls += 1
        return 7


def test_case_16_a_constant_hash_shares_no_pages(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """50 prompts that differ early or late in their pages, every key of the cache with one hash; then all again."""
    monkeypatch.setattr(prefix_cache, "tuple", _ConstantHash, raising=False)
    base = model.prompt(130)
    prompts = [base[: i * 2] + ((base[i * 2] + 1 + i) % 500,) + base[i * 2 + 1 :] for i in range(50)]
    cold = [Arrival(f"cold{i}", prompt, SHORT, at_step=i) for i, prompt in enumerate(prompts)]
    warm = [replace(arrival, name=f"warm{i}", at_step=90 + i) for i, arrival in enumerate(cold)]
    before = _ConstantHash.calls
    run = model.run([*cold, *warm], disable_radix_cache=False)
    assert _ConstantHash.calls - before > 100, "the hash was not used"
    assert all(run.results[arrival.name].num_cached_tokens == 128 for arrival in warm)
    solo = [model.solo(arrival) for arrival in cold]
    assert bits_of(run.results, cold) == bits_of(run.results, warm) == solo and len(set(solo)) == 50


def test_case_16_ten_thousand_random_prompts() -> None:
    """With the real hash: what a prompt finds is exactly what was put there under its own token ids."""
    draw = random.Random(0)
    pool = PagePool(40_000, 4)
    cache = PrefixCache(pool)
    tokens_of_page: dict[int, list[int]] = {}
    hits = 0
    for _ in range(10_000):
        prompt = [draw.randrange(6) for _ in range(draw.randrange(5, 20))]
        found = cache.match(prompt)
        assert [tokens_of_page[page] for page in found] == [prompt[: 4 * (i + 1)] for i in range(len(found))]
        hits += len(found)
        cache.lock(found)
        fresh = pool.allocate(len(prompt) // 4 - len(found))
        assert fresh is not None
        pages = [*found, *fresh]
        cache.insert(prompt, pages, len(found))
        for index, page in enumerate(pages):
            assert tokens_of_page.setdefault(page, prompt[: 4 * (index + 1)]) == prompt[: 4 * (index + 1)]
        cache.release(pages)
    assert hits > 5000 and len(tokens_of_page) > 5000
    cache.check_integrity()


@pytest.mark.parametrize("kind", KINDS)
def test_case_19_every_option_at_its_default(kind: str) -> None:
    """Every family starts with nothing but its name, its choices carry reasons, and cold = flushed = warm."""
    folder = str(tiny_checkpoint(kind))
    engine = LLMEngine(EngineConfig(model=folder))
    assert {"dtype", "kernel_library"} <= set(engine.plan.reasons) and engine.loaded.ops.describe()
    prompt = make_prompt(150, engine.model_config.vocab_size)

    def ask() -> Result:
        return run_script(engine, [Arrival("r", prompt, SHORT)]).results["r"]

    cold, warm = ask(), ask()
    assert engine.flush_cache()
    flushed = ask()
    assert (cold.num_cached_tokens, warm.num_cached_tokens, flushed.num_cached_tokens) == (0, 128, 0)
    assert cold.bits == warm.bits == flushed.bits
