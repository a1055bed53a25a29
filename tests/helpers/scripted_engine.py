"""The HTTP surface over a coordinator that answers requests with given tokens, without a model or Ray.

A test module makes a fixture of `runner` and hands it scenarios: coroutines that talk to a `Stack`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import uvicorn
from starlette.types import ASGIApp

from cluster.http.guard import Guard
from cluster.messages.engine import (
    Abort,
    EngineToCoordinator,
    Finished,
    FinishReason,
    GenerateRequest,
    Prefilled,
    PromptLogprobs,
    StepOutput,
    Submit,
    TokenLogprobs,
)
from cluster.requests.engine_client import EngineClient
from cluster.requests.served_model import ServedModel
from cluster.serve.ingress import create_app
from cluster.text.tokenizer import Tokenizer
from configs.schema import ServerConfig
from parallel.sockets import pack_frame, read_frame

EOS = 2
REPLY = "Hello there 😀, 漢字 and more."
MODEL = "test/smollm2"


@dataclass
class ScriptedCoordinator:
    """Answers requests with given tokens, one a step, as the scheduler would end them."""

    reply: list[int]
    replies: list[list[int]] = field(default_factory=list)
    """In place of `reply`: answers in turn, over and over."""
    step_s: float = 0.0
    fail_after: int | None = None
    """Tokens after which requests end with an engine error."""
    public_message: str | None = None
    """What callers may be told of that error."""
    error_code: str = "engine_error"
    overloaded: bool = False
    burst: int = 1
    """Tokens that come at once."""
    hang_after: int | None = None
    """Tokens after which nothing comes any more."""
    submissions: list[list[GenerateRequest]] = field(default_factory=list)
    """What came at once, in order."""
    aborted: list[int] = field(default_factory=list)
    num_flushes: int = 0

    @property
    def requests(self) -> list[GenerateRequest]:
        """All that were submitted, in order."""
        return [request for requests in self.submissions for request in requests]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        decoder = msgspec.msgpack.Decoder(EngineToCoordinator)
        running: set[asyncio.Task[None]] = set()
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                message = decoder.decode(await read_frame(reader))
                if isinstance(message, Submit):
                    turn = len(self.requests)
                    self.submissions.append(requests := message.requests())
                    reply = self.replies[turn % len(self.replies)] if self.replies else self.reply
                    running.add(asyncio.create_task(self._generate(requests, reply, writer)))
                elif isinstance(message, Abort):
                    self.aborted += message.ids
                else:
                    self.num_flushes += 1
        for task in running:
            task.cancel()
        writer.close()

    async def _generate(self, requests: list[GenerateRequest], reply: list[int], writer: asyncio.StreamWriter) -> None:
        def send(output: StepOutput) -> None:
            writer.write(pack_frame(msgspec.msgpack.encode(output)))

        if self.overloaded:
            error = {"reason": FinishReason.ERROR, "error": "The queue is full.", "error_code": "engine_overloaded"}
            send(StepOutput(finished=[Finished(id=request.id, **error) for request in requests]))  # type: ignore[arg-type]
            return
        live = list(requests)
        for position, token in enumerate(reply):
            if position % self.burst == 0:
                await asyncio.sleep(self.step_s)
            live = [request for request in live if request.id not in self.aborted]
            if not live or position == self.hang_after:
                return
            if position == self.fail_after:
                error = {
                    "error": "rank 1 of /tmp died",
                    "error_code": self.error_code,
                    "public_message": self.public_message,
                }
                ends = [Finished(id=request.id, reason=FinishReason.ERROR, **error) for request in live]  # type: ignore[arg-type]
                send(StepOutput(finished=ends))
                return
            finished = [end for request in live if (end := _end(request, reply, position)) is not None]
            send(
                StepOutput(
                    ids=b"".join(struct.pack("<q", request.id) for request in live),
                    tokens=struct.pack("<i", token) * len(live),
                    logprobs=[_logprobs(request) for request in live if request.sampling.num_logprobs >= 0],
                    prompt_logprobs=[
                        _prompt_logprobs(request)
                        for request in live
                        if request.sampling.prompt_logprobs >= 0 and position == 0
                    ],
                    prefilled=[Prefilled(request.id, 16) for request in live] if position == 0 else [],
                    finished=finished,
                )
            )
            ended = {end.id for end in finished}
            live = [request for request in live if request.id not in ended]


def _end(request: GenerateRequest, reply: list[int], position: int) -> Finished | None:
    sampling, token = request.sampling, reply[position]
    if token in sampling.stop_token_ids or (token == EOS and not sampling.ignore_eos):
        return Finished(id=request.id, reason=FinishReason.STOP, stop_token_id=token)
    if position + 1 == sampling.max_tokens or position + 1 == len(reply):
        return Finished(id=request.id, reason=FinishReason.LENGTH)
    return None


def _logprobs(request: GenerateRequest) -> TokenLogprobs:
    """ "Hello" is the likeliest, all others are impossible; those asked for by id have -1, -2 and so on."""
    k, num_items = request.sampling.num_logprobs, len(request.sampling.item_lens) or 1
    extra = request.sampling.logprob_token_ids * num_items
    labels = [-1.0 - i for i in range(len(extra) // num_items)] * num_items
    likeliest = [19556, 5, *range(100, 200)][:k]
    return TokenLogprobs(
        id=request.id,
        logprob=-1.5,
        top_ids=np.array([*likeliest, *extra], "<i4").tobytes(),
        top_logprobs=np.array([*[-0.5, *[float("-inf")] * 200][:k], *labels], "<f4").tobytes(),
    )


def _prompt_logprobs(request: GenerateRequest) -> PromptLogprobs:
    """Each token has minus its position; "Hello" has -0.5 everywhere, and the token itself is the second likeliest."""
    ids = np.frombuffer(request.prompt, "<i4")[1:]
    k = request.sampling.prompt_logprobs
    own = -np.arange(1, len(ids) + 1, dtype="<f4")
    top_ids = np.tile(np.array([19556, 0, *range(100, 200)], "<i4"), (len(ids), 1))
    top_logprobs = np.tile(np.array([-0.5, 0.0] + [-99.0] * 100, "<f4"), (len(ids), 1))
    top_ids[:, 1], top_logprobs[:, 1] = ids, own
    return PromptLogprobs(
        id=request.id,
        start=1,
        logprobs=own.tobytes(),
        top_ids=top_ids[:, :k].tobytes(),
        top_logprobs=top_logprobs[:, :k].tobytes(),
    )


def prompt_ids(request: GenerateRequest) -> list[int]:
    """The tokens of a request's prompt."""
    ids: list[int] = np.frombuffer(request.prompt, "<i4").tolist()
    return ids


