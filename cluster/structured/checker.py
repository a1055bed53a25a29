"""Checks grammars before a request is queued: in processes that can be killed, each grammar once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from cluster.structured.matcher_pool import MatcherPool
from cluster.structured.protocol import Check, Checked, Died, Refused, Reply, Setup, pack
from cluster.structured.spec import GrammarSpec
from configs.errors import OverloadedError, RequestError

logger = logging.getLogger(__name__)

# More than there may be cores for: the kernel shares these among slow grammars and quick ones.
_NUM_PROCESSES = 4
_MAX_WAITING = 256
_MAX_CACHE_BYTES = 32 << 20
_REPLY_TIMEOUT_S = 10.0
# The first answer has to wait for the tokenizer.
_START_TIMEOUT_S = 60.0
_ENTRY_BYTES = 512  # of a cached refusal and of the dictionary's own
_LENGTH_BYTES = 4

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
        self._idle: asyncio.Queue[_Connection] = asyncio.Queue()
        self._connections: list[_Connection] = []
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Starts the processes unless they run: then the first check need not wait half a second for them."""
        async with self._starting:
            if self._pool is not None:
                return
            pool = await asyncio.to_thread(lambda: MatcherPool.start(self._make_setup(), _NUM_PROCESSES))
            self._pool, self._idle = pool, asyncio.Queue()
            for sock in pool.sockets:
                sock.setblocking(False)
                connection = await asyncio.open_unix_connection(sock=sock)
                self._connections.append(connection)
                self._idle.put_nowait(connection)

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
                if len(self._checking) >= _MAX_WAITING:
                    raise OverloadedError(f"{len(self._checking)} grammars wait to be checked; try again later.")
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
        reply = await self._ask(pack(Check(spec)))
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
        idle = self._idle
        try:
            async with asyncio.timeout(timeout_s):
                connection = await idle.get()
        except TimeoutError:
            raise OverloadedError("Too many grammars wait to be checked; try again later.") from None
        reader, writer = connection
        try:
            async with asyncio.timeout(timeout_s):
                writer.write(frame)
                length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "little")
                reply: Reply = self._decoder.decode(await reader.readexactly(length))
        except (TimeoutError, OSError, asyncio.IncompleteReadError) as error:
            # What was asked may still be answered: this connection is of no use any more, nor are its processes.
            logger.error("the processes that check grammars do not answer: %r", error)
            self._drop_pool()
            raise OverloadedError("Grammars cannot be checked just now; try again later.") from error
        idle.put_nowait(connection)
        return reply

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
        if self._pool is not None:
            self._pool.end()
            self._pool = None


def _size(key: bytes, reply: Checked | Refused) -> int:
    return _ENTRY_BYTES + len(key) + len(reply.grammar if isinstance(reply, Checked) else reply.message)
