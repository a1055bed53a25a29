"""Joins a Ray cluster, or starts one for this command only."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import secrets
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]  # two uses do not earn a stub package
import ray
from ray._private import ray_constants

from cluster.ranks.rank import CPU_ENVIRONMENT, CUDA_ENVIRONMENT
from cluster.serve.haproxy import DIRECTORY, PROGRAM, REPLICA_SETTINGS, install, ports_of_own, use_haproxy
from configs.addresses import family_of
from configs.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
_OBJECT_STORE_BYTES = 100 * 1024 * 1024  # our data does not go through the object store
_PROBE_TIMEOUT_S = 3.0
# Ray uses gRPC, so its server answers an HTTP/2 client's first bytes with a SETTINGS frame. Without this check,
# `ray.init` would wait a minute for a server of another kind.
_HTTP2_SETTINGS = b"\x04"
_HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0" + _HTTP2_SETTINGS + b"\0\0\0\0\0"
_JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
_DIRECTORY_NAME = Path(DIRECTORY).name  # followed by the command's process id


@dataclass(frozen=True)
class Session:
    """Facts about the Ray cluster to which a command is connected."""

    own: bool
    """Whether this command started the cluster, and ends it."""
    dashboard_url: str | None = None
    """The dashboard's address. None if the cluster has none."""
    working_dir: str | None = None
    """URI from which the cluster's nodes fetch this checkout. None for a cluster that this command started."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that every process starts with, in a cluster that this command started. Empty for other clusters."""


