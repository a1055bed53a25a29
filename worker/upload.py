"""Copies of host arrays to the device, without waiting."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch


def upload(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """A copy on the device. The host does not wait: torch reuses the pinned memory only after the copy."""
    source = torch.from_numpy(np.require(array, requirements="W"))
    return source.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else source.clone()
