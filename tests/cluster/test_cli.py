"""The command line as a person uses it: what it says and refuses, and that what it starts leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import Mock, patch

import httpx
import psutil
import pytest
import ray
from typer.testing import CliRunner

from cluster.commands import serve
from cluster.commands.cli import app
from cluster.commands.serve import ServingJob, root_cause
from cluster.serve import deployment, session
from cluster.serve.haproxy import ports_of_own
from cluster.serve.session import Session, cluster_address
from configs.errors import ConfigError
from tests.conftest import unused_port

ROOT = Path(__file__).resolve().parents[2]
CONFIG = "configs/smollm2-135m.yaml"
BIN = Path(sys.executable).parent
MODEL = "smollm2-135m-instruct"


def environment(**extra: str) -> dict[str, str]:
    """This process's, less what it set for the test run's own cluster, and as README has it for `ray start`."""
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH" and not key.startswith("RAY_")}
    ray_settings = {
        "RAY_AUTH_MODE": "token",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    return {**kept, **ray_settings, "COLUMNS": "80", **extra}


def run(*arguments: str, stdin: str = "", **extra: str) -> subprocess.CompletedProcess[str]:
    """What `python -m cluster ARGUMENTS` prints and returns, in this process; a command that starts Ray fails here.

    Spares the seconds that a process takes to import torch and Ray. Log lines are not in its stderr, and libraries
    have read their settings from the environment before.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with contextlib.chdir(ROOT), patch.dict(os.environ, environment(**extra), clear=True):
        try:
            with patch.object(ray, "init", side_effect=AssertionError("the command starts Ray")):
                result = CliRunner().invoke(app, arguments, input=stdin, catch_exceptions=False)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
    return subprocess.CompletedProcess(arguments, result.exit_code, result.stdout, result.stderr)


