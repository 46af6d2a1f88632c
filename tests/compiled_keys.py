"""What Triton would compile for a model on a GPU, without a GPU and without compiling: run as a program by a test.

A stand-in for the driver says "sm90", and a launch only works out the key under which the compiled kernel would be
found. `python -m tests.compiled_keys MODEL OP [checks]` prints, as JSON, how many keys the warm-up of admission asks
for (but for OP, which it leaves out), and which kernels steps of an engine, or the checks of admission, add to them.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import torch
import triton.runtime.jit as jit
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from isobit.kernels.gpu.library import GpuLibrary
from isobit.kernels.gpu.probes import checks_for
from isobit.kernels.gpu.warm import warm_up
from isobit.kernels.interface import AttentionShape, Draws, HeadNorms, RopeTables, StepArrays
from isobit.kernels.registry import OPS_OF_ORDER
from isobit.model_config import ModelConfig, load_model_config
from isobit.order import MmaLinearOrder, Order, model_orders


class _Driver:
    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


KEYS: dict[tuple[str, str], int] = {}


def _run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    """As JITFunction.run, up to the key."""
    kwargs["debug"] = kwargs.get("debug", self.debug)
    kwargs["instrumentation_mode"] = ""
    _, known, _, _, binder = self.device_caches[0]
    _, specialization, options = binder(*args, **kwargs)
    key = jit.compute_cache_key(known, specialization, options)
    KEYS[self.fn.__name__, str(key)] = KEYS.get((self.fn.__name__, str(key)), 0) + 1


def warm(library: GpuLibrary, orders: dict[str, Order], left_out: str) -> None:
    for order in dict.fromkeys(orders.values()):
        for op in [op for op in OPS_OF_ORDER[type(order)] if op != left_out]:
            for schedule in library.schedules(op, order):
                warm_up(library, op, order, schedule)


def step(library: GpuLibrary, config: ModelConfig, orders: dict[str, Order], chunks: list[tuple[int, int]]) -> None:
    """One layer and the head over chunks (start, rows), by every schedule of the linears that takes so many rows."""
    page = 64
    rows, widest = sum(count for _, count in chunks), max(-(-(start + count) // page) for start, count in chunks)
    positions = np.concatenate([np.arange(start, start + count) for start, count in chunks]).astype(np.int32)
    ends = np.cumsum([0] + [count for _, count in chunks]).astype(np.int32)
    starts = np.array([start for start, _ in chunks], np.int32)
    tables = np.zeros((len(chunks), widest), np.int32)
    token_ids, inputs = library.begin_step(StepArrays(positions, positions, positions, ends, starts, tables))
    shape = AttentionShape(config.num_heads, config.num_kv_heads, config.head_dim)
    [layer] = library.new_kv_layers(1, 70, page, shape, library.dtype_name)
    weights = {
        name: library.make_weight(order, torch.empty((order.n, order.k), dtype=library.dtype),
                                  torch.empty(order.n) if order.has_bias else None)
        for name, order in orders.items() if isinstance(order, MmaLinearOrder)
    }  # fmt: skip

    def linear(name: str, x: torch.Tensor, addend: torch.Tensor | None = None) -> torch.Tensor:
        packed, dtype, y = weights[f"linear.{name}"], library.dtype_name, torch.empty(0)
        for schedule in library.schedules("linear", packed.order):
            least, most = library.linear_rows(packed.order, schedule)
            if least <= x.shape[0] <= most:
                y = library.linear(x, packed, dtype, schedule, addend)
        return y

    table, ones = torch.empty((5000, config.head_dim // 2)), torch.ones(config.head_dim)
    x = library.embedding(weights["linear.lm_head"], token_ids)
    for norms in (None, HeadNorms(ones, ones, 1e-6)):
        qkv = linear("qkv", library.rms_norm(x, torch.ones(config.hidden_size), 1e-6))
        q = library.rope_and_cache(qkv, inputs.positions, inputs.slots, RopeTables(table, table), norms, layer, shape)
    for schedule in library.schedules("attention", orders["attention"]):
        out = library.attention(q, layer, inputs, shape, 0.1, schedule)
    x = linear("o", out, x)
    weight = torch.ones(config.hidden_size)
    x = linear("down", library.silu_mul(linear("gate_up", library.rms_norm(x, weight, 1e-6))), x)
    head(library, linear("lm_head", library.rms_norm(x[:5], weight, 1e-6)))
    assert rows == x.shape[0]


def head(library: GpuLibrary, logits: torch.Tensor) -> None:
    count = logits.shape[0]
    library.argmax(logits)
    library.logprobs(logits)
    for n in (1, 2, 5, 20, 64):
        library.top_rows(logits, n)
    for top_k, top_p, min_p in ((0, 1.0, 0.0), (1, 1.0, 0.0), (40, 0.9, 0.0), (0, 0.9, 0.0), (500, 0.8, 0.02)):
        reals = (np.full(count, value) for value in (0.7, top_k, top_p, min_p))
        library.sample_rows(logits, Draws(*reals, np.full(count, 5, np.uint64), np.full(count, 9)))


def check(library: GpuLibrary, orders: dict[str, Order]) -> int:
    """Run every check of admission, as far as shapes and dtypes; how many there were."""
    count = 0
    for order in dict.fromkeys(orders.values()):
        for op in OPS_OF_ORDER[type(order)]:
            shared: dict[Any, Any] = {}
            for schedule in library.schedules(op, order):
                for each in checks_for(library, op, order, schedule, shared):
                    found = each.run()
                    for name, expected in each.expected.items():
                        same = found[name].shape == expected.shape and found[name].dtype == expected.dtype
                        assert same, f"{op}, {schedule}, {each.label}: {name}"
                    count += 1
    return count


def main() -> None:
    driver.set_active(_Driver())
    jit.JITFunction.run = _run
    config = load_model_config(sys.argv[1])
    orders = model_orders(config, "bfloat16", "bfloat16", "bfloat16", "sm90")
    library = GpuLibrary("sm90", "bfloat16", torch.device("cpu"))
    warm(library, orders, left_out=sys.argv[2])
    warmed = dict(KEYS)
    checks = check(library, orders) if "checks" in sys.argv[3:] else 0
    for chunks in (
        [(0, 1)], [(0, 5)], [(100, 1), (513, 1)], [(0, 130), (2000, 1)], [(0, 700)], [(4095, 1)] * 9,
        [(0, 16), (64, 48), (700, 1), (1, 1)], [(0, 2049)],
    ):  # fmt: skip
        step(library, config, orders, chunks)
    added = sorted({name for name, key in KEYS if (name, key) not in warmed})
    print(json.dumps({"warmed": len(warmed), "added": added, "checks": checks}))


if __name__ == "__main__":
    main()
