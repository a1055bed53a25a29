"""The requests that are being answered: their list, the time for which each client has not read, and how to end one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass

from cluster.http.context import RequestContext
from cluster.messages.state import EngineLife, EngineState
from configs.errors import OverloadedError, RequestError
from parallel.sockets import num_descriptors_left

logger = logging.getLogger(__name__)

UNREAD_TIMEOUT_S = 60.0
"""Seconds for which a client may leave a full connection unread, before its request or connection is ended."""
_STOPPING = "The server is stopping; try again."
_LAST_WORDS_S = 1.0
_SPARE_DESCRIPTORS = 64
"""File descriptors to leave free. Without free ones, new connections are reset without an explanation."""
# Before Linux 6.2, counting 8,000 descriptors takes 13 ms. While many are free, they are counted rarely, so that
# counting takes at most a fiftieth of the event loop's time.
_MANY_DESCRIPTORS = 1024
_COUNT_EVERY_S = 0.02
_COUNT_SHARE = 50
_NO_DESCRIPTORS = "The server has too many connections; try again."
_LOG_EVERY_S = 10.0


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """One request that is being answered."""

    context: RequestContext
    task: asyncio.Task[None]
    error: RequestError | None = None
    """The error given to `end`. None unless `end` was called."""
    stuck_since: float | None = None
    """Time on the event loop's clock since which the client has not read. None while the client reads, or has nothing
    to read."""

    def end(self, error: RequestError) -> None:
        """Ends the request with `error`, which is sent to the client if possible."""
        if self.error is None and not self.task.done():
            self.error = error
            self.task.cancel()


class ActiveRequests:
    """The requests that one replica is answering. Use them on its event loop only."""

    def __init__(self, send_timeout_s: float = UNREAD_TIMEOUT_S, life: EngineLife | None = None) -> None:
        """`life` is the state of the engine, which `drain` changes to draining. If None, a new one."""
        self._life = life or EngineLife()
        self._send_timeout_s = send_timeout_s
        self._requests: set[ActiveRequest] = set()
        self._sweep: asyncio.TimerHandle | None = None
        self._next_log_s = self._next_count_s = 0.0

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def stopping(self) -> bool:
        """Whether `drain` was called and the engine is alive."""
        return self._life.state is EngineState.DRAINING

    def check_admits(self) -> None:
        """Raises OverloadedError while the server is stopping, or has few file descriptors left."""
        if self.stopping:
            raise OverloadedError(_STOPPING)
        if (now := time.monotonic()) < self._next_count_s:
            return
        left = num_descriptors_left()
        if left >= _MANY_DESCRIPTORS:
            self._next_count_s = now + max(_COUNT_EVERY_S, _COUNT_SHARE * (time.monotonic() - now))
        elif left < _SPARE_DESCRIPTORS:
            if now >= self._next_log_s:
                self._next_log_s = now + _LOG_EVERY_S
                logger.warning(
                    "requests are refused: %d file descriptors are left, and more are needed; raise ulimit -n", left
                )
            raise OverloadedError(_NO_DESCRIPTORS, closes_connection=True)

    def admit_again(self) -> None:
        """Cancels `drain` for later requests."""
        self._life.enter(EngineState.RUNNING)

    @contextlib.contextmanager
    def track(self, context: RequestContext, task: asyncio.Task[None]) -> Iterator[ActiveRequest]:
        """Lists `task` as the answer to a request during the block."""
        request = ActiveRequest(context, task)
        self._requests.add(request)
        if self._sweep is None:
            self._schedule()
        try:
            yield request
        finally:
            self._requests.discard(request)

    def abort(self, request_id: str | None, *, spare: RequestContext | None = None) -> int:
        """Ends the requests with this id, or all if it is None, except the request `spare`. Returns their number."""
        chosen = [
            request
            for request in self._requests
            if request_id in (None, request.context.request_id) and request.context != spare
        ]
        for request in chosen:
            request.end(RequestError("The request was aborted.", code="request_aborted", status=409))
        return len(chosen)

    async def drain(self, timeout_s: float) -> None:
        """Accepts no more requests, and returns when the last one has ended. After `timeout_s`, ends the remaining
        requests with an error that asks to retry."""
        self._life.enter(EngineState.DRAINING)
        await self._wait_idle(timeout_s)
        if self._requests:
            logger.warning("ending %d requests that still run after %g s", len(self._requests), timeout_s)
        for request in list(self._requests):
            request.end(OverloadedError(_STOPPING))
        await self._wait_idle(_LAST_WORDS_S)

    async def _wait_idle(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._requests:
                    await asyncio.wait([request.task for request in self._requests])
                    await asyncio.sleep(0)  # the tasks are done, but their `track` blocks have not left yet

    def _schedule(self) -> None:
        self._sweep = asyncio.get_running_loop().call_later(self._send_timeout_s / 4, self._end_stuck)

    def _end_stuck(self) -> None:
        now = asyncio.get_running_loop().time()
        for request in self._requests:
            if request.stuck_since is not None and now - request.stuck_since > self._send_timeout_s:
                logger.warning("ended request %s, because its client does not read", request.context.request_id)
                request.end(RequestError("The client does not read its answer.", code="client_too_slow", status=408))
        self._sweep = None
        if self._requests:
            self._schedule()
