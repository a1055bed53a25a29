"""The ASGI endpoint of every route with a JSON body: reads the body, runs the handler, delivers the answer."""

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
    """Answers the requests to one route.

    A request runs as one task, beside another task that waits for the client to disconnect. This holds for streamed and
    whole answers, queued or running. A slow client only slows its own answer: no more is written than its connection
    accepts, and what the engine generates meanwhile waits as token ids. Errors before the first byte are raised, and
    the guard writes them. A later error becomes the last event of a stream, or cuts off any other answer.
    """

    handle: Handler
    server: ServerConfig
    active: ActiveRequests
    turns: LoopTurns
    """The turns that all endpoints of an event loop share."""
    engine_is_there: Callable[[], bool]
    on_stream_error: Callable[[RequestError], None]
    """Called with every error that ends a stream after it has begun."""

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
                # One task is left, even if this task is cancelled from outside.
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
            # This is done here, because the task that awaits the answer may be cancelled again before its end.
            delivery.close()

    async def _fail(self, error: Exception, context: RequestContext, delivery: Delivery) -> None:
        failure = as_request_error(error, context.request_id, engine_is_there=self.engine_is_there())
        if not delivery.streaming:
            raise failure  # a whole answer that has begun can only be cut off
        self.on_stream_error(failure)
        await delivery.fail(failure)


async def _client_gone(receive: Receive) -> None:
    """Returns once the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass
