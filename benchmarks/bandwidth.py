"""Bandwidth of a device's memory: a large tensor copied to another, bytes read and bytes written both counted.

    python -m benchmarks.bandwidth [--device cuda|cpu] [--mib N]

Prints one JSON line. The floor of a decode step is the bytes it must read over this.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys

import torch

from benchmarks.report import ROOT
from worker.device.peaks import copy_rates

_ROUNDS = 5
_DEFAULT_MIB = {"cuda": 4096, "cpu": 256}
_COPIES = {"cuda": 10, "cpu": 3}
_TIMEOUT_S = 300.0


def measure(device: str, mib: int | None = None) -> float:
    """GB/s (1e9 bytes) of copies between two tensors of `mib` MiB on `device`, median of rounds."""
    rates = copy_rates(torch.device(device), (mib or _DEFAULT_MIB[device]) << 20, _COPIES[device], _ROUNDS)
    return statistics.median(rates) / 1e9


def measure_apart(device: str) -> float:
    """`measure` in a process of its own, whose memory is free again when this returns.

    Raises:
        CalledProcessError: the device cannot be used.
    """
    command = [sys.executable, "-m", "benchmarks.bandwidth", "--device", device]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, timeout=_TIMEOUT_S)
    return float(json.loads(done.stdout.splitlines()[-1])["gb_s"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=tuple(_DEFAULT_MIB), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--mib", type=int, help="size of each of the two tensors; default 4096 on cuda, 256 on cpu")
    args = parser.parse_args()
    print(json.dumps({"device": args.device, "gb_s": round(measure(args.device, args.mib), 1)}))


if __name__ == "__main__":
    main()
