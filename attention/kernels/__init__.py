"""Triton kernels of attention and its metadata, imported only on CUDA, and the C kernel of attention on CPUs."""
