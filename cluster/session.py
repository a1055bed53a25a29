"""Joining a Ray cluster, or starting one for this command alone."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import ray

from configs.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent
_OBJECT_STORE_BYTES = 100 * 1024 * 1024  # nothing of ours goes through the object store


def check_port_free(host: str, port: int) -> None:
    """Raises ConfigError when another program listens on `host:port`: Serve's proxy would only log it."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"http_options.port={port} on {host} is taken ({error.strerror}); choose another with "
                f"--set http_options.port={port + 1} or stop what listens there"
            ) from None


def running_cluster() -> str | None:
    """Address of the cluster a command joins when it is told none: RAY_ADDRESS, or one on this machine."""
    if address := os.environ.get("RAY_ADDRESS"):
        return address
    with contextlib.suppress(ConnectionError):
        ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
        return "auto"
    return None


@contextlib.contextmanager
def ray_session(address: str | None, *, min_cpus: float) -> Iterator[bool]:
    """Connects to Ray; yields whether the cluster is ours and ends with the block.

    Args:
        address: `local`, a cluster's address, or None for `running_cluster()` and then local.
        min_cpus: logical CPUs a cluster of our own must have; ranks on CPU may share cores.
    """
    # Workers import this checkout: a cluster of our own inherits it, a job brings it as its working_dir.
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    address = address or running_cluster()
    own = address in (None, "local")
    if own:
        ray.init(
            address="local",
            num_cpus=max(os.cpu_count() or 1, int(min_cpus) + 1),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=_OBJECT_STORE_BYTES,
        )
    elif not ray.is_initialized():
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    try:
        yield own
    finally:
        ray.shutdown()
