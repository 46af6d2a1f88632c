"""Golden digests of a GPU's device class: SHA-256 of every op's output on fixed inputs, on that card.

Inputs are made of integers, so they are the same everywhere; tensor-core arithmetic is the card's. The digests of an
NVIDIA H200 are in `tests/golden/sm90_ops.json`; a library upgrade that moves one changes bits: it needs a new
`NUMERICS_VERSION` and a line in the changelog. `python -m isobit.kernels.gpu.golden --write FILE` makes the file anew.
"""

from __future__ import annotations

import hashlib
import itertools

import numpy as np
import torch

from isobit.kernels.golden import run_command
from isobit.kernels.gpu.checks import device_floats
from isobit.kernels.gpu.device import gpu_facts
from isobit.kernels.gpu.library import GpuLibrary
from isobit.kernels.gpu.probes import checks_for
from isobit.kernels.interface import TORCH_DTYPES
from isobit.kernels.registry import OPS_OF_ORDER
from isobit.kernels.triton.mla import reference_mla
from isobit.kernels.triton.moe import reference_moe_linear
from isobit.kernels.triton.moe_combine import moe_combine
from isobit.order import (
    MmaLinearOrder,
    Order,
    logprobs_order,
    mma_attention_order,
    moe_combine_order,
    norm_order,
    pointwise_order,
    sampling_order,
)

__all__ = ["all_digests", "golden_digests", "golden_orders", "mixture_digests"]

_CHECKS = 12  # of each op; the first ones hold all rows


def golden_orders(device_class: str, dtype: str) -> dict[str, Order]:
    """Orders of every kind, with odd and even sizes, by name."""
    orders: dict[str, Order] = {
        f"linear {n}x{k} slices {slices} {output}": MmaLinearOrder(n, k, dtype, output, slices)
        for n, k, slices, output in (
            (320, 1024, 1, dtype), (320, 1024, 2, "float32"), (256, 2048, 4, "float32"), (173, 344, 1, dtype),
            (97, 172, 1, "float32"),
        )
    }  # fmt: skip
    orders |= {f"attention {width}": mma_attention_order(width, width, dtype, device_class) for width in (64, 96, 128)}
    orders |= {f"norm {width}": norm_order(width, device_class) for width in (64, 577, 4096)}
    orders |= {
        "pointwise": pointwise_order(device_class),
        "logprobs": logprobs_order(9001, device_class),
        "sampling": sampling_order(9001, device_class),
    }
    return orders


def golden_digests(library: GpuLibrary, dtype: str) -> dict[str, str]:
    """Digest of each op under each Order, by its first schedule; admission proves that the others give the same."""
    found = {}
    with torch.inference_mode():
        for name, order in golden_orders(library.name, dtype).items():
            for op in OPS_OF_ORDER[type(order)]:
                checks = checks_for(library, op, order, library.schedules(op, order)[0], {})
                sha = hashlib.sha256()
                for check in itertools.islice(checks, _CHECKS):
                    for output, tensor in sorted(check.run().items()):
                        sha.update(f"{output} {tensor.dtype} {list(tensor.shape)}".encode() + _bytes(tensor))
                found[f"{op}: {name} {dtype}"] = sha.hexdigest()
    return found


def mixture_digests(device: torch.device, device_class: str, dtype: str) -> dict[str, str]:
    """Digests of what no model of this version runs yet: experts, their combination, absorbed MLA (references)."""
    torch_dtype, full = TORCH_DTYPES[dtype], torch.float32
    ids = torch.tensor([[3, 0], [1, 3], [3, 2], [0, 1], [2, 3]], dtype=torch.int32, device=device)
    x, weights = (device_floats(i, size, torch_dtype, device) for i, size in ((71, (5, 256)), (72, (4, 192, 256))))
    experts = reference_moe_linear(x, weights, ids, MmaLinearOrder(192, 256, dtype, dtype))
    shares, residual = (device_floats(i, size, full, device) for i, size in ((73, (5, 2)), (74, (5, 192))))
    y = moe_combine(experts.view(5, 2, 192), shares, residual, moe_combine_order(2, device_class))
    order = mma_attention_order(576, 512, dtype, device_class)
    sizes = ((75, (70, 5, 576)), (76, (12, 64, 576)))
    q, latent = (device_floats(i, size, torch_dtype, device, low=-6, high=1) for i, size in sizes)
    first, at = (np.array(values, np.int32) for values in ((0, 69, 70), (0, 600)))  # a prompt; a row after 600 keys
    tables = np.array([[11, 2, *[0] * 8], [9, 1, 8, 3, 7, 4, 10, 0, 5, 6]], np.int32)
    attended = reference_mla(q, latent, first, at, tables, order, 576**-0.5)
    named = {"moe_linear": experts, "moe_combine": y, "mla_attention": attended}
    return {f"{name} {dtype}": hashlib.sha256(_bytes(tensor)).hexdigest() for name, tensor in named.items()}


def _bytes(tensor: torch.Tensor) -> bytes:
    """Little-endian bytes of a tensor; every NaN has one form."""
    if tensor.is_floating_point():
        tensor = torch.where(tensor.isnan(), torch.nan, tensor)
    return tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes()


def all_digests() -> dict[str, str]:
    """Digests in both dtypes on this card."""
    device_class, _ = gpu_facts()
    found = {}
    for dtype in ("bfloat16", "float16"):
        library = GpuLibrary(device_class, dtype)
        found.update(golden_digests(library, dtype))
        found.update(mixture_digests(library.device, device_class, dtype))
    return found


if __name__ == "__main__":
    run_command("isobit.kernels.gpu.golden", all_digests)
