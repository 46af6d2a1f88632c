"""What the user asked for: one frozen object, resolved once, printed, unknown keys refused. No torch.

The option names are those users of SGLang and vLLM know; the command line and the YAML file are generated from the
fields below. Nothing here can move a bit except `dtype`, `activation_dtype` and `kv_cache_dtype`, which choose Orders.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

DTYPES = ("auto", "float32", "bfloat16", "float16")


def _option(default: Any, help: str, choices: tuple[str, ...] | None = None) -> Any:
    return field(default=default, metadata={"help": help, "choices": choices})


@dataclass(frozen=True)
class EngineConfig:
    """Options of an engine. Construct with `EngineConfig.from_options` to get unknown names refused by name.

    Raises ValueError for a value outside its range, naming the option, the value and what is possible.
    """

    model: str = _option("smollm2", "checkpoint folder (config.json + safetensors), .gguf file, or 'smollm2'")
    load_format: str = _option(
        "auto", "auto: the checkpoint's weights; dummy: random ones of its shapes, to measure with", ("auto", "dummy")
    )
    device: str = _option("cpu", "device to run on; cuda: an NVIDIA GPU of compute capability 9.0", ("cpu", "cuda"))
    dtype: str = _option(
        "auto", "dtype of the weights; auto on cpu: float32 for float16/float32 files, else bfloat16; auto on cuda: "
        "float16 for float16 files, else bfloat16", DTYPES,
    )  # fmt: skip
    activation_dtype: str = _option("auto", "dtype linear inputs are rounded to; auto: the weights' dtype", DTYPES)
    kv_cache_dtype: str = _option("auto", "dtype of the KV cache; auto: the weights' dtype", DTYPES)
    context_length: int | None = _option(None, "longest sequence, prompt and output; default: what the model allows")
    max_running_requests: int | None = _option(None, "most requests in one step; default: 64 on cpu, 256 on cuda")
    chunked_prefill_size: int | None = _option(
        None, "most tokens computed in one step; prompts are cut to fit; default: 512 on cpu, 8192 on cuda"
    )
    max_total_tokens: int | None = _option(
        None, "tokens the KV cache holds; default: 16384 on cpu, 131072 on cuda, at least one full context"
    )
    disable_radix_cache: bool = _option(False, "never reuse a cached prefix")
    num_threads: int | None = _option(None, "threads of the CPU kernels; default: the cores this process may use")
    cpu_library: str = _option(
        "auto", "instruction set of the CPU kernels", ("auto", "avx512bf16", "avx512", "avx2", "neon", "scalar")
    )
    random_seed: int | None = _option(None, "seed of the seeds given to unseeded requests; default: from the system")
    served_model_name: str | None = _option(None, "model name in the API; default: the last part of `model`")
    chat_template: str | None = _option(None, "file with a Jinja chat template replacing the checkpoint's")
    hf_overrides: str | None = _option(None, 'JSON object laid over config.json, such as {"rope_theta": 10000.0}')
    max_logprobs: int = _option(64, "most alternatives per position a request may ask for")
    max_queued_requests: int = _option(4096, "most requests waiting or running; more are refused")

    def __post_init__(self) -> None:
        for name in ("model", "chat_template"):
            if isinstance(getattr(self, name), os.PathLike):
                object.__setattr__(self, name, os.fspath(getattr(self, name)))  # frozen for everyone else
        for spec in fields(self):
            value, choices = getattr(self, spec.name), spec.metadata["choices"]
            check_type(spec.name, value, str(spec.type))
            if choices and value not in choices:
                raise ValueError(f"{spec.name}={value!r}: supported are {', '.join(choices)}")
            if choices is DTYPES and (self.device, value) in (("cpu", "float16"), ("cuda", "float32")):
                possible = [choice for choice in DTYPES if choice != value]
                raise ValueError(f"{spec.name}={value!r}: on {self.device} supported are {', '.join(possible)}")
        at_least = {
            "context_length": 2, "max_running_requests": 1, "chunked_prefill_size": 1, "max_total_tokens": 64,
            "num_threads": 1, "max_logprobs": 0, "max_queued_requests": 1,
        }  # fmt: skip
        for name, minimum in at_least.items():
            value = getattr(self, name)
            if value is not None and not minimum <= value < 2**31:
                raise ValueError(f"{name}={value!r}: a whole number from {minimum} to 2147483647 is needed")
        if self.hf_overrides is not None:
            self.parsed_overrides()

    def parsed_overrides(self) -> dict[str, Any]:
        """`hf_overrides` as a dict. Raises ValueError when it is not a JSON object."""
        if self.hf_overrides is None:
            return {}
        try:
            overrides = json.loads(self.hf_overrides)
        except ValueError as error:
            raise ValueError(f"hf_overrides is not JSON: {error}") from error
        if not isinstance(overrides, dict):
            raise ValueError(f"hf_overrides must be a JSON object, got {self.hf_overrides!r}")
        return overrides

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> EngineConfig:
        """Build from a mapping of option names. Raises ValueError listing the known names for an unknown one."""
        known = {spec.name for spec in fields(cls)}
        unknown = sorted(set(options) - known)
        if unknown:
            raise ValueError(f"unknown option {', '.join(unknown)}; known: {', '.join(sorted(known))}")
        return cls(**options)


def check_type(name: str, value: object, wanted: str) -> None:
    """Raise ValueError unless `value` is `wanted`, a field's annotation: bool, int or str, perhaps "| None"."""
    kind, _, optional = wanted.partition(" | ")
    if value is None and optional:
        return
    python_type, words = {
        "bool": (bool, "true or false"), "int": (int, "a whole number"), "str": (str, "a text"),
    }[kind]  # fmt: skip
    if not isinstance(value, python_type) or (kind == "int" and isinstance(value, bool)):
        raise ValueError(f"{name}={value!r}: {words} is needed")
