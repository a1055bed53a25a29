"""Names a rank's platform: with exact numerics, bits depend only on it, on this code and on the model."""

from __future__ import annotations

import ctypes
import importlib.metadata
import platform

import torch


def platform_of(device: torch.device) -> str:
    """The kind of `device`, and the versions of the software that computes on it, in this process.

    GPUs of one compute capability are of one kind: an H100 and an H200 gave the same bits.
    """
    if device.type != "cuda":
        return f"{platform.machine()}, torch {torch.__version__}"
    major, minor = torch.cuda.get_device_capability(device)
    triton = importlib.metadata.version("triton")
    return f"sm{major}{minor}, torch {torch.__version__}, triton {triton}, cublaslt {_cublaslt_version()}"


def _cublaslt_version() -> int:
    """The version of the library that torch has loaded, which may differ from the one it was built with."""
    assert torch.version.cuda is not None, "a torch without CUDA has no GPU"
    version = ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.partition('.')[0]}").cublasLtGetVersion
    version.restype = ctypes.c_size_t
    return int(version())