def run_apart(*arguments: str, timeout_s: float = 120, **extra: str) -> subprocess.CompletedProcess[str]:
    """`python -m cluster ARGUMENTS` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "cluster", *arguments],
        cwd=ROOT,
        env=environment(**extra),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def session_processes(leader: int) -> list[str]:
    """Processes of the session that `leader` began: all that a command started, whoever their parent is by now."""
    found = []
    for process in psutil.process_iter(["status", "name"]):
        try:
            if process.info["status"] != psutil.STATUS_ZOMBIE and os.getsid(process.pid) == leader:
                found.append(f"{process.pid} {process.info['name']}")
        except ProcessLookupError:
            continue
    return found


def wait_for(condition: Any, timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout_s:g} s"
        time.sleep(0.2)


def test_check_shows_the_plan_in_80_columns(smollm2_path: Path) -> None:
    result = run_apart("check", CONFIG, "--set", "tensor_parallel_size=9", "--set", "kv_cache.num_tokens=null")
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert "9 query heads, 3 KV heads" in lines[0]
    begin = next(i for i, line in enumerate(lines) if line.startswith("rank "))
    rows = [line.split() for line in lines[begin + 1 : begin + 10]]
    assert [row[0] for row in rows] == [str(rank) for rank in range(9)]
    assert {len(row) for row in rows} == {9}, "a row is wrapped or a column is missing"
    assert max(len(line) for line in lines[begin : begin + 10]) <= 80
    assert any("of what is free after loading" in line for line in lines)
    assert any("a group takes 1 CPU of Ray" in line for line in lines)
    assert "tools      generic form, calls as hermes (docs/guides/api.md)" in lines


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ messages[0].tool_calls }}{{ tools }}<tool_call>", "by the chat template, calls as hermes"),
        ([{"name": "default", "template": "{{ messages }}"}], "generic form, calls as hermes (docs/guides/api.md)"),
        (None, "none: there is no chat template"),
    ],
)
def test_check_says_what_shows_the_model_tools(template: Any, words: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(ROOT / "benchmarks/models/qwen3-0.6b", model)
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    result = run("check", CONFIG, "--set", f"model={model}", "--set", "load_format=dummy")
    assert result.returncode == 0, result.stderr
    assert f"tools      {words}" in result.stdout.splitlines()


@pytest.mark.parametrize("override", ["attention.backend=triton", "parallel.all_reduce=nccl"])
def test_what_only_gpus_have_is_no_mistake_before_the_cluster_is_known(smollm2_path: Path, override: str) -> None:
    result = run("check", CONFIG, "--set", override)
    assert result.returncode == 0, result.stderr
    assert "GPU" in result.stdout
    assert_refused(run("check", CONFIG, "--set", override, "--set", "device=cpu"), override, "needs GPUs")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("tensor_paralel_size=2", ["tensor_paralel_size", "tensor_parallel_size"]),
        ("tensor_parallel_size=10", ["tensor_parallel_size=10", "num_attention_heads=9"]),
        ("tensor_parallel_size=two", ["tensor_parallel_size", "two"]),
        ("model=/nowhere/model", ["/nowhere/model", "does not exist"]),
    ],
)
def test_a_wrong_setting_ends_with_one_clear_line(smollm2_path: Path, override: str, words: list[str]) -> None:
    assert_refused(run("check", CONFIG, "--set", override), *words)


@pytest.mark.parametrize("broken", ["safetensors", "pickle"])
def test_broken_weights_are_refused_before_ray_starts(tmp_path: Path, broken: str) -> None:
    if broken == "safetensors":
        header = json.dumps({"model.norm.weight": {"dtype": "F32", "shape": [64], "data_offsets": [0, 256]}}).encode()
        (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 100)
        settings = {"model_type": "llama", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128}
        heads = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
        limits = {"max_position_embeddings": 128, "rms_norm_eps": 1e-5}
        (tmp_path / "config.json").write_text(json.dumps({**settings, **heads, **limits}))
    else:
        (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    result = run("serve", CONFIG, "--address", "local", "--set", f"model={tmp_path}", "--set", "tensor_parallel_size=1")
    assert_refused(result, "pickle" if broken == "pickle" else "truncated")
    assert "starting Ray" not in result.stdout


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [", ["broken.yaml:1"]),
        ("name: someone else's", ["applications"]),
        ("applications: [{name: x, import_path: 'other:app'}]", ["other:app", "cluster.app:build_app"]),
    ],
)
def test_a_file_that_is_not_ours_is_named_with_the_reason(tmp_path: Path, text: str, words: list[str]) -> None:
    file = tmp_path / "broken.yaml"
    file.write_text(text)
    assert_refused(run("check", str(file)), "broken.yaml", *words)


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("127.0.0.1:1", ["RAY_ADDRESS=127.0.0.1:1", "refused"]),
        ("http://127.0.0.1:8265", ["RAY_ADDRESS=http://127.0.0.1:8265", "ray job submit"]),
        ("nonsense", ["RAY_ADDRESS=nonsense", "host:port"]),
    ],
)
def test_a_wrong_ray_address_is_refused_at_once(address: str, words: list[str]) -> None:
    began = time.monotonic()
    assert_refused(run("serve", CONFIG, RAY_ADDRESS=address), *words)
    assert time.monotonic() - began < 20


def test_an_address_where_something_else_listens_is_refused(free_port: int) -> None:
    with http_server(free_port):
        assert_refused(run("serve", CONFIG, RAY_ADDRESS=f"127.0.0.1:{free_port}"), "something else listens there")


def test_only_a_cluster_that_ray_start_noted_is_joined_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert cluster_address(None) is None
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("127.0.0.1:1")
    assert cluster_address(None) is None, "a note of a cluster that is gone counts as none"
    with pytest.raises(ConfigError, match="ray start --head"):
        cluster_address("auto")


def test_the_root_cause_of_a_failed_start_is_the_error_without_its_traceback() -> None:
    message = """A replica failed to start with exception. Retrying 2 more time(s). Error:
Traceback (most recent call last):
  File "cluster/serve/app.py", line 45, in __init__
    self._engine = await RunningEngine.start(spec)
