"""Triton kernels of the decoder and the sampler. Imported only on CUDA."""
