"""Triton kernels of the group's collectives. Imported on CUDA only, because a CPU install has no Triton."""
