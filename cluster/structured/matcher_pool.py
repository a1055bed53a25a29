"""Starts and ends the processes that compile and match; both sides talk to them over one socket a process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from cluster.structured.checker_messages import Setup

_ROOT = Path(__file__).parents[2]


class MatcherPool:
    """Running processes, one behind each of `sockets`: closing all of these ends them, and so does our own end."""

    def __init__(self, process: subprocess.Popen[bytes], sockets: Sequence[socket.socket]) -> None:
        self._process = process
        self.sockets = sockets
        """Blocking. What is sent before the processes have read their tokenizer waits in the kernel."""

    @classmethod
    def start(cls, setup: Setup, num_processes: int, *, niceness: int = 0) -> MatcherPool:
        """Takes as long as the new process needs to begin to read: tens of milliseconds.

        Args:
            niceness: added to that of this process.

        Raises:
            OSError: there is no memory, process or file descriptor to be had.
        """
        # Isolated from what the environment would import, and able to import this very code.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(_ROOT), *filter(None, sys.path)))}
        ours: list[socket.socket] = []
        theirs: list[socket.socket] = []
        try:
            for _ in range(num_processes):
                for ends, end in zip((ours, theirs), socket.socketpair(), strict=True):
                    ends.append(end)
            descriptors = [end.fileno() for end in theirs]
            process = subprocess.Popen(
                [sys.executable, "-m", "cluster.structured.matcher_process", str(niceness), *map(str, descriptors)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=descriptors,
                env=environment,
            )
        except BaseException:
            for end in ours:
                end.close()
            raise
        finally:
            for end in theirs:
                end.close()
        assert process.stdin is not None, "asked for"
        try:
            process.stdin.write(msgspec.msgpack.encode(setup))
            process.stdin.close()
        except BrokenPipeError:
            pass  # it ended at once: the sockets say so
        return cls(process, ours)

    def end(self) -> None:
        """Ends the first process, and waits for it; the others end once their sockets are closed, which see to."""
        self._process.kill()
        self._process.wait()
