"""What every request passes and every response carries: names, headers, limits, errors; over a scripted coordinator."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from cluster.http.active import ActiveRequests
from cluster.http.context import RequestContext, current_request
from cluster.http.guard import with_clean_names
from cluster.serve.ingress import create_app
from tests.helpers.scripted_engine import MODEL, Run, Stack, error_of

BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


# --- Names ------------------------------------------------------------------------------------------------------------


def test_every_response_has_the_requests_name_and_no_sniffing(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        for method, path, status in (
            ("GET", "/health", 200),
            ("GET", "/ready", 503),
            ("GET", "/nothing", 404),
            ("DELETE", "/v1/models", 405),
            ("POST", "/v1/completions", 400),
        ):
            named = await stack.http.request(method, path, headers={"x-request-id": "my-id.1"})
            assert (named.status_code, named.headers["x-request-id"]) == (status, "my-id.1")
            assert named.headers["x-content-type-options"] == "nosniff"
            assert not any(name.startswith("access-control") for name in named.headers)
            unnamed = await stack.http.request(method, path)
            assert len(unnamed.headers["x-request-id"]) == 32
        stream = await stack.chat(stream=True)
        assert len(stream.headers["x-request-id"]) == 32

    run(scenario)


ODD_NAMES = [b"a b", b"x" * 129, b"x" * 14_000, "é".encode(), b"\xff\xfe", b'"', b"a\tb", b"<script>", b"\x1b[31m"]


@pytest.mark.parametrize("header", [b"x-request-id", b"x-session-id", b"X_Session_Id"])
@pytest.mark.parametrize("name", ODD_NAMES, ids=range(len(ODD_NAMES)))
def test_a_name_with_odd_bytes_is_refused_with_an_id_of_ours(
    run: Run, header: bytes, name: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(stack: Stack) -> None:
        for path in ("/v1/chat/completions", "/v1/messages"):
            response = await stack.http.post(path, json=BODY, headers=[(header, name)])
            assert response.status_code == 400
            assert response.headers["content-type"] == "application/json"
            [shown] = response.headers.get_list("x-request-id")
            assert len(shown) == 32
            assert "x-s" in response.json()["error"]["message"] or "x-r" in response.json()["error"]["message"]
        assert stack.coordinator.requests == []

    run(scenario)
    assert name.decode("latin-1") not in caplog.text


def test_a_name_that_comes_twice_is_refused_and_an_empty_one_is_none(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        for names in (("x-request-id", "x-request-id"), ("x-session-id", "x_session_id")):
            response = await stack.http.get("/health", headers=[(names[0], "a"), (names[1], "b")])
            error_of(response, 400, "invalid_header")
        response = await stack.http.get("/health", headers={"x-request-id": "", "x-session-id": ""})
        assert response.status_code == 200
        assert len(response.headers["x-request-id"]) == 32

    run(scenario)


def test_behind_ray_serve_a_response_has_one_name_and_no_header_steers_ray(run: Run) -> None:
    """Ray's own middleware stands between `with_clean_names` and the app, as in a replica."""
    from ray.serve._private.http_util import RequestIdMiddleware

    async def scenario(stack: Stack) -> None:
        seen: list[dict[bytes, bytes]] = []
        inner = create_app(stack.model, names_responses=False)

        async def replica(scope: Scope, receive: Receive, send: Send) -> None:
            headers = dict(scope["headers"])
            seen.append(headers)
            for value in headers.values():
                value.decode()  # as Ray does
            await inner(scope, receive, send)

        app = with_clean_names(RequestIdMiddleware(replica))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
            for value, status in ((b"\xff\xfe", 400), (b"fit", 200), (None, 200)):
                headers = [] if value is None else [(b"x-request-id", value), (b"x-session-id", value)]
                steering = [(b"serve_multiplexed_model_id", b"\xff"), (b"x-request-disconnect-disabled", b"?1")]
                response = await http.get("/v1/models", headers=headers + steering)
                assert response.status_code == status, response.text
                [shown] = response.headers.get_list("x-request-id")
                assert (shown == "fit") == (value == b"fit")
                assert {b"serve_multiplexed_model_id", b"x-request-disconnect-disabled"}.isdisjoint(seen[-1])

    run(scenario)


