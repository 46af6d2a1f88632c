"""What a linear of MmaLinearOrder accepts, checked the same for one row and for many, and the memory its kernels share.

Knows no kernels and no schedules. Invariant: what passes here is what the kernels assume: unit inner strides, rows of
x on 16-byte boundaries wherever K allows it, contiguous everything else; no other layout reaches a kernel.
"""

from __future__ import annotations

import threading

import torch

from isobit.kernels.interface import TORCH_DTYPES
from isobit.order import MmaLinearOrder

__all__ = ["LinearWorkspace", "checked_output"]

ALIGNMENT = 16  # bytes: what tensor descriptors and vector loads need


class LinearWorkspace:
    """Partial sums of K slices and the counters of who has arrived; one for each stream that linears run on.

    Counters are zeroed once, here; every kernel leaves them zero. Addresses change only when `reserve` grows the room:
    reserve the most before capturing a graph. Room never shrinks, whichever threads ask for it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._growing = threading.Lock()
        on_gpu = device.type == "cuda"
        self.multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 2
        self.partials = torch.empty(0, dtype=torch.float32, device=device)
        self.counters = torch.empty(0, dtype=torch.int32, device=device)

    def reserve(self, partials: int, counters: int) -> None:
        """Room for at least so many float32 partials and so many counters."""
        with self._growing:
            if partials > self.partials.numel():
                self.partials = torch.empty(partials, dtype=torch.float32, device=self.device)
            if counters > self.counters.numel():
                self.counters = torch.zeros(counters, dtype=torch.int32, device=self.device)


def checked_output(
    x: torch.Tensor,
    weight: torch.Tensor,
    order: MmaLinearOrder,
    bias: torch.Tensor | None,
    addend: torch.Tensor | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """`out`, or a new tensor of the Order's output dtype, if all arguments fit the Order.

    Raises ValueError naming what does not fit and the remedy.
    """
    _check_x(x, order)
    shape, output_dtype = (x.shape[0], order.n), TORCH_DTYPES[order.output_dtype]
    _check("weight", weight, (order.n, order.k), TORCH_DTYPES[order.weight_dtype], order)
    if bias is not None:
        _check("bias", bias, (order.n,), torch.float32, order)
    if addend is not None:
        if output_dtype != torch.float32:
            raise ValueError(f"linear adds only to float32: no addend under {order}; give it output_dtype='float32'")
        _check("addend", addend, shape, torch.float32, order)
    if out is None:
        return torch.empty(shape, dtype=output_dtype, device=x.device)
    _check("out", out, shape, output_dtype, order)
    return out


def _check_x(x: torch.Tensor, order: MmaLinearOrder) -> None:
    if x.dim() != 2 or x.shape[1] != order.k or x.dtype != TORCH_DTYPES[order.weight_dtype]:
        raise ValueError(f"linear takes x [rows, {order.k}] of {order.weight_dtype}, got {list(x.shape)} of {x.dtype}")
    row_bytes = x.stride(0) * x.element_size()
    if x.stride(1) != 1 or x.stride(0) < order.k:
        raise ValueError(f"linear takes rows of contiguous features, got x with strides {x.stride()}: x.contiguous()")
    if order.k * x.element_size() % ALIGNMENT == 0 and (row_bytes % ALIGNMENT or x.data_ptr() % ALIGNMENT):
        raise ValueError(
            f"linear takes rows on {ALIGNMENT}-byte boundaries, got x at byte {x.data_ptr() % ALIGNMENT} of one, rows "
            f"{row_bytes} bytes apart: x.clone(memory_format=torch.contiguous_format)"
        )


def _check(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, order: MmaLinearOrder) -> None:
    if tensor.shape != shape or tensor.dtype != dtype:
        raise ValueError(
            f"linear takes {name} {list(shape)} of {dtype}, got {list(tensor.shape)} of {tensor.dtype} under {order}"
        )
    if not tensor.is_contiguous() or tensor.data_ptr() % ALIGNMENT:
        raise ValueError(
            f"linear takes {name} contiguous on a {ALIGNMENT}-byte boundary, got strides {tensor.stride()} at byte "
            f"{tensor.data_ptr() % ALIGNMENT} of one: {name}.clone(memory_format=torch.contiguous_format)"
        )
