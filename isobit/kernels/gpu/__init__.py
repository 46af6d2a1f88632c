"""The kernel library of NVIDIA GPUs: Triton and vendor kernels behind one face, their proof and their tuning."""
