"""The ASGI endpoint of every route that takes a JSON body: reads it, runs the handler, delivers the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass

from starlette.types import Receive, Scope, Send

from cluster.http.active import ActiveRequests
from cluster.http.body import ClientDisconnect, read_body
from cluster.http.context import RequestContext, routed_context
from cluster.http.delivery import Delivery
from cluster.http.http_errors import as_request_error
from cluster.http.response import HttpResponse, LoopTurns
from configs.errors import RequestError
from configs.schema import ServerConfig

Handler = Callable[[bytes, RequestContext], Awaitable[HttpResponse]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Answers one route.

    The request runs as a task beside one that watches for the client going away, whatever the answer is: streamed or
    not, queued or running. A client that reads slowly slows its own answer: nothing more is written for it than its
    connection takes, and what the engine generates meanwhile waits as token ids.

    Errors before the first byte are raised, for the guard to write; later ones become the last event of a stream, and
    cut any other answer off.
    """

    handle: Handler
    server: ServerConfig
    active: ActiveRequests
    turns: LoopTurns
    """Shared by all endpoints of an event loop."""
    engine_is_there: Callable[[], bool]
    on_stream_error: Callable[[RequestError], None]
    """Told of every error that ends a stream which had begun."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.active.check_admits()
        context = routed_context(scope)
        try:
            body = await read_body(scope, receive, self.server)
        except ClientDisconnect:
            return
        delivery = Delivery(send, self.turns)
        answering = asyncio.create_task(self._answer(body, context, delivery))
        with self.active.track(context, answering) as request:
            delivery.request = request
            watching = asyncio.create_task(_client_gone(receive))
            try:
                await asyncio.wait((answering, watching), return_when=asyncio.FIRST_COMPLETED)
            finally:
                # Whichever is left, also when this task is cancelled from outside.
                for task in (answering, watching):
                    task.cancel()
                await asyncio.gather(answering, watching, return_exceptions=True)
        if not answering.cancelled():
            answering.result()

    async def _answer(self, body: bytes, context: RequestContext, delivery: Delivery) -> None:
        try:
            response = await self.handle(body, context)
            async with aclosing(response.chunks) as chunks:
                if response.streamed:
                    delivery.keep_alive(response)
                    async for chunk in chunks:
                        await delivery.stream(chunk, response)
                    await delivery.end(response)
                else:
                    await delivery.whole(chunks, response)
        except asyncio.CancelledError:
            if delivery.request is None or delivery.request.error is None:
                raise
            await self._fail(delivery.request.error, context, delivery)
        except Exception as error:  # noqa: BLE001 -- the last place that can still tell the client of a stream
            await self._fail(error, context, delivery)
        finally:
            # Here, as whoever waits for the answer may be cancelled again, and leave before its end.
            delivery.close()

    async def _fail(self, error: Exception, context: RequestContext, delivery: Delivery) -> None:
        failure = as_request_error(error, context.request_id, engine_is_there=self.engine_is_there())
        if not delivery.streaming:
            raise failure  # an answer that has begun and is no stream is cut: nothing can be said in it
        self.on_stream_error(failure)
        await delivery.fail(failure)


async def _client_gone(receive: Receive) -> None:
    """Returns once the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
