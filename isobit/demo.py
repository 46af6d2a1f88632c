"""The promise, shown on a real model in a few minutes: `make demo`, or `python -m isobit.demo`.

Two requests (one greedy, one seeded) are served under every condition that moves bits in other engines; their tokens
and log-probs are compared by SHA-256. A row counts only with evidence that its condition really happened. The control
runs the same checkpoint through torch's own kernels, which owe nobody an order. Adds no numbers itself; exit status 1
when a row differs or could not be measured.
"""

from __future__ import annotations

import argparse
import hashlib
import struct
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from isobit.config import EngineConfig
from isobit.engine import LLMEngine
from isobit.kernels.cpu.features import available_cores, supported_libraries
from isobit.llm import LLM
from isobit.loading import LoadedModel, load_model
from isobit.model_config import load_model_config
from isobit.models.llama import LlamaForCausalLM
from isobit.request import SamplingParams
from isobit.weights import open_weights

SYSTEM = "You are a friendly assistant. You answer in a few plain sentences."
QUESTION = (
    "Please write a short, friendly note that invites my neighbours to a picnic in the park next Saturday. "
    "It starts at noon, there will be cake and lemonade, and children are welcome. Three sentences are enough."
)
NUM_TOKENS = 24
CONTROL_TOKENS = 12
NEEDLES = {
    "greedy": SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, logprobs=0, ignore_eos=True),
    "seeded": SamplingParams(
        max_tokens=NUM_TOKENS, temperature=0.8, top_p=0.95, seed=7, logprobs=0, ignore_eos=True
    ),
}  # fmt: skip
CROWD_SIZE = 32


# By step: name, prompt (empty: the needles'), params.
Arrivals = dict[int, list[tuple[str, Sequence[int], SamplingParams]]]


@dataclass(frozen=True)
class Row:
    """One line of the table. `evidence` says what happened; `happened` is False when the condition did not arise."""

    condition: str
    evidence: str
    happened: bool
    tokens: str
    logprobs: str


@dataclass
class Trace:
    """What the two needles got, and under which circumstances."""

    token_ids: dict[str, list[int]]
    logprobs: dict[str, list[float]]
    cached_tokens: int = 0
    most_requests: int = 0  # in a step in which a needle gained a token
    most_rows: int = 0  # in any step
    num_steps: int = 0
    num_preemptions: int = 0

    def row(self, condition: str, evidence: str, happened: bool) -> Row:
        """Digest over both needles, in a fixed order; log-probs as the bytes of float32."""
        tokens = [token for name in NEEDLES for token in self.token_ids[name]]
        logprobs = [logprob for name in NEEDLES for logprob in self.logprobs[name]]
        assert len(tokens) == len(logprobs) == NUM_TOKENS * len(NEEDLES), "a needle was not served to its end"
        return Row(condition, evidence, happened, digest("q", tokens), digest("f", logprobs))


def digest(kind: str, values: Sequence[float]) -> str:
    """First 12 digits of the SHA-256 of the values' bytes."""
    return hashlib.sha256(struct.pack(f"<{len(values)}{kind}", *values)).hexdigest()[:12]


def run(
    engine: LLMEngine,
    prompt: Sequence[int],
    arrivals: Arrivals,
    before_step: Callable[[LLMEngine, Trace], None] | None = None,
) -> Trace:
    """Drive the engine until all `arrivals` are served, and watch the needles. `before_step` may interfere."""
    trace = Trace({name: [] for name in NEEDLES}, {name: [] for name in NEEDLES})
    last_arrival = max(arrivals)
    while engine.has_unfinished() or trace.num_steps <= last_arrival:
        for name, token_ids, params in arrivals.get(trace.num_steps, []):
            engine.add_request(name, token_ids or prompt, params)
        if before_step is not None:
            before_step(engine, trace)
        trace.num_steps += 1
        for output in engine.step():
            if output.request_id in NEEDLES:
                trace.token_ids[output.request_id] += output.new_token_ids
                trace.logprobs[output.request_id] += [entry.logprob for entry in output.new_logprobs]
                trace.cached_tokens = max(trace.cached_tokens, output.num_cached_tokens)
                trace.most_requests = max(trace.most_requests, engine.stats().last_step_requests)
        trace.most_rows = max(trace.most_rows, engine.stats().last_step_rows)
    trace.num_preemptions = engine.stats().num_preemptions
    return trace


def together() -> Arrivals:
    """Both needles at once, nobody else."""
    return {0: [(name, (), params) for name, params in NEEDLES.items()]}


