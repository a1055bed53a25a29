"""Classes of attack that other servers of this kind have met, and the proof that each is absent. See also test_auth,
test_connection, test_chat_template, test_weights and test_channel."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import json
import os
import pickle
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import ray

from cluster.text.tokenizer import Tokenizer
from configs.errors import CheckpointError
from configs.read_config import read_model_config
from configs.schema import ServerConfig
from tests.cluster.test_cli import wait_for
from tests.conftest import SMALL
from tests.helpers.scripted_engine import MODEL, Run, Stack, prompt_ids

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("attention", "cluster", "configs", "parallel", "worker")

# --- Nothing that came from outside is run ----------------------------------------------------------------------------

FORBIDDEN_MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "code"}
FORBIDDEN_CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
    "torch.load",
    "np.load",
    "numpy.load",
    "os.system",
    "os.popen",
    "importlib.import_module",
    "msgspec.convert_type",
}
# They pickle what they send.
FORBIDDEN_ATTRIBUTES = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
    "send_pyobj",
    "recv_pyobj",
}
ALLOWED = {
    (
        "attention/registry.py",
        "importlib.import_module",
    ),  # names of modules in the table of backends, which is constant
}
"""(file, what), with a reason beside each."""


def sources() -> Iterator[tuple[str, ast.AST]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield str(path.relative_to(ROOT)), ast.parse(path.read_text("utf-8"))


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


def test_nothing_unpickles_evaluates_or_imports_what_it_is_given() -> None:
    found = set()
    for file, tree in sources():
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names if alias.name.split(".")[0] in FORBIDDEN_MODULES]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FORBIDDEN_MODULES:
                names = [node.module or ""]
            elif isinstance(node, ast.Call) and dotted(node.func) in FORBIDDEN_CALLS:
                names = [dotted(node.func)]
            elif isinstance(node, ast.Call) and dotted(node.func).startswith("subprocess."):
                names = ["a shell" for keyword in node.keywords if keyword.arg == "shell"]
            elif isinstance(node, ast.Attribute) and node.attr in FORBIDDEN_ATTRIBUTES:
                names = [node.attr]
            elif isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "trust_remote_code"):
                names = [] if isinstance(node.value, ast.Constant) and node.value.value is False else [node.arg]
            found |= {(file, name) for name in names}
    assert found == ALLOWED


def test_no_model_code_is_imported(smollm2: Tokenizer, smollm2_path: Path, tmp_path: Path) -> None:
    """A repository that asks for code of its own: `auto_map` in every file that may have it."""
    smollm2._fast.save_pretrained(tmp_path)
    marker = tmp_path / "ran"
    code = f"open({str(marker)!r}, 'w').close()\nclass Any: pass\n"
    for module in ("configuration_evil", "modeling_evil", "tokenization_evil"):
        (tmp_path / f"{module}.py").write_text(code)
    tokenizer_config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    tokenizer_config["auto_map"] = {"AutoTokenizer": ["tokenization_evil.Any", "tokenization_evil.Any"]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    auto_map = {"AutoConfig": "configuration_evil.Any", "AutoModelForCausalLM": "modeling_evil.Any"}
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "vocab_size": 49152, "auto_map": auto_map}))
    assert read_model_config(tmp_path).hidden_size == SMALL["hidden_size"]
    assert Tokenizer.load(tmp_path).encode("hi", add_special_tokens=False)
    # Without its fast tokenizer, transformers looks for a class, and would take the repository's.
    (tmp_path / "tokenizer.json").unlink()
    with contextlib.suppress(CheckpointError):
        Tokenizer.load(tmp_path)
    assert not marker.exists()


@pytest.mark.slow
def test_validation_does_not_rest_on_asserts_and_no_request_is_unpickled(smollm2_path: Path) -> None:
    """The same refusals under `python -O`, in a process where finding a class for a pickle ends it."""
    result = subprocess.run(
        [sys.executable, "-O", "-m", "tests.helpers.refusals", str(smollm2_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "refused as they should be" in result.stdout


# --- No request reaches out -------------------------------------------------------------------------------------------

URL = "http://192.0.2.1:9/x.png"
PARTS: list[dict[str, Any]] = [
    {"type": "image_url", "image_url": {"url": URL}},
    {"type": "image_url", "image_url": URL},
    {"type": "input_image", "image_url": URL},
    {"type": "video_url", "video_url": {"url": URL}},
    {"type": "audio_url", "audio_url": {"url": URL}},
    {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
    {"type": "file", "file": {"file_id": "f"}},
    {"type": "file", "file": {"file_data": URL}},
    {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
    {"type": "image", "source": {"type": "url", "url": URL}},
    {"type": "document", "source": {"type": "url", "url": URL}},
]


def test_media_are_refused_or_replaced_and_no_socket_is_opened(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(stack: Stack) -> None:
        opened: list[object] = []

        def refuse(*args: object, **kwargs: object) -> None:
            opened.append(args)
            raise OSError("no socket may be opened")

        for name in ("connect", "connect_ex"):
            monkeypatch.setattr(socket.socket, name, refuse)
        monkeypatch.setattr(socket, "getaddrinfo", refuse)
        for part in PARTS:
            content = [{"type": "text", "text": "see"}, part]
            for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses"):
                key = "input" if path.endswith("responses") else "messages"
                body = {"model": MODEL, "max_tokens": 2, key: [{"role": "user", "content": content}]}
                response = await stack.http.post(path, json=body)
                is_left_out = key == "messages" or part["type"] == "input_image"
                assert response.status_code == (200 if is_left_out else 400), (path, part, response.text)
                assert not is_left_out or f"{key}.{part['type']}" in response.headers["x-ignored-fields"]
        assert opened == []
        for request in stack.coordinator.requests:
            assert "192.0.2.1" not in stack.model.tokenizer.decode(prompt_ids(request))

    run(scenario)


@pytest.mark.parametrize(
    "fields",
    [
        {"chat_template": "{{ 1 }}"},
        {"chat_template_kwargs": {"chat_template": "x"}},
        {"chat_template_kwargs": {"tokenize": True}},
    ],
)
def test_no_route_takes_a_template_from_a_request(run: Run, fields: dict[str, Any]) -> None:
    async def scenario(stack: Stack) -> None:
        messages = [{"role": "user", "content": "hi"}]
        for path in ("/v1/chat/completions", "/tokenize", "/v1/messages", "/v1/responses"):
            body = {"model": MODEL, "messages": messages, "input": messages, "max_tokens": 2, **fields}
            if path == "/v1/responses":
                del body["messages"], body["max_tokens"]
            elif path != "/tokenize":
                del body["input"]
            response = await stack.http.post(path, json=body)
            assert response.status_code == 400 or stack.coordinator.requests == [], (path, response.text)
        assert stack.coordinator.requests == []

    run(scenario, server=ServerConfig(strict_fields=True))


# --- Numbers ----------------------------------------------------------------------------------------------------------

NUMBERS = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "n", "seed", "logprobs", "frequency_penalty",
           "presence_penalty", "repetition_penalty", "min_tokens", "priority", "prompt_logprobs")  # fmt: skip
HOSTILE = ("-1", "0", "NaN", "Infinity", "-Infinity", "1e309", "1e308", str(2**31), str(2**63), str(-(2**63) - 1),
           "9" * 5000, '"1"', "null", "true", "[]", "{}", "1.5")  # fmt: skip


def test_no_number_breaks_the_server(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        for field in NUMBERS:
            for value in HOSTILE:
                for path, rest in (
                    ("/v1/completions", '"prompt": "hi"'),
                    ("/v1/chat/completions", '"messages": [{"role": "user", "content": "hi"}]'),
                ):
                    raw = f'{{"model": "{MODEL}", {rest}, "max_tokens": 2, "{field}": {value}}}'
                    response = await stack.http.post(path, content=raw.encode())
                    assert response.status_code in (200, 400), (path, raw[:200], response.text)
        # Whatever passed is within what the workers take.
        for request in stack.coordinator.requests:
            sampling = request.sampling
            assert 1 <= sampling.max_tokens <= 128
            assert -(2**63) <= sampling.seed < 2**63
            assert 0 <= sampling.temperature <= 2
        assert stack.engine.num_open == 0

    run(scenario)


# --- Sockets ----------------------------------------------------------------------------------------------------------

GARBAGE = (
    pickle.dumps({"a": Path}),
    b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\xffcos\nsystem\n(S'true'\ntR.",
    b"GET / HTTP/1.1\r\n\r\n",
    b"\xff" * 4096,
    b"\0" * 4096,
    (1 << 31).to_bytes(4, "little") + b"x" * 100,
)


def our_processes() -> dict[int, psutil.Process]:
    """The coordinators and ranks of this run's cluster, by pid."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error, IndexError):
            if process.cmdline()[0].startswith(("ray::CoordinatorActor", "ray::RankActor")):
                found[process.pid] = process
    return found


