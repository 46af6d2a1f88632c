"""Triton's interpreter with arithmetic that rounds as the device's: import this before running numeric kernels in it.

The interpreter computes `tl.fma` as a product and a sum, each rounded, and cuts float32 to bfloat16 towards zero. Here
fma rounds once and the conversion is to nearest even. It also cannot loop over a range whose end is an argument under
numpy 2.4, nor combine a tile with a comparison of scalars; here it can. Where there is a GPU nothing is changed.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from isobit.kernels.reference.math import fma32, round_bf16

INTERPRETED = not torch.cuda.is_available()  # conftest.py asks for the interpreter where there is no GPU
DEVICE = "cpu" if INTERPRETED else "cuda"

if INTERPRETED:
    import triton.language as tl
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    _cast = InterpreterBuilder.cast_impl
    _patch_tensor = interpreter._patch_lang_tensor

    def _fma(self: InterpreterBuilder, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
        assert x.data.dtype == np.float32, f"tl.fma of {x.data.dtype} is not emulated"
        return TensorHandle(fma32(x.data, y.data, z.data), z.dtype.scalar)

    def _cast_to_nearest(self: InterpreterBuilder, src: TensorHandle, dst_type: tl.dtype) -> TensorHandle:
        if src.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16:
            rounded = np.ascontiguousarray(round_bf16(src.data))
            return TensorHandle((rounded.view(np.uint32) >> 16).astype(np.uint16), tl.bfloat16)
        return _cast(self, src, dst_type)

    def _patch_tensor_and_index(tensor: type, scope: interpreter._LangPatchScope) -> None:
        _patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def _boolean(compare: Callable[..., TensorHandle]) -> Callable[..., TensorHandle]:
        return lambda self, x, y: TensorHandle(compare(self, x, y).data.astype(np.bool_), tl.int1)

    for _name in dir(InterpreterBuilder):
        if _name.startswith(("create_fcmp", "create_icmp")):
            setattr(InterpreterBuilder, _name, _boolean(getattr(InterpreterBuilder, _name)))
    interpreter._patch_lang_tensor = _patch_tensor_and_index
    InterpreterBuilder.create_fma = _fma
    InterpreterBuilder.cast_impl = _cast_to_nearest
