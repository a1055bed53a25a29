"""A library that answers as NVIDIA's driver does on a node with some GPUs."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from configs.cards import Card

_SOURCE = """
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
static const struct { const char *name; int major, minor, shared; size_t bytes; } cards[] = { CARDS };
int cuInit(unsigned flags) { return ON_START; }
int cuDeviceGetCount(int *out) { *out = sizeof cards / sizeof *cards; return 0; }
int cuDeviceGet(int *out, int index) { *out = 10 + index; return 0; }
int cuDeviceGetName(char *out, int size, int device) { strncpy(out, cards[device - 10].name, size); return 0; }
int cuDeviceTotalMem_v2(size_t *out, int device) { *out = cards[device - 10].bytes; return 0; }
int cuDeviceGetAttribute(int *out, int attribute, int device) {
    *out = attribute == 75 ? cards[device - 10].major : attribute == 76 ? cards[device - 10].minor
         : attribute == 97 ? cards[device - 10].shared : -1;
    return 0;
}
int cuDeviceCanAccessPeer(int *out, int device, int peer) { *out = PEERS; return device == peer ? 101 : 0; }
"""


def make_driver(folder: Path, cards: Sequence[Card], *, on_start: str = "0") -> Path:
    """Compiles `folder`/libcuda.so.1, and returns its path.

    Args:
        cards: at least one. Each GPU reaches the others if the first has peers.
        on_start: an expression in C that cuInit returns: 0, or the number of an error.
    """
    rows = [
        f'{{"{it.name}", {it.compute_capability[0]}, {it.compute_capability[1]}, {it.shared_bytes}, {it.memory_bytes}}}'
        for it in cards
    ]
    source, library = folder / "driver.c", folder / "libcuda.so.1"
    source.write_text(_SOURCE)
    defines = [f"-DCARDS={', '.join(rows)}", f"-DPEERS={int(cards[0].has_peers)}", f"-DON_START={on_start}"]
    subprocess.run(["cc", "-shared", "-fPIC", *defines, "-o", library, source], check=True)
    return library
