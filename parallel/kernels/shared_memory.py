"""The shared memory of GPUs, by which kernels choose their tiles."""

from __future__ import annotations

import functools

import torch

_H200 = 227 << 10
_LITTLE = 160 << 10
_STAGES = 3


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Most bytes of shared memory that a program may have on `device`. An H200's for CPUs, where kernels are
    interpreted."""
    if device.type != "cuda":
        return _H200
    properties = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]  # torch does not declare it


def has_little(device: torch.device) -> bool:
    """Whether `device` has too little shared memory for the tiles that are fastest on an H200. An A100 (163 KiB) has
    enough for most, an L40S and an RTX 5090 (99 KiB) do not."""
    return shared_bytes(device) < _LITTLE


@functools.cache
def is_b200(device: torch.device) -> bool:
    """Whether `device` has compute capability 10. There, a tile of latents takes 245 KiB where an H200 takes less than
    227."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 10


def fitting_stages(num_stages: int, rows: int, device: torch.device) -> int:
    """The number of stages with which a product's loads fit: `num_stages`, or fewer for a tile of many `rows` on a
    device with little shared memory. The bits of a sum do not depend on it."""
    return min(num_stages, _STAGES) if rows >= 64 and has_little(device) else num_stages
