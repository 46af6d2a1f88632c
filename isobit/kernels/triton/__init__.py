"""Kernels in Triton for NVIDIA GPUs of compute capability 9.0; every one claims an Order and is admitted by bytes."""
