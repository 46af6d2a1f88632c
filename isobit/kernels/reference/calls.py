"""The reference under the one calling convention of probes: (op, Order, named inputs) -> named outputs.

Keeps the invariant that an output row is computed from that row's inputs alone, so that any selection of rows of a
probe has the same selection of rows of its outputs as the truth. `isobit/kernels/calls.py` is its twin for kernels and
documents the inputs of each op.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from isobit.kernels.reference import ops
from isobit.kernels.reference.math import flush
from isobit.order import norm_order

Arrays = dict[str, npt.NDArray[Any]]


def expect(op: str, order: Any, inputs: Mapping[str, Any]) -> Arrays:
    """Outputs of `op` by the reference; every output has one leading entry per row."""
    return _EXPECT[op](order, inputs)


def _linear(order: Any, inputs: Mapping[str, Any]) -> Arrays:
    return {"y": ops.linear(order, inputs["x"], inputs["w"], inputs["bias"], inputs["addend"])}


def _embedding(order: Any, inputs: Mapping[str, Any]) -> Arrays:
    return {"y": flush(inputs["w"][inputs["ids"]])}


def _rms_norm(order: Any, inputs: Mapping[str, Any]) -> Arrays:
    return {"y": ops.rms_norm(order, inputs["x"], inputs["weight"], inputs["eps"])}


def _silu_mul(order: Any, inputs: Mapping[str, Any]) -> Arrays:
    return {"y": ops.silu_mul(inputs["gate_up"])}


def _rope_and_cache(order: Any, inputs: Mapping[str, Any]) -> Arrays:
    heads, kv_heads, width = inputs["num_heads"], inputs["num_kv_heads"], order.head_dim
    rows = inputs["qkv"].reshape(-1, heads + 2 * kv_heads, width)
    q, k, v = rows[:, :heads], rows[:, heads : heads + kv_heads], rows[:, heads + kv_heads :]
    if inputs["q_norm"] is not None:
        norm = norm_order(width, "cpu")
        q = ops.rms_norm(norm, q, inputs["q_norm"], inputs["eps"])
        k = ops.rms_norm(norm, k, inputs["k_norm"], inputs["eps"])
    cos, sin = inputs["cos"][inputs["positions"]], inputs["sin"][inputs["positions"]]
    q, k = (ops.rope(x, cos, sin, inputs["interleaved"]) for x in (q, k))
    return {
        "q": flush(q.reshape(q.shape[0], -1)),
        "k": flush(ops.round_to(order.kv_dtype, k)),
        "v": flush(ops.round_to(order.kv_dtype, v)),
        "spilled": np.zeros(rows.shape[0], np.int64),
    }


def _attention(order: Any, inputs: Mapping[str, Any]) -> Arrays:
    out = np.zeros_like(inputs["q"])
    for request, (k, v) in enumerate(inputs["kv"]):
        rows = np.flatnonzero(inputs["requests"] == request)
        if rows.size:
            start = int(inputs["positions"][rows[0]])
            assert np.array_equal(inputs["positions"][rows], start + np.arange(rows.size)), "rows are not consecutive"
            out[rows] = ops.attention(order, inputs["q"][rows], k, v, start, inputs["num_heads"], inputs["scale"])
    return {"y": out}


def _logprobs(order: Any, inputs: Mapping[str, Any]) -> Arrays:
    maxima, lse = ops.logprobs(order, inputs["logits"])
    return {"maxima": maxima + np.float32(0), "lse": lse}


def _top_logits(order: Any, inputs: Mapping[str, Any]) -> Arrays:
    return {"ids": np.stack([ops.top_logits(row, inputs["n"]) for row in inputs["logits"]])}


def _argmax(order: Any, inputs: Mapping[str, Any]) -> Arrays:
    ids, finite = ops.argmax(inputs["logits"])
    has_nan = np.isnan(inputs["logits"]).any(axis=1)  # such a row's id has no meaning
    return {"finite": finite, "ids": np.where(has_nan, np.int32(-1), ids)}


def _sample(order: Any, inputs: Mapping[str, Any]) -> Arrays:
    rows = zip(inputs["logits"], inputs["arguments"], strict=True)
    drawn = [ops.sample(order, row, *arguments) for row, arguments in rows]
    return {"ids": np.array(drawn, np.int64)}


_EXPECT: Mapping[str, Callable[[Any, Mapping[str, Any]], Arrays]] = MappingProxyType(
    {
        "linear": _linear,
        "embedding": _embedding,
        "rms_norm": _rms_norm,
        "silu_mul": _silu_mul,
        "rope_and_cache": _rope_and_cache,
        "attention": _attention,
        "logprobs": _logprobs,
        "top_logits": _top_logits,
        "argmax": _argmax,
        "sample": _sample,
    }
)
