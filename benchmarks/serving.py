"""The endpoint as a benchmark starts it: `python -m cluster serve` in a process of its own, on a free port."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from benchmarks.report import ROOT

_STOP_TIMEOUT_S = 90.0


@contextmanager
def endpoint(config: str, overrides: Sequence[str]) -> Iterator[str]:
    """Serves `config` on a Ray cluster of its own until the block ends; yields the base URL, `/v1` included."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    sets = [part for item in [*overrides, f"http_options.port={port}"] for part in ("--set", item)]
    command = [sys.executable, "-m", "cluster", "serve", config, "--address", "local", *sets]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None, "stdout is a pipe"
        for line in server.stdout:
            if line.startswith("curl "):
                break
        else:
            raise SystemExit(f"the endpoint did not start: {' '.join(command)}")
        try:
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            server.send_signal(signal.SIGINT)
            server.communicate(timeout=_STOP_TIMEOUT_S)
