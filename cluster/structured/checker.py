"""Checks grammars before a request is queued: each grammar once, in a process that a hostile grammar may end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import socket
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import msgspec

from cluster.structured.checker_messages import Checked, Died, Refused, Reply, Setup, pack
from cluster.structured.spec import GrammarSpec
from configs.errors import OverloadedError, RequestError
from parallel.sockets import receive_frame

logger = logging.getLogger(__name__)

_ROOT = Path(__file__).parents[2]
_MAX_CHECKING = 1024
_MAX_WAIT_S = 2.0
_MAX_CACHE_BYTES = 32 << 20
# The first reply also waits for the tokenizer.
_REPLY_TIMEOUT_S = 60.0
_ENTRY_BYTES = 512  # bytes of a cached refusal and its dictionary entry
_TOO_MANY = "Too many grammars wait to be checked; try again later."


class GrammarChecker:
    """Turns a `GrammarSpec` into the value of `SamplingParams.grammar`, or raises RequestError.

    The checker owns one process, a thread that talks to the process, and a cache of checked grammars. `start` or the
    first check starts both. Used on one event loop, which the checker never blocks.
    """

    def __init__(self, make_setup: Callable[[], Setup]) -> None:
        """`make_setup` is called by the thread when the process starts."""
        self._make_setup = make_setup
        self._cache: OrderedDict[bytes, Checked | Refused] = OrderedDict()
        self._cache_bytes = 0
        self._checking: dict[bytes, asyncio.Task[Checked | Refused]] = {}
        # The newest grammar goes first, so that a flood of grammars only delays its own requests, until they time out.
        self._work: queue.LifoQueue[tuple[GrammarSpec | None, Future[Reply | None]] | None] = queue.LifoQueue()
        self._thread: threading.Thread | None = None
        # only the thread uses these
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    async def start(self) -> None:
        """Starts the process unless it runs, so that the first check need not wait for the start. Raises
        OverloadedError if it cannot be started now; the next call tries again."""
        await self._ask(None)

    async def check(self, spec: GrammarSpec) -> str:
        """Checks a grammar and returns it for `SamplingParams.grammar`.

        Raises:
            RequestError: the grammar is wrong or too complex.
            OverloadedError: too many checks wait, or the process does not answer.
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
            # A caller that leaves must not cancel the check for other callers.
            known = await asyncio.shield(task)
        if isinstance(known, Refused):
            raise RequestError(known.message, code=known.code, param=known.param)
        return known.grammar

    async def close(self) -> None:
        """Ends the process and the thread. Running checks end with OverloadedError."""
        for task in list(self._checking.values()):
            task.cancel()
        await asyncio.gather(*self._checking.values(), return_exceptions=True)
        if self._thread is not None:
            self._work.put(None)
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)  # no caller waits for a reply any more
            await asyncio.to_thread(self._thread.join)
            self._thread = None

    async def _check(self, key: bytes, spec: GrammarSpec) -> Checked | Refused:
        reply = await self._ask(spec)
        if isinstance(reply, Died):
            reply = Refused(f"{spec.param}: the grammar {reply.reason}.", "grammar_too_complex", spec.param)
        assert reply is not None, "there was a grammar"
        self._remember(key, reply)
        return reply

    async def _ask(self, spec: GrammarSpec | None) -> Reply | None:
        """The reply to `spec`, or None for no spec once the process runs. Raises OverloadedError after some time."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="grammar-checker", daemon=True)
            self._thread.start()
        future: Future[Reply | None] = Future()
        self._work.put((spec, future))
        reply = asyncio.wrap_future(future)
        await asyncio.wait([reply], timeout=_MAX_WAIT_S)
        if not reply.done() and future.cancel():  # fails once the thread has begun
            raise OverloadedError(_TOO_MANY)
        return await reply

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            spec, future = work
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(self._exchange(spec))
                except Exception as error:  # noqa: BLE001 -- whatever it was, a request waits for its reply
                    # A late reply may still come, so this process cannot be used any more.
                    fault = "cannot be started" if self._process is None else "does not answer"
                    logger.error("the process that checks grammars %s: %r", fault, error)
                    self._end_process()
                    future.set_exception(OverloadedError("Grammars cannot be checked just now; try again later."))
        self._end_process()

    def _exchange(self, spec: GrammarSpec | None) -> Reply | None:
        if self._socket is None:
            self._start_process()
        assert self._socket is not None, "it was started"
        if spec is None:
            return None
        self._socket.sendall(pack(spec))
        if (frame := receive_frame(self._socket)) is None:
            raise EOFError("the socket was closed")
        return msgspec.msgpack.decode(frame, type=Reply)

    def _start_process(self) -> None:
        setup = pack(self._make_setup())
        # The process is isolated from the environment's imports, but can import this code.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(_ROOT), *filter(None, sys.path)))}
        command = [sys.executable, "-m", "cluster.structured.check_process"]
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, env=environment)
        self._socket.settimeout(_REPLY_TIMEOUT_S)
        self._socket.sendall(setup)

    def _end_process(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _remember(self, key: bytes, reply: Checked | Refused) -> None:
        self._cache[key] = reply
        self._cache_bytes += _size(key, reply)
        while self._cache_bytes > _MAX_CACHE_BYTES:
            self._cache_bytes -= _size(*self._cache.popitem(last=False))


def _size(key: bytes, reply: Checked | Refused) -> int:
    return _ENTRY_BYTES + len(key) + len(reply.grammar if isinstance(reply, Checked) else reply.message)
