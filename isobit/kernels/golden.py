"""Golden digests: SHA-256 of every op's output on fixed inputs, the same on every machine and in every release.

Inputs are made of integers. `tests/golden/cpu_ops.json` holds the digests, `tests/test_golden_ops.py` compares the
reference and every library that runs here with them. A digest that moves is a change of bits: it needs a new
`NUMERICS_VERSION` and a line in the changelog. `python -m isobit.kernels.golden --write FILE` makes the file anew.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from isobit.kernels.probe_data import bits, floats, with_specials
from isobit.kernels.reference.calls import Arrays, expect
from isobit.kernels.reference.ops import round_to
from isobit.order import (
    NUMERICS_VERSION,
    Order,
    attention_order,
    linear_order,
    logprobs_order,
    norm_order,
    pointwise_order,
    sampling_order,
)

__all__ = ["GoldenCase", "digest", "golden_cases", "golden_digests", "run_command"]

_VOCAB_SIZE = 9001  # three blocks of log-probs and a tail


@dataclass(frozen=True)
class GoldenCase:
    """Fixed inputs of an op, as `kernels/calls.py` names them, under one Order."""

    name: str
    op: str
    order: Order
    inputs: dict[str, Any]


def digest(outputs: Arrays) -> str:
    """SHA-256 over names, dtypes, shapes and little-endian bytes of `outputs`; NaN has one form."""
    sha = hashlib.sha256()
    for name in sorted(outputs):
        array = np.ascontiguousarray(outputs[name])
        if array.dtype.kind == "f":
            array = np.where(np.isnan(array), array.dtype.type(np.nan), array)
        sha.update(f"{name} {array.dtype.name} {array.shape}".encode())
        sha.update(array.astype(array.dtype.newbyteorder("<")).tobytes())
    return sha.hexdigest()


def golden_cases() -> list[GoldenCase]:
    """One case or more for each op."""
    return [*_linear_cases(), *_attention_cases(), *_pointwise_cases(), *_vocabulary_cases()]


def _linear_cases() -> list[GoldenCase]:
    cases = []
    for i, (weight_dtype, activation_dtype) in enumerate(
        (("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16"))
    ):
        seed = 10_000 + 10 * i
        order = linear_order(37, 1101, weight_dtype, activation_dtype, "cpu")
        inputs = {
            "x": with_specials(seed, floats(seed + 1, 5, 1101)),
            "w": round_to(weight_dtype, with_specials(seed + 2, floats(seed + 3, 37, 1101))),
            "bias": floats(seed + 4, 37),
            "addend": floats(seed + 5, 5, 37),
        }
        cases.append(GoldenCase(f"linear {weight_dtype} {activation_dtype}", "linear", order, inputs))
        if activation_dtype == "float32":
            inputs = {"w": inputs["w"], "ids": np.array([36, 0, 5, 5], np.int32)}
            cases.append(GoldenCase(f"embedding {weight_dtype}", "embedding", order, inputs))
    return cases


def _attention_cases() -> list[GoldenCase]:
    cases = []
    for i, kv_dtype in enumerate(("float32", "bfloat16")):
        seed, order = 11_000 + 50 * i, attention_order(32, kv_dtype, "cpu")
        lengths, rows = (130, 64), (40, 1)
        inputs: dict[str, Any] = {
            "q": floats(seed, sum(rows), 6 * 32, low=-6, high=2),
            "requests": np.repeat([0, 1], rows),
            "positions": np.concatenate([np.arange(n - m, n) for n, m in zip(lengths, rows, strict=True)]),
            "kv": [tuple(round_to(kv_dtype, floats(seed + 2 * n + i, n, 2, 32)) for i in (0, 1)) for n in lengths],
            "num_heads": 6,
            "scale": 32**-0.5,
        }
        cases.append(GoldenCase(f"attention {kv_dtype}", "attention", order, inputs))
        interleaved = i == 1
        inputs = {
            "qkv": with_specials(seed + 20, floats(seed + 21, 9, 5 * 32)),
            "positions": np.array([0, 1, 2, 3, 70, 71, 19, 0, 5], np.int32),
            "cos": floats(seed + 22, 72, 12, low=-9, high=-1),
            "sin": floats(seed + 23, 72, 12, low=-9, high=-1),
            "q_norm": floats(seed + 24, 32) if interleaved else None,
            "k_norm": floats(seed + 25, 32) if interleaved else None,
            "eps": 1e-6,
            "num_heads": 3,
            "num_kv_heads": 1,
            "interleaved": interleaved,
        }
        cases.append(GoldenCase(f"rope_and_cache {kv_dtype}", "rope_and_cache", order, inputs))
    return cases


def _pointwise_cases() -> list[GoldenCase]:
    norm = {"x": with_specials(12_000, floats(12_001, 7, 577)), "weight": floats(12_002, 577), "eps": 1e-5}
    silu = {"gate_up": with_specials(12_003, floats(12_004, 7, 2 * 577, low=-20, high=7))}
    return [
        GoldenCase("rms_norm", "rms_norm", norm_order(577, "cpu"), norm),
        GoldenCase("silu_mul", "silu_mul", pointwise_order("cpu"), silu),
    ]


def _vocabulary_cases() -> list[GoldenCase]:
    logits = floats(13_000, 6, _VOCAB_SIZE, low=-4, high=3)
    logits[:, 100::100] = logits[:, :1]  # ties
    settings = (
        (1.0, 0, 1.0, 0.0), (0.7, 40, 1.0, 0.0), (1.3, 0, 0.9, 0.0), (0.9, 0, 1.0, 0.1), (2.0, 500, 0.8, 0.01),
        (0.5, 1, 1.0, 0.0),
    )  # fmt: skip
    seeds = [int(b >> np.uint64(1)) for b in bits(13_001, len(settings))]
    arguments = [(*setting, seed, 7 * i) for i, (setting, seed) in enumerate(zip(settings, seeds, strict=True))]
    logprobs, sampling = logprobs_order(_VOCAB_SIZE, "cpu"), sampling_order(_VOCAB_SIZE, "cpu")
    return [
        GoldenCase("logprobs", "logprobs", logprobs, {"logits": logits}),
        GoldenCase("top_logits", "top_logits", logprobs, {"logits": logits, "n": 200}),
        GoldenCase("argmax", "argmax", sampling, {"logits": logits}),
        GoldenCase("sample", "sample", sampling, {"logits": logits, "arguments": np.array(arguments, dtype=object)}),
    ]


def golden_digests() -> dict[str, str]:
    """Digest of each case by the reference."""
    return {case.name: digest(expect(case.op, case.order, case.inputs)) for case in golden_cases()}


def run_command(module: str, digests: Callable[[], dict[str, str]]) -> None:
    """`python -m MODULE [--write FILE]`: print the digests, or make the file anew."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description="Digests of every op.")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write them there, instead of printing them")
    args = parser.parse_args()
    text = json.dumps({"numerics_version": NUMERICS_VERSION, "digests": digests()}, indent=2) + "\n"
    if args.write is None:
        print(text, end="")
    else:
        args.write.parent.mkdir(parents=True, exist_ok=True)
        args.write.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    run_command("isobit.kernels.golden", golden_digests)
