"""Checks grammars before a request is queued: in a process that hostile ones cannot take down, each grammar once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import msgspec

from cluster.structured.checker_messages import Checked, Died, Refused, Reply, Setup, pack
from cluster.structured.spec import GrammarSpec
from configs.errors import OverloadedError, RequestError
from parallel.sockets import read_frame

logger = logging.getLogger(__name__)

_ROOT = Path(__file__).parents[2]
_MAX_CHECKING = 1024
_MAX_WAIT_S = 2.0
_MAX_CACHE_BYTES = 32 << 20
# The first answer has to wait for the tokenizer.
_REPLY_TIMEOUT_S = 60.0
_ENTRY_BYTES = 512  # of a cached refusal and of the dictionary's own
_NOT_NOW = "Grammars cannot be checked just now; try again later."
_TOO_MANY = "Too many grammars wait to be checked; try again later."


class GrammarChecker:
    """Makes of a `GrammarSpec` what `SamplingParams.grammar` holds, or a RequestError.

    Owns one process, started by the first check or by `start`, and the grammars that were checked lately. One event
    loop's; nothing in it blocks the loop.
    """

    def __init__(self, make_setup: Callable[[], Setup]) -> None:
        """`make_setup`: called in a thread when the process starts."""
        self._make_setup = make_setup
        self._decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
        self._cache: OrderedDict[bytes, Checked | Refused] = OrderedDict()
        self._cache_bytes = 0
        self._checking: dict[bytes, asyncio.Task[Checked | Refused]] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._starting = asyncio.Lock()
        self._is_busy = False
        self._waiting: list[asyncio.Future[None]] = []

    async def start(self) -> None:
        """Starts the process unless it runs: then the first check need not wait half a second for it.

        Raises:
            OverloadedError: it cannot be started now; the next call tries again.
        """
        async with self._starting:
            if self._streams is not None:
                return
            try:
                setup = await asyncio.to_thread(self._make_setup)
                self._process, sock = await asyncio.to_thread(_start_process)
                self._streams = await asyncio.open_unix_connection(sock=sock)
                self._streams[1].write(pack(setup))
            except (OSError, RuntimeError, MemoryError) as error:
                logger.error("the process that checks grammars cannot be started: %r", error)
                self._end_process()
                raise OverloadedError(_NOT_NOW) from error

    async def check(self, spec: GrammarSpec) -> str:
        """The checked grammar.

        Raises:
            RequestError: it is wrong, or too complex.
            OverloadedError: too many grammars wait for their check, or the process does not answer.
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
        """Ends the process; checks under way end with OverloadedError."""
        for task in list(self._checking.values()):
            task.cancel()
        await asyncio.gather(*self._checking.values(), return_exceptions=True)
        self._is_busy = False
        self._end_process()

    async def _check(self, key: bytes, spec: GrammarSpec) -> Checked | Refused:
        await self._take_turn()
        try:
            await self.start()
            assert self._streams is not None, "it was started"
            reader, writer = self._streams
            async with asyncio.timeout(_REPLY_TIMEOUT_S):
                writer.write(pack(spec))
                reply: Reply = self._decoder.decode(await read_frame(reader))
        except (TimeoutError, OSError, asyncio.IncompleteReadError) as error:
            # What was asked may still be answered: this process is of no use any more.
            logger.error("the process that checks grammars does not answer: %r", error)
            self._end_process()
            raise OverloadedError(_NOT_NOW) from error
        finally:
            self._end_turn()
        if isinstance(reply, Died):
            reply = Refused(f"{spec.param}: the grammar {reply.reason}.", "grammar_too_complex", spec.param)
        self._remember(key, reply)
        return reply

    async def _take_turn(self) -> None:
        """Waits for the check before. The newest goes first: a flood then waits for itself, and for its time to be up.

        Raises:
            OverloadedError: its turn did not come in time.
        """
        if self._is_busy:
            loop = asyncio.get_running_loop()
            turn: asyncio.Future[None] = loop.create_future()
            self._waiting.append(turn)
            timer = loop.call_later(_MAX_WAIT_S, self._give_up, turn)
            try:
                await turn
            finally:
                timer.cancel()
        self._is_busy = True

    def _give_up(self, turn: asyncio.Future[None]) -> None:
        if not turn.done():
            self._waiting.remove(turn)
            turn.set_exception(OverloadedError(_TOO_MANY))

    def _end_turn(self) -> None:
        """Hands the turn on: nobody comes between."""
        while self._waiting:
            turn = self._waiting.pop()
            if not turn.done():
                turn.set_result(None)
                return
        self._is_busy = False

    def _remember(self, key: bytes, reply: Checked | Refused) -> None:
        self._cache[key] = reply
        self._cache_bytes += _size(key, reply)
        while self._cache_bytes > _MAX_CACHE_BYTES:
            self._cache_bytes -= _size(*self._cache.popitem(last=False))

    def _end_process(self) -> None:
        if self._streams is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._streams[1].transport.abort()
            self._streams = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def _start_process() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A new `check_process` and our end of its socket. Takes as long as it needs to begin: tens of milliseconds."""
    # Isolated from what the environment would import, and able to import this very code.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(_ROOT), *filter(None, sys.path)))}
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "cluster.structured.check_process"]
    try:
        with theirs:
            process = subprocess.Popen(command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, env=environment)
    except BaseException:
        ours.close()
        raise
    ours.setblocking(False)
    return process, ours


def _size(key: bytes, reply: Checked | Refused) -> int:
    return _ENTRY_BYTES + len(key) + len(reply.grammar if isinstance(reply, Checked) else reply.message)
