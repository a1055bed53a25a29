"""API keys: the file, roles, quotas, and that no way of writing a request gets around them. Raw bytes over sockets."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from cluster.http import access
from cluster.http.context import Role
from cluster.http.guard import Guard
from cluster.http.keys import ApiKey, KeyRing, new_key, open_keys, parse_keys
from cluster.http.quota import Quotas
from cluster.messages.engine import WeightsChanged
from cluster.routes import ROUTES
from cluster.serve.ingress import create_app
from configs.errors import ConfigError, EngineError, RequestError
from configs.load import load_app_config
from configs.schema import ServerConfig
from tests.helpers.scripted_engine import MODEL, Run, Stack, error_of, served

ADMIN_PATHS = [route.path for route in ROUTES if route.roles == access.ADMINS]
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


class Keys:
    """A file of keys, and the keys."""

    def __init__(self, folder: Path, *lines: tuple[str, Role, str]) -> None:
        self.path = folder / "keys"
        self.secrets: dict[str, str] = {}
        text = ["# who may call", ""]
        for id_, role, limits in lines:
            secret, line = new_key(id_, role)
            self.secrets[id_] = secret
            text.append(line + (f":{Role.USER}" if limits and role == Role.USER else "") + limits)
        self.path.write_text("\n".join(text))

    def bearer(self, id_: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.secrets[id_]}"}


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path, ("alice", Role.USER, ""), ("root", Role.ADMIN, ""), ("prom", Role.METRICS, ""))


def guarded(stack: Stack, path: Path) -> httpx.AsyncClient:
    app = create_app(stack.model, keys=KeyRing(path))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


# --- The file ---------------------------------------------------------------------------------------------------------


def test_a_made_key_is_found_by_its_line_and_only_its_digest_is_written(tmp_path: Path) -> None:
    secret, line = new_key("alice", Role.ADMIN)
    assert re.fullmatch(r"sk-lockstep-[\w-]{43}", secret)
    assert line == f"alice:{hashlib.sha256(secret.encode()).hexdigest()}:admin"
    path = tmp_path / "keys"
    path.write_text(f"{line}:30:4\n")
    ring = open_keys(ServerConfig(api_keys=str(path)))
    assert ring is not None
    found = ring.find(secret.encode())
    assert found == ApiKey("alice", bytes.fromhex(line.split(":")[1]), Role.ADMIN, 30, 4)
    assert ring.find(b"sk-lockstep-other") is None
    assert ring.find(line.split(":")[1].encode()) is None  # the digest is no key
    assert open_keys(ServerConfig()) is None
    assert open_keys(ServerConfig(api_keys=False)) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "lists no keys"),
        ("# only words\n\n", "lists no keys"),
        ("alice", "keys:1: the line is not of the form"),
        ("alice:abc", "keys:1: the second field is no SHA-256"),
        ("al ice:" + "0" * 64, "keys:1: the id 'al ice'"),
        (":" + "0" * 64, "keys:1: the id ''"),
        ("\nalice:" + "0" * 64 + ":boss", "keys:2: the role is 'boss'; it must be one of user, admin, metrics"),
        ("alice:" + "0" * 64 + ":user:many", "keys:1: the limit 'many' is no positive number"),
        ("alice:" + "0" * 64 + ":user:0", "keys:1: the limit '0' is no positive number"),
        ("alice:" + "0" * 64 + ":user:1:2:3", "keys:1: the line is not of the form"),
        ("alice:" + "0" * 64 + ":user:1:2:rows=3", "keys:1: the line is not of the form"),
        ("alice:" + "0" * 64 + ":tokens=3:user", "keys:1: the line is not of the form"),
        ("alice:" + "0" * 64 + ":tokens=1:tokens=2", "keys:1: the line is not of the form"),
        ("alice:" + "0" * 64 + ":tokens=", "keys:1: the limit '' is no positive number"),
        ("alice:" + "0" * 64 + ":priority=5", "keys:1: the range '5' is not of the form -10..10"),
        ("alice:" + "0" * 64 + ":priority=5..-5", "keys:1: the range '5..-5' is not of the form -10..10"),
        ("alice:" + "0" * 64 + "\nbob:" + "0" * 64, "keys:2: an earlier line has the same key as bob"),
    ],
)
def test_a_wrong_line_is_named_by_its_number(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        parse_keys(text, "keys")
    assert "000000" not in str(caught.value)


def test_a_line_may_grant_tokens_a_minute_and_a_range_of_priorities() -> None:
    digest = "0" * 64
    [key] = parse_keys(f"alice:{digest}:user:600:32:tokens=100000:priority=-10..10", "keys")
    assert key == ApiKey("alice", bytes(32), Role.USER, 600, 32, tokens=100_000, priorities=(-10, 10))
    [key] = parse_keys(f"alice:{digest}:priority=0..5", "keys")
    assert key == ApiKey("alice", bytes(32), priorities=(0, 5))


def test_a_request_carries_the_range_of_priorities_of_its_key(tmp_path: Path) -> None:
    keys = Keys(tmp_path, ("alice", Role.USER, ":::priority=-3..4"), ("bob", Role.USER, ""))
    admit = access.Access(KeyRing(keys.path)).admit
    for id_, granted in (("alice", (-3, 4)), ("bob", None)):
        headers = [(b"authorization", keys.bearer(id_)["authorization"].encode())]
        context, _ = admit({"type": "http", "path": "/v1/models", "headers": headers}, "r")
        assert context.priorities == granted


def test_a_file_that_is_not_there_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"server\.api_keys=.*cannot be read"):
        open_keys(ServerConfig(api_keys=str(tmp_path / "none")))


def test_a_changed_file_is_read_again_and_a_broken_one_changes_nothing(tmp_path: Path) -> None:
    now = [0.0]
    keys = Keys(tmp_path, ("alice", Role.USER, ""))
    ring = KeyRing(keys.path, clock=lambda: now[0])
    secret, line = new_key("bob", Role.ADMIN)
    keys.path.write_text(line)
    assert ring.find(secret.encode()) is None  # looked at a moment ago
    now[0] += 2
    assert ring.find(secret.encode()) is not None
    assert ring.find(keys.secrets["alice"].encode()) is None
    assert ring.has_admin
    for text in ("alice", ""):
        keys.path.write_text(text)
        now[0] += 2
        assert ring.find(secret.encode()) is not None
    os.remove(keys.path)
    for _ in range(2):
        now[0] += 2
        assert ring.find(secret.encode()) is not None
        with contextlib.suppress(FileExistsError):
            os.mkfifo(keys.path)  # read, it would hold up the whole replica


def test_every_key_is_compared_in_constant_time_whichever_is_presented(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = Keys(tmp_path, *((f"c{i}", Role.USER, "") for i in range(5)))
    ring = KeyRing(keys.path)
    compared: list[bytes] = []

    compare = hmac.compare_digest

    def counting(a: bytes, b: bytes) -> bool:
        compared.append(a)
        return compare(a, b)

    monkeypatch.setattr(hmac, "compare_digest", counting)
    for presented in (keys.secrets["c0"], keys.secrets["c4"], "nonsense", ""):
        compared.clear()
        ring.find(presented.encode())
        assert len(compared) == 5
        assert all(len(digest) == 32 for digest in compared)


def test_a_salt_is_a_clients_own_and_of_this_process(tmp_path: Path) -> None:
    keys = Keys(tmp_path, ("alice", Role.USER, ""), ("bob", Role.USER, ""))
    one, other = KeyRing(keys.path), KeyRing(keys.path)
    assert one.salt("alice") == one.salt("alice")
    assert len({one.salt("alice"), one.salt("bob"), other.salt("alice")}) == 3


# --- Who may call what ------------------------------------------------------------------------------------------------


def paths(app: Guard) -> list[tuple[str, str]]:
    """(method, path) of every route."""
    found = []
    for route in app.routes:
        path = re.sub(r"\{[^}]*\}", "x", route.path)  # type: ignore[attr-defined]
        found += [(method, path) for method in route.methods]  # type: ignore[attr-defined]
    return found


def test_every_route_asks_for_a_key_but_the_allow_list(run: Run, keys: Keys) -> None:
    async def scenario(stack: Stack) -> None:
        async with guarded(stack, keys.path) as http:
            routes = paths(create_app(stack.model))
            assert len(routes) > 10
            for method, path in [*routes, ("GET", "/nothing"), ("POST", "/"), ("OPTIONS", "/v1/models")]:
                response = await http.request(method, path)
                if path in {"/", "/health", "/ready"}:
                    assert response.status_code in (200, 405, 503)
                    continue
                assert response.status_code == 401, (method, path)
                assert response.headers["www-authenticate"] == "Bearer"
                if method != "HEAD":
                    assert "API key" in response.json()["error"]["message"]
            wrong = await http.get("/v1/models", headers={"authorization": "Bearer sk-lockstep-wrong"})
            error_of(wrong, 401, "invalid_api_key")
        assert stack.coordinator.requests == []

    run(scenario)


def test_a_key_is_taken_as_bearer_or_x_api_key_and_reaches_the_engine_as_its_id(run: Run, keys: Keys) -> None:
    async def scenario(stack: Stack) -> None:
        secret = keys.secrets["alice"]
        async with guarded(stack, keys.path) as http:
            for headers in (
                {"authorization": f"Bearer {secret}"},
                {"authorization": f"bearer  {secret}"},
                {"x-api-key": secret},
                {"authorization": f"Bearer {secret}", "x-api-key": secret},
            ):
                response = await http.post("/v1/chat/completions", json=BODY, headers=headers)
                assert response.status_code == 200, response.text
            root = await http.post("/v1/chat/completions", json=BODY, headers=keys.bearer("root"))
            assert root.status_code == 200
        *alices, roots = stack.coordinator.requests
        assert {request.terms.client for request in alices} == {"alice"}
        assert len({request.terms.cache_salt for request in alices}) == 1
        assert len(alices[0].terms.cache_salt) == 32
        assert (roots.terms.client, roots.terms.cache_salt != alices[0].terms.cache_salt) == ("root", True)

    run(scenario)


@pytest.mark.parametrize(
    "headers",
    [
        [("authorization", "Bearer")],
        [("authorization", "Bearer ")],
        [("authorization", "Basic {alice}")],
        [("authorization", "{alice}")],
        [("authorization", "Token {alice}")],
        [("x-api-key", "")],
        [("authorization", "Bearer {alice}"), ("authorization", "Bearer wrong")],
        [("authorization", "Bearer wrong"), ("x-api-key", "{alice}")],
        [("authorization", "Bearer {alice} x")],
        [("authorization", "Bearer é")],
        [("cookie", "api_key={alice}")],
    ],
)
def test_what_is_not_one_good_key_is_refused(run: Run, keys: Keys, headers: list[tuple[str, str]]) -> None:
    async def scenario(stack: Stack) -> None:
        sent = [(name, value.format(**keys.secrets).encode()) for name, value in headers]
        async with guarded(stack, keys.path) as http:
            response = await http.get(f"/v1/models?api_key={keys.secrets['alice']}", headers=sent)
            assert response.status_code == 401
            assert keys.secrets["alice"] not in response.text
            assert ("two different API keys" in response.text) == (len(headers) > 1)

    run(scenario)


def test_each_role_may_call_its_own(run: Run, keys: Keys) -> None:
    async def scenario(stack: Stack) -> None:
        async with guarded(stack, keys.path) as http:

            async def status(method: str, path: str, id_: str) -> int:
                return (await http.request(method, path, headers=keys.bearer(id_))).status_code

            assert await status("GET", "/v1/models", "alice") == 200
            assert await status("GET", "/v1/models", "prom") == 403
            assert await status("POST", "/v1/chat/completions", "prom") == 403
            assert await status("GET", "/version", "prom") == 200
            for path in ADMIN_PATHS:
                error_of(await http.post(path, headers=keys.bearer("alice"), json={}), 403, "permission_denied")
                assert await status("POST", path, "prom") == 403
            assert await status("GET", "/metrics", "alice") == 403

    run(scenario)


def test_no_path_with_a_parameter_has_roles_of_its_own() -> None:
    # Roles are found by the path itself, before any route is matched.
    assert all(route.roles == access.USERS for route in ROUTES if "{" in route.path)


def test_admin_routes_are_absent_without_an_admin_key(run: Run, tmp_path: Path) -> None:
    async def scenario(stack: Stack) -> None:
        keys = Keys(tmp_path, ("alice", Role.USER, ""))
        async with guarded(stack, keys.path) as http:
            for path in ADMIN_PATHS:
                error_of(await http.post(path, headers=keys.bearer("alice"), json={}), 404, "not_found")
        for path in ADMIN_PATHS:
            error_of(await stack.http.post(path, json={}), 404, "not_found")

    run(scenario)


def test_an_admin_ends_requests_and_flushes_the_cache(run: Run, keys: Keys) -> None:
    async def scenario(stack: Stack) -> None:
        root = keys.bearer("root")
        async with guarded(stack, keys.path) as http:

            async def start(name: str) -> asyncio.Task[httpx.Response]:
                headers = {**keys.bearer("alice"), "x-request-id": name}
                task = asyncio.create_task(http.post("/v1/chat/completions", json=BODY, headers=headers))
                number = len(stack.coordinator.requests)
                await stack.until(lambda: len(stack.coordinator.requests) > number)
                return task

            one, two, three = [await start(name) for name in ("one", "two", "three")]
            aborted = await http.post("/abort_request", json={"rid": "two"}, headers=root)
            assert aborted.json() == {"aborted": 1}
            error_of(await two, 409, "request_aborted")
            assert stack.coordinator.aborted == [2]
            assert (await http.post("/abort_request", json={"rid": "none"}, headers=root)).json() == {"aborted": 0}
            everyone = await http.post("/abort_request", json={"abort_all": True}, headers=root)
            assert everyone.json() == {"aborted": 2}
            assert [(await task).status_code for task in (one, three)] == [409, 409]
            for body in ({}, {"rid": 5}, {"abort_all": "yes"}):
                error_of(await http.post("/abort_request", json=body, headers=root), 400, "invalid_type")
            assert (await http.post("/flush_cache", json={}, headers=root)).status_code == 200
            await stack.until(lambda: stack.coordinator.num_flushes == 1)
            for key, status in (({}, 401), (keys.bearer("alice"), 403)):
                reply = await http.post("/v1/admin/weights", json={"model": "m"}, headers=key)
                assert reply.status_code == status
            wrong = await http.post("/v1/admin/weights", json={"model": "m", "running": "stop"}, headers=root)
            error_of(wrong, 400, "invalid_value")
            asked = {"model": "m", "revision": "r", "version": None, "running": "finish"}

            async def update_weights(**fields: Any) -> WeightsChanged:
                assert fields == asked
                if stack.model.version == "full":
                    raise ConfigError("another resize or change of weights is under way; try again after it")
                if stack.model.version == "failing":
                    raise EngineError("rank 1 died", public_message="The replica is being replaced.")
                return WeightsChanged("m@r", 0.5, 2.0, "host")

            async def resize_app(size: int) -> float:
                if size == 9:
                    raise ConfigError("tensor_parallel_size=9 exceeds num_attention_heads=8")
                return 0.1234

            operations: Any = SimpleNamespace(update_weights=update_weights, resize_app=resize_app)
            stack.model.operations = operations
            changed = await http.post("/v1/admin/weights", json=asked, headers=root)
            assert changed.json() == {"version": "m@r", "pause_s": 0.5, "load_s": 2.0, "staged_in": "host"}
            resized = await http.post("/v1/admin/resize", json={"tensor_parallel_size": 3}, headers=root)
            assert resized.json() == {"tensor_parallel_size": 3, "pause_s": 0.123}
            too_many = await http.post("/v1/admin/resize", json={"tensor_parallel_size": 9}, headers=root)
            assert error_of(too_many, 400, "not_resized")["param"] == "tensor_parallel_size"
            stack.model.version = "full"
            error_of(await http.post("/v1/admin/weights", json=asked, headers=root), 400, "weights_not_changed")
            stack.model.version = "failing"
            failed = await http.post("/v1/admin/weights", json=asked, headers=root)
            assert "rank 1 died" in error_of(failed, 500, "engine_error")["message"]

            async def sleep(*, wakes: bool) -> float:
                if wakes:
                    raise ConfigError("the engine is awake")
                return 0.25

            operations.sleep = sleep
            assert (await http.post("/sleep", headers=keys.bearer("alice"))).status_code == 403
            assert (await http.post("/sleep", headers=root)).json() == {"seconds": 0.25}
            error_of(await http.post("/wake_up", headers=root), 400, "no_change")
            assert (await http.get("/is_sleeping", headers=root)).json() == {"is_sleeping": False}

    run(scenario, hang_after=1)


def test_a_priority_counts_across_clients_within_the_range_that_its_key_is_granted(run: Run, tmp_path: Path) -> None:
    keys = Keys(tmp_path, ("alice", Role.USER, ":::priority=-3..4"), ("bob", Role.USER, ""))

    async def scenario(stack: Stack) -> None:
        async with guarded(stack, keys.path) as http:
            for id_, priority in (("alice", -99), ("alice", 2), ("alice", 99), ("bob", -(2**53) + 1), ("bob", None)):
                body = BODY | {"priority": priority}
                await http.post("/v1/chat/completions", json=body, headers=keys.bearer(id_))
        levels = [(request.terms.level, request.terms.priority) for request in stack.coordinator.requests]
        assert levels == [(-3, -99), (2, 2), (4, 99), (0, -(2**53) + 1), (0, 0)]

    run(scenario)


def test_below_a_prefix_the_same_rules_hold(run: Run, keys: Keys) -> None:
    async def scenario(stack: Stack) -> None:
        app = create_app(stack.model, keys=KeyRing(keys.path))
        transport = httpx.ASGITransport(app, root_path="/llm")
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            assert (await http.get("/llm/health")).status_code == 200
            assert (await http.get("/llm/v1/models")).status_code == 401
            assert (await http.get("/llm/v1/models", headers=keys.bearer("alice"))).status_code == 200
            for path in ("/llm/llm/health", "/llmhealth", "/llm//health", "/llm/health/", "/llm"):
                assert (await http.get(path)).status_code == 401, path

    run(scenario)


# --- Raw bytes --------------------------------------------------------------------------------------------------------

RAW_REQUESTS = [
    "GET /v1/models HTTP/1.1\r\nHost: x/?\r\n\r\n",
    "GET /v1/models HTTP/1.1\r\nHost: x/health?\r\n\r\n",
    "GET /v1/models HTTP/1.1\r\nHost: x\r\nX-Forwarded-Path: /health\r\nX-Original-URL: /health\r\n\r\n",
    "GET http://x/v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
    "GET http://health/v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
    "GET //v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
    "GET /health/../v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
    "GET /health/%2e%2e/v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
    "GET /%2e/v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
    "GET /v1/model%73 HTTP/1.1\r\nHost: x\r\n\r\n",
    "GET /v1/models/ HTTP/1.1\r\nHost: x\r\n\r\n",
    "GET /health/ HTTP/1.1\r\nHost: x\r\n\r\n",
    "GET /health%2f HTTP/1.1\r\nHost: x\r\n\r\n",
    "GET /health;/v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
    "GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n",
    "GET /v1/models?/health HTTP/1.1\r\nHost: x\r\n\r\n",
    "GET /v1/models#/health HTTP/1.1\r\nHost: x\r\n\r\n",
    "HEAD /v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
    "OPTIONS /v1/models HTTP/1.1\r\nHost: x\r\nOrigin: http://x\r\nAccess-Control-Request-Method: GET\r\n\r\n",
    "OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
    "GET /v1/models HTTP/1.0\r\n\r\n",
    "GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
    "GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
    "HTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n",
    "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}",
    "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-HTTP-Method-Override: GET\r\nContent-Length: 0\r\n\r\n",
    "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
]


async def answer_to(url: str, request: bytes) -> bytes:
    """All that comes back until the server closes or is silent for a moment."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    received = b""
    try:
        async with asyncio.timeout(3):
            while part := await reader.read(65536):
                received += part
                head, _, body = received.partition(b"\r\n\r\n")
                length = re.search(rb"content-length: (\d+)", head)
                if length and (len(body) >= int(length[1]) or request.startswith(b"HEAD")):
                    break
    finally:
        writer.close()
    return received


