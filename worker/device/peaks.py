"""Peak rates of a rank's device, measured on it. They are the denominators of MFU and MBU.

A data sheet's figures assume another clock and cooling, and CPUs have no such figures.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

_ROUNDS = 5
# Larger than the caches, but small compared to the memory left for a KV pool.
_COPY_BYTES = {"cuda": 512 << 20, "cpu": 64 << 20}
_COPIES = {"cuda": 10, "cpu": 1}
# Large enough to be bound by arithmetic, small enough to not delay a start noticeably.
_MATRIX_SIZE = {"cuda": 8192, "cpu": 512}
_PRODUCTS = {"cuda": 5, "cpu": 1}


@dataclass(frozen=True)
class Peaks:
    """Peaks of one rank while the group's other ranks measure too, so ranks that share a device share its rates."""

    flops: float
    """FLOP per second of a large matrix product in the model's dtype."""
    bandwidth: float
    """Bytes per second of a large copy in the device's memory. Both bytes read and bytes written count."""

    def __str__(self) -> str:
        return f"{self.flops / 1e12:,.2f} TFLOP/s and {self.bandwidth / 1e9:,.0f} GB/s measured"


@torch.inference_mode()
def measure_peaks(device: torch.device, dtype: torch.dtype) -> Peaks:
    """The median of a few rounds on `device`. Frees its memory afterwards, and takes a tenth of a second."""
    bandwidth = statistics.median(copy_rates(device, _COPY_BYTES[device.type], _COPIES[device.type], _ROUNDS))
    flops = statistics.median(_product_rates(device, dtype))
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return Peaks(flops, bandwidth)


def copy_rates(device: torch.device, num_bytes: int, copies: int, rounds: int) -> list[float]:
    """[rounds] bytes per second, read and written, for `copies` copies of a tensor of `num_bytes`."""
    source = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    target = torch.zeros_like(source)
    return _rates(device, lambda: target.copy_(source), 2.0 * num_bytes, copies, rounds)


def _product_rates(device: torch.device, dtype: torch.dtype) -> list[float]:
    size = _MATRIX_SIZE[device.type]
    # Random like weights: with constants a GPU draws less power and runs at a clock that no model reaches.
    left, right = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    product = torch.empty_like(left)
    return _rates(device, lambda: torch.mm(left, right, out=product), 2.0 * size**3, _PRODUCTS[device.type], _ROUNDS)


def _rates(device: torch.device, run: Callable[[], object], amount: float, times: int, rounds: int) -> list[float]:
    """[rounds] rates of `amount` per second. `run` does `amount` of work and runs `times` times a round."""
    run()
    rates = []
    for _ in range(rounds):
        _wait(device)
        began = time.perf_counter()
        for _ in range(times):
            run()
        _wait(device)
        rates.append(amount * times / (time.perf_counter() - began))
    return rates


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
