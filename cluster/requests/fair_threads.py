"""Threads that decode, check, render and encode requests before the engine gets them.

Clients take turns, so that one client's requests do not delay the requests of others. This module limits how much is
prepared at once, and `json_body` limits what a body may contain.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from cluster.http.context import current_request
from cluster.requests.json_body import check_lists, decode_body
from configs.errors import OverloadedError

_Done = TypeVar("_Done")
_NUM_THREADS = 4
_MAX_OF_CLIENT = 3  # threads for one client; the fourth serves other clients while one client's templates take seconds
_MAX_WAITING = 1024  # waiting requests per client
_MAX_BYTES = 16 << 20  # total bytes of the bodies in preparation; encoding takes up to a hundred times this memory
_MAX_OTHER_VALUES = 4096  # values in a body, besides the token ids of a prompt that fits
_LARGE_BYTES = 1 << 20  # bytes of work after which the C library returns its free memory
# Bytes that are checked and encoded without a thread, in 2 to 3 ms; a thread costs 0.1 ms, and jitter
_INLINE_BYTES = 8 << 10


class FairThreads:
    """The threads of one model. Use it on one event loop."""

    def __init__(self, max_model_len: int) -> None:
        self._max_model_len = max_model_len
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="prepare")
        self._waiting: dict[str, deque[tuple[int, asyncio.Future[None]]]] = {}
        """client -> waiting work: bytes, and the future that starts it. The client with the next turn is first."""
        self._running: Counter[str] = Counter()
        self._num_bytes = 0

    def close(self) -> None:
        """Accepts no more work."""
        self._threads.shutdown(wait=False)

    async def prepared(self, body: bytes, prepare: Callable[[dict[str, Any]], _Done]) -> _Done:
        """Decodes a body and calls `prepare` with its JSON, to check it and encode its texts. A long body is prepared
        in a thread. Raises the errors of `decode_body`, `check_lists`, `prepare` and `run`."""

        def work() -> _Done:
            raw = decode_body(body, max_values=self._max_model_len + _MAX_OTHER_VALUES)
            check_lists(raw, self._max_model_len)
            return prepare(raw)

        return await self.off_loop(len(body), work)

    async def off_loop(self, num_bytes: int, work: Callable[[], _Done]) -> _Done:
        """Runs `work()` for a body of `num_bytes`, in a thread if the body is long: 100,000 messages take a second."""
        return work() if num_bytes <= _INLINE_BYTES else await self.run(num_bytes, work)

    async def run(self, num_bytes: int, work: Callable[[], _Done]) -> _Done:
        """Runs `work()` in a thread, once the client has its turn. Raises OverloadedError if too many of the client's
        requests wait."""
        context = current_request()
        client = "" if context is None else context.share_owner
        waiting = self._waiting.setdefault(client, deque())
        if len(waiting) >= _MAX_WAITING:
            raise OverloadedError("Too many of your requests are being prepared; try again later.")
        turn = asyncio.get_running_loop().create_future()
        waiting.append((num_bytes, turn))
        self._begin()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self._end(client, num_bytes)
            raise
        working = asyncio.get_running_loop().run_in_executor(self._threads, _tidied, num_bytes, work)

        def end(working: asyncio.Future[_Done]) -> None:
            self._end(client, num_bytes)
            if not working.cancelled():
                working.exception()  # if the client has left, no one awaits the result

        working.add_done_callback(end)
        # A thread cannot be stopped, so the work counts until it ends, even if the client leaves.
        return await asyncio.shield(working)

    def _begin(self) -> None:
        """Starts waiting work until no thread is free, or the next work has too many bytes."""
        for client in list(self._waiting):
            waiting = self._waiting[client]
            while waiting and waiting[0][1].cancelled():
                waiting.popleft()
            if not waiting:
                del self._waiting[client]
            elif self._running[client] < _MAX_OF_CLIENT:
                num_bytes, turn = waiting[0]
                num_running = self._running.total()
                if num_running and (num_running >= _NUM_THREADS or self._num_bytes + num_bytes > _MAX_BYTES):
                    return
                waiting.popleft()
                self._waiting[client] = self._waiting.pop(client)  # after the other clients
                self._running[client] += 1
                self._num_bytes += num_bytes
                turn.set_result(None)

    def _end(self, client: str, num_bytes: int) -> None:
        self._num_bytes -= num_bytes
        self._running[client] -= 1
        if not self._running[client]:
            del self._running[client]
        self._begin()


def _tidied(num_bytes: int, work: Callable[[], _Done]) -> _Done:
    """Runs `work()`, then returns freed memory to the system."""
    try:
        return work()
    finally:
        if num_bytes >= _LARGE_BYTES and hasattr(_libc, "malloc_trim"):
            _libc.malloc_trim(0)


_libc = ctypes.CDLL(None)