def test_no_way_of_writing_a_request_gets_around_the_key(run: Run, keys: Keys) -> None:
    async def scenario(stack: Stack) -> None:
        async with served(create_app(stack.model, keys=KeyRing(keys.path))) as url:
            for request in RAW_REQUESTS:
                answer = await answer_to(url, request.encode())
                status = int(answer.split(b" ", 2)[1])
                assert status in (400, 401, 403), (request, answer)
                assert MODEL.encode() not in answer
            good = "GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {alice}\r\n\r\n".format(**keys.secrets)
            assert MODEL.encode() in await answer_to(url, good.encode())
            assert b" 200 " in await answer_to(url, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert stack.coordinator.requests == []

    run(scenario)


# --- Quotas -----------------------------------------------------------------------------------------------------------


def test_a_quota_is_exact_over_any_minute() -> None:
    now = [100.0]
    quotas = Quotas(clock=lambda: now[0])
    key = ApiKey("alice", b"", rpm=3)

    def take() -> float | None:
        try:
            with quotas.take(key):
                return None
        except RequestError as error:
            return error.retry_after_s if error.status == 429 else None

    assert [take() for _ in range(3)] == [None] * 3
    now[0] += 20
    assert take() == pytest.approx(40)
    with quotas.take(ApiKey("bob", b"", rpm=3)):
        pass  # another client's
    now[0] += 40.001
    assert [take() for _ in range(3)] == [None] * 3
    assert take() is not None
    with quotas.take(None), quotas.take(ApiKey("carol", b"")):
        pass


def test_a_client_over_its_quota_is_told_when_to_come_back(run: Run, tmp_path: Path) -> None:
    async def scenario(stack: Stack) -> None:
        keys = Keys(tmp_path, ("alice", Role.USER, ":2"), ("bob", Role.USER, ""))
        async with guarded(stack, keys.path) as http:

            async def post(id_: str) -> httpx.Response:
                return await http.post("/v1/chat/completions", json=BODY, headers=keys.bearer(id_))

            assert [(await post("alice")).status_code for _ in range(2)] == [200, 200]
            refused = await post("alice")
            error_of(refused, 429, "rate_limit_exceeded")
            assert 55 <= int(refused.headers["retry-after"]) <= 60
            assert refused.headers["x-should-retry"] == "true"
            assert (await post("bob")).status_code == 200
            # Looking costs nothing.
            assert (await http.get("/v1/models", headers=keys.bearer("alice"))).status_code == 200

    run(scenario)


def test_every_sequence_of_a_request_counts_among_those_at_once(run: Run, tmp_path: Path) -> None:
    async def scenario(stack: Stack) -> None:
        keys = Keys(tmp_path, ("alice", Role.USER, "::8"), ("bob", Role.USER, "::8"))
        async with guarded(stack, keys.path) as http:

            async def post(path: str, id_: str = "alice", **fields: Any) -> httpx.Response:
                body = {"model": MODEL, "max_tokens": 50, **fields}
                return await http.post(path, json=body, headers=keys.bearer(id_))

            chat = {"messages": BODY["messages"]}
            running = asyncio.create_task(post("/v1/chat/completions", n=6, **chat))
            await stack.until(lambda: len(stack.coordinator.requests) == 6)
            error_of(await post("/v1/completions", prompt=["a", "b", "c"]), 429, "rate_limit_exceeded")
            native = {"text": ["a", "b", "c"]}
            generated = await http.post("/generate", json=native, headers=keys.bearer("alice"))
            error_of(generated, 429, "rate_limit_exceeded")
            assert (await post("/v1/completions", "bob", prompt=["a", "b"], n=4)).status_code == 200
            assert (await post("/v1/completions", prompt=["a", "b"])).status_code == 200
            assert (await running).status_code == 200
            # What never fits is not to be tried again, and all is given back.
            error_of(await post("/v1/chat/completions", n=9, **chat), 400, "invalid_value")
            assert (await post("/v1/chat/completions", n=8, **chat)).status_code == 200
            assert (await post("/v1/chat/completions", n=8, **chat)).status_code == 200

    run(scenario, step_s=0.04)


def test_the_tokens_of_a_minute_are_those_of_prompts_and_answers(run: Run, tmp_path: Path) -> None:
    async def scenario(stack: Stack) -> None:
        keys = Keys(tmp_path, ("alice", Role.USER, ":tokens=100"))
        async with guarded(stack, keys.path) as http:

            async def post(num_tokens: int, max_tokens: int) -> httpx.Response:
                body = {"model": MODEL, "prompt": [5] * num_tokens, "max_tokens": max_tokens, "ignore_eos": True}
                return await http.post("/v1/completions", json=body, headers=keys.bearer("alice"))

            assert (await post(60, 5)).status_code == 200
            refused = await post(40, 1)  # 65 are used
            error_of(refused, 429, "rate_limit_exceeded")
            assert 55 <= int(refused.headers["retry-after"]) <= 60
            assert (await post(35, 1)).status_code == 200
            error_of(await post(1, 1), 429, "rate_limit_exceeded")

    run(scenario)


def test_a_prompt_above_the_tokens_of_a_minute_passes_when_nothing_else_is_counted() -> None:
    now = [100.0]
    quotas = Quotas(clock=lambda: now[0])
    key = ApiKey("alice", b"", tokens=10)
    with quotas.take(key) as meter:
        meter.begin(1, 50)
    now[0] += 30
    with quotas.take(key) as meter, pytest.raises(RequestError) as caught:
        meter.begin(1, 1)
    assert caught.value.retry_after_s == pytest.approx(30)
    now[0] += 30.001
    with quotas.take(key) as meter:
        meter.begin(1, 1)


def test_generating_for_health_counts_and_many_calls_share_a_token(run: Run, tmp_path: Path) -> None:
    async def scenario(stack: Stack) -> None:
        keys = Keys(tmp_path, ("alice", Role.USER, ":3"), ("bob", Role.USER, ""))
        async with guarded(stack, keys.path) as http:

            async def get(id_: str) -> int:
                return (await http.get("/health_generate", headers=keys.bearer(id_))).status_code

            assert [await get("alice") for _ in range(4)] == [200, 200, 200, 429]
            assert len(stack.coordinator.requests) == 3
            assert await asyncio.gather(*(get("bob") for _ in range(20))) == [200] * 20
            assert len(stack.coordinator.requests) <= 3 + 2
            assert (await http.get("/v1/models", headers=keys.bearer("alice"))).status_code == 200

    run(scenario, step_s=0.05)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_has_only_so_many_requests_at_once(run: Run, tmp_path: Path, stream: bool) -> None:
    async def scenario(stack: Stack) -> None:
        keys = Keys(tmp_path, ("alice", Role.USER, "::2"))
        async with guarded(stack, keys.path) as http:

            async def post() -> httpx.Response:
                body = {**BODY, "max_tokens": 50, "stream": stream}
                return await http.post("/v1/chat/completions", json=body, headers=keys.bearer("alice"))

            running = [asyncio.create_task(post()) for _ in range(2)]
            await stack.until(lambda: len(stack.coordinator.requests) == 2)
            error_of(await post(), 429, "rate_limit_exceeded")
            assert [(await response).status_code for response in running] == [200, 200]
            assert (await post()).status_code == 200

    run(scenario, step_s=0.03)


# --- Without keys -----------------------------------------------------------------------------------------------------


def scope_of(client: tuple[str, int | None] | None, origin: str | None = None) -> dict[str, Any]:
    """A request of that client, which HAProxy on this machine may have sent on."""
    headers = [] if origin is None else [(b"origin", origin.encode())]
    headers.append((b"host", b"localhost"))
    return {"type": "http", "path": "/v1/models", "headers": headers, "client": client, "server": ("127.0.0.1", 80)}


def test_without_keys_only_this_machine_is_answered() -> None:
    closed, open_ = access.Access(None), access.Access(None, anyone=True)
    for local in (("127.0.0.1", 80), ("127.8.8.8", 80), ("::1", 80), ("localhost", 80), None, ("/run/s", None)):
        closed.admit(scope_of(local), "r")
    for host in ("10.0.0.5", "192.168.1.2", "::ffff:10.0.0.5", "example.com", "0.0.0.0"):
        open_.admit(scope_of((host, 80)), "r")
        with pytest.raises(RequestError, match=r"server\.api_keys") as caught:
            closed.admit(scope_of((host, 80)), "r")
        assert caught.value.status == 403


def test_clients_without_keys_share_by_their_address_and_an_ipv6_site_counts_once() -> None:
    owners = {
        host: access.Access(None, anyone=True).admit(scope_of((host, 80)), "r")[0].share_owner
        for host in ("10.0.0.5", "10.0.0.6", "::ffff:10.0.0.5", "2001:db8::1", "2001:db8::ffff:2", "2001:db8:0:1::1")
    }
    assert owners["10.0.0.5"] == owners["::ffff:10.0.0.5"] == "10.0.0.5"
    assert owners["10.0.0.6"] == "10.0.0.6"
    assert owners["2001:db8::1"] == owners["2001:db8::ffff:2"] != owners["2001:db8:0:1::1"]
    assert access.Access(None).admit(scope_of(None), "r")[0].share_owner == ""


def test_without_keys_no_page_of_another_site_is_answered() -> None:
    closed = access.Access(None)
    for origin in ("http://localhost:3000", "http://127.0.0.1:8000", "http://[::1]:8000"):
        closed.admit(scope_of(("127.0.0.1", 80), origin), "r")
    for origin in ("https://evil.example", "null", "http://127.0.0.1.evil.example", "http://localhost.evil"):
        with pytest.raises(RequestError, match="other sites"):
            closed.admit(scope_of(("127.0.0.1", 80), origin), "r")
        access.Access(None, anyone=True).admit(scope_of(("127.0.0.1", 80), origin), "r")


def status_for(stack_access: access.Access, *hosts: str | None, version: str = "1.1", path: str = "/v1/models") -> int:
    headers = [(b"host", host.encode("latin-1")) for host in hosts if host is not None]
    scope = {"type": "http", "path": path, "headers": headers, "server": ("127.0.0.1", 80), "http_version": version}
    try:
        stack_access.admit(scope, "r")
    except RequestError as error:
        return error.status if error.code in ("host_refused", "invalid_host") else -1
    return 200


def test_without_keys_only_requests_to_the_servers_own_names_are_answered() -> None:
    local = access.Access(None, host_names={"inside.example"})
    public = access.Access(None, anyone=True, host_names={"inside.example"})
    for own in ("localhost", "LOCALHOST:8000", "127.0.0.1", "127.9.9.9:80", "[::1]:8000", "Inside.Example.:80"):
        assert status_for(local, own) == status_for(public, own) == 200, own
    for address in ("10.0.0.5:8000", "0.0.0.0", "[2001:db8::1]", "169.254.169.254"):
        assert (status_for(local, address), status_for(public, address)) == (403, 200), address
    for name in ("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "x"):
        assert status_for(local, name) == status_for(public, name) == 403, name
    for odd in ("", "a b", "localhost@evil.example", "localhost:80:80", "::1", "\xe9", "localhost/x", "[::1"):
        assert status_for(local, odd) == status_for(public, odd) == 400, odd
    assert status_for(local) == status_for(local, "localhost", "localhost") == 400
    assert status_for(local, version="1.0") == 200  # it has no Host


def test_with_keys_a_host_of_any_name_is_answered(keys: Keys) -> None:
    headers = [(b"authorization", keys.bearer("alice")["authorization"].encode()), (b"host", b"evil.example")]
    scope = {"type": "http", "path": "/v1/models", "headers": headers, "server": ("127.0.0.1", 80)}
    access.Access(KeyRing(keys.path)).admit(scope, "r")


def test_a_server_that_answers_other_machines_knows_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "Node7")
    monkeypatch.setattr("socket.getfqdn", lambda: "node7.lan.")
    assert access.own_host_names(ServerConfig(api_keys=False, host_names=["LLM.example"])) == {
        "node7",
        "node7.lan",
        "llm.example",
    }
    assert access.own_host_names(ServerConfig()) == frozenset()


def test_a_page_whose_name_points_here_reads_nothing(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        async with served(stack.model) as url, httpx.AsyncClient(base_url=url, trust_env=False) as http:
            evil = {"host": "evil.example"}
            # Admin routes are refused before they are found to be absent, so all routes answer alike.
            for route in ROUTES:
                response = await http.request(route.method, route.path.split("{")[0], headers=evil)
                if route.roles == access.ANYONE:
                    assert response.status_code != 403, route.path
                elif "{" not in route.path:
                    assert response.status_code == 403, (route.path, response.text)
            assert (await http.get("/v1/models")).status_code == 200

    run(scenario)


def test_a_public_address_without_keys_is_refused_at_start_up(tmp_path: Path, keys: Keys) -> None:
    file = Path(__file__).parents[2] / "configs" / "smollm2-135m.yaml"
    for host in ("0.0.0.0", "::", "10.1.2.3", "example.com"):
        with pytest.raises(ConfigError, match=r"python -m cluster key ID.*http_options\.host=127"):
            load_app_config(file, [f"http_options.host='{host}'"])
        load_app_config(file, [f"http_options.host='{host}'", f"server.api_keys={keys.path}"])
        load_app_config(file, [f"http_options.host='{host}'", "server.api_keys=false"])
    for host in ("127.0.0.1", "localhost", "::1"):
        load_app_config(file, [f"http_options.host='{host}'"])
    with pytest.raises(ConfigError, match="api_keys"):
        load_app_config(file, ["server.api_keys=true"])