def send(address: Any, garbage: bytes, family: int = socket.AF_INET) -> None:
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as stranger:
        stranger.settimeout(2)
        stranger.connect(address)
        stranger.sendall(garbage)
        stranger.shutdown(socket.SHUT_WR)
        stranger.recv(4096)


def all_listening() -> dict[str, set[str]]:
    """Addresses at which this process, its Ray cluster and Ray Serve listen, by process name."""
    found: dict[str, set[str]] = {}
    this = psutil.Process()
    for process in [this, *this.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            for connection in process.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    found.setdefault(process.name(), set()).add(connection.laddr.ip.removeprefix("::ffff:"))
    return found


@pytest.mark.ray
@pytest.mark.timeout(900)
def test_every_process_of_ray_and_serve_listens_on_loopback_alone(endpoint: Any) -> None:
    listening = all_listening()
    assert {"gcs_server", "raylet", "haproxy"} <= listening.keys()
    assert len(listening) >= 6, listening
    assert set().union(*listening.values()) == {"127.0.0.1"}, listening


@pytest.mark.ray
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", ["disabled", pytest.param("token", marks=pytest.mark.slow)])
def test_nobody_joins_the_cluster_without_its_token(endpoint: Any, mode: str, tmp_path: Path) -> None:
    address = ray.get_runtime_context().gcs_address
    script = (
        "import ray, sys\n"
        f"ray.init(address={address!r}, log_to_driver=False)\n"
        "print('ran as', ray.get(ray.remote(lambda: 'root').remote()))"
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    wrong = {"RAY_AUTH_MODE": mode, "RAY_AUTH_TOKEN": "0" * 64} if mode == "token" else {"RAY_AUTH_MODE": mode}
    stranger = subprocess.run(
        [sys.executable, "-c", script],
        env={**kept, **wrong, "HOME": str(tmp_path), "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert stranger.returncode != 0
    assert "ran as" not in stranger.stdout
    assert "uthent" in stranger.stderr, stranger.stderr[-2000:]


@pytest.mark.ray
@pytest.mark.timeout(900)
@pytest.mark.parametrize("stream", [True, False])
def test_a_request_whose_client_leaves_ends_within_a_second(endpoint: Any, stream: bool) -> None:
    """Head and body come in two packets, as httpx and urllib send them."""
    fields = {"model": endpoint.model, "prompt": "Once", "max_tokens": 4000, "ignore_eos": True, "stream": stream}
    body = json.dumps(fields).encode()
    host, port = endpoint.url.removeprefix("http://").split(":")
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)

    def ends() -> bool:
        with socket.create_connection((host, int(port)), timeout=60) as client:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client.sendall(head)
            time.sleep(0.1)
            client.sendall(body)
            wait_for(lambda: endpoint.status()["num_running"] == 1, 60, "the request's first step")
        left = time.monotonic()
        endpoint.wait_idle()
        return time.monotonic() < left + 1

    endpoint.wait_idle()
    assert any(ends() for _ in range(3)), "three times in a row it was late, so it was not the machine"


@pytest.mark.ray
@pytest.mark.timeout(900)
def test_garbage_on_the_sockets_of_our_processes_harms_nobody(endpoint: Any) -> None:
    processes = our_processes()
    assert len(processes) >= 3, processes
    listening = {
        connection.laddr.port
        for process in processes.values()
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    local = [line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines() if "@lockstep-" in line]
    assert local
    for garbage in GARBAGE:
        for port in listening:
            send(("127.0.0.1", port), garbage)
        for name in set(local):
            send("\0" + name[1:], garbage, socket.AF_UNIX)
        send((endpoint.url.split(":")[1].strip("/"), int(endpoint.url.rsplit(":", 1)[1])), garbage)
    body = {"model": endpoint.model, "prompt": "One, two,", "max_tokens": 4, "temperature": 0}
    assert httpx.post(f"{endpoint.url}/v1/completions", json=body, timeout=60).status_code == 200
    assert processes.keys() <= our_processes().keys()


def ask_raw(url: str, request: bytes) -> bytes:
    """What comes until the server closes the connection."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as client:
        client.sendall(request)
        return b"".join(iter(lambda: client.recv(1 << 16), b""))


@pytest.mark.ray
@pytest.mark.timeout(900)
def test_hostile_heads_are_refused_and_old_clients_are_served(endpoint: Any) -> None:
    """By HAProxy, whose settings are ours."""
    head = b"POST /none HTTP/1.1\r\nHost: x\r\n"
    for garbage in (b"\x80\x04\x95.", b"EHLO x\r\n\r\n", head + b"x-long: " + b"a" * 20_000 + b"\r\n\r\n"):
        assert ask_raw(endpoint.url, garbage).startswith(b"HTTP/1.1 400 ")
    began = time.monotonic()
    assert ask_raw(endpoint.url, head).startswith(b"HTTP/1.1 408 ")
    assert time.monotonic() - began < 30
    body = json.dumps({"model": endpoint.model, "prompt": "Once", "max_tokens": 4}).encode()
    request = b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    first, _, answer = ask_raw(endpoint.url, request).partition(b"\r\n\r\n")
    assert b" 200 " in first.splitlines()[0]
    assert json.loads(answer)["usage"]["completion_tokens"] == 4


@pytest.mark.ray
@pytest.mark.timeout(900)
def test_odd_names_of_requests_are_refused_in_json_and_reach_no_log(endpoint: Any) -> None:
    """Behind Ray Serve, whose own code echoes, decodes and logs them."""
    mark = b"odd-name-4711"
    for header in (b"x-request-id", b"x-session-id", b"x_session_id"):
        for name in (b"\xff\xfe" + mark, b"\xe2\x80\xae" + mark, mark + b" b", mark * 1000, mark + b"\tx"):
            head = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n%s: %s\r\n\r\n"
            answer, _, body = ask_raw(endpoint.url, head % (header, name)).partition(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 400 "), (header, name[:40], answer)
            assert mark not in answer
            assert json.loads(body)["error"]["code"] == "invalid_header"
            assert answer.lower().count(b"\r\nx-request-id: ") == 1
    fit = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nx-request-id: fit\r\n\r\n"
    answer = ask_raw(endpoint.url, fit)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.lower().count(b"\r\nx-request-id: ") == 1
    evil = b"GET /v1/models HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n"
    assert b'"host_refused"' in ask_raw(endpoint.url, evil)
    import ray

    logs_of_this_run = Path(ray._private.worker._global_node.get_logs_dir_path())
    logs = [path for path in logs_of_this_run.rglob("*") if path.is_file()]
    assert logs
    assert not [path for path in logs if mark in path.read_bytes()]


@pytest.mark.exhaustive
@pytest.mark.ray
@pytest.mark.timeout(900)
def test_hostile_neighbours_do_not_change_an_answer(endpoint: Any) -> None:
    body = {"model": endpoint.model, "prompt": "The ship left the harbour", "max_tokens": 12, "temperature": 1,
            "seed": 5, "logprobs": 2}  # fmt: skip
    hostile: list[dict[str, Any]] = [
        {"prompt": [1, 49152]},
        {"prompt": [-1]},
        {"stop_token_ids": [10**9]},
        {"logit_bias": {"49152": 5}},
        {"logit_bias": {"5": 100}, "n": 4},
        {"allowed_token_ids": [7]},
        {"bad_words": ["the"] * 100},
        {"repetition_penalty": 1e-3, "frequency_penalty": 2.0},
        {"temperature": 2.0, "top_k": 1, "min_p": 1.0, "ignore_eos": True},
        {"prompt": "x" * 20_000, "max_tokens": 1},
        {"n": 129},
    ]

    async def ask() -> list[Any]:
        async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=None)) as client:
            url = f"{endpoint.url}/v1/completions"
            mates = [asyncio.create_task(client.post(url, json={**body, "seed": 7, **fields})) for fields in hostile]
            canary = await client.post(url, json=body)
            statuses = [(await mate).status_code for mate in mates]
            assert set(statuses) <= {200, 400}, statuses
            return [canary.json()["choices"][0]]

    alone = httpx.post(f"{endpoint.url}/v1/completions", json=body, timeout=120).json()["choices"][0]
    [among] = asyncio.run(ask())
    assert among["text"] == alone["text"]
    assert os.environ.get("PYTHONOPTIMIZE") is None


def test_whatever_waits_goes_by_the_monotonic_clock() -> None:
    """A clock that is set moves no deadline: the time of day is told, and nothing is reckoned with it but ages told."""
    told = {
        "cluster/commands/bench/command.py",
        "cluster/native/server_status.py",
        "cluster/observability/tracing.py",
        "cluster/openai/openai_writer.py",
        "cluster/openai/responses/response_writer.py",
        "cluster/openai/responses/responses.py",
        "cluster/requests/served_model.py",
        "cluster/text/chat_template.py",
    }
    asked = re.compile(r"\btime\.time(_ns)?\(|datetime\.(now|utcnow)\(")
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    assert {str(path.relative_to(ROOT)) for path in paths if asked.search(path.read_text())} == told
