"""The only place where numbers are added: kernels by technology, and the proof that they keep their Orders.

`reference/` is what each Order means, in slow numpy; `cpu/` holds the C kernels; `interface.py` is what models need of
any of them, `registry.py` the form of their claims; `admission.py` proves the claims by bytes. Knows Orders, arrays and
threads; not requests or models.
"""
