"""Checks grammars before a request is queued: in processes that can be killed, each grammar once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict, deque
from collections.abc import Callable

import msgspec

from cluster.structured.checker_messages import Check, Checked, Died, Refused, Reply, Setup, pack
from cluster.structured.grammar_limits import CHECK_CPU_S, QUICK_CHECK_CPU_S
from cluster.structured.matcher_pool import MatcherPool
from cluster.structured.spec import GrammarSpec
from configs.errors import OverloadedError, RequestError
from parallel.sockets import read_frame

logger = logging.getLogger(__name__)

_NUM_PROCESSES = 4
# Where there are no cores to spare, a new request's grammar waits rather than the answers that are under way.
_NICENESS = 5
# Of these processes, so that there is always one for grammars that may be quick.
_NUM_SLOW = 2
_MAX_CHECKING = 1024
_MAX_WAIT_S = 2.0
# With more waiting than this the newest goes first: a flood then waits for itself, and for its time to be up.
_CROWD = 16
_MAX_CACHE_BYTES = 32 << 20
_REPLY_TIMEOUT_S = 10.0
# The first answer has to wait for the tokenizer.
_START_TIMEOUT_S = 60.0
_ENTRY_BYTES = 512  # of a cached refusal and of the dictionary's own
_NOT_NOW = "Grammars cannot be checked just now; try again later."
_TOO_MANY = "Too many grammars wait to be checked; try again later."

_Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class GrammarChecker:
    """Makes of a `GrammarSpec` what `SamplingParams.grammar` holds, or a RequestError.

    Owns two processes, started by the first check or by `start`, and the grammars that were checked lately. One event
    loop's; nothing in it blocks the loop.
    """

    def __init__(self, make_setup: Callable[[], Setup]) -> None:
        """`make_setup`: called in a thread when the processes start."""
        self._make_setup = make_setup
        self._decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
        self._cache: OrderedDict[bytes, Checked | Refused] = OrderedDict()
        self._cache_bytes = 0
        self._checking: dict[bytes, asyncio.Task[Checked | Refused]] = {}
        self._pool: MatcherPool | None = None
        self._connections: list[_Connection] = []
        self._idle: list[_Connection] = []
        self._waiting: deque[asyncio.Future[_Connection]] = deque()
        self._starting = asyncio.Lock()
        self._slow = asyncio.Semaphore(_NUM_SLOW)

    async def start(self) -> None:
        """Starts the processes unless they run: then the first check need not wait half a second for them.

        Raises:
            OverloadedError: they cannot be started now; the next call tries again.
        """
        async with self._starting:
            if self._pool is not None:
                return
            try:
                self._pool = await asyncio.to_thread(
                    lambda: MatcherPool.start(self._make_setup(), _NUM_PROCESSES, niceness=_NICENESS)
                )
                for sock in self._pool.sockets:
                    sock.setblocking(False)
                    self._connections.append(await asyncio.open_unix_connection(sock=sock))
            except (OSError, RuntimeError, MemoryError) as error:
                logger.error("the processes that check grammars cannot be started: %r", error)
                self._drop_pool()
                raise OverloadedError(_NOT_NOW) from error
            for connection in list(self._connections):
                self._give_back(connection)

    async def check(self, spec: GrammarSpec) -> str:
        """The checked grammar.

        Raises:
            RequestError: it is wrong, or too complex.
            OverloadedError: too many grammars wait for their check, or the processes do not answer.
        """
        key = msgspec.msgpack.encode(spec)
        known = self._cache.get(key)
        if known is not None:
            self._cache.move_to_end(key)
        else:
            task = self._checking.get(key)
            if task is None:
                if len(self._checking) >= _MAX_CHECKING:
                    raise OverloadedError(_TOO_MANY)
                task = self._checking[key] = asyncio.create_task(self._check(key, spec))
                task.add_done_callback(lambda _: self._checking.pop(key, None))
            # One caller that goes away must not take the check from the others.
            known = await asyncio.shield(task)
        if isinstance(known, Refused):
            raise RequestError(known.message, code=known.code, param=known.param)
        return known.grammar

    async def close(self) -> None:
        """Ends the processes; checks under way end with OverloadedError."""
        for task in list(self._checking.values()):
            task.cancel()
        await asyncio.gather(*self._checking.values(), return_exceptions=True)
        self._drop_pool()

    async def _check(self, key: bytes, spec: GrammarSpec) -> Checked | Refused:
        reply = await self._ask(pack(Check(spec, QUICK_CHECK_CPU_S)))
        if isinstance(reply, Died):
            # In a queue of its own: a hundred slow grammars must not keep a quick one waiting for each of them.
            try:
                async with asyncio.timeout(_MAX_WAIT_S):
                    await self._slow.acquire()
            except TimeoutError:
                raise OverloadedError(_TOO_MANY) from None
            try:
                reply = await self._ask(pack(Check(spec, CHECK_CPU_S)))
            finally:
                self._slow.release()
        match reply:
            case Died(reason):
                reply = Refused(f"{spec.param}: the grammar {reason}.", "grammar_too_complex", spec.param)
            case Refused(message, code, param):
                reply = Refused(message, code, param or spec.param)
        assert isinstance(reply, Checked | Refused), f"a check was answered by {type(reply).__name__}"
        self._remember(key, reply)
        return reply

    async def _ask(self, frame: bytes) -> Reply:
        timeout_s = _REPLY_TIMEOUT_S if self._pool is not None else _START_TIMEOUT_S
        await self.start()
        connection = await self._take()
        reader, writer = connection
        try:
            async with asyncio.timeout(timeout_s):
                writer.write(frame)
                reply: Reply = self._decoder.decode(await read_frame(reader))
        except (TimeoutError, OSError, asyncio.IncompleteReadError) as error:
            # What was asked may still be answered: this connection is of no use any more, nor are its processes.
            logger.error("the processes that check grammars do not answer: %r", error)
            self._drop_pool()
            raise OverloadedError(_NOT_NOW) from error
        self._give_back(connection)
        return reply

    async def _take(self) -> _Connection:
        """A connection to a process that does nothing. Raises OverloadedError when none is found in time."""
        if self._idle:
            return self._idle.pop()
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[_Connection] = loop.create_future()
        self._waiting.append(waiter)
        timer = loop.call_later(_MAX_WAIT_S, self._give_up, waiter)
        try:
            return await waiter
        finally:
            timer.cancel()

    def _give_up(self, waiter: asyncio.Future[_Connection]) -> None:
        if not waiter.done():
            self._waiting.remove(waiter)
            waiter.set_exception(OverloadedError(_TOO_MANY))

    def _give_back(self, connection: _Connection) -> None:
        if connection not in self._connections:
            return  # its processes were given up meanwhile
        while self._waiting:
            waiter = self._waiting.pop() if len(self._waiting) > _CROWD else self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(connection)
                return
        self._idle.append(connection)

    def _remember(self, key: bytes, reply: Checked | Refused) -> None:
        self._cache[key] = reply
        self._cache_bytes += _size(key, reply)
        while self._cache_bytes > _MAX_CACHE_BYTES:
            self._cache_bytes -= _size(*self._cache.popitem(last=False))

    def _drop_pool(self) -> None:
        for _, writer in self._connections:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                writer.transport.abort()
        self._connections.clear()
        self._idle.clear()
        if self._pool is not None:
            self._pool.end()
            self._pool = None


def _size(key: bytes, reply: Checked | Refused) -> int:
    return _ENTRY_BYTES + len(key) + len(reply.grammar if isinstance(reply, Checked) else reply.message)
