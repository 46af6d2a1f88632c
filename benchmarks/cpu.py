"""SmolLM2-135M in bfloat16 on the CPU: isobit against transformers `generate`, and its linear kernel against F.linear.

Both sides read one safetensors export of the same weights, run in the same process, alternate, and are reported as
medians of the repetitions; peak memory (VmHWM) is taken in fresh processes. Writes benchmarks/results/cpu.json.

    python -m benchmarks.cpu [--repetitions 5] [--num-threads 2] [--skip-linear]
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from isobit.config import EngineConfig
from isobit.demo import transformers_model
from isobit.engine import LLMEngine
from isobit.kernels.admission import admit
from isobit.kernels.cpu.claims import library_kernels
from isobit.kernels.cpu.library import CpuLibrary
from isobit.model_config import load_model_config
from isobit.ops import Linear, Ops
from isobit.order import Order, linear_order
from isobit.request import SamplingParams

RESULT_FILE = Path(__file__).parent / "results" / "cpu.json"
PROMPT_TOKENS, NEW_TOKENS, PREFILL_TOKENS = 32, 128, 512
LINEAR_ROWS = (1, 4, 16, 64, 512)
COLD_BYTES = 128 * 2**20  # copies of a weight are rotated over this many bytes, so that it comes from memory
CELL_SECONDS = 0.25  # time spent on each side of one cell of the linear table
SETTLE_SECONDS = 0.1  # lets the other side's worker threads fall asleep

Prompts = Sequence[Sequence[int]]


def make_prompts(num_prompts: int, length: int, vocab_size: int) -> list[list[int]]:
    """Equal-length prompts of pseudo-random token ids, a function of the arguments alone."""
    generator = torch.Generator().manual_seed(num_prompts * 1000 + length)
    ids: list[list[int]] = torch.randint(100, vocab_size, (num_prompts, length), generator=generator).tolist()
    return ids


class Isobit:
    """Greedy generation through the engine, no prefix cache, so that every repetition computes everything."""

    def __init__(self, checkpoint: str, num_threads: int) -> None:
        config = EngineConfig(model=checkpoint, dtype="bfloat16", disable_radix_cache=True, num_threads=num_threads)
        self.engine = LLMEngine(config)
        self.library = self.engine.plan.kernel_library

    def generate(self, prompts: Prompts, new_tokens: int) -> int:
        """Runs to the end; returns the number of tokens generated."""
        params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        for index, prompt in enumerate(prompts):
            self.engine.add_request(str(index), list(prompt), params)
        generated = 0
        while self.engine.has_unfinished():
            generated += sum(len(output.new_token_ids) for output in self.engine.step())
        return generated


class Transformers:
    """Greedy `generate` with its own KV cache and its default attention, bfloat16."""

    def __init__(self, checkpoint: str, num_threads: int) -> None:
        import transformers

        torch.set_num_threads(num_threads)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()
        self.version: str = transformers.__version__

    @torch.inference_mode()
    def generate(self, prompts: Prompts, new_tokens: int) -> int:
        """Runs to the end; returns the number of tokens generated."""
        ids = torch.tensor(prompts)
        output = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, use_cache=True,
            min_new_tokens=new_tokens, max_new_tokens=new_tokens,
        )  # fmt: skip
        return int((output.shape[1] - ids.shape[1]) * output.shape[0])


@dataclass(frozen=True)
class Comparison:
    """Rates in tokens per second, medians and every repetition; ratio > 1: isobit is faster."""

    isobit: float
    transformers: float
    ratio: float
    isobit_all: list[float]
    transformers_all: list[float]


def compare(ours: Isobit, theirs: Transformers, prompts: Prompts, new_tokens: int, repetitions: int) -> Comparison:
    """Alternate the two sides after one warm-up each. Counts prompt tokens where one token is generated (prefill)."""
    rates: tuple[list[float], list[float]] = ([], [])
    for repetition in range(repetitions + 1):
        for side, rate in zip((ours, theirs), rates, strict=True):
            time.sleep(SETTLE_SECONDS)
            start = time.perf_counter()
            generated = side.generate(prompts, new_tokens)  # type: ignore[attr-defined]
            seconds = time.perf_counter() - start
            assert generated == len(prompts) * new_tokens, f"{generated} tokens generated"
            counted = generated if new_tokens > 1 else sum(len(prompt) for prompt in prompts)
            if repetition:
                rate.append(round(counted / seconds, 2))
    medians = [statistics.median(rate) for rate in rates]
    return Comparison(medians[0], medians[1], round(medians[0] / medians[1], 3), *rates)


def export_checkpoint(model: str, folder: str) -> None:
    """Write `model` as bfloat16 safetensors with a config.json, what both sides then load."""
    transformers_model(model, torch.bfloat16).save_pretrained(folder)


def peak_memory_mb(side: str, checkpoint: str, num_threads: int) -> float:
    """VmHWM of a fresh process that loads the checkpoint, prefills 512 tokens and decodes 128."""
    command = [sys.executable, "-m", "benchmarks.cpu", "--memory-of", side, checkpoint]
    command += ["--num-threads", str(num_threads)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(result.stdout.strip().splitlines()[-1])


def run_memory(side: str, checkpoint: str, num_threads: int) -> None:
    """Body of the fresh process: print its peak resident size in MiB."""
    runner: Any = {"isobit": Isobit, "transformers": Transformers}[side](checkpoint, num_threads)
    vocab_size = load_model_config(checkpoint).vocab_size
    runner.generate(make_prompts(1, PREFILL_TOKENS, vocab_size), NEW_TOKENS)
    status = Path("/proc/self/status").read_text(encoding="ascii")
    peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    print(int(peak.split()[1]) / 1024)


def median_ms(call: Callable[[int], object]) -> float:
    """Median time of `call(i)`, i counting up, over CELL_SECONDS and at least 3 calls, after one to warm up."""
    time.sleep(SETTLE_SECONDS)
    call(0)
    times: list[float] = []
    spent, index = 0.0, 1
    while spent < CELL_SECONDS or len(times) < 3:
        start = time.perf_counter()
        call(index)
        times.append(time.perf_counter() - start)
        spent += times[-1]
        index += 1
    return statistics.median(times) * 1000


def linear_rows(name: str, n: int, k: int, dtype: str, num_threads: int, library_name: str) -> list[dict[str, Any]]:
    """Times of one linear layer for each of LINEAR_ROWS: ours through `Ops.linear` (the engine's schedule), torch's."""
    library = CpuLibrary(library_name, num_threads)
    torch.set_num_threads(num_threads)
    orders: dict[str, Order] = {"linear.x": linear_order(n, k, dtype, dtype, "cpu")}
    ops = Ops(library, orders, admit(library_kernels(library), orders))
    torch_dtype = torch.float32 if dtype == "float32" else torch.bfloat16
    weight = (torch.randn(n, k, generator=torch.Generator().manual_seed(0)) / k**0.5).to(torch_dtype)
    copies = max(1, min(64, COLD_BYTES // (weight.numel() * weight.element_size())))
    packed = [ops.make_linear("linear.x", [weight]) for _ in range(copies)]
    plain = [weight.clone() for _ in range(copies)]
    rows = []
    for num_rows in LINEAR_ROWS:
        x = torch.randn(num_rows, k, generator=torch.Generator().manual_seed(1))
        ours = median_ms(partial(_call_isobit, ops, x, packed))
        theirs = median_ms(partial(_call_torch, x.to(torch_dtype), plain))
        rows.append({
            "layer": name, "n": n, "k": k, "dtype": dtype, "num_threads": num_threads, "m": num_rows,
            "isobit_ms": round(ours, 4), "torch_ms": round(theirs, 4), "speedup": round(theirs / ours, 3),
        })  # fmt: skip
    return rows


def _call_isobit(ops: Ops, x: torch.Tensor, layers: list[Linear], index: int) -> torch.Tensor:
    return ops.linear(x, layers[index % len(layers)])


def _call_torch(x: torch.Tensor, weights: list[torch.Tensor], index: int) -> torch.Tensor:
    return torch.nn.functional.linear(x, weights[index % len(weights)])


@torch.inference_mode()
def linear_table(shapes: dict[str, tuple[int, int]], library_name: str) -> list[dict[str, Any]]:
    """`linear_rows` of every shape, both dtypes, 1 and 2 threads."""
    cells = [(name, dtype, threads) for name in shapes for dtype in ("float32", "bfloat16") for threads in (1, 2)]
    rows: list[dict[str, Any]] = []
    for name, dtype, threads in tqdm(cells, desc="linear", disable=None):
        rows += linear_rows(name, *shapes[name], dtype, threads, library_name)
    return rows


def cpu_description() -> dict[str, Any]:
    """Model name and the instruction sets that matter here, from /proc/cpuinfo where there is one."""
    info: dict[str, str] = {}
    if Path("/proc/cpuinfo").exists():
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            info.setdefault(key.strip(), value.strip())
    wanted = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_bf16", "amx_bf16", "asimd")
    flags = info.get("flags", info.get("Features", "")).split()
    return {
        "model": info.get("model name", platform.processor() or platform.machine()),
        "family_model": f"{info.get('cpu family', '?')}/{info.get('model', '?')}",
        "flags": [flag for flag in wanted if flag in flags],
        "num_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """All measurements, as the JSON object of the result file."""
    load = round(os.getloadavg()[0], 2)  # of the last minute: other work on the machine spoils the figures
    with tempfile.TemporaryDirectory() as folder:
        export_checkpoint(arguments.model, folder)
        model_config = load_model_config(folder)
        vocab_size, threads = model_config.vocab_size, arguments.num_threads
        memory = {side: peak_memory_mb(side, folder, threads) for side in ("isobit", "transformers")}
        ours, theirs = Isobit(folder, threads), Transformers(folder, threads)
        runs: dict[str, Comparison] = {}
        for name, num_prompts, length, new_tokens in (
            ("decode_bs1", 1, PROMPT_TOKENS, NEW_TOKENS),
            ("decode_bs8", 8, PROMPT_TOKENS, NEW_TOKENS),
            ("prefill512", 1, PREFILL_TOKENS, 1),
        ):
            prompts = make_prompts(num_prompts, length, vocab_size)
            runs[name] = compare(ours, theirs, prompts, new_tokens, arguments.repetitions)
            run = runs[name]
            print(f"{name}: isobit {run.isobit} tokens/s, transformers {run.transformers} tokens/s", flush=True)
    shapes = {**model_config.linear_shapes(), "2048x8192": (8192, 2048)}
    memory_ratio = round(memory["isobit"] / memory["transformers"], 3)
    return {
        "summary": {
            **{f"{name}_vs_transformers": run.ratio for name, run in runs.items()},
            "peak_memory_vs_transformers": memory_ratio,
        },
        "command": " ".join(["python -m benchmarks.cpu", *sys.argv[1:]]),
        "load_average_before": load,
        "date": datetime.date.today().isoformat(),
        "device": cpu_description(),
        "versions": {
            "python": platform.python_version(), "torch": torch.__version__, "transformers": theirs.version,
        },
        "cpu_library": ours.library,
        "num_threads": threads,
        "settings": {
            "dtype": "bfloat16", "prompt_tokens": PROMPT_TOKENS, "new_tokens": NEW_TOKENS,
            "decode": "new tokens / wall time of a whole greedy generation, prompt included",
            "prefill": "prompt tokens / wall time to the first token",
        },
        "tokens_per_second": {name: vars(run) for name, run in runs.items()},
        "peak_memory_mib": {side: round(value, 1) for side, value in memory.items()},
        "linear": [] if arguments.skip_linear else linear_table(shapes, ours.library),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu", description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--num-threads", type=int, default=2)
    parser.add_argument("--skip-linear", action="store_true")
    parser.add_argument("--output", type=Path, default=RESULT_FILE)
    parser.add_argument("--memory-of", nargs=2, metavar=("SIDE", "CHECKPOINT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory_of:
        side, checkpoint = arguments.memory_of
        run_memory(side, checkpoint, arguments.num_threads)
        return
    result = measure(arguments)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result["summary"], indent=1))


if __name__ == "__main__":
    main()