configs.errors.CheckpointError: /models/a is truncated; download it again
Some trailing text: of Serve's"""
    assert root_cause(message) == "/models/a is truncated; download it again"
    assert root_cause("Traceback\n  ImportError: no module") == "ImportError: no module"
    assert root_cause("waiting for resources") == "waiting for resources"


def test_from_an_interrupt_on_only_the_command_itself_is_heard(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # as it is again afterwards
    job = ServingJob.create(ROOT / CONFIG, [], "local", time.monotonic())
    print("(raylet) before")  # noqa: T201 -- as Ray's own thread does
    job._on_signal(signal.SIGINT, None)
    print("(raylet) A worker died or was killed while executing a task")  # noqa: T201
    job._say("stopped")
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()] == ["before", "stopped"]


def test_a_terminal_that_goes_away_interrupts_unless_that_is_ignored() -> None:
    job = ServingJob.create(ROOT / CONFIG, [], "local", time.monotonic())
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    stdout = sys.stdout
    ours, theirs = pty.openpty()
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup has it
        job._trap_signals()
        signal.raise_signal(signal.SIGHUP)
        assert not job._stop.is_set()
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        job._trap_signals()
        signal.raise_signal(signal.SIGHUP)
        assert job._stop.is_set()
        os.close(ours)
        job._console.file = gone = os.fdopen(theirs, "w")
        job._say("stopping")
        with contextlib.suppress(OSError):
            gone.close()
    finally:
        sys.stdout = stdout
        for number, handler in handlers.items():
            signal.signal(number, handler)


def test_a_cluster_of_our_own_that_loses_its_raylet_ends_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    raylet = subprocess.Popen(["sleep", "60"])
    head = [psutil.Process(), psutil.Process(raylet.pid)]
    ended = threading.Event()

    def end_at_once(exit_code: int) -> NoReturn:
        ended.set()
        raise SystemExit(exit_code)

    job = ServingJob.create(ROOT / CONFIG, [], "local", time.monotonic())
    monkeypatch.setattr(job, "_serve", lambda *_, **__: ended.wait(30))
    monkeypatch.setattr(serve, "_head_processes", lambda: head)
    monkeypatch.setattr(serve, "_end_at_once", end_at_once)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: Mock(gcs_address="127.0.0.1:0"))
    threading.Timer(0.2, raylet.kill).start()
    with pytest.raises(SystemExit, match="2"):
        job._serve_watchfully(Session(own=True), detach=False)
    raylet.wait()


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:8000/v1"),
        ("::", "http://[::1]:8000/v1"),
        ("::1", "http://[::1]:8000/v1"),
        ("::ffff:127.0.0.1", "http://[::ffff:127.0.0.1]:8000/v1"),
    ],
)
def test_the_url_of_an_endpoint_has_its_ipv6_address_in_brackets(host: str, url: str) -> None:
    overrides = [f"http_options.host='{host}'", "server.api_keys=false"]
    assert ServingJob.create(ROOT / CONFIG, overrides, "local", time.monotonic()).url == url


def test_detaching_from_a_cluster_that_ends_with_the_command_is_refused(smollm2_path: Path) -> None:
    result = run("serve", CONFIG, "--address", "local", "--detach")
    assert_refused(result, "--detach", "ray start --head")


def test_chat_says_what_is_wrong_with_an_address(free_port: int) -> None:
    assert_refused(run("chat", f"http://127.0.0.1:{free_port}/v1"), "nothing answers", str(free_port))
    with http_server(free_port):
        assert_refused(run("chat", f"127.0.0.1:{free_port}"), "no OpenAI endpoint", "/v1/models")


@pytest.mark.ray
def test_chat_answers_lines_until_an_empty_one(endpoint: Any) -> None:
    result = run("chat", endpoint.url, "--temperature", "0", stdin="Say hello.\n\nnever read\n")
    assert result.returncode == 0, result.stderr
    assert endpoint.model in result.stdout
    assert "ello" in result.stdout.partition("> ")[2]
    assert result.stdout.count("> ") == 2