def check_port_free(host: str, port: int) -> None:
    """Raises ConfigError if nothing can listen on `host:port`. Serve's proxy would only log this error."""
    with socket.socket(family_of(host), socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise ConfigError(
                    f"http_options.host={host} is no address of this machine ({error.strerror}); use 127.0.0.1 to "
                    "serve only this machine, or 0.0.0.0 to serve others too"
                ) from None
            raise ConfigError(
                f"http_options.port={port} on {host} cannot be used ({error.strerror}); choose another with "
                f"--set http_options.port={min(port + 1, 65535)}, or stop the program that listens there"
            ) from None


def cluster_address(address: str | None) -> str | None:
    """The address of the cluster that a command joins, as `host:port`. None if the command starts its own cluster.

    Args:
        address: `local`, `auto` or `host:port`. If None, RAY_ADDRESS, else the cluster that `ray start` last started on
            this machine.

    Raises:
        ConfigError: no cluster answers at the given address.
    """
    source = "--address" if address else "RAY_ADDRESS"
    address = address or os.environ.get("RAY_ADDRESS")
    if address == "local":
        return None
    if address in (None, "", "auto"):
        recorded = _recorded_address()
        if recorded is not None and unreachable(recorded) is None:
            return recorded
        if not address:
            return None
        raise ConfigError(f"{source}=auto, but no Ray cluster runs on this machine; start one with `ray start --head`")
    assert address is not None, "the case of None is above"
    if "://" in address:
        raise ConfigError(
            f"{source}={address} is not of the form host:port; a dashboard's or client's address is for "
            "`ray job submit`, here give the cluster's own (by default its head's port 6379), auto or local"
        )
    reason = unreachable(address)
    if reason is not None:
        raise ConfigError(
            f"no Ray cluster answers at {source}={address} ({reason}); correct it, or leave it out to start one here"
        )
    return address


@contextlib.contextmanager
def ray_session(address: str | None, *, min_cpus: float) -> Iterator[Session]:
    """Connects to Ray for the duration of the block.

    Args:
        address: the result of `cluster_address`. If None, starts a cluster.
        min_cpus: minimum number of logical CPUs of a new cluster. Ranks on CPU may share cores.

    Raises:
        ConfigError: the cluster cannot be joined.
        KeyboardInterrupt: SIGTERM arrived while Ray started.
    """
    # Workers import this checkout. A new cluster inherits its path, and an existing cluster gets it as a working_dir.
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    try:
        if address is None:
            prepare_own_cluster()
        yield _connect(address, min_cpus)
    except SystemExit:
        # Ray's own SIGTERM handler, which is active while Ray starts, raises SystemExit.
        raise KeyboardInterrupt from None
    finally:
        ray.shutdown()
        if address is None:
            remove_own_files()


def prepare_own_cluster() -> None:
    """Sets what `ray.init` in this process needs to start a cluster that only this machine reaches and, with Ray's
    token, only this user. `remove_own_files` removes the files that this makes.

    Ray listens only at 127.0.0.1 if it does not expect other machines, as on laptops.
    `ray.init(_node_ip_address="127.0.0.1")` has no such effect, because Ray replaces the address by the machine's own.
    """
    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = False  # Ray read the variable when it was imported
    _ensure_token()
    _remove_abandoned_files()
    directory = tempfile.mkdtemp(prefix=f"{_DIRECTORY_NAME}{os.getpid()}-", dir="/tmp")
    use_haproxy()
    # Ray starts some processes in advance, and can use them only if they have this environment.
    os.environ.update(install(Path(directory)) | ports_of_own() | REPLICA_SETTINGS | CUDA_ENVIRONMENT | CPU_ENVIRONMENT)


def remove_own_files() -> None:
    """Removes the directory that `prepare_own_cluster` made, if any. Call this when the cluster has ended."""
    directory = Path(os.environ.get(PROGRAM, "")).parent
    if directory.name.startswith(f"{_DIRECTORY_NAME}{os.getpid()}-"):  # otherwise the user has set a program
        shutil.rmtree(directory, ignore_errors=True)


def _ensure_token() -> None:
    """Creates Ray's token in a file that only this user can read. All users could read a file that Ray creates."""
    file = Path.home() / ".ray" / "auth_token"
    file.parent.mkdir(mode=0o700, exist_ok=True)
    new = file.with_name(f"{file.name}.{os.getpid()}")
    new.touch(mode=0o600)
    new.write_text(secrets.token_hex(32))
    with contextlib.suppress(FileExistsError):
        file.hardlink_to(new)  # the file appears complete, and never replaces an existing token
    new.unlink()
    with contextlib.suppress(PermissionError):  # the file belongs to another user
        file.chmod(0o600)


def _remove_abandoned_files() -> None:
    """Removes directories of this user's earlier commands that were killed before they could remove them."""
    for directory in Path("/tmp").glob(f"{_DIRECTORY_NAME}*-*"):
        pid = directory.name.removeprefix(_DIRECTORY_NAME).split("-")[0]
        with contextlib.suppress(FileNotFoundError):  # another command may be removing it
            is_own = directory.lstat().st_uid == os.geteuid()
            if is_own and pid.isdecimal() and not psutil.pid_exists(int(pid)):
                shutil.rmtree(directory, ignore_errors=True)


def _connect(address: str | None, min_cpus: float) -> Session:
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is None:
        ray.init(
            address="local",
            num_cpus=max(os.cpu_count() or 1, int(min_cpus) + 1),
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            **options,
        )
        return Session(own=True, environment=dict(os.environ))
    # A job already has its own copy of the checkout.
    if not _job_runtime_env().get("working_dir"):
        options["runtime_env"] = {"working_dir": str(ROOT)}
    try:
        context = ray.init(address=address, **options)
    except (ConnectionError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"the Ray cluster at {address} cannot be joined; check the address and the token: {reason}"
        ) from None
    url = context.dashboard_url
    return Session(
        own=False,
        dashboard_url=None if not url else url if "://" in url else f"http://{url}",
        working_dir=ray.get_runtime_context().runtime_env.get("working_dir"),
    )


def _job_runtime_env() -> dict[str, Any]:
    """The environment that `ray job submit` gave this driver. Empty outside a job."""
    config: dict[str, Any] = json.loads(os.environ.get(_JOB_CONFIG) or "{}")
    return config.get("runtime_env") or {}


def _recorded_address() -> str | None:
    """The address that `ray start` recorded. Ray's `auto` would accept any cluster of this machine."""
    record = Path(os.environ.get("RAY_TMPDIR") or "/tmp") / "ray" / "ray_current_cluster"
    with contextlib.suppress(FileNotFoundError):
        return record.read_text(encoding="utf-8").strip() or None
    return None


def unreachable(address: str) -> str | None:
    """The reason why no Ray server answers at `host:port`. None if one answers."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        return "not of the form host:port"
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _PROBE_TIMEOUT_S) as connection:
            if os.environ.get("RAY_USE_TLS") == "1":
                return None
            connection.settimeout(_PROBE_TIMEOUT_S)
            connection.sendall(_HTTP2_GREETING)
            answer = connection.recv(4)
    except OSError as error:
        return error.strerror or str(error)
    return None if answer[3:] == _HTTP2_SETTINGS else "something else listens there"
