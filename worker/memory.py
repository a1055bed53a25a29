"""How much memory a device has left. How many KV pages go into it is `configs.resolve.num_kv_pages`."""

from __future__ import annotations

import psutil  # type: ignore[import-untyped]  # ships no types
import torch


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on `device`; on CPU of the whole node, shared by all its ranks."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)
