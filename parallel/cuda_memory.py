"""GPU memory behind a file descriptor, by the CUDA driver's virtual memory API.

The memory is freed when its last descriptor is closed and its last mapping is gone, in whichever process. See
cuMemExportToShareableHandle and cuMemRelease in the driver's reference.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from typing import Any

import torch

from configs.errors import EngineError

_log = logging.getLogger(__name__)

_PINNED = _DEVICE = _POSIX_FD = 1
_READ_WRITE = 3
_OUT_OF_MEMORY = 2


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class _Mapping:
    """Mapped device memory. It is unmapped with its last tensor, when nothing on the device may use the memory any
    more. Raises EngineError if the driver cannot map it."""

    def __init__(self, handle: ctypes.c_uint64, num_bytes: int, device: int) -> None:
        self._pointer = ctypes.c_uint64()
        self._size = ctypes.c_size_t(_whole(num_bytes, device))
        access = _Access(_Location(_DEVICE, device), _READ_WRITE)
        zero = ctypes.c_uint64(0)
        _call("cuMemAddressReserve", ctypes.byref(self._pointer), self._size, ctypes.c_size_t(0), zero, zero)
        _call("cuMemMap", self._pointer, self._size, ctypes.c_size_t(0), handle, zero)
        _call("cuMemSetAccess", self._pointer, self._size, ctypes.byref(access), ctypes.c_size_t(1))
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (self._pointer.value, False),
            "version": 3,
        }

    def __del__(self) -> None:
        driver = _driver()
        driver.cuMemUnmap(self._pointer, self._size)
        driver.cuMemAddressFree(self._pointer, self._size)


def new_descriptor(num_bytes: int, device: torch.device) -> int:
    """Allocates memory on `device` and returns its descriptor, which the caller closes.

    Raises:
        torch.OutOfMemoryError: the device has no room for it.
        EngineError: the driver does not support memory behind a descriptor.
    """
    index = _index(device)
    handle = ctypes.c_uint64()
    args = (ctypes.byref(handle), ctypes.c_size_t(_whole(num_bytes, index)), ctypes.byref(_properties(index)))
    if _driver().cuMemCreate(*args, ctypes.c_uint64(0)) == _OUT_OF_MEMORY:
        torch.cuda.empty_cache()  # torch caches freed memory
        if _driver().cuMemCreate(*args, ctypes.c_uint64(0)) == _OUT_OF_MEMORY:
            raise torch.OutOfMemoryError(f"{device} has no room for {num_bytes} bytes; lower kv_cache.memory_fraction")
    if not handle.value:
        raise EngineError(f"{device} has no memory that outlives a process")
    descriptor = ctypes.c_int()
    try:
        _call("cuMemExportToShareableHandle", ctypes.byref(descriptor), handle, _POSIX_FD, ctypes.c_uint64(0))
    finally:
        _call("cuMemRelease", handle)
    return descriptor.value


def mapped(descriptor: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """Maps the memory of `descriptor` as [num_bytes] uint8 on `device`. The descriptor may be closed afterwards. Raises
    EngineError."""
    index = _index(device)
    handle = ctypes.c_uint64()
    _call("cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(descriptor), _POSIX_FD)
    try:
        mapping = _Mapping(handle, num_bytes, index)
    finally:
        _call("cuMemRelease", handle)
    return torch.as_tensor(mapping, device=device)


def outlives_processes(device: torch.device) -> bool:
    """Whether `device` supports memory that outlives its process. Some virtual GPUs and containers do not pass its
    descriptors on."""
    try:
        descriptor = new_descriptor(1, device)
        try:
            mapped(descriptor, 1, device)
        finally:
            os.close(descriptor)
    except (EngineError, OSError) as error:
        _log.warning("weights and KV on %s are lost with a rank: %s", device, error)
        return False
    return True


def _index(device: torch.device) -> int:
    """The device's number. Makes its context current."""
    torch.cuda.set_device(device)
    torch.cuda.current_stream(device).synchronize()
    return device.index or 0


@functools.cache
def _granularity(device: int) -> int:
    found = ctypes.c_size_t()
    _call("cuMemGetAllocationGranularity", ctypes.byref(found), ctypes.byref(_properties(device)), 0)
    return found.value


def _whole(num_bytes: int, device: int) -> int:
    """`num_bytes` rounded up to whole pages of the device."""
    return -(-num_bytes // _granularity(device)) * _granularity(device)


def _properties(device: int) -> _Properties:
    return _Properties(type=_PINNED, handle_types=_POSIX_FD, location=_Location(_DEVICE, device))


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *args: Any) -> None:
    if code := getattr(_driver(), name)(*args):
        raise EngineError(f"{name} failed with CUDA error {code}")
