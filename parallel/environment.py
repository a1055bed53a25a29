"""Environment variables with which every process of a CUDA group must start. Imports no torch."""

from __future__ import annotations

MULTICAST_OFF = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
"""A group refuses to start without these, because multicast objects can wedge the host's NVSwitch."""

RANK_ENVIRONMENT = {
    **MULTICAST_OFF,
    # Without these, torch's watchdog may kill surviving ranks while they abort.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
"""All of these variables. They must be set before torch is imported."""