class Demo:
    """One loaded checkpoint, and the conditions it is served under."""

    def __init__(self, config: EngineConfig, loaded: LoadedModel, prompt: Sequence[int]) -> None:
        self.config = config
        self.loaded = loaded
        self.prompt = list(prompt)

    def engine(self, **options: Any) -> LLMEngine:
        """A fresh engine over the loaded weights, under other options."""
        config = replace(self.config, **options)
        return LLMEngine(config, self.loaded.reconfigured(config))

    def alone(self) -> Row:
        trace = Trace({}, {})
        for name, params in NEEDLES.items():
            one = run(self.engine(), self.prompt, {0: [(name, (), params)]})
            trace.token_ids[name], trace.logprobs[name] = one.token_ids[name], one.logprobs[name]
            trace.most_requests = max(trace.most_requests, one.most_requests)
        return trace.row("alone", f"{trace.most_requests} request in every step", trace.most_requests == 1)

    def crowd(self) -> Row:
        """30 others of mixed lengths and parameters arrive one by one; the needles arrive among them."""
        arrivals: Arrivals = {}
        for index in range(CROWD_SIZE - len(NEEDLES)):
            params = SamplingParams(
                max_tokens=16 + index, temperature=(index % 3) * 0.6, seed=index, top_k=(index % 4) * 20,
                repetition_penalty=1.0 + (index % 2) * 0.2, logprobs=index % 5, ignore_eos=True,
            )  # fmt: skip
            mate = self.prompt[index + 1 : index + 6 + 2 * index]
            arrivals.setdefault(index // 2, []).append((f"mate {index}", mate, params))
        for step, name in zip((9, 14), NEEDLES, strict=True):
            arrivals[step].append((name, (), NEEDLES[name]))
        trace = run(self.engine(max_running_requests=CROWD_SIZE), self.prompt, arrivals)
        evidence = f"up to {trace.most_requests} requests and {trace.most_rows} rows in a step"
        return trace.row(f"in a crowd of {CROWD_SIZE}", evidence, trace.most_requests >= CROWD_SIZE // 2)

    def chunked(self, size: int = 17) -> Row:
        trace = run(self.engine(chunked_prefill_size=size), self.prompt, together())
        evidence = f"{len(self.prompt)} prompt tokens, at most {trace.most_rows} rows in a step"
        return trace.row(f"prompt in chunks of {size}", evidence, trace.most_rows == size < len(self.prompt))

    def warm(self) -> Row:
        engine = self.engine()
        run(engine, self.prompt, together())
        trace = run(engine, self.prompt, together())
        evidence = f"{trace.cached_tokens} of {len(self.prompt)} prompt tokens from the cache"
        return trace.row("from a warm prefix", evidence, trace.cached_tokens > 0)

    def preempted(self) -> Row:
        """Each needle loses its pages twice in the middle of its output, and no cache helps it to resume."""

        def take_pages(engine: LLMEngine, trace: Trace) -> None:
            for name, token_ids in trace.token_ids.items():
                if len(token_ids) in (5, 14):
                    engine.scheduler.preempt(name)

        engine = self.engine(disable_radix_cache=True, max_total_tokens=256)
        trace = run(engine, self.prompt, together(), take_pages)
        evidence = f"{trace.num_preemptions} preemptions, everything computed again"
        return trace.row("after forced preemption", evidence, trace.num_preemptions >= 4)

    def threads(self, num_threads: int) -> Row:
        engine = self.engine(num_threads=num_threads)
        trace = run(engine, self.prompt, together())
        now = self.loaded.ops.library.num_threads
        name = f"on {num_threads} thread{'s' if num_threads > 1 else ''}"
        return trace.row(name, f"the library's pool had {now}", now == num_threads)

    def library(self, name: str) -> Row:
        """Loads the checkpoint anew for another instruction set; the second needle reuses the first one's page."""
        config = replace(self.config, cpu_library=name)
        loaded = self.loaded if name == self.loaded.ops.library.name else load_model(config)
        arrivals: Arrivals = {step: [(one, (), NEEDLES[one])] for step, one in zip((0, 2), NEEDLES, strict=True)}
        trace = run(LLMEngine(config, loaded.reconfigured(config)), self.prompt, arrivals)
        ran = loaded.ops.library.name
        return trace.row(f"{name} library", f"kernels of {ran!r} ran", ran == name)


def transformers_model(model: str, dtype: torch.dtype) -> Any:
    """The checkpoint as transformers' own LlamaForCausalLM, filled with the weights isobit loads. In eval mode."""
    import transformers

    config = load_model_config(model)
    assert config.architecture == "LlamaForCausalLM", "the control is written for Llama checkpoints"
    weights = open_weights(model, config)
    hf_config = transformers.LlamaConfig(
        vocab_size=config.vocab_size, hidden_size=config.hidden_size, intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers, num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads, head_dim=config.head_dim, rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=config.max_position_embeddings, tie_word_embeddings=config.tie_word_embeddings,
        rope_parameters={"rope_type": config.rope.rope_type, "rope_theta": config.rope.theta},
        bos_token_id=config.bos_token_id, eos_token_id=list(config.eos_token_ids), dtype=dtype,
    )  # fmt: skip
    control = transformers.LlamaForCausalLM(hf_config).to(dtype)
    state = {name: weights.get(name).to(dtype) for name in LlamaForCausalLM.expected_weights(config)}
    missing, unexpected = control.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, f"missing {missing}, unexpected {unexpected}"
    control.tie_weights()
    control.generation_config.eos_token_id = None  # the needles ignore the end of text
    return control.eval()


@torch.inference_mode()
def control_rows(model: str, prompt: Sequence[int], num_threads: int) -> list[Row]:
    """The greedy needle in transformers, alone and as the first of 32 rows; its own row needs no padding in either."""
    torch.set_num_threads(num_threads)
    control = transformers_model(model, torch.float32)
    rows = []
    for condition, size in (("alone", 1), (f"in a crowd of {CROWD_SIZE}", CROWD_SIZE)):
        mates = [[*prompt[index:], *prompt[:index]] for index in range(size)]  # mate 0 is the needle
        ids = torch.tensor(mates)
        out = control.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=CONTROL_TOKENS, pad_token_id=0,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        scores = control.compute_transition_scores(out.sequences, out.logits, normalize_logits=True)
        tokens, logprobs = out.sequences[0, len(prompt) :].tolist(), scores[0].tolist()
        rows.append(Row(condition, f"{size} sequences a step", True, digest("q", tokens), digest("f", logprobs)))
    return rows


def print_rows(rows: Sequence[Row]) -> None:
    for row in rows:
        evidence = row.evidence if row.happened else f"NOT MEASURED: {row.evidence}"
        print(f"{row.condition:<24}  {evidence:<48}  {row.tokens:<12}  {row.logprobs}", flush=True)


def all_equal(rows: Sequence[Row]) -> bool:
    """True when every condition really happened and gave the bits of the first row."""
    return all(row.happened and (row.tokens, row.logprobs) == (rows[0].tokens, rows[0].logprobs) for row in rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m isobit.demo", description="Show that company moves no bit.")
    parser.add_argument("--model", default="smollm2", help="a Llama checkpoint with a chat template")
    options = parser.parse_args(arguments)
    start = time.perf_counter()
    llm = LLM(model=options.model)
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    print(f"{QUESTION}\n")
    [result] = llm.chat(messages, SamplingParams(max_tokens=64, temperature=0.0), use_tqdm=False)
    print(f"{result.outputs[0].text.strip()}\n")

    engine: LLMEngine = llm.engine
    demo = Demo(engine.config, engine.loaded, result.prompt_token_ids)
    print(f"fingerprint {engine.fingerprint}, {engine.plan.dtype} weights, kernels {engine.plan.kernel_library!r}")
    print(f"the same two requests (greedy; seed 7 at temperature 0.8), {NUM_TOKENS} tokens each:\n")
    print(f"{'condition':<24}  {'what happened':<48}  {'tokens':<12}  log-prob bits")
    cases: list[Callable[[], Row]] = [demo.alone, demo.crowd, demo.chunked, demo.warm, demo.preempted]
    cases += [lambda: demo.threads(1), lambda: demo.threads(2)]
    cases += [lambda name=name: demo.library(name) for name in supported_libraries()]  # type: ignore[misc]
    rows = []
    for case in cases:
        rows.append(case())
        print_rows(rows[-1:])
    good = all_equal(rows)
    print(f"\n{'all equal, by bytes' if good else 'NOT ALL EQUAL'}: {len(rows)} conditions\n")

    print(f"control: the greedy request ({CONTROL_TOKENS} tokens) and the same weights in transformers, float32:\n")
    control = control_rows(options.model, demo.prompt, available_cores())
    print_rows(control)
    differs = not all_equal(control)
    print(f"\ntorch's own kernels: {'log-prob bits depend on the company' if differs else 'no difference this time'}")
    print(f"{time.perf_counter() - start:.0f} s in all")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
