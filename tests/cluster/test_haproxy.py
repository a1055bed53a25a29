"""Ray Serve's HAProxy as we run it: Ray writes its configuration, `run_haproxy` changes it, and it stands before a
server that says what reached it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import resource
import shutil
import socket
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import uvicorn
from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
from ray.serve.config import HTTPOptions

from cluster.serve.haproxy import PROGRAM, SETTINGS, install, reinstall
from cluster.serve.ingress import client_address
from cluster.serve.run_haproxy import HEAD_TIMEOUT_S, TemplateError, close_to_others, hardened, proof
from cluster.serve.session import remove_own_files
from tests.conftest import unused_port

pytestmark = pytest.mark.skipif(SETTINGS["RAY_SERVE_ENABLE_HA_PROXY"] != "1", reason="Ray has HAProxy for Linux alone")
NUM_HALF_OPEN = 4200


@dataclass
class Replica:
    """An ASGI app that answers with the client's address, or, asked for /silent, notes when the client left."""

    waits: threading.Event = field(default_factory=threading.Event)
    was_left: threading.Event = field(default_factory=threading.Event)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        if scope["path"] == "/silent":
            self.waits.set()
            while (await receive())["type"] != "http.disconnect":
                pass
            self.was_left.set()
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(client_address(proof(), scope)).encode()})


@dataclass
class Proxy:
    """A running HAProxy."""

    port: int
    replica: Replica
    process: subprocess.Popen[bytes]
    directory: Path

    def connect(self, source: str = "127.0.0.1") -> socket.socket:
        """A connection from that address."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=10, source_address=(source, 0))

    def get(self, *headers: tuple[str, str], source: str = "127.0.0.1") -> tuple[int, Any]:
        """Status and JSON of the answer to a request with these headers, from that address."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30, source_address=(source, 0))
        with contextlib.closing(connection):
            connection.putrequest("GET", "/")
            for name, value in headers:
                connection.putheader(name, value)
            connection.endheaders()
            response = connection.getresponse()
            return response.status, json.loads(response.read())


def write_as_ray(
    directory: Path, port: int, replica_port: int | None, fallback_port: int | None = None, *, is_updating: bool = False
) -> Path:
    """The configuration that Ray Serve writes for an application with one replica, and perhaps with Ray's own proxy
    behind it. Without a port of the replica, there is no application. While its replica is updating, an application has
    none."""
    path = directory / "haproxy.cfg"
    config = HAProxyConfig(
        http_options=HTTPOptions(host="127.0.0.1", port=port),
        socket_path=f"{directory}/admin.sock",
        server_state_base=str(directory),
        server_state_file=f"{directory}/server-state",
        metrics_socket_path=f"{directory}/metrics.sock",
        stats_port=unused_port(),
        metrics_port=unused_port(),
        is_head=True,
    )
    backends = {}
    if replica_port is not None:
        fallback = None if fallback_port is None else ServerConfig("fallback", "127.0.0.1", fallback_port)
        replica = ServerConfig("replica", "127.0.0.1", replica_port)
        servers = [] if is_updating else [replica]
        backends["app"] = BackendConfig("app", "/", servers=servers, fallback_server=fallback)
    HAProxyApi(config, backends, str(path))._generate_config_file_internal()
    return path


