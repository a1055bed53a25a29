"""What Ray says of a cluster's GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

_TYPE = "accelerator_type:"
# By the names of `ray.util.accelerators`; what comes behind a dash is the memory.
_COMPUTE_CAPABILITIES = {
    "V100": (7, 0),
    "T4": (7, 5),
    "A100": (8, 0),
    "A10G": (8, 6),
    "L4": (8, 9),
    "L40S": (8, 9),
    "H100": (9, 0),
    "H20": (9, 0),
    "H200": (9, 0),
    "B200": (10, 0),
}


def least_compute_capability(nodes: Iterable[Mapping[str, Any]]) -> tuple[int, int] | None:
    """Of all GPUs of the live nodes of `ray.nodes()`; None where a type of them is not known, or Ray names none."""
    names = [
        name.removeprefix(_TYPE).partition("-")[0]
        for node in nodes
        if node["Alive"] and node["Resources"].get("GPU")
        for name in node["Resources"]
        if name.startswith(_TYPE)
    ]
    found = [_COMPUTE_CAPABILITIES.get(name) for name in names]
    known = [capability for capability in found if capability is not None]
    return min(known) if known and len(known) == len(found) else None
