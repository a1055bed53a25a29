"""The command line as a person uses it: processes of their own, a cluster of their own, and nothing left behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

ROOT = Path(__file__).resolve().parent.parent
CONFIG = "configs/smollm2-135m.yaml"


def environment(**extra: str) -> dict[str, str]:
    """This process's, less what would make a command join the test run's own cluster."""
    kept = {key: value for key, value in os.environ.items() if key not in ("RAY_ADDRESS", "PYTHONPATH")}
    return {**kept, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "COLUMNS": "200", **extra}


def run(*arguments: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cluster", *arguments],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def ray_processes() -> set[int]:
    """Processes on this machine that belong to any Ray cluster."""
    found = set()
    for process in psutil.process_iter(["cmdline", "name"]):
        line = " ".join(process.info["cmdline"] or [])
        if any(word in line for word in ("raylet", "gcs_server", "ray::", "default_worker.py", "ray/dashboard")):
            found.add(process.pid)
    return found


def wait_for(condition: Any, timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout_s:g} s"
        time.sleep(0.2)


def test_check_shows_the_plan_and_starts_nothing(smollm2_path: Path) -> None:
    before = ray_processes()
    result = run("check", CONFIG, "--set", "tensor_parallel_size=5")
    assert result.returncode == 0, result.stderr
    assert "9 query heads, 3 KV heads" in result.stdout
    rows = [line.split() for line in result.stdout.splitlines() if line.strip()[:1].isdigit()]
    assert [row[0] for row in rows[:5]] == ["0", "1", "2", "3", "4"]
    assert ray_processes() <= before


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("tensor_paralel_size=2", ["tensor_paralel_size", "tensor_parallel_size"]),
        ("tensor_parallel_size=10", ["tensor_parallel_size=10", "num_attention_heads=9"]),
        ("tensor_parallel_size=two", ["tensor_parallel_size", "two"]),
        ("model=/nowhere/model.gguf", ["/nowhere/model.gguf"]),
    ],
)
def test_a_wrong_setting_ends_with_one_clear_line(smollm2_path: Path, override: str, words: list[str]) -> None:
    result = run("check", CONFIG, "--set", override)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr


def test_help_is_quick() -> None:
    result = run("--help")
    assert result.returncode == 0
    for command in ("serve", "check", "chat", "generate"):
        assert command in result.stdout


@pytest.mark.ray
@pytest.mark.timeout(300)
def test_a_taken_port_is_refused_before_anything_starts(smollm2_path: Path) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = run("serve", CONFIG, "--address", "local", "--set", f"http_options.port={port}")
    assert result.returncode == 2
    assert f"http_options.port={port}" in result.stderr


@pytest.mark.ray
@pytest.mark.timeout(300)
def test_serve_answers_and_an_interrupt_leaves_nothing_behind(smollm2_path: Path, free_port: int) -> None:
    processes, segments = ray_processes(), set(os.listdir("/dev/shm"))
    server = start_serve(free_port)
    try:
        lines = read_until_ready(server)
        assert any(line.startswith("curl ") for line in lines)
        body = {"model": "smollm2-135m-instruct", "prompt": "Hello", "max_tokens": 4}
        reply = httpx.post(f"http://127.0.0.1:{free_port}/v1/completions", json=body, timeout=60)
        assert reply.json()["usage"]["completion_tokens"] == 4
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == 0
    finally:
        server.kill()
        server.communicate()
    wait_for(lambda: ray_processes() <= processes, 20, "the end of every process")
    assert set(os.listdir("/dev/shm")) <= segments


@pytest.mark.ray
@pytest.mark.timeout(300)
def test_generate_needs_no_http(smollm2_path: Path) -> None:
    result = run(
        "generate",
        CONFIG,
        "--address",
        "local",
        "--prompt",
        "The capital of France is",
        "--max-tokens",
        "8",
        timeout_s=240,
    )
    assert result.returncode == 0, result.stderr
    assert "Paris" in result.stdout


def start_serve(port: int, *arguments: str, **extra: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "cluster", "serve", CONFIG, "--set", f"http_options.port={port}", *arguments]
    if not extra:
        command += ["--address", "local"]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(**extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def read_until_ready(server: subprocess.Popen[str]) -> list[str]:
    """Output up to the curl line."""
    assert server.stdout is not None
    lines = []
    for line in server.stdout:
        lines.append(line)
        if line.startswith("curl "):
            return lines
    raise AssertionError("the server ended:\n" + "".join(lines))


@pytest.fixture
def head_node(tmp_path: Path) -> Iterator[str]:
    """A cluster started by `ray start --head`, with a dashboard; its address for jobs."""
    ray = shutil.which("ray", path=str(Path(sys.executable).parent))
    assert ray is not None
    ports = {name: str(number) for name, number in zip(("port", "dashboard-port"), (26379, 28265), strict=True)}
    command = [ray, "start", "--head", "--block", "--num-cpus=2", f"--temp-dir=/tmp/lockstep-{os.getpid()}"]
    command += [f"--{name}={number}" for name, number in ports.items()]
    with subprocess.Popen(
        command,
        env=environment(PYTHONPATH=str(ROOT)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as head:
        try:
            url = f"http://127.0.0.1:{ports['dashboard-port']}"

            def answers() -> bool:
                try:
                    return httpx.get(f"{url}/api/version", timeout=2).status_code == 200
                except httpx.HTTPError:
                    return False

            wait_for(answers, 90, "the dashboard's start")
            yield url
        finally:
            children = psutil.Process(head.pid).children(recursive=True)
            head.send_signal(signal.SIGTERM)
            psutil.wait_procs(children, timeout=15)
            for child in children:
                if child.is_running():
                    child.kill()
    shutil.rmtree(f"/tmp/lockstep-{os.getpid()}", ignore_errors=True)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_a_submitted_job_serves_and_its_stop_takes_the_app_down(
    smollm2_path: Path, head_node: str, free_port: int
) -> None:
    ray = shutil.which("ray", path=str(Path(sys.executable).parent))
    assert ray is not None
    jobs = [ray, "job"]
    env = environment(RAY_ADDRESS=head_node)
    submit = [*jobs, "submit", "--no-wait", "--submission-id", "serving", "--working-dir", ".", "--"]
    entrypoint = [sys.executable, "-m", "cluster", "serve", CONFIG, "--set", f"http_options.port={free_port}"]
    subprocess.run([*submit, *entrypoint], cwd=ROOT, env=env, check=True, capture_output=True, timeout=120)
    url = f"http://127.0.0.1:{free_port}"

    def status() -> int:
        try:
            return httpx.get(f"{url}/ready", timeout=5).status_code
        except httpx.HTTPError:
            return 0

    wait_for(lambda: status() == 200, 180, "the endpoint's readiness")
    body = {"model": "smollm2-135m-instruct", "prompt": "Hello", "max_tokens": 4}
    assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200
    subprocess.run([*jobs, "stop", "serving"], env=env, check=True, capture_output=True, timeout=60)
    wait_for(lambda: status() in (0, 404, 503), 60, "the app's end")


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_serve_deploy_takes_the_same_file(smollm2_path: Path, head_node: str) -> None:
    serve = shutil.which("serve", path=str(Path(sys.executable).parent))
    assert serve is not None
    env = environment(RAY_DASHBOARD_ADDRESS=head_node)
    subprocess.run([serve, "deploy", CONFIG], cwd=ROOT, env=env, check=True, capture_output=True, timeout=120)

    def ready() -> bool:
        try:
            return httpx.get("http://127.0.0.1:8000/ready", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    wait_for(ready, 180, "the endpoint's readiness")