@pytest.fixture(scope="module", autouse=True)
def token() -> Iterator[None]:
    """Ray's token, which this machine need not have."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_TOKEN", "f" * 64)
        yield


@pytest.fixture(scope="module")
def proxy(token: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    """HAProxy before a `Replica`, started as Ray Serve starts it."""
    directory = tmp_path_factory.mktemp("h")
    replica, port, replica_port = Replica(), unused_port(), unused_port()
    server = uvicorn.Server(
        uvicorn.Config(replica, port=replica_port, log_config=None, lifespan="off", timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    program = install(directory)["RAY_SERVE_HAPROXY_BINARY_PATH"]
    node = directory / "node"
    node.mkdir()
    process = subprocess.Popen(
        [program, "-db", "-f", write_as_ray(node, port, replica_port)], stderr=subprocess.DEVNULL
    )
    proxy = Proxy(port, replica, process, node)
    try:
        deadline = time.monotonic() + 30
        while True:
            with contextlib.suppress(OSError, ValueError):
                if proxy.get()[0] == 200:
                    break
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield proxy
    finally:
        process.kill()
        process.wait()
        server.should_exit = True
        thread.join()


def test_only_its_user_controls_haproxy_and_reads_its_configuration(proxy: Proxy) -> None:
    for directory in (proxy.directory, proxy.directory.parent):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE((proxy.directory / "admin.sock").stat().st_mode) == 0o600


def test_haproxy_serves_its_figures_where_the_endpoint_listens(proxy: Proxy) -> None:
    listening = [it.laddr for it in psutil.Process(proxy.process.pid).net_connections("inet") if it.status == "LISTEN"]
    assert len(listening) == 3
    assert {address.ip for address in listening} == {"127.0.0.1"}


@pytest.mark.parametrize("has_application", [False, True])
def test_requests_without_a_replica_are_answered_at_once_with_503(has_application: bool) -> None:
    directory = Path(tempfile.mkdtemp(dir="/tmp", prefix="h"))  # a socket's path must be short
    port, replica_port = unused_port(), unused_port()
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, directory)
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))  # Ray's proxy waits for a replica
        ports = (replica_port, silent.getsockname()[1]) if has_application else (None,)
        path = write_as_ray(directory, port, *ports)
        program = install(directory)["RAY_SERVE_HAPROXY_BINARY_PATH"]
        process = stack.enter_context(subprocess.Popen([program, "-db", "-f", path], stderr=subprocess.DEVNULL))
        stack.callback(process.kill)
        url = f"http://127.0.0.1:{port}"
        # Until HAProxy has noticed that the replica is not there.
        within(60, lambda: httpx.post(f"{url}/v1/models", json={}, timeout=5).headers.get("retry-after") == "2")
        for path_ in ("/v1/models", "/v1/messages"):
            began = time.monotonic()
            response = httpx.post(f"{url}{path_}", json={}, timeout=30)
            assert time.monotonic() - began < 4.0  # and Ray's proxy would never answer
            assert (response.status_code, response.headers["retry-after"]) == (503, "2")
            assert response.headers["x-should-retry"] == "true"
            assert response.json()["error"]["code"] == "engine_overloaded"
            assert response.json()["type"] == "error"


def test_a_replica_that_ray_takes_out_while_it_updates_is_used_until_it_fails_a_check() -> None:
    directory = Path(tempfile.mkdtemp(dir="/tmp", prefix="h"))
    port, replica_port = unused_port(), unused_port()

    def status() -> int:
        return httpx.get(f"http://127.0.0.1:{port}/", timeout=30).status_code

    @contextlib.contextmanager
    def served() -> Iterator[None]:
        server = uvicorn.Server(
            uvicorn.Config(Replica(), port=replica_port, log_config=None, lifespan="off", timeout_graceful_shutdown=1)
        )
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            yield
        finally:
            server.should_exit = True
            thread.join()

    def start(*arguments: str, is_updating: bool) -> subprocess.Popen[bytes]:
        if arguments:  # Ray hands on what the HAProxy that runs knows of its servers
            with socket.socket(socket.AF_UNIX) as control:
                control.connect(f"{directory}/admin.sock")
                control.sendall(b"show servers state\n")
                (directory / "server-state").write_bytes(b"".join(iter(lambda: control.recv(1 << 16), b"")))
        path = write_as_ray(directory, port, replica_port, fallback, is_updating=is_updating)
        process = stack.enter_context(subprocess.Popen([program, "-db", "-f", path, *arguments]))
        stack.callback(process.kill)
        return process

    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, directory)
        program = install(directory)["RAY_SERVE_HAPROXY_BINARY_PATH"]
        fallback = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
        with served():
            first = start(is_updating=False)
            within(30, lambda: status() == 200)
            second = start("-sf", str(first.pid), is_updating=True)
            first.wait(30)
            for _ in range(20):  # several health checks
                assert status() == 200
                time.sleep(0.3)
        within(30, lambda: status() == 503)
        # Another application's replica, at the same port.
        with served():
            time.sleep(6)
            assert status() == 503
            start("-sf", str(second.pid), is_updating=False)
            second.wait(30)
            within(30, lambda: status() == 200)


def within(seconds: float, is_so: Callable[[], bool]) -> None:
    """Waits until it is so, or fails. Until the port is open, it is not."""
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError, httpx.TransportError):
            if is_so():
                return
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_replica_is_told_the_address_of_haproxys_client_and_believes_nobody_else(proxy: Proxy) -> None:
    assert proxy.get(source="127.0.0.7") == (200, "127.0.0.7")
    for word in (proof(), "0" * 64):
        assert proxy.get(("x-lockstep-client", f"{word} 10.1.2.3"), source="127.0.0.8") == (200, "127.0.0.8")
    scope = {"client": ("127.0.0.9", 1), "headers": [(b"x-lockstep-client", b"0 10.1.2.3")]}
    assert client_address(proof(), scope) == "unknown"
    assert client_address(None, scope) == "127.0.0.9", "without Ray's token nothing proves the header"


@pytest.mark.parametrize("pause_s", [0.0, 0.1], ids=["one packet", "head and body apart"])
def test_a_replica_learns_within_a_second_that_a_client_has_left(proxy: Proxy, pause_s: float) -> None:
    def learns() -> bool:
        proxy.replica.waits.clear()
        proxy.replica.was_left.clear()
        with proxy.connect() as client:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client.sendall(b"POST /silent HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\n")
            time.sleep(pause_s)
            client.sendall(b"hello")
            assert proxy.replica.waits.wait(10)
            time.sleep(0.5)  # longer than HAProxy takes to hand the body on
        in_time = proxy.replica.was_left.wait(1.0)
        assert proxy.replica.was_left.wait(10)
        return in_time

    assert any(learns() for _ in range(3)), "three times in a row it was late, so it was not the machine"


def test_a_client_that_closes_its_sending_side_counts_as_gone(proxy: Proxy) -> None:
    """docs/guides/deploy.md says so."""
    with proxy.connect() as client:
        client.sendall(b"GET /silent HTTP/1.1\r\nHost: localhost\r\n\r\n")
        client.shutdown(socket.SHUT_WR)
        assert b"".join(iter(lambda: client.recv(1 << 16), b"")).startswith(b"HTTP/1.1 400 ")


def test_thousands_of_half_open_connections_keep_nobody_waiting(proxy: Proxy) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2 * NUM_HALF_OPEN)), hard))
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        half_open = [stack.enter_context(proxy.connect()) for _ in range(NUM_HALF_OPEN)]
        for connection in half_open:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: ")
        began = time.monotonic()
        assert proxy.get()[0] == 200
        assert proxy.get(source="127.0.0.2")[0] == 200
        assert time.monotonic() - began < 5.0  # their heads are late after ten seconds
        # HAProxy says so and closes.
        half_open[0].settimeout(30)
        assert half_open[0].recv(4096).startswith(b"HTTP/1.1 408 ")
        assert time.monotonic() - began < HEAD_TIMEOUT_S + 5


def test_one_address_holds_three_quarters_of_the_connections_and_others_are_served(
    proxy: Proxy, tmp_path: Path
) -> None:
    """The bound is read from the configuration: nobody opens so many here."""
    text = (proxy.directory / "haproxy.cfg").read_text()
    [maximum] = [int(line.split()[1]) for line in text.splitlines() if line.startswith("    maxconn ")]
    assert f"tcp-request connection reject if {{ sc0_conn_cur gt {maximum * 3 // 4} }}" in text
    assert maximum * 3 // 4 > NUM_HALF_OPEN


def test_another_template_of_rays_ends_the_start_with_what_is_missing(tmp_path: Path) -> None:
    text = write_as_ray(tmp_path, 8000, 30000).read_text()
    for line in ("option splice-request", "mode 666 level admin", "frontend prometheus", "bind *:"):
        with pytest.raises(TemplateError, match="not the expected one"):
            hardened(text.replace(line, "other words"), 1000)
    program = install(tmp_path)["RAY_SERVE_HAPROXY_BINARY_PATH"]
    (tmp_path / "haproxy.cfg").write_text(text.replace("option splice-request", ""))
    ended = subprocess.run(
        [program, "-db", "-f", tmp_path / "haproxy.cfg"], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    assert "splice-request" in ended.stderr


def test_a_directory_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(PermissionError, match="not a directory of this user"):
        close_to_others(tmp_path)


def test_a_missing_program_that_a_user_has_named_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o755)
    monkeypatch.setenv(PROGRAM, str(tmp_path / "haproxy"))
    reinstall()
    assert not list(tmp_path.iterdir())
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
    monkeypatch.setattr("cluster.serve.haproxy.DIRECTORY", str(tmp_path))
    reinstall()
    assert (tmp_path / "haproxy").exists()


def test_the_number_of_connections_that_an_operator_sets_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_SERVE_HAPROXY_MAXCONN", "4096")
    text = write_as_ray(tmp_path, 8000, 30000).read_text()
    assert "    maxconn 4096\n" in hardened(text, 1000)


def test_a_command_that_has_made_no_directory_removes_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Users may name their own HAProxy, and the start may fail before it is replaced."""
    program = tmp_path / "haproxy"
    program.touch()
    monkeypatch.setenv(PROGRAM, str(program))
    remove_own_files()
    assert program.exists()
    monkeypatch.delenv(PROGRAM)
    remove_own_files()
