"""Kernels for copies on a CUDA device; each module needs Triton, which not every machine has."""
