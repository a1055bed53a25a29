"""How a thread says that it prepares something for this and later steps, which takes longer than any step: by its name.

Whoever looks for steps that hang reads the names of the ranks' threads (cluster/ranks/liveness.py), as `top -H` does.
No torch here.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

PREPARING = "preparing"
"""The name of such a thread: 15 characters at most."""

_PR_SET_NAME, _PR_GET_NAME = 15, 16


@contextlib.contextmanager
def preparing() -> Iterator[None]:
    """Gives the calling thread that name meanwhile."""
    prctl = ctypes.CDLL(None).prctl
    name = ctypes.create_string_buffer(16)
    prctl(_PR_GET_NAME, name, 0, 0, 0)
    prctl(_PR_SET_NAME, PREPARING.encode(), 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_NAME, name, 0, 0, 0)


def mark_compilations() -> None:
    """Has this process's threads prepare, in the sense of this module, while Triton compiles in them."""
    from triton import knobs  # a CPU install has none

    marks = contextlib.ExitStack()

    def begin(**_: object) -> None:
        marks.enter_context(preparing())

    def end(**_: object) -> None:
        marks.close()

    knobs.runtime.jit_cache_hook, knobs.runtime.jit_post_compile_hook = begin, end
