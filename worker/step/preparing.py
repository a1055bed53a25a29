"""Marks a thread, by its name, while it prepares something for this and later steps, which takes longer than any step.

cluster/ranks/liveness.py reads the names of the ranks' threads, so a marked thread does not count as a hanging step.
This module uses no torch.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

PREPARING = "preparing"
"""The name of a marked thread. Linux allows at most 15 characters."""

_PR_SET_NAME, _PR_GET_NAME = 15, 16


@contextlib.contextmanager
def preparing() -> Iterator[None]:
    """Renames the calling thread to `PREPARING` inside the `with` block."""
    prctl = ctypes.CDLL(None).prctl
    name = ctypes.create_string_buffer(16)
    prctl(_PR_GET_NAME, name, 0, 0, 0)
    prctl(_PR_SET_NAME, PREPARING.encode(), 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_NAME, name, 0, 0, 0)


def mark_compilations() -> None:
    """Marks threads of this process with `preparing` while Triton compiles in them."""
    from triton import knobs  # not part of a CPU install

    marks = contextlib.ExitStack()

    def begin(**_: object) -> None:
        marks.enter_context(preparing())

    def end(**_: object) -> None:
        marks.close()

    knobs.runtime.jit_cache_hook, knobs.runtime.jit_post_compile_hook = begin, end
