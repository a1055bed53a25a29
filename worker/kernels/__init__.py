"""Triton kernels of the decoder and the sampler; imported on CUDA only."""
