"""Triton kernels of the group's collectives. Imported on CUDA only: a CPU install has no Triton."""
