"""Kernels of NVIDIA's libraries; every one claims an Order and is admitted by bytes, never by its flags."""
