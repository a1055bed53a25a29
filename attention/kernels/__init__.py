"""Triton kernels of the attention metadata; imported on CUDA only."""
