"""Forked processes for tests: what one closes over needs no pickling."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable, Iterable
from multiprocessing.process import BaseProcess
from typing import Any


def start_forked(main: Callable[..., object], arguments: Iterable[tuple[Any, ...]]) -> list[BaseProcess]:
    """One started process per tuple of arguments.

    Nothing that the parent left to the garbage collector is collected in a child: a gloo group, finalised without
    its threads, is a segmentation fault.
    """

    def child(*args: Any) -> None:
        gc.freeze()
        gc.enable()
        main(*args)

    context = multiprocessing.get_context("fork")
    processes: list[BaseProcess] = [context.Process(target=child, args=args) for args in arguments]
    gc.disable()
    try:
        for process in processes:
            process.start()
    finally:
        gc.enable()
    return processes
