"""Which requests begin alike: the key a proxy routes by, and how it comes to the replica's router."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from cluster.http import edge
from cluster.http.affinity import PEEKED_BYTES, beginning_key, keeping_replica, response_prefix
from cluster.http.body import BODY, read_body
from cluster.http.edge import Edge
from configs.errors import RequestError
from configs.schema import ServerConfig


def key_of(body: dict[str, Any], **how: Any) -> str:
    key = beginning_key(json.dumps(body, **how).encode())
    assert key is not None
    return key


def turns(first: str, count: int, system: str = "Be kind.") -> list[dict[str, Any]]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": first}]
    for turn in range(count - 1):
        messages += [{"role": "assistant", "content": f"a{turn}"}, {"role": "user", "content": f"q{turn}"}]
    return messages


@pytest.mark.parametrize("how", [{}, {"indent": 2}, {"separators": (",", ":")}])
def test_the_turns_of_a_conversation_have_one_key(how: Any) -> None:
    bodies = [{"model": "m", "temperature": t, "messages": turns("Hello", t + 1), "stop": ["x"]} for t in range(5)]
    assert len({key_of(body, **how) for body in bodies}) == 1
    assert key_of({"messages": turns("Goodbye", 3)}, **how) != key_of(bodies[0], **how)
    assert key_of({"messages": turns("Hello", 3, system="Be brief.")}, **how) != key_of(bodies[0], **how)


def test_parts_of_content_are_content() -> None:
    def of(text: str, more: int) -> str:
        content = [{"type": "text", "text": text}]
        return key_of({"messages": [{"role": "user", "content": content}, *turns("x", more)]})

    assert of("Hello", 1) == of("Hello", 3)
    assert of("Hello", 1) != of("Hello!", 1)


@pytest.mark.parametrize("field", ["prompt", "input", "text"])
def test_long_prompts_are_alike_when_their_beginnings_are(field: str) -> None:
    document = "The same long document. " * 300
    keys = {key_of({"model": "m", field: document + question}) for question in ("Who?", "When?", "Why?" * 5000)}
    assert len(keys) == 1
    assert key_of({"model": "m", field: "Another. " + document}) not in keys
    assert key_of({field: "Who?"}) != key_of({field: "When?"})


def test_a_long_first_message_is_alike_when_its_beginning_is() -> None:
    document = "The same long document. " * 300
    assert key_of({"messages": turns(document + "Who?", 1)}) == key_of({"messages": turns(document + "When?", 4)})


def test_token_ids_are_a_prompt() -> None:
    assert key_of({"prompt": [1, 2, 3]}) != key_of({"prompt": [1, 2, 4]})
    assert key_of({"input_ids": [1, 2, 3]}) == key_of({"input_ids": [1, 2, 3], "stream": True})


def test_clients_are_kept_apart() -> None:
    body = json.dumps({"prompt": "Hello"}).encode()
    assert beginning_key(body, b"one") != beginning_key(body, b"two")


@pytest.mark.parametrize(
    "body",
    [b"", b"{}", b"[]", b'{"model":"m"}', b'{"prompt"', b"\xff\xfe", b"prompt: x", b'{"tools":"' + b"x" * (1 << 20)],
)
def test_what_shows_no_prompt_has_no_key(body: bytes) -> None:
    assert beginning_key(body) is None


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages":',
        b'{"messages":[',
        b'{"messages":[}',
        b'{"messages":[1,',
        b'{"messages":[{"role":"user","content":"\xf0\x9f',
        b'{"messages":' + b"[" * 20_000,
        b'{"messages":' + b'{"a":' * 20_000,
        b'{"prompt":' + b"9" * 20_000,
    ],
)
def test_no_body_is_too_odd(body: bytes) -> None:
    assert beginning_key(body) == beginning_key(body)


def test_random_cuts_of_a_body_never_fail() -> None:
    rng = random.Random(5)
    raw = json.dumps({"messages": turns('Hello "there" \\ 😀', 4)}, ensure_ascii=False).encode()
    for _ in range(500):
        mutated = bytearray(raw[: rng.randrange(len(raw))])
        for _ in range(rng.randrange(4)):
            if mutated:
                mutated[rng.randrange(len(mutated))] = rng.randrange(256)
        beginning_key(bytes(mutated))


# --- In the proxy -----------------------------------------------------------------------------------------------------


def through(
    parts: list[bytes], headers: list[tuple[bytes, bytes]], *, path: str = "/", pause_s: float = 0.0
) -> tuple[Scope, bytes]:
    """The scope and the body that the app behind the edge sees."""
    seen: list[Scope] = []
    body = b""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal body
        seen.append(scope)
        more = True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def run() -> None:
        messages = [
            {"type": "http.request", "body": part, "more_body": i + 1 < len(parts)} for i, part in enumerate(parts)
        ]

        async def receive() -> Message:
            await asyncio.sleep(pause_s)
            return messages.pop(0)

        async def send(message: Message) -> None:
            pass

        scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
        await Edge(app)(scope, receive, send)

    asyncio.run(run())
    return seen[0], body


def session_of(scope: Scope) -> bytes | None:
    [value] = [value for name, value in scope["headers"] if name == b"x-session-id"] or [None]
    return value


def test_the_proxy_names_the_beginning_and_passes_the_body_on() -> None:
    raw = json.dumps({"messages": turns("Hello", 2), "pad": "x" * (2 * PEEKED_BYTES)}).encode()
    parts = [raw[:10], raw[10:200], raw[200:9000], raw[9000:]]
    scope, body = through(parts, [])
    assert body == raw
    assert session_of(scope) == session_of(through([raw], [])[0])
    assert (session_of(scope) or b"").startswith(b"prefix-")
    other, _ = through(parts, [(b"authorization", b"Bearer k")])
    assert session_of(other) != session_of(scope)


def test_a_client_that_names_its_conversation_is_believed() -> None:
    raw = json.dumps({"messages": turns("Hello", 2)}).encode()
    scope, body = through([raw], [(b"x-session-id", b"mine")])
    assert (session_of(scope), body) == (b"mine", raw)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses/resp_ab12_0f", b""),
        ("/llm/v1/responses/resp_ab12_0f/cancel", b""),
        ("/v1/responses", b'{"input": "And then?", "previous_response_id" : "resp_ab12_0f"}'),
    ],
)
def test_what_speaks_of_a_response_goes_to_the_replica_that_keeps_it(path: str, body: bytes) -> None:
    for headers in ([], [(b"x-session-id", b"mine")]):
        scope, seen = through([body], headers, path=path)
        assert (session_of(scope), seen) == (b"replica-ab12", body)


@pytest.mark.parametrize("id_", ["resp_0f", "resp_AB_0f", "chatcmpl-1", "resp_../x_"])
def test_other_ids_name_no_replica(id_: str) -> None:
    scope, _ = through([json.dumps({"previous_response_id": id_}).encode()], [], path=f"/v1/responses/{id_}")
    assert session_of(scope) is None


def test_a_replicas_prefix_is_what_the_proxy_reads() -> None:
    assert keeping_replica(f"/v1/responses/{response_prefix('8dq07xp3')}{'0' * 32}", b"") == "8dq07xp3"
    assert response_prefix("") == "resp_"


def test_a_slow_client_is_served_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge, "_PEEK_S", 0.05)
    raw = json.dumps({"messages": turns("Hello", 2)}).encode()
    scope, body = through([raw[:5], raw[5:50], raw[50:]], [], pause_s=0.1)
    assert body == raw
    assert session_of(scope) is None


# --- The body, which rides along with the request --------------------------------------------------------------------


def test_a_small_body_goes_with_its_request_and_comes_as_messages_too() -> None:
    raw = json.dumps({"messages": turns("Hello", 2)}).encode()
    for parts in ([raw], [raw[:5], raw[5:50], raw[50:]], [b"", raw, b""]):
        scope, body = through(parts, [])
        assert (scope[BODY], body) == (raw, raw)


def test_a_body_that_did_not_come_whole_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge, "_PEEK_S", 0.05)
    long = b"x" * (2 * PEEKED_BYTES)
    assert BODY not in through([long[:PEEKED_BYTES], long], [])[0]
    assert BODY not in through([b"{", b"}"], [], pause_s=0.1)[0]

    async def left() -> Scope:
        """A client that leaves in the midst of its body."""
        messages = [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]
        seen: list[Scope] = []

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            seen.append(scope)

        async def receive() -> Message:
            return messages.pop(0)

        async def send(message: Message) -> None:
            pass

        await Edge(app)({"type": "http", "method": "POST", "path": "/", "headers": []}, receive, send)
        return seen[0]

    assert BODY not in asyncio.run(left())


def test_a_body_that_came_along_is_read_without_its_messages_and_within_the_limit() -> None:
    async def never() -> Message:
        raise AssertionError("nothing is asked for")

    scope = {"type": "http", "headers": [], BODY: b"{}" * 600}
    assert asyncio.run(read_body(scope, never, ServerConfig())) == b"{}" * 600
    with pytest.raises(RequestError) as caught:
        asyncio.run(read_body(scope, never, ServerConfig(max_body_bytes=1024)))
    assert caught.value.status == 413
