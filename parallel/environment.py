"""Environment variables that every process of a CUDA group must start with. Imports no torch."""

from __future__ import annotations

MULTICAST_OFF = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
"""Multicast objects can wedge the host's NVSwitch for all: a group refuses to start without these."""

RANK_ENVIRONMENT = {
    **MULTICAST_OFF,
    # Else torch's own watchdog ends the surviving ranks, or ends them while they abort.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
"""All of them; to be set before torch is imported."""
