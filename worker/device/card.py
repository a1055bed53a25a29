"""Facts of this node's GPUs, from NVIDIA's driver. As a script, prints them as JSON.

No context is created, so it works beside processes that use the GPUs. The script is a process of its own, because Ray
hides the GPUs from a process to which it gave none.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from configs.cards import Card

_DRIVER = "libcuda.so.1"
_MAJOR, _MINOR, _SHARED_BYTES = 75, 76, 97  # values of CUdevice_attribute
_TIMEOUT_S = 60.0


@functools.cache
def node_card(driver: str = _DRIVER) -> Card:
    """The facts that hold for all GPUs that a new process of this node sees.

    Args:
        driver: name or path of the driver's library.

    Raises:
        RuntimeError: there is no driver or no GPU, or the driver fails. The message has the reason.
    """
    # Variables that Ray has changed since this process started do not count.
    lines = Path("/proc/self/environ").read_bytes().decode(errors="surrogateescape").split("\0")
    environment = dict(line.split("=", 1) for line in lines if "=" in line)
    command = [sys.executable, "-m", __name__, driver]
    root = Path(__file__).parents[2]
    try:
        asked = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{driver} did not answer within {_TIMEOUT_S:g} s") from None
    if asked.returncode != 0:
        raise RuntimeError(asked.stderr.strip().rsplit("\n", 1)[-1])
    cards = [Card(name, (major, minor), *rest) for name, major, minor, *rest in json.loads(asked.stdout)]
    if not cards:
        raise RuntimeError(f"{driver} shows no GPU")
    return Card.least(cards)


def _facts(driver: str) -> list[tuple[str, int, int, int, int, bool]]:
    """Returns for each GPU: name, compute capability, bytes of shared memory of a block, bytes of memory, and whether
    all GPUs reach each other's memory."""
    cuda = ctypes.CDLL(driver)

    def call(name: str, *args: Any) -> None:
        if error := getattr(cuda, name)(*args):
            raise OSError(f"{name} failed with CUDA's error {error}")

    def number(name: str, *args: Any) -> int:
        value = ctypes.c_int()
        call(name, ctypes.byref(value), *args)
        return value.value

    call("cuInit", 0)
    devices = [number("cuDeviceGet", index) for index in range(number("cuDeviceGetCount"))]
    has_peers = all(number("cuDeviceCanAccessPeer", *pair) for pair in itertools.permutations(devices, 2))
    facts = []
    for device in devices:
        name, memory_bytes = ctypes.create_string_buffer(256), ctypes.c_size_t()
        call("cuDeviceGetName", name, len(name), device)
        call("cuDeviceTotalMem_v2", ctypes.byref(memory_bytes), device)
        major, minor, shared = (number("cuDeviceGetAttribute", it, device) for it in (_MAJOR, _MINOR, _SHARED_BYTES))
        facts.append((name.value.decode(), major, minor, shared, memory_bytes.value, has_peers))
    return facts


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_facts(sys.argv[1])))