def test_help_is_quick() -> None:
    result = run_apart("--help")
    assert result.returncode == 0
    for command in ("serve", "check", "chat", "generate", "bench", "status", "schema", "completion"):
        assert command in result.stdout

    def processor_s(code: str) -> float:
        began = os.times().children_user
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment(), check=True, capture_output=True)
        return os.times().children_user - began

    # Processor time, the best of three: other work on the machine is not ours. Measured by what draws the help, 0.25 s
    # where Ray alone would take 0.4 s more and torch 1 s: no two machines are equally fast.
    run_it = "import runpy, sys; sys.argv = ['cluster', '--help']; runpy.run_module('cluster', run_name='__main__')"
    needed_s = min(processor_s("import typer.rich_utils") for _ in range(3))
    assert min(processor_s(run_it) for _ in range(3)) < 2 * needed_s


def test_a_host_of_another_machine_is_named_and_not_its_port() -> None:
    with pytest.raises(ConfigError, match=r"http_options\.host=203\.0\.113\.7 is no address of this machine"):
        session.check_port_free("203.0.113.7", 8000)


def test_a_chat_template_that_is_none_is_refused_before_anything_starts(smollm2_path: Path, tmp_path: Path) -> None:
    (template := tmp_path / "mine.jinja").write_text("{% for m in messages %}")
    result = run("serve", CONFIG, "--address", "local", "--set", f"server.chat_template={template}")
    assert_refused(result, f"server.chat_template={template} is not Jinja")
    assert "starting Ray" not in result.stdout


def test_a_taken_port_is_refused_before_anything_starts(smollm2_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = run("serve", CONFIG, "--address", "local", "--set", f"http_options.port={port}")
    assert_refused(result, f"http_options.port={port}", f"http_options.port={port + 1}")
    assert "starting Ray" not in result.stdout


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_serve_answers_and_an_interrupt_leaves_nothing_behind(smollm2_path: Path, free_port: int) -> None:
    with served(free_port) as server:
        output = read_until_ready(server)
        # Pasted as it is printed.
        [curl] = [line for line in output.splitlines() if line.startswith("curl ")]
        reply = subprocess.run(
            ["bash", "-c", f"{curl} --silent"], capture_output=True, text=True, timeout=60, check=True
        )
        answer = json.loads(reply.stdout)
        assert answer["model"] == MODEL
        assert answer["choices"][0]["message"]["content"] == "The capital of France is Paris."
        assert "9 query heads, 3 KV heads" in output
        assert "loading weights" in output
        # A terminal's Ctrl-C reaches Ray's own processes too.
        began = time.monotonic()
        os.killpg(server.pid, signal.SIGINT)
        rest, _ = server.communicate(timeout=120)
        assert server.returncode == 0, rest
        assert time.monotonic() - began < 60
        assert [line.split()[-1] for line in rest.splitlines() if line.strip()][-2:] == ["stopping", "stopped"]
        for noise in ("Traceback", "(raylet)", "INFO ", "WARNING"):
            assert noise not in output + rest
        assert not list(Path("/tmp").glob(f"lockstep{server.pid}-*"))


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("moment", "number"),
    [
        pytest.param("starting Ray Serve", signal.SIGTERM, marks=pytest.mark.exhaustive),
        ("loading weights", signal.SIGINT),
        pytest.param("starting Ray\n", signal.SIGINT, marks=pytest.mark.exhaustive),
        pytest.param("starting ranks", signal.SIGINT, marks=pytest.mark.exhaustive),
        pytest.param("loading weights", signal.SIGTERM, marks=pytest.mark.exhaustive),
        pytest.param("Ctrl-C ends it", signal.SIGTERM, marks=pytest.mark.exhaustive),
    ],
)
def test_an_interrupt_during_the_start_leaves_nothing_behind(
    smollm2_path: Path, free_port: int, moment: str, number: signal.Signals
) -> None:
    with served(free_port) as server:
        read_until(server, moment)
        time.sleep(0.5)
        began = time.monotonic()
        os.killpg(server.pid, number)
        rest, _ = server.communicate(timeout=120)
        assert server.returncode == 0, rest
        assert time.monotonic() - began < 60
        assert "Traceback" not in rest


