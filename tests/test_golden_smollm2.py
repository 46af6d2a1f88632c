"""Golden digests of the whole engine: 64 greedy tokens of SmolLM2 with their log-prob bits, on every CPU library.

The digests stand in tests/golden/smollm2.json and hold on any CPU: x86 of any age, aarch64, any thread count. When one
moves, either a bug moved bits or an Order changed on purpose: then NUMERICS_VERSION is raised and the file written anew
with `python -m tests.test_golden_smollm2`.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from isobit.config import EngineConfig
from isobit.engine import LLMEngine
from isobit.kernels.cpu.features import supported_libraries
from isobit.order import NUMERICS_VERSION
from isobit.request import SamplingParams
from tests.harness import Arrival, make_prompt, run_script

GOLDEN = Path(__file__).parent / "golden" / "smollm2.json"
DTYPES = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16 weights, float32 activations": {"dtype": "bfloat16", "activation_dtype": "float32"},
}
PROMPT = make_prompt(40, 49152)


def measure(dtype: str, library: str, num_tokens: int) -> dict[str, str]:
    """SHA-256 of the tokens and of the log-prob bits, and the fingerprint."""
    config = EngineConfig(cpu_library=library, context_length=256, **DTYPES[dtype])  # type: ignore[arg-type]
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, logprobs=4, prompt_logprobs=0, ignore_eos=True)
    engine = LLMEngine(config)
    result = run_script(engine, [Arrival("golden", PROMPT, params)]).results["golden"]
    assert len(result.token_ids) == num_tokens
    return {
        "tokens": hashlib.sha256(repr(result.token_ids).encode()).hexdigest(),
        "bits": hashlib.sha256(result.bits).hexdigest(),
        "fingerprint": engine.fingerprint,
    }


def cases() -> list[tuple[str, str, str]]:
    """(dtype, library, golden entry): every library this CPU runs; the scalar one a shorter text, as it is slow."""
    found = [(dtype, library, f"{dtype}, 64 tokens") for dtype in DTYPES for library in supported_libraries()[:-1]]
    return [*found, ("bfloat16", supported_libraries()[-1], "bfloat16, 4 tokens")]


@pytest.mark.parametrize(("dtype", "library", "entry"), cases())
def test_smollm2_gives_its_golden_bits(dtype: str, library: str, entry: str) -> None:
    golden = json.loads(GOLDEN.read_text())
    assert golden["numerics_version"] == NUMERICS_VERSION, "write the golden digests anew (see the docstring)"
    assert measure(dtype, library, 4 if entry.endswith(" 4 tokens") else 64) == golden[entry]


if __name__ == "__main__":
    best = supported_libraries()[0]
    entries: dict[str, object] = {f"{dtype}, 64 tokens": measure(dtype, best, 64) for dtype in DTYPES}
    entries["bfloat16, 4 tokens"] = measure("bfloat16", best, 4)
    GOLDEN.write_text(json.dumps({"numerics_version": NUMERICS_VERSION, **entries}, indent=2) + "\n")
