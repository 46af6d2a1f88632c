"""What a GPU kernel is checked on before it runs, op by op.

Linear and attention against the plainest kernel of their Order on this card (tensor-core arithmetic is part of the
Order); everything else against the numpy reference, byte by byte, on data without subnormals, which a GPU keeps and
the reference flushes. Rows at both sides of every tile and of every threshold between schedules; NaN where no kernel
may look.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from isobit.kernels.gpu.attention_probes import attention_checks, rope_and_cache_checks
from isobit.kernels.gpu.checks import Check, device_floats, same_rows
from isobit.kernels.interface import Draws
from isobit.kernels.probe_data import bits, floats
from isobit.kernels.reference import ops as reference
from isobit.order import MmaLinearOrder, NormOrder, Order

__all__ = ["PROBE_VERSION", "checks_for"]

PROBE_VERSION = 1
ROW_COUNTS = (
    1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 95, 96, 97, 127, 128, 129, 191, 192, 193, 255,
    256, 257, 383, 384, 385, 511, 512, 513, 767, 1023, 1024, 1025, 2047, 2049, 4097, 8192,
)  # fmt: skip
_MOST_PRODUCTS = 3 << 40  # of one linear check: bounds the time of a proof on huge matrices


def _linear(library: Any, order: MmaLinearOrder, schedule: str, shared: dict[str, Any]) -> Iterator[Check]:
    """Every row count the schedule is offered for, at the start, the middle and the end of the rows; with an addend."""
    least, most = library.linear_rows(order, schedule)
    largest = max(least, min(most, ROW_COUNTS[-1], _MOST_PRODUCTS // (order.n * order.k)))
    counts = [count for count in (*ROW_COUNTS, least, most) if least <= count <= largest]
    for form in ("plain", "addend") if order.output_dtype == "float32" else ("plain",):
        x, packed, addend, expected = _linear_case(library, order, form, largest, shared)
        for at, count in enumerate(counts if form == "plain" else counts[-3:]):
            start = (0, (largest - count) // 2, largest - count)[at % 3]
            rows = slice(start, start + count)
            some, part = _aligned(x[rows]), None if addend is None else _aligned(addend[rows])

            def run(some: Any = some, part: Any = part, packed: Any = packed) -> dict[str, torch.Tensor]:
                return {"y": library.linear(some, packed, order.weight_dtype, schedule, part)}

            yield Check(f"{form}, {count} rows from {start}", run, {"y": expected[rows]})


def _aligned(rows: torch.Tensor) -> torch.Tensor:
    """The rows on a 16-byte boundary, as every tensor of a step is: rows of an odd width need not start on one."""
    return rows if rows.data_ptr() % 16 == 0 else rows.clone()


def _linear_case(library: Any, order: MmaLinearOrder, form: str, rows: int, shared: dict[str, Any]) -> tuple[Any, ...]:
    """(x, packed weight, addend, expected), made once for all schedules, with at least `rows` rows."""
    key = f"{form} {order}"
    if key not in shared or shared[key][0].shape[0] < rows:
        device, dtype = library.device, library.dtype
        if form == "addend":  # one float32 addition to the plain result, by the Order
            x, packed, _, plain = _linear_case(library, order, "plain", rows, shared)
            addend = device_floats(14, (x.shape[0], order.n), torch.float32, device, high=8)
            shared[key] = (x, packed, addend, addend + plain)
            return tuple(shared[key])
        if "w" not in shared:
            shared["w"] = device_floats(11, (order.n, order.k), dtype, device)
        x = device_floats(12, (rows, order.k), dtype, device, low=-10, high=3)
        bias = device_floats(13, (order.n,), torch.float32, device, low=-12) if order.has_bias else None
        packed = library.make_weight(order, shared["w"], bias)
        shared[key] = (x, packed, None, library.reference_linear(x, packed, None))
    return tuple(shared[key])


def _embedding(library: Any, order: MmaLinearOrder, schedule: str, shared: dict[str, Any]) -> Iterator[Check]:
    rows = min(order.n, 992)  # a multiple of 16 as vocabularies are, or it would be compiled once more
    weight = device_floats(21, (rows, order.k), library.dtype, library.device)
    packed = library.make_weight(dataclasses.replace(order, has_bias=False), weight)
    for count in (1, 2, 33, 257):
        ids = torch.from_numpy((bits(22 + count, count) % np.uint64(rows)).astype(np.int32)).to(library.device)
        expected = {"y": weight[ids.long()].float()}
        yield Check(f"{count} rows", lambda ids=ids: {"y": library.embedding(packed, ids)}, expected)  # type: ignore[misc]


def _rms_norm(library: Any, order: NormOrder, schedule: str, shared: dict[str, Any]) -> Iterator[Check]:
    x, weight = floats(31, 65, order.width), floats(32, order.width, low=-3, high=1)
    x[::2] = floats(33, 33, order.width, low=-1, high=1)  # of one size, so that every addition rounds
    truth = torch.from_numpy(reference.rms_norm(order, x, weight, 1e-5)).to(library.dtype)
    on_device = torch.from_numpy(weight).to(library.device)
    return _by_rows(library, {"x": x}, {"y": truth}, lambda x: {"y": library.rms_norm(x, on_device, 1e-5)})


def _silu_mul(library: Any, order: Order, schedule: str, shared: dict[str, Any]) -> Iterator[Check]:
    for width in (8, 36, 40, 1536):
        gate_up = torch.from_numpy(floats(41 + width, 65, 2 * width, low=-20, high=7)).to(library.dtype)
        gate_up[3, : 2 * width : 3] = (torch.inf, -torch.inf, torch.nan)[width % 3]
        truth = torch.from_numpy(reference.silu_mul(gate_up.float().numpy())).to(library.dtype)
        inputs = {"gate_up": gate_up}
        yield from _by_rows(library, inputs, {"y": truth}, lambda gate_up: {"y": library.silu_mul(gate_up)})


def _logits(seed: int, rows: int, vocab_size: int) -> Any:
    logits = floats(seed, rows, vocab_size, low=-3, high=3)
    logits[1::2, ::17] = logits[1::2, :1]  # ties somewhere
    logits[::2, ::17] = logits[::2].max(axis=1, keepdims=True)  # ties at the top
    return logits


def _logprobs(library: Any, order: Any, schedule: str, shared: dict[str, Any]) -> Iterator[Check]:
    logits = _logits(51, 5, order.vocab_size)
    logits[3, order.vocab_size // 2] = np.nan
    logits[4, : order.vocab_size // 2] = -np.inf
    maxima, lse = (torch.from_numpy(output) for output in reference.logprobs(order, logits))

    def run(logits: torch.Tensor) -> dict[str, torch.Tensor]:
        return dict(zip(("maxima", "lse"), library.logprobs(logits), strict=True))

    return _by_rows(library, {"logits": logits}, {"maxima": maxima, "lse": lse}, run)


def _top_logits(library: Any, order: Any, schedule: str, shared: dict[str, Any]) -> Iterator[Check]:
    logits = _logits(55, 3, order.vocab_size)
    logits[1, : order.vocab_size // 2] = -np.inf
    for n in dict.fromkeys(min(n, order.vocab_size) for n in (1, 2, 17, 64, 65, 300)):
        truth = torch.from_numpy(np.stack([reference.top_logits(row, n) for row in logits]))
        run: Callable[..., Any] = lambda logits, n=n: {"ids": library.top_rows(logits, n)}  # noqa: E731
        yield from _by_rows(library, {"logits": logits}, {"ids": truth}, run)


def _argmax(library: Any, order: Any, schedule: str, shared: dict[str, Any]) -> Iterator[Check]:
    logits = _logits(61, 9, order.vocab_size)
    logits[3] = (0.0, -0.0)[order.vocab_size % 2]
    logits[4, -1] = 99  # the last id alone
    for row, bad in ((6, np.nan), (7, np.inf), (8, -np.inf)):
        logits[row, order.vocab_size // 3] = bad
    logits[5, ::2] = -np.inf  # as banned ids are: the largest of the others is asked for
    ids, finite = reference.argmax(logits)
    ids[np.isnan(logits).any(axis=1)] = -1  # has no meaning

    def run(logits: torch.Tensor) -> dict[str, torch.Tensor]:
        found, is_finite = library.argmax(logits)
        return {"finite": is_finite, "ids": torch.where(logits.isnan().any(dim=1), -1, found)}

    truth = {"finite": torch.from_numpy(finite), "ids": torch.from_numpy(ids)}
    return _by_rows(library, {"logits": logits}, truth, run)


def _sample(library: Any, order: Any, schedule: str, shared: dict[str, Any]) -> Iterator[Check]:
    filters = ((0, 1.0, 0.0), (1, 1.0, 0.0), (40, 0.9, 0.0), (0, 0.95, 0.0), (0, 0.1, 0.0), (0, 1.0, 0.05),
               (500, 0.8, 0.02))  # fmt: skip
    settings = [(temperature, *kept) for temperature in (1.0, 0.7, 3.5) for kept in filters]
    temperature, top_k, top_p, min_p = (np.array(column) for column in zip(*settings, strict=True))
    seed = bits(65, len(settings)) >> np.uint64(1)
    draws = Draws(temperature, top_k, top_p, min_p, seed, 3 * np.arange(len(settings)))
    logits = _logits(66, len(settings), order.vocab_size)
    rows = zip(logits, settings, seed.tolist(), draws.position.tolist(), strict=True)
    truth = [reference.sample(order, row, *of_row, own, position) for row, of_row, own, position in rows]
    on_device = torch.from_numpy(logits).to(library.device)
    for picked in (slice(None), slice(3, 4), slice(0, None, 7), slice(20, None, -1)):
        index = np.arange(len(settings))[picked].copy()
        part = Draws(*(getattr(draws, name)[index] for name in Draws.__slots__))
        expected = torch.tensor(truth, dtype=torch.int32)[index].to(library.device)
        some = on_device[torch.from_numpy(index)]

        def run(some: torch.Tensor = some, part: Draws = part) -> dict[str, torch.Tensor]:
            return {"ids": library.sample_rows(some, part)}

        yield Check(f"{index.size} rows", run, {"ids": expected})


def _by_rows(
    library: Any,
    inputs: Mapping[str, Any],
    truth: Mapping[str, torch.Tensor],
    run: Callable[..., dict[str, torch.Tensor]],
) -> Iterator[Check]:
    """All rows, then fewer of them from the start, the middle and the end."""
    on_device = {name: torch.as_tensor(value).to(library.device) for name, value in inputs.items()}
    expected = {name: value.to(library.device) for name, value in truth.items()}
    total = next(iter(truth.values())).shape[0]
    for at, count in enumerate(count for count in (total, 1, 2, 3, 5, 8, 33, 64) if count <= total):
        start = (0, (total - count) // 2, total - count)[at % 3]
        rows = slice(start, start + count)
        part = {name: _aligned(value[rows]) for name, value in on_device.items()}
        yield Check(f"{count} rows from {start}", lambda part=part: run(**part), same_rows(expected, rows))  # type: ignore[misc]


_CHECKS: Mapping[str, Callable[..., Iterator[Check]]] = MappingProxyType(
    {
        "linear": _linear,
        "embedding": _embedding,
        "rms_norm": _rms_norm,
        "rope_and_cache": rope_and_cache_checks,
        "attention": attention_checks,
        "silu_mul": _silu_mul,
        "argmax": _argmax,
        "logprobs": _logprobs,
        "top_logits": _top_logits,
        "sample": _sample,
    }
)


def checks_for(library: Any, op: str, order: Order, schedule: str, shared: dict[str, Any]) -> Iterator[Check]:
    """The checks of an op under an Order and a schedule; `shared` keeps what its schedules have in common."""
    return _CHECKS[op](library, order, schedule, shared)
