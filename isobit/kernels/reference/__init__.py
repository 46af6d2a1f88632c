"""The Orders, executed: slow, obvious numpy that every kernel must match to the last bit. No torch, no C.

`math.py` is the arithmetic (single-rounding fma, exp32, log64, noise); `ops.py` is one function per op. A change here
that moves a bit is a change of `NUMERICS_VERSION`.
"""