@dataclass
class Stack:
    """Everything between an HTTP client and the scripted coordinator."""

    coordinator: ScriptedCoordinator
    engine: EngineClient
    model: ServedModel
    http: httpx.AsyncClient

    async def chat(self, **fields: Any) -> httpx.Response:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}
        return await self.http.post("/v1/chat/completions", json=body)

    async def complete(self, **fields: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"model": MODEL, "prompt": "hi", **fields})

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():  # noqa: ASYNC110 -- what it waits for has no event
            await asyncio.sleep(0.002)


Scenario = Callable[[Stack], Coroutine[Any, Any, None]]


Run = Callable[..., None]


def runner(smollm2: Tokenizer, folder: Path) -> Run:
    """run(scenario, server=..., timeout_s=60, **script): a fresh stack for each scenario, for a bounded time."""
    reply = [*smollm2.encode(REPLY, add_special_tokens=False), EOS]

    @contextlib.asynccontextmanager
    async def stack(server: ServerConfig, max_model_len: int, script: dict[str, Any]) -> AsyncIterator[Stack]:
        coordinator = ScriptedCoordinator(**{"reply": reply, **script})
        path = folder / "engine.sock"
        listening = await asyncio.start_unix_server(coordinator.serve, path)
        engine = await EngineClient.connect(str(path))
        model = ServedModel(
            engine, smollm2, model_name=MODEL, max_model_len=max_model_len, server=server, version="1.2"
        )
        transport = httpx.ASGITransport(create_app(model))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            yield Stack(coordinator, engine, model, http)
        await model.close()
        await engine.close()
        listening.close()

    async def bounded(scenario: Scenario, timeout_s: float, *stack_of: Any) -> None:
        async with asyncio.timeout(timeout_s), stack(*stack_of) as made:
            await scenario(made)

    def go(
        scenario: Scenario,
        server: ServerConfig | None = None,
        max_model_len: int = 128,
        *,
        timeout_s: float = 60,
        **script: Any,
    ) -> None:
        asyncio.run(bounded(scenario, timeout_s, server or ServerConfig(), max_model_len, script))

    return go


def events(response: httpx.Response) -> list[Any]:
    """The SSE payloads of a response, [DONE] as the string."""
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks[-1] == ""
    assert all(block.startswith("data: ") for block in blocks[:-1])
    payloads = [block.removeprefix("data: ") for block in blocks[:-1]]
    return [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]


def error_of(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["code"] == code
    error: dict[str, Any] = body["error"]
    return error


@contextlib.asynccontextmanager
async def served(what: ServedModel | Guard | ASGIApp, at: int = 0, **options: Any) -> AsyncIterator[str]:
    """The URL of a model, or of its app, behind uvicorn on a loopback port: `at`, or a free one."""
    app = create_app(what) if isinstance(what, ServedModel) else what
    listening = socket.socket(proto=socket.IPPROTO_TCP)  # else asyncio leaves Nagle on: 40 ms an answer
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 10)  # else megabytes wait for a client
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind(("127.0.0.1", at))
    config = uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=1, **options)
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve(sockets=[listening]))
    while not server.started:  # noqa: ASYNC110 -- uvicorn has no event for it
        await asyncio.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task
        listening.close()
