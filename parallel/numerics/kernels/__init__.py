"""Kernels of products and sums. The Triton kernels are imported on CUDA only, because a CPU install has no Triton."""
