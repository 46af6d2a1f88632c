"""The only place where numbers are added: kernels by technology, and the proof that they keep their Orders.

`reference/` is what each Order means, in slow numpy; `cpu/` holds the C kernels; `registry.py` declares what each
kernel claims; `admission.py` proves the claims by bytes. Knows Orders, arrays and threads; not requests or models.
"""
