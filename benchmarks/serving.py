"""The endpoint as a benchmark starts it: `python -m cluster serve` in a process of its own, on a free port."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from benchmarks.report import ROOT
from cluster.commands.endpoint_client import EndpointClient

_STOP_TIMEOUT_S = 90.0


@contextmanager
def endpoint(config: str, overrides: Sequence[str]) -> Iterator[str]:
    """Serves `config` on a Ray cluster of its own until the block ends; yields the base URL, `/v1` included, once the
    last CUDA graph is captured: until then, figures would be of other steps."""
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
        url = f"http://127.0.0.1:{port}/v1"
        try:
            with EndpointClient(url) as client:
                next(live for live in client.events("GET", "/live") if not live["is_preparing"])
            yield url
        finally:
            server.send_signal(signal.SIGINT)
            server.communicate(timeout=_STOP_TIMEOUT_S)