def test_a_handler_and_what_it_starts_know_the_request(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(stack: Stack) -> None:
        seen: list[RequestContext | None] = []
        submit = stack.engine.submit

        def recording(*args: Any, **kwargs: Any) -> Any:
            seen.append(current_request())
            return submit(*args, **kwargs)

        monkeypatch.setattr(stack.engine, "submit", recording)
        await stack.http.post("/v1/chat/completions", json=BODY, headers={"x-request-id": "one"})
        await stack.chat()
        assert [None if context is None else context.client for context in seen] == ["", ""]
        assert seen[0] == RequestContext(request_id="one", network="127.0.0.1")
        assert seen[1] is not None
        assert seen[1].request_id != "one"
        assert current_request() is None

    run(scenario)


def test_salts_differ_by_client_and_by_what_a_client_asks_for() -> None:
    one = RequestContext(request_id="r", client="one", salt=b"1" * 32)
    two = RequestContext(request_id="r", client="two", salt=b"2" * 32)
    open_ = RequestContext(request_id="r")
    assert open_.cache_salt() == b""
    salts = [one.cache_salt(), two.cache_salt(), *(c.cache_salt(asked) for c in (one, two, open_) for asked in "ab")]
    assert len(set(salts)) == len(salts)
    assert one.cache_salt("a") == one.cache_salt("a")
    assert "1" * 32 not in repr(one)


# --- Errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_says_when_to_try_again(run: Run, stream: bool) -> None:
    async def scenario(stack: Stack) -> None:
        response = await stack.chat(stream=stream)
        error_of(response, 503, "engine_overloaded")
        assert response.headers["retry-after"] == "1"
        assert response.headers["retry-after-ms"] == "1000"
        assert response.headers["x-should-retry"] == "true"

    run(scenario, overloaded=True)


def test_what_no_retry_mends_says_so(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(stack: Stack) -> None:
        def broken(*args: object, **kwargs: object) -> None:
            raise RuntimeError("/secret/path")

        monkeypatch.setattr(stack.engine, "submit", broken)
        response = await stack.http.post("/v1/chat/completions", json=BODY, headers={"x-request-id": "find-me"})
        error = error_of(response, 500, "internal_error")
        assert "find-me" in error["message"]
        assert "secret" not in response.text
        assert response.headers["x-should-retry"] == "false"
        assert "x-should-retry" not in (await stack.chat(max_tokens=0)).headers

    run(scenario)


def test_head_options_and_wrong_methods_have_the_same_shape(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        assert (await stack.http.head("/health")).status_code == 200
        for method in ("OPTIONS", "PUT", "PATCH", "TRACE"):
            response = await stack.http.request(method, "/v1/chat/completions")
            error_of(response, 405, "method_not_allowed")
            assert response.headers["allow"] == "POST"
        assert (await stack.http.head("/v1/chat/completions")).status_code == 405
        for path in ("//v1/models", "/v1/models/", "/health/", "/V1/models", "/v1/chat"):
            error_of(
                await stack.http.get(f"http://test{path}"),
                404,
                "not_found" if "models/" not in path else "model_not_found",
            )

    run(scenario)


def test_a_websocket_is_refused(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        sent: list[Message] = []

        async def receive() -> Message:
            return {"type": "websocket.connect"}

        async def send(message: Message) -> None:
            sent.append(dict(message))

        await create_app(stack.model)(
            {"type": "websocket", "path": "/v1/chat/completions", "headers": []}, receive, send
        )
        assert sent == [{"type": "websocket.close", "code": 1008}]

    run(scenario)


# --- Slow readers and stopping ----------------------------------------------------------------------------------------


class Client:
    """One streamed request over the bare ASGI app: what it sent so far, and a hand on what it receives next."""

    def __init__(self, stack: Stack, active: ActiveRequests, **fields: Any) -> None:
        self.sent: list[Message] = []
        self.writable = asyncio.Event()
        self.writable.set()
        self.room: int | None = None
        """How many messages it takes before it is not writable any more."""
        self.messages: asyncio.Queue[Message] = asyncio.Queue()
        body = json.dumps({**BODY, "stream": True, **fields}).encode()
        self.messages.put_nowait({"type": "http.request", "body": body, "more_body": False})
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/chat/completions",
            "query_string": b"",
            "headers": [(b"x-request-id", b"the-one")],
            "root_path": "",
        }
        self.task = asyncio.create_task(create_app(stack.model, active)(scope, self.messages.get, self._send))

    async def _send(self, message: Message) -> None:
        await self.writable.wait()
        self.sent.append(message)
        if len(self.sent) == self.room:
            self.writable.clear()

    @property
    def payloads(self) -> list[Any]:
        blocks = b"".join(message.get("body", b"") for message in self.sent).decode().split("\n\n")[:-1]
        texts = [block.removeprefix("data: ") for block in blocks]
        return [text if text == "[DONE]" else json.loads(text) for text in texts]


def test_a_full_connection_holds_back_an_answer_and_loses_nothing_of_it(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        client = Client(stack, ActiveRequests())
        await stack.until(lambda: len(client.sent) >= 2)
        client.writable.clear()
        sent = len(client.sent)
        await stack.until(lambda: stack.engine.num_open == 0)  # the engine goes on meanwhile
        assert len(client.sent) == sent
        client.writable.set()
        await client.task
        *chunks, done = client.payloads
        assert done == "[DONE]"
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks if chunk["choices"])
        assert text == "Hello there 😀, 漢字 and more."
        # What was generated meanwhile came in few chunks.
        assert len(client.sent) < sent + 5

    run(scenario, step_s=0.005)


@pytest.mark.parametrize("reads_later", [True, False])
def test_a_client_that_does_not_read_loses_its_request(run: Run, reads_later: bool) -> None:
    async def scenario(stack: Stack) -> None:
        active = ActiveRequests(send_timeout_s=0.1)
        client = Client(stack, active)
        await stack.until(lambda: len(client.sent) >= 2)
        client.writable.clear()
        await stack.until(lambda: stack.coordinator.aborted == [1])
        if reads_later:
            client.writable.set()
        await client.task
        # Without its last message the server in front closes the connection.
        assert client.sent[-1].get("more_body", True) != reads_later
        if reads_later:
            assert client.payloads[-1]["error"]["code"] == "client_too_slow"
        assert (len(active), stack.engine.num_open) == (0, 0)

    run(scenario, hang_after=6, step_s=0.01)


LONG: dict[str, Any] = {
    "stream": False,
    "messages": [{"role": "user", "content": "a b " * 500}],
    "prompt_logprobs": 20,
    "max_tokens": 1,
}


def test_a_long_answer_that_is_no_stream_goes_as_fast_as_its_client_reads(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        client = Client(stack, ActiveRequests(), **LONG)
        client.room = 1
        await stack.until(lambda: len(client.sent) == 1)
        assert (client.sent[0]["status"], stack.engine.num_open) == (200, 0)
        assert b"content-length" not in dict(client.sent[0]["headers"])
        await asyncio.sleep(0.05)
        assert len(client.sent) == 1
        client.writable.set()
        await client.task
        bodies = [message["body"] for message in client.sent[1:]]
        assert max(map(len, bodies)) < 64 << 10
        assert [message["more_body"] for message in client.sent[1:]] == [True] * (len(bodies) - 1) + [False]
        assert len(json.loads(b"".join(bodies))["prompt_logprobs"]) > 1000

    run(scenario, max_model_len=4096)


def test_a_long_answer_whose_client_does_not_read_is_cut_and_not_ended(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        active = ActiveRequests(send_timeout_s=0.1)
        client = Client(stack, active, **LONG)
        client.room = 1
        await client.task
        # Nothing says that it is complete: the server in front closes the connection.
        assert [message["type"] for message in client.sent] == ["http.response.start"]
        assert len(active) == 0

    run(scenario, max_model_len=4096)


def test_a_stopping_server_lets_answers_end_and_refuses_new_requests(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        active = ActiveRequests()
        await stack.model.warm_up()
        stack.coordinator.step_s = 0.02
        running = Client(stack, active)
        await stack.until(lambda: len(running.sent) >= 2)
        draining = asyncio.create_task(active.drain(10))
        await asyncio.sleep(0)
        late = Client(stack, active)
        await late.task
        assert late.sent[0]["status"] == 503
        assert (b"retry-after", b"1") in late.sent[0]["headers"]
        assert json.loads(late.sent[1]["body"])["error"]["code"] == "engine_overloaded"
        await draining
        await running.task
        assert running.payloads[-1] == "[DONE]"

    run(scenario)


def test_what_outlasts_the_stop_ends_with_an_error_in_its_stream(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        active = ActiveRequests()
        streaming, queued = Client(stack, active), Client(stack, active, stream=False)
        await stack.until(lambda: len(streaming.sent) >= 2)
        await active.drain(0.05)
        await asyncio.gather(streaming.task, queued.task)
        assert streaming.payloads[-1]["error"]["code"] == "engine_overloaded"
        assert streaming.sent[-1]["more_body"] is False
        assert queued.sent[0]["status"] == 503
        assert sorted(stack.coordinator.aborted) == [1, 2]

    run(scenario, hang_after=3)


def test_a_request_can_be_ended_by_its_name(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        active = ActiveRequests()
        client = Client(stack, active)
        await stack.until(lambda: len(client.sent) >= 2)
        assert active.abort("another") == 0
        assert active.abort("the-one") == 1
        await client.task
        assert client.payloads[-1]["error"]["code"] == "request_aborted"
        assert stack.engine.num_open == 0

    run(scenario, hang_after=3)


# --- Limits -----------------------------------------------------------------------------------------------------------


def test_too_many_or_too_long_headers_are_refused(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        many = [(f"x-{i}", "v") for i in range(300)]
        error_of(await stack.http.get("/health", headers=many), 431, "headers_too_large")
        long = {"x-long": "v" * (1 << 17)}
        error_of(await stack.http.post("/v1/completions", headers=long, json=BODY), 431, "headers_too_large")
        assert (await stack.http.get("/health", headers=many[:200])).status_code == 200

    run(scenario)
