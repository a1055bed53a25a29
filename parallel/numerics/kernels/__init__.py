"""Kernels of products and sums: Triton's are imported on CUDA only, as a CPU install has no Triton."""
