"""What a kernel is tried on, op by op: order-sensitive inputs. `attention_probes.py` has the two ops of attention.

The values spread widely in exponent, cancel, underflow, and hold subnormals and zeros of both signs: an order of
additions other than the Order's shows (`tests/test_admission.py` has the controls that must be refused). N is small,
because outputs do not meet in a reduction; every K, width and vocabulary that an Order names is taken as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from isobit.kernels.attention_probes import attention_probes, rope_and_cache_probes
from isobit.kernels.probe_data import Probe, bits, floats, row_runs, with_specials
from isobit.kernels.reference.math import Float32
from isobit.kernels.reference.ops import round_to

__all__ = ["PROBE_VERSION", "probes_for"]

PROBE_VERSION = 1


def _linear_inputs(order: Any, seed: int, m: int, n: int, k: int) -> dict[str, Any]:
    """Rows that cancel (every second product undoes the one before, nearly) and rows whose products underflow."""
    w = floats(seed, n, k)
    w[:, 1::2] = w[:, : k - 1 : 2] if k > 1 else w[:, 1::2]
    x = floats(seed + 1, m, k, low=-10, high=3)
    cancel = np.arange(m) % 3 == 1
    nudged = (-x[cancel, : k - 1 : 2]).view(np.uint32) ^ (bits(seed + 2, 1, k // 2) & np.uint64(7)).astype(np.uint32)
    x[cancel, 1::2] = nudged.view(np.float32)
    x[np.arange(m) % 5 == 2] *= np.float32(2.0**-118)  # a power of two: exact but for subnormals, which are meant
    w, x = with_specials(seed + 3, w, 97), with_specials(seed + 4, x, 97)
    return {"x": x, "w": round_to(order.weight_dtype, w), "bias": None, "addend": None}


def _linear(order: Any) -> list[Probe]:
    block = order.k_block
    shapes = [(97, 83, 1536), (33, 323, 576), (17, 37, block), (9, 19, block + 1), (6, 21, 2 * block - 1)]
    shapes += [(7, 17, k) for k in (1, 2, 3, 7, 31, 64)] + [(3, 5, 8 * block + 3)]
    shapes = [(m, n, -(-k // order.k_slices) * order.k_slices) for m, n, k in shapes]
    probes = []
    for i, (m, n, k) in enumerate(shapes):
        inputs = _linear_inputs(order, 100 + 10 * i, m, n, k)
        if i % 2 == 0:
            inputs["bias"] = with_specials(105 + 10 * i, floats(106 + 10 * i, n, low=-12))
        if i % 3 < 2:
            inputs["addend"] = with_specials(107 + 10 * i, floats(108 + 10 * i, m, n, low=-12, high=8))
        probes.append(Probe("linear", f"M<={m} N={n} K={k}", inputs, ("x", "addend"), row_runs(m)))
    return probes


def _embedding(order: Any) -> list[Probe]:
    w = round_to(order.weight_dtype, with_specials(201, floats(200, 83, 577)))
    ids = (bits(202, 33) % np.uint64(83)).astype(np.int32)
    ids[:2] = (82, 0)
    return [Probe("embedding", "N=83 K=577", {"ids": ids, "w": w}, ("ids",), row_runs(33))]


def _rms_norm(order: Any) -> list[Probe]:
    x = with_specials(301, floats(300, 33, order.width, low=-10, high=5))
    x[::2] = floats(304, 17, order.width, low=-1, high=1)  # of one size, so that every addition rounds
    x[5] *= np.float32(2.0**-70)  # squares underflow
    x[6] = 0
    inputs = {"x": x, "weight": with_specials(302, floats(303, order.width)), "eps": 1e-5}
    return [Probe("rms_norm", f"D={order.width}", inputs, ("x",), row_runs(33))]


def _silu_mul(order: Any) -> list[Probe]:
    probes = []
    for i, f in enumerate((1, 15, 16, 37, 1536)):
        gate_up = with_specials(401 + 9 * i, floats(400 + 9 * i, 17, 2 * f, low=-20, high=7))
        gate_up[3, : 2 * f : 3] = (np.inf, -np.inf, np.nan)[i % 3]
        probes.append(Probe("silu_mul", f"F={f}", {"gate_up": gate_up}, ("gate_up",), row_runs(17)))
    return probes


def _logits(seed: int, m: int, vocab_size: int) -> Float32:
    logits = with_specials(seed, floats(seed + 1, m, vocab_size, low=-3, high=3), 301)
    logits[1::2, ::17] = logits[1::2, :1]  # ties somewhere
    logits[::2, ::17] = logits[::2].max(axis=1, keepdims=True)  # ties at the top
    if m > 2:
        logits[2] *= np.float32(8)  # one row far apart, most of it below exp32's zero
    return logits


def _logprobs(order: Any) -> list[Probe]:
    logits = _logits(500, 7, order.vocab_size)
    logits[4, order.vocab_size // 2] = np.nan
    logits[5, : order.vocab_size // 2] = -np.inf
    counts = (1, 2, 3, 7)
    return [Probe("logprobs", f"V={order.vocab_size}", {"logits": logits}, ("logits",), row_runs(7, counts))]


def _top_logits(order: Any) -> list[Probe]:
    logits = _logits(550, 3, order.vocab_size)
    logits[1, : order.vocab_size // 2] = -np.inf
    return [
        Probe("top_logits", f"V={order.vocab_size} n={n}", {"logits": logits, "n": n}, ("logits",), row_runs(3, (3,)))
        for n in dict.fromkeys(min(n, order.vocab_size) for n in (1, 2, 17, 64))
    ]


def _argmax(order: Any) -> list[Probe]:
    logits = _logits(600, 9, order.vocab_size)
    logits[3] = (0.0, -0.0)[order.vocab_size % 2]
    logits[4, -1] = 99  # the last id alone
    logits[5] = -logits[5].max()
    for row, bad in ((6, np.nan), (7, np.inf), (8, -np.inf)):
        logits[row, order.vocab_size // 3] = bad
    logits[8, ::2] = -np.inf  # as banned ids are: the largest of the others is asked for
    return [Probe("argmax", f"V={order.vocab_size}", {"logits": logits}, ("logits",), row_runs(9, (1, 2, 3, 9)))]


def _sample(order: Any) -> list[Probe]:
    settings = [
        (temperature, top_k, top_p, min_p)
        for temperature in (1.0, 0.7, 3.5)
        for top_k, top_p, min_p in (
            (0, 1.0, 0.0), (1, 1.0, 0.0), (40, 0.9, 0.0), (0, 0.95, 0.0), (0, 0.1, 0.0), (0, 1.0, 0.05),
            (500, 0.8, 0.02),
        )
    ]  # fmt: skip
    seeds = [int(b >> np.uint64(1)) for b in bits(650, len(settings))]
    arguments = [(*setting, seed, 3 * i) for i, (setting, seed) in enumerate(zip(settings, seeds, strict=True))]
    logits = _logits(660, len(arguments), order.vocab_size)
    logits[5, : order.vocab_size // 2] = -np.inf
    inputs = {"logits": logits, "arguments": np.array(arguments, dtype=object)}
    runs = row_runs(len(arguments), (len(arguments),))
    return [Probe("sample", f"V={order.vocab_size}", inputs, ("logits", "arguments"), runs)]


_PROBES: Mapping[str, Callable[[Any], list[Probe]]] = MappingProxyType(
    {
        "linear": _linear,
        "embedding": _embedding,
        "rms_norm": _rms_norm,
        "rope_and_cache": rope_and_cache_probes,
        "attention": attention_probes,
        "silu_mul": _silu_mul,
        "argmax": _argmax,
        "logprobs": _logprobs,
        "top_logits": _top_logits,
        "sample": _sample,
    }
)


def probes_for(op: str, order: Any) -> list[Probe]:
    """The probes of an op under an Order."""
    return _PROBES[op](order)
