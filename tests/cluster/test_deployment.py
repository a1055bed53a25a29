"""How an application reaches Ray Serve: by the cluster's dashboard, and without one where it is not up."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import ray

from cluster.serve.deployment import find_dashboard
from tests.conftest import unused_port

VERSION = json.dumps({"version": "4", "ray_version": ray.__version__, "ray_commit": "", "session_name": ""})
APPLICATIONS = "/api/serve/applications/"


@contextlib.contextmanager
def http_server(answers: dict[str, tuple[int, str]]) -> Iterator[str]:
    """The URL of a server that gives each path its status and body, and 404 to every other path."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answers.get(self.path, (404, "not here"))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_dashboard_that_is_up_tells_what_runs() -> None:
    running = {"http_options": {"port": 8000}, "applications": {}}
    with http_server({"/api/ray/version": (200, VERSION), APPLICATIONS: (200, json.dumps(running))}) as url:
        client, details = find_dashboard(url)
    assert client is not None
    assert details == running


@pytest.mark.parametrize(
    "answers",
    [
        {},
        {"/api/ray/version": (500, "broken")},
        {"/api/ray/version": (200, "<html>another server</html>")},
        {"/api/ray/version": (200, "{}")},
        {"/api/ray/version": (200, VERSION), APPLICATIONS: (503, "Traceback:\n Serve's module is not there")},
    ],
    ids=["not Ray's", "broken", "no JSON", "no version", "no Serve"],
)
def test_a_dashboard_that_is_not_up_is_one_line_of_the_log(
    answers: dict[str, tuple[int, str]], caplog: pytest.LogCaptureFixture
) -> None:
    with http_server(answers) as url:
        assert find_dashboard(url) == (None, {})
    assert_one_line(caplog, url)


def test_a_dashboard_where_nothing_listens_is_one_line_of_the_log(
    free_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert find_dashboard(f"http://127.0.0.1:{free_port}") == (None, {})
    assert_one_line(caplog, f"http://127.0.0.1:{free_port}")


def test_an_install_without_ray_default_is_one_line_of_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ray.dashboard.modules.serve.sdk.requests", None)
    assert find_dashboard("http://127.0.0.1:8265") == (None, {})
    assert_one_line(caplog, "http://127.0.0.1:8265", "ray[default]")


def test_a_cluster_without_a_dashboard_is_nothing_to_warn_of(caplog: pytest.LogCaptureFixture) -> None:
    assert find_dashboard(None) == (None, {})
    assert not caplog.records


def assert_one_line(caplog: pytest.LogCaptureFixture, *words: str) -> None:
    [record] = caplog.records
    line = record.getMessage()
    assert "\n" not in line
    assert record.exc_info is None
    assert line.endswith("deploying without it")
    assert all(word in line for word in ("is not up", *words))


OPEN_SERVE = """
import ray
from ray import serve
from cluster.serve.session import prepare_own_cluster, remove_own_files
prepare_own_cluster()
ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
from cluster.app import build_app
from configs.errors import ConfigError
serve.start(http_options={"host": "0.0.0.0", "port": PORT})
args = {"model": MODEL, "tensor_parallel_size": 1, "kv_cache": {"num_tokens": 1024}}
try:
    build_app(args)
    print("built")
except ConfigError as error:
    print("refused:", error)
build_app({**args, "server": {"api_keys": False}})
print("built with api_keys: false")
ray.shutdown()
remove_own_files()
"""


@pytest.mark.slow
@pytest.mark.ray
def test_an_app_without_keys_is_refused_where_serve_listens_at_every_address(smollm2_path: Path) -> None:
    """As `serve deploy` and KubeRay start it, which give the application its `args` alone."""
    script = OPEN_SERVE.replace("PORT", str(unused_port())).replace("MODEL", repr(str(smollm2_path)))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    found = subprocess.run([sys.executable, "-c", script], env=kept, capture_output=True, text=True, timeout=240)
    assert found.returncode == 0, found.stderr
    refused, built = found.stdout.strip().splitlines()[-2:]
    assert refused.startswith("refused: http_options.host=0.0.0.0 can be reached from other machines")
    assert built == "built with api_keys: false"
