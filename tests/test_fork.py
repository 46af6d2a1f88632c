"""A process forked from one that has used an engine: both go on, to the same bits, and neither sees the other.

Run in a process of its own, with a limit of time: what this finds, when it finds something, hangs or writes elsewhere.
"""

from __future__ import annotations

import subprocess
import sys

from tests.tiny import tiny_checkpoint

SCRIPT = """
import os
import signal
import sys
import numpy as np
from isobit import LLM, SamplingParams
from tests.harness import make_prompt

llm = LLM(model=sys.argv[1], dtype="float32", context_length=256, num_threads=2)
prompts = [make_prompt(length, 480, salt) for salt, length in enumerate((1, 63, 64, 65, 128, 129, 192))]
params = [SamplingParams(max_tokens=12, temperature=i % 2, seed=i, logprobs=3) for i in range(len(prompts))]
params[5] = SamplingParams(max_tokens=2, seed=0, prompt_logprobs=2)  # many rows of logits at once


def run():
    results = llm.generate(prompts, params, use_tqdm=False)
    return [result.bits_digest() for result in results], sum(result.num_cached_tokens for result in results)


expected, _ = run()
memory = [layer.numpy() for layer in llm.engine.runner.kv_cache.layers]
child = os.fork()
if child == 0:
    signal.alarm(90)
    for layer in memory:
        layer[:] = np.nan  # control: where the memory is shared, this ends the parent's cached prefixes
    llm.engine.flush_cache()
    os._exit(0 if run() == (expected, 0) else 1)
status = os.waitpid(child, 0)[1]
bits, cached = run()
print(status, bits == expected, cached > 0)
"""


def test_parent_and_child_give_the_same_bits() -> None:
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(tiny_checkpoint("llama"))]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.stdout == "0 True True\n", result.stdout + result.stderr