@pytest.mark.exhaustive
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_replicas_of_three_ranks_serve_side_by_side(smollm2_path: Path, free_port: int) -> None:
    with served(free_port, "--set", "num_replicas=2", "--set", "tensor_parallel_size=3") as server:
        assert "2 groups of 3 ranks" in read_until_ready(server)
        answers = {complete(f"http://127.0.0.1:{free_port}") for _ in range(8)}
        assert len(answers) == 1
        os.killpg(server.pid, signal.SIGINT)
        server.communicate(timeout=60)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_generate_prints_the_text_and_nothing_else(smollm2_path: Path) -> None:
    prompt = ["--prompt", "The capital of France is", "--max-tokens", "2"]
    result = run_apart("generate", CONFIG, "--address", "local", *prompt, timeout_s=240)
    assert result.returncode == 0, result.stderr
    assert result.stdout == " Paris.\n"


def start_serve(port: int, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "cluster", "serve", CONFIG, "--set", f"http_options.port={port}"]
    return subprocess.Popen(
        [*command, "--address", "local", *arguments],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@contextlib.contextmanager
def served(port: int, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`serve` in a session of its own; when the block has ended it, checks that nothing of it is left."""
    segments = set(os.listdir("/dev/shm"))
    server = start_serve(port, *arguments)
    try:
        yield server
    finally:
        ended = server.poll() is not None
        server.kill()
        server.communicate()
    assert ended, "the block ends the server"
    wait_for(lambda: not session_processes(server.pid), 20, "the end of every process")
    wait_for(lambda: set(os.listdir("/dev/shm")) <= segments, 20, "the end of every shared memory segment")


def read_until(server: subprocess.Popen[str], text: str) -> str:
    """Output up to the line with `text`."""
    assert server.stdout is not None
    output = ""
    for line in server.stdout:
        output += line
        if text in line:
            return output
    raise AssertionError("the server ended:\n" + output)


def read_until_ready(server: subprocess.Popen[str]) -> str:
    """Output up to the curl line."""
    return read_until(server, "curl ")


def assert_refused(result: subprocess.CompletedProcess[str], *words: str) -> None:
    """Exit code 2, one line on stderr with all of `words`."""
    assert result.returncode == 2, result.stdout + result.stderr
    [line] = result.stderr.splitlines()
    assert line.startswith("error: ")
    for word in words:
        assert word in line


def complete(url: str) -> str:
    body = {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["choices"][0]["text"]
    return text


@contextlib.contextmanager
def http_server(port: int) -> Iterator[None]:
    """Something that speaks HTTP and knows nothing: 404 to every request, 400 to what is none."""

    class Nothing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", port), Nothing) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


# ---- on a cluster


@pytest.mark.parametrize(
    ("host", "num_nodes", "chosen"), [("127.0.0.1", 1, "1"), ("127.0.0.1", 2, "0"), ("0.0.0.0", 2, "1")]
)
def test_haproxy_is_chosen_where_it_reaches_every_replica(
    monkeypatch: pytest.MonkeyPatch, host: str, num_nodes: int, chosen: str
) -> None:
    started: dict[str, Any] = {}
    monkeypatch.setattr(deployment.ray, "nodes", lambda: [{"Alive": True}] * num_nodes + [{"Alive": False}])
    monkeypatch.setattr(deployment.serve, "start", lambda **options: started.update(options))
    monkeypatch.setattr(deployment, "_install_on_nodes", dict)
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
    deployment._start_serve({"http_options": {"host": host, "port": 8000}}, {})
    env_vars = started["controller_options"]["runtime_env"]["env_vars"]
    assert env_vars["RAY_SERVE_ENABLE_HA_PROXY"] == chosen


def test_clusters_of_one_machine_share_no_port_that_ray_serve_shares_unasked() -> None:
    one, other = ports_of_own(), ports_of_own()
    assert len({*one.values(), *other.values()}) == 2 * len(one)
    for name in one:
        assert hasattr(ray.serve._private.constants, name), f"Ray Serve has no setting {name}"
    assert "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT" in one


def token() -> str:
    """Ray's token of this user."""
    command = [BIN / "ray", "get-auth-token"]
    return subprocess.run(command, env=environment(), check=True, capture_output=True, text=True).stdout.strip()


@dataclass(frozen=True)
class Head:
    """A cluster started by `ray start --head`."""

    dashboard_url: str
    address: str
    temp_dir: Path

    def job(self, *arguments: str, check: bool = True) -> str:
        """Output of `ray job ARGUMENTS`."""
        result = subprocess.run(
            [BIN / "ray", "job", *arguments],
            cwd=ROOT,
            env=environment(RAY_ADDRESS=self.dashboard_url),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=240,
            check=False,
        )
        assert not check or result.returncode == 0, result.stdout
        return result.stdout

    def submit(
        self, name: str, port: int, *arguments: str, wait: bool = True, check: bool = True, config: str | Path = CONFIG
    ) -> str:
        """Output of a job that serves."""
        options = ["--submission-id", name, "--working-dir", ".", *([] if wait else ["--no-wait"])]
        command = ["python", "-m", "cluster", "serve", str(config), "--set", f"http_options.port={port}", *arguments]
        return self.job("submit", *options, "--", *command, check=check)

    def replicas(self) -> dict[str, list[str]]:
        """Replica ids of each application of Ray Serve."""
        details = httpx.get(
            f"{self.dashboard_url}/api/serve/applications/", timeout=30, headers={"authorization": f"Bearer {token()}"}
        ).json()
        return {
            name: [
                replica["replica_id"]
                for deployment in app["deployments"].values()
                for replica in deployment["replicas"]
            ]
            for name, app in details["applications"].items()
        }


@pytest.fixture(scope="session")
def shared_head() -> Iterator[Head]:
    """A cluster with a dashboard, whose nodes have this checkout on their path."""
    with started_head(PYTHONPATH=str(ROOT)) as head:
        yield head


@pytest.fixture
def head(shared_head: Head) -> Iterator[Head]:
    """The shared cluster; Ray Serve is shut down on it after the test, so that the next one may choose a port."""
    yield shared_head
    address = f"--address={shared_head.dashboard_url}"
    subprocess.run([BIN / "serve", "shutdown", "--yes", address], env=environment(), check=True, capture_output=True)
    wait_for(lambda: not shared_head.replicas(), 60, "the end of every app")


@pytest.fixture
def bare_head() -> Iterator[Head]:
    """A cluster with a dashboard, whose nodes lack our code until a job brings it."""
    with started_head() as head:
        yield head


@contextlib.contextmanager
def started_head(**extra: str) -> Iterator[Head]:
    """A cluster of its own, with `extra` in the environment of its nodes."""
    names = ("port", "dashboard-port", "dashboard-agent-listen-port", "dashboard-agent-grpc-port")
    ports = {name: unused_port() for name in (*names, "ray-client-server-port", "metrics-export-port")}
    temp_dir = Path(f"/tmp/lockstep-{os.getpid()}")  # short: it holds sockets
    command = [BIN / "ray", "start", "--head", "--block", "--num-cpus=4", "--num-gpus=0", f"--temp-dir={temp_dir}"]
    extra["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] = "0"
    subprocess.run([BIN / "ray", "get-auth-token", "--generate"], env=environment(), check=True, capture_output=True)
    process = subprocess.Popen(
        [*command, *(f"--{name}={port}" for name, port in ports.items())],
        env=environment(PATH=f"{BIN}:{os.environ['PATH']}", **ports_of_own(), **extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        read_until(process, "block forever")
        url = f"http://127.0.0.1:{ports['dashboard-port']}"
        yield Head(url, f"127.0.0.1:{ports['port']}", temp_dir)
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=30)
        for entry in session_processes(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(entry.split()[0]), signal.SIGKILL)
        process.communicate()
        shutil.rmtree(temp_dir, ignore_errors=True)


def is_ready(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/ready", timeout=5).status_code == 200
    return False


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_a_job_serves_stops_with_its_app_and_can_come_again(
    smollm2_path: Path, head: Head, free_port: int, tmp_path: Path
) -> None:
    url = f"http://127.0.0.1:{free_port}"
    head.submit("attached", free_port, wait=False)
    wait_for(lambda: is_ready(url), 180, "the endpoint's readiness")
    complete(url)
    uploads = list(head.temp_dir.glob("session_2*/runtime_resources/working_dir_files/_ray_pkg_*/"))
    assert uploads
    for upload in uploads:
        files = [path for path in upload.rglob("*") if path.is_file()]
        assert sum(path.stat().st_size for path in files) < 5 << 20
        assert not [path for path in upload.iterdir() if path.name.startswith(".")]
    head.job("stop", "attached", check=False)
    wait_for(lambda: not head.replicas(), 60, "the app's end")
    assert "stopped" in head.job("logs", "attached")

    assert "serving smollm2-135m-instruct" in head.submit("detached", free_port, "--detach")
    before = head.replicas()
    complete(url)
    head.submit("unchanged", free_port, "--detach")
    assert head.replicas() == before, "a re-run without changes restarts nothing"

    refused = head.submit("refused", free_port + 1, check=False)
    assert f"port={free_port + 1}, but Ray Serve of this cluster already listens on port {free_port}" in refused
    noisy, second = tmp_path / "noisy.yaml", tmp_path / "second.yaml"
    noisy.write_text((ROOT / CONFIG).read_text() + "logging_config: {log_level: NOISY}\n")
    assert "error: Ray Serve refused" in head.submit("noisy", free_port, check=False, config=noisy)
    second.write_text((ROOT / CONFIG).read_text().replace("name: smollm2-135m\n", "name: second\n", 1))
    taken = head.submit("taken", free_port, check=False, config=second)
    assert "error: Ray Serve refused the application: Prefix / is being used" in taken
    missing = head.submit("missing", free_port, "--set", "model=/nowhere/x", check=False)
    assert "error: model=/nowhere/x does not exist" in missing
    assert "Job 'missing' failed" in missing
    too_large = run_apart(
        "serve", CONFIG, "--set", "device=cuda", "--set", f"http_options.port={free_port}", RAY_ADDRESS=head.address
    )
    assert_refused(too_large, "needs 2 GPUs on one node, the largest has 0")
    assert head.replicas() == before, "a start that was refused leaves the app of others alone"


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_serve_deploy_takes_the_same_file(smollm2_path: Path, head: Head, free_port: int, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text((ROOT / CONFIG).read_text().replace("port: 8000", f"port: {free_port}"))
    env = environment(RAY_DASHBOARD_ADDRESS=head.dashboard_url)
    subprocess.run([BIN / "serve", "deploy", file], env=env, check=True, capture_output=True, timeout=120)
    url = f"http://127.0.0.1:{free_port}"
    wait_for(lambda: is_ready(url), 180, "the endpoint's readiness")
    complete(url)
    before = head.replicas()
    file.write_text(file.read_text() + "    deployments:\n      - {name: Engine, max_queued_requests: 7}\n")
    subprocess.run([BIN / "serve", "deploy", file], env=env, check=True, capture_output=True, timeout=120)
    wait_for(lambda: is_ready(url), 60, "the endpoint's readiness")
    assert head.replicas() == before, "a limit of the deployment restarts nothing"


def test_the_working_dir_that_nodes_fetch_is_the_whole_checkout() -> None:
    assert session.ROOT == ROOT
