"""Kernels: in Triton, of attention and of its metadata, imported on CUDA only; in C, of attention on CPUs."""
