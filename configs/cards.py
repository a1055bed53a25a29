"""What models of NVIDIA GPUs can do, and how far Lockstep was tested on each. docs/reference/cards.md shows this table.

The facts of a running node's GPUs come from the GPUs themselves: worker/device/card.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

Capability = tuple[int, int]

_KIB, _MIB = 1 << 10, 1 << 20
LEAST: Capability = (8, 0)
"""The smallest compute capability with products of bf16, which all kernels use."""
FP8_FROM: Capability = (8, 9)
"""The first compute capability with FP8 numbers."""
RAN: Mapping[Capability, str] = {(9, 0): "ran, on H100 and H200: the tests of `tests/gpu/` and the benchmarks"}
"""Compute capabilities on which Lockstep ran, and what ran."""
COMPILED: Mapping[Capability, int] = {
    (8, 0): 163 * _KIB,
    (8, 9): 99 * _KIB,
    (9, 0): 227 * _KIB,
    (10, 0): 227 * _KIB,
    (12, 0): 99 * _KIB,
}
"""Compute capabilities for which tests/worker/test_kernels_compile.py compiles the kernels, and bytes of shared memory
that a block of threads may have there."""


@dataclass(frozen=True, slots=True)
class Card:
    """Facts of one GPU, or those that hold for all GPUs of several nodes."""

    name: str
    compute_capability: Capability
    shared_bytes: int
    """Most bytes of shared memory of a block of threads."""
    memory_bytes: int
    """Memory of the GPU, as its driver reports it."""
    has_peers: bool = True
    """Whether all GPUs of a node can read and write each other's memory."""

    @classmethod
    def least(cls, cards: Iterable[Card]) -> Card:
        """The facts that hold for each of `cards`, at least one."""
        found = list(cards)
        return cls(
            " and ".join(sorted({card.name for card in found})),
            min(card.compute_capability for card in found),
            min(card.shared_bytes for card in found),
            min(card.memory_bytes for card in found),
            all(card.has_peers for card in found),
        )

    def __str__(self) -> str:
        return f"{self.name} has {shown(self.compute_capability)}"


def support(capability: Capability) -> str:
    """How far Lockstep was tested on GPUs of this compute capability."""
    if capability < LEAST:
        return f"refused: below {shown(LEAST)}"
    if capability in COMPILED:
        return RAN.get(capability, "compiles: all kernels are compiled for it in a test, and never ran")
    return "not tested: neither compiled for nor run"


def shown(capability: Capability) -> str:
    """`9.0`, for example."""
    return "{}.{}".format(*capability)


def _known(name: str, capability: Capability, memory_mib: int, *, has_peers: bool = True) -> Card:
    return Card(name, capability, COMPILED[capability], memory_mib * _MIB, has_peers)


CARDS: Mapping[str, Card] = {
    "h100": _known("H100", (9, 0), 81559),
    "h200": _known("H200", (9, 0), 143771),
    "h20": _known("H20", (9, 0), 97871),
    "b200": _known("B200", (10, 0), 183359),
    "a100-40gb": _known("A100", (8, 0), 40960),
    "a100-80gb": _known("A100", (8, 0), 81920),
    "l40s": _known("L40S", (8, 9), 46068),
    "rtx-4090": _known("RTX 4090", (8, 9), 24564, has_peers=False),
    "rtx-5090": _known("RTX 5090", (12, 0), 32607, has_peers=False),
    "rtx-pro-6000": _known("RTX PRO 6000", (12, 0), 97887),
}
"""The GPUs that `check --gpu` knows by name. Whether GPUs on PCIe have peers also depends on the machine, which only a
start asks."""
