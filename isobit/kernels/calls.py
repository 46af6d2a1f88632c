"""Kernels under the calling convention of probes: numpy in, the library's own method as in service, numpy out.

Twin of `reference/calls.py`. Builds weights, pages and tensors the way a model would; knows no expected values. Named
inputs, M rows: linear x [M, K], w [N, K], bias [N] | None, addend [M, N] | None; embedding ids [M], w; rms_norm x,
weight, eps; silu_mul gate_up [M, 2F]; rope_and_cache qkv, positions [M], cos, sin [P, R/2], q_norm, k_norm [D] | None,
eps, num_heads, num_kv_heads, interleaved; attention q, requests [M], positions [M], kv (k, v [T, KV, D] of each
request), num_heads, scale; logprobs, argmax logits [M, V]; top_logits logits, n; sample logits, arguments (temperature,
top_k, top_p, min_p, seed, position of each row).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from isobit.kernels.interface import TORCH_DTYPES, AttentionInputs, AttentionShape, HeadNorms, RopeTables
from isobit.kernels.reference.calls import Arrays
from isobit.kernels.reference.math import Float32, flush

_SENTINEL = 7.0  # what untouched cache slots hold while rope_and_cache is watched


def prepare(library: Any, op: str, order: Any, inputs: Mapping[str, Any]) -> Any:
    """What a model keeps between calls of `op`: the packed weight of linear and embedding, else None."""
    if op not in ("linear", "embedding"):
        return None
    weight = _tensor(inputs["w"]).to(TORCH_DTYPES[order.weight_dtype])
    return library.pack_linear(weight, _optional(inputs.get("bias"), False))


def call(
    library: Any, op: str, order: Any, schedule: str, inputs: Mapping[str, Any], misaligned: bool, kept: Any
) -> Arrays:
    """Run `library`'s method `op`; `kept` is from `prepare`.

    `misaligned`: float inputs start 4 bytes off an allocation, and linear adds in place.
    """
    if op == "linear":
        return _linear(library, order, schedule, inputs, misaligned, kept)
    if op == "embedding":
        return {"y": flush(library.embedding(kept, _int32(inputs["ids"])).numpy())}
    return _CALLS[op](library, order, schedule, inputs, misaligned)


def _tensor(array: Any, misaligned: bool = False) -> torch.Tensor:
    """A contiguous copy of `array` as a tensor of the same dtype."""
    source = torch.from_numpy(np.array(array))
    if not misaligned or source.dtype != torch.float32:
        return source
    shifted = torch.empty(source.numel() + 1)[1:].view(source.shape)
    return shifted.copy_(source)


def _optional(array: Any, misaligned: bool) -> torch.Tensor | None:
    return None if array is None else _tensor(array, misaligned)


def _int32(values: Any) -> torch.Tensor:
    return _tensor(np.asarray(values, dtype=np.int32))


def _linear(
    library: Any, order: Any, schedule: str, inputs: Mapping[str, Any], misaligned: bool, packed: Any
) -> Arrays:
    x, addend = _tensor(inputs["x"], misaligned), _optional(inputs["addend"], misaligned)
    out = addend if misaligned else None  # the residual stream may be updated in place
    return {"y": library.linear(x, packed, order.activation_dtype, schedule, addend, out).numpy()}


def _rms_norm(library: Any, order: Any, schedule: str, inputs: Mapping[str, Any], misaligned: bool) -> Arrays:
    x, weight = _tensor(inputs["x"], misaligned), _tensor(inputs["weight"], misaligned)
    return {"y": library.rms_norm(x, weight, inputs["eps"]).numpy()}


def _silu_mul(library: Any, order: Any, schedule: str, inputs: Mapping[str, Any], misaligned: bool) -> Arrays:
    return {"y": library.silu_mul(_tensor(inputs["gate_up"], misaligned)).numpy()}


def _rope_and_cache(library: Any, order: Any, schedule: str, inputs: Mapping[str, Any], misaligned: bool) -> Arrays:
    kv_heads, width, num_rows = inputs["num_kv_heads"], order.head_dim, len(inputs["positions"])
    page_size = order.kv_block
    num_pages = num_rows // page_size + 2
    slots = (np.arange(num_rows) * 37 + 11) % (num_pages * page_size)  # 37 is odd: no slot twice
    kv_layer = torch.full((2, num_pages, kv_heads * width * page_size), _SENTINEL, dtype=TORCH_DTYPES[order.kv_dtype])
    norms = None
    if inputs["q_norm"] is not None:
        norms = HeadNorms(_tensor(inputs["q_norm"], misaligned), _tensor(inputs["k_norm"], misaligned), inputs["eps"])
    q = library.rope_and_cache(
        _tensor(inputs["qkv"], misaligned), _int32(inputs["positions"]), _int32(slots),
        RopeTables(_tensor(inputs["cos"]), _tensor(inputs["sin"]), inputs["interleaved"]), norms, kv_layer,
        AttentionShape(inputs["num_heads"], kv_heads, width),
    )  # fmt: skip
    cache = kv_layer.to(torch.float32).numpy()
    k = cache[0].reshape(num_pages, kv_heads, width, page_size).transpose(0, 3, 1, 2).reshape(-1, kv_heads, width)
    v = cache[1].reshape(num_pages, kv_heads, page_size, width).transpose(0, 2, 1, 3).reshape(-1, kv_heads, width)
    untouched = np.setdiff1d(np.arange(num_pages * page_size), slots)
    spilled = np.count_nonzero(k[untouched] != _SENTINEL) + np.count_nonzero(v[untouched] != _SENTINEL)
    return {
        "q": flush(q.numpy()),
        "k": flush(k[slots]),
        "v": flush(v[slots]),
        "spilled": np.full(num_rows, spilled, np.int64),
    }


def _attention(library: Any, order: Any, schedule: str, inputs: Mapping[str, Any], misaligned: bool) -> Arrays:
    requests, positions = np.asarray(inputs["requests"]), np.asarray(inputs["positions"])
    starts = np.flatnonzero(np.diff(requests, prepend=-1))  # one run of rows per request, in the order of the rows
    lengths = positions[np.append(starts[1:], requests.size) - 1] + 1
    kv = [inputs["kv"][request] for request in requests[starts]]
    kv_layer, page_tables = paged(order, kv, lengths.tolist())
    shape = AttentionShape(inputs["num_heads"], kv[0][0].shape[1], order.head_dim)
    where = AttentionInputs(
        positions=_int32(positions),
        slots=_int32(np.zeros_like(positions)),  # keys are in their pages already
        query_starts=_int32(np.append(starts, requests.size)),
        start_positions=_int32(positions[starts]),
        page_tables=page_tables,
    )
    y = library.attention(_tensor(inputs["q"], misaligned), kv_layer, where, shape, inputs["scale"], schedule)
    return {"y": y.numpy()}


def paged(order: Any, kv: list[tuple[Float32, Float32]], lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(kv_layer, page_tables): the first `lengths` keys of each (k, v [T, KV, D]) in scattered pages, else NaN.

    k and v hold values of the Order's `kv_dtype`.
    """
    (kv_heads, width), page_size = kv[0][0].shape[1:], order.kv_block
    counts = [-(-length // page_size) for length in lengths]
    num_pages = int(np.add.reduce(counts)) + 2
    cache = np.full((2, num_pages, kv_heads, page_size * width), np.nan, np.float32)
    page_tables = np.zeros((len(kv), max(counts)), np.int32)
    free = list(range(1, num_pages))[::-1]
    for request, (k, v) in enumerate(kv):
        for logical in range(counts[request]):
            page = free.pop(0 if logical % 2 else -1)  # neither contiguous nor monotone
            page_tables[request, logical] = page
            keys = slice(logical * page_size, min((logical + 1) * page_size, lengths[request]))
            size = keys.stop - keys.start
            k_page = cache[0, page].reshape(kv_heads, width, page_size)
            v_page = cache[1, page].reshape(kv_heads, page_size, width)
            k_page[:, :, :size] = k[keys].transpose(1, 2, 0)
            v_page[:, :size] = v[keys].transpose(1, 0, 2)
    layer = torch.from_numpy(cache.reshape(2, num_pages, -1)).to(TORCH_DTYPES[order.kv_dtype])
    return layer, torch.from_numpy(page_tables)


def _logprobs(library: Any, order: Any, schedule: str, inputs: Mapping[str, Any], misaligned: bool) -> Arrays:
    maxima, lse = library.logprobs(_tensor(inputs["logits"], misaligned))
    return {"maxima": maxima.numpy() + np.float32(0), "lse": lse.numpy()}


def _top_logits(library: Any, order: Any, schedule: str, inputs: Mapping[str, Any], misaligned: bool) -> Arrays:
    logits = _tensor(inputs["logits"], misaligned)
    return {"ids": np.stack([library.top_logits(row, inputs["n"]).numpy() for row in logits])}


def _argmax(library: Any, order: Any, schedule: str, inputs: Mapping[str, Any], misaligned: bool) -> Arrays:
    ids, finite = (output.numpy() for output in library.argmax(_tensor(inputs["logits"], misaligned)))
    has_nan = np.isnan(inputs["logits"]).any(axis=1)
    return {"finite": finite, "ids": np.where(has_nan, np.int32(-1), ids)}


def _sample(library: Any, order: Any, schedule: str, inputs: Mapping[str, Any], misaligned: bool) -> Arrays:
    logits = _tensor(inputs["logits"], misaligned)
    drawn = [library.sample(row, *arguments) for row, arguments in zip(logits, inputs["arguments"], strict=True)]
    return {"ids": np.array(drawn, np.int64)}


_CALLS: Mapping[str, Callable[[Any, Any, str, Mapping[str, Any], bool], Arrays]] = MappingProxyType(
    {
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
