"""Answers that follow a grammar, on the coordinator's side: one thread for each process that computes masks.

The step loop never waits: it leaves tokens with a guide and is woken when the mask is there. What a guide knows is
enough to begin again, so when a process is ended by another answer's grammar, its own answer just goes on.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import select
import socket
import threading
from array import array
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from cluster.structured.checker_messages import (
    Advance,
    Close,
    Died,
    Gone,
    Mask,
    Open,
    Refused,
    Reply,
    Request,
    Setup,
    pack,
)
from cluster.structured.matcher_pool import MatcherPool
from configs.errors import GuideError, OverloadedError, RequestError
from parallel.sockets import receive_frame
from worker.protocol import UInt32Array

logger = logging.getLogger(__name__)

# Replies of so many masks fit into a socket's buffer, so neither side waits for the other to read.
_PIPELINE = 4
# Masks that come within it of each other are told as one: the next step can then take all of their rows.
_GATHER_S = 0.0003
_REPLY_TIMEOUT_S = 30.0
_Work = queue.SimpleQueue["GrammarGuide | None"]
_FAILED = "the processes that follow grammars ended"
_NOT_STARTED = "the processes that follow grammars cannot be started"


class GrammarGuide:
    """A `cluster.scheduling.request.Guide` for one answer; made by `GrammarGuides.open`."""

    def __init__(self, id_: int, grammar: str, work: _Work) -> None:
        self.id = id_
        self.grammar = grammar
        self._work = work
        # Written by the step loop:
        self.tokens: list[int] = []
        self.is_closed = False
        # Written by the thread, each in one go:
        self._mask: tuple[int, UInt32Array] | None = None  # with the number of tokens it follows
        self._is_finished = False
        self._error: RequestError | None = None

    def accept(self, tokens: Sequence[int]) -> None:
        self.tokens.extend(tokens)
        self._work.put(self)

    def poll(self) -> UInt32Array | None:
        if self._error is not None:
            raise self._error
        if self._mask is None or self._mask[0] != len(self.tokens):
            return None
        return self._mask[1]

    @property
    def is_finished(self) -> bool:
        return self._is_finished

    def close(self) -> None:
        self.is_closed = True
        self._work.put(self)

    def tell(self, mask: Mask, num_tokens: int) -> None:
        """What may follow the first `num_tokens` tokens."""
        if mask.error is not None:
            self.fail(mask.error)
        elif mask.is_finished:
            self._is_finished = True
        else:
            self._mask = (num_tokens, np.frombuffer(mask.mask, np.uint32))

    def fail(self, reason: str) -> None:
        """The answer cannot go on, for a reason of its grammar."""
        self._error = GuideError(f"The answer was ended: {reason}.")

    def drop(self, reason: str) -> None:
        """The answer cannot go on, for a reason that another time is not there."""
        self._error = OverloadedError(f"The answer was ended: {reason}; try again later.")


class GrammarGuides:
    """Makes guides, and owns the threads and processes behind them, which the first guide starts."""

    def __init__(self, setup: Setup, wake: Callable[[], None], num_processes: int = 2) -> None:
        """`wake`: called, from a thread, when a guide has something to tell."""
        self._setup = setup
        self._wake = wake
        self._num_processes = num_processes
        self._ids = itertools.count(1)
        self._running: _Processes | None = None

    def open(self, grammar: str) -> GrammarGuide:
        """A guide for one answer; its first mask is on its way. Raises OverloadedError where no thread can start."""
        running = self._running
        if running is None or running.failure is not None:
            running = _Processes(self._setup, self._wake, self._num_processes)
            try:
                running.start()
            except RuntimeError as error:
                logger.error("%s: %r", _NOT_STARTED, error)
                raise OverloadedError("Grammars cannot be followed just now; try again later.") from error
            self._running = running
        id_ = next(self._ids)
        guide = GrammarGuide(id_, grammar, running.queues[id_ % len(running.queues)])
        guide.accept(())
        if running.failure is not None:  # perhaps before it saw this guide
            guide.drop(running.failure)
        return guide

    def close(self) -> None:
        """Ends threads and processes. Guides that wait for a mask wait on."""
        if self._running is not None:
            for work in self._running.queues:
                work.put(None)
            self._running.join()


class _Processes(threading.Thread):
    """A pool of processes with a thread for each; over when one of them fails, or cannot be started."""

    def __init__(self, setup: Setup, wake: Callable[[], None], num_processes: int) -> None:
        super().__init__(name="grammar-processes", daemon=True)
        self.queues: list[_Work] = [queue.SimpleQueue() for _ in range(num_processes)]
        self.failure: str | None = None
        """Why its guides end; None while it works. Set before they are told, so that none is overlooked."""
        self.pool: MatcherPool | None = None
        self._setup = setup
        self._wake = wake

    def run(self) -> None:
        started: list[_Follower] = []
        try:
            # Not in the step loop: a start takes tens of milliseconds, and writes a megabyte.
            self.pool = MatcherPool.start(self._setup, len(self.queues))
            for work, sock in zip(self.queues, self.pool.sockets, strict=True):
                follower = _Follower(work, sock, self._wake, lambda: self._fail(_FAILED))
                follower.start()
                started.append(follower)
        except Exception as error:  # noqa: BLE001 -- whatever it was, requests wait for these processes
            logger.error("%s: %r", _NOT_STARTED, error)
            self._fail(_NOT_STARTED)
        for follower in started:
            follower.join()
        if self.pool is not None:
            for sock in self.pool.sockets:
                sock.close()
            self.pool.end()
        if self.failure is not None:
            for work in self.queues:  # of those that have no follower
                for guide in _take_all(work):
                    guide.drop(self.failure)
            self._wake()

    def _fail(self, reason: str) -> None:
        self.failure = self.failure or reason
        for work in self.queues:
            work.put(None)


class _Follower(threading.Thread):
    """Hands one process the work of its guides, and the guides its replies."""

    def __init__(
        self, work: _Work, sock: socket.socket, wake: Callable[[], None], on_failure: Callable[[], None]
    ) -> None:
        super().__init__(name="grammar-follower", daemon=True)
        self._work = work
        self._socket = sock
        self._wake = wake
        self._on_failure = on_failure
        self._decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
        self._guides: dict[int, GrammarGuide] = {}
        self._num_sent: dict[int, int] = {}  # by id: tokens the process has; absent: it does not know the session
        self._awaited: deque[tuple[GrammarGuide, int]] = deque()  # with how many tokens the reply is for
        self._has_news = False

    def run(self) -> None:
        self._socket.settimeout(_REPLY_TIMEOUT_S)
        try:
            while (guide := self._next()) is not None:
                self._send(guide)
        except Exception as error:  # noqa: BLE001 -- whatever it was, requests wait for these replies
            logger.error("a process that follows grammars does not answer: %r", error)
            self._on_failure()
        finally:
            self._socket.close()
            self._fail_guides()

    def _fail_guides(self) -> None:
        for guide in (*self._guides.values(), *_take_all(self._work)):
            guide.drop(_FAILED)
        self._wake()

    def _next(self) -> GrammarGuide | None:
        """The next guide with work. Replies are taken meanwhile; before it waits, the loop is woken for them."""
        while True:
            if len(self._awaited) < _PIPELINE:
                with contextlib.suppress(queue.Empty):
                    return self._work.get_nowait()
            if self._has_news and not (self._awaited and self._is_readable()):
                self._has_news = False
                self._wake()
            if not self._awaited:
                return self._work.get()
            self._take_reply()

    def _is_readable(self) -> bool:
        return bool(select.select([self._socket], [], [], _GATHER_S)[0])

    def _send(self, guide: GrammarGuide) -> None:
        """Tells the process what `guide` has learnt since."""
        id_ = guide.id
        num_sent = self._num_sent.get(id_)
        if guide.is_closed:
            if self._guides.pop(id_, None) is not None:
                self._num_sent.pop(id_, None)
                self._socket.sendall(pack(Close(id_)))
            return
        num_tokens = len(guide.tokens)
        if num_sent == num_tokens:
            return
        tokens = array("i", guide.tokens[num_sent or 0 : num_tokens]).tobytes()
        request: Request = Open(id_, guide.grammar, tokens) if num_sent is None else Advance(id_, tokens)
        self._guides[id_] = guide
        self._num_sent[id_] = num_tokens
        self._awaited.append((guide, num_tokens))
        self._socket.sendall(pack(request))

    def _take_reply(self) -> None:
        frame = receive_frame(self._socket)
        if frame is None:
            raise EOFError("the socket was closed")
        reply = self._decoder.decode(frame)
        guide, num_tokens = self._awaited.popleft()
        match reply:
            case Mask():
                guide.tell(reply, num_tokens)
            case Gone():
                # Lost with a process that another grammar ended. The guide knows its tokens: it begins again.
                self._num_sent.pop(guide.id, None)
                self._send(guide)
                return
            case Died(reason):
                guide.fail(f"its grammar {reason}")
            case Refused(message):
                guide.fail(message)
        self._has_news = True


def _take_all(work: _Work) -> list[GrammarGuide]:
    """The guides in `work`, which is empty then."""
    guides: list[GrammarGuide] = []
    with contextlib.suppress(queue.Empty):
        while True:
            if (guide := work.get_nowait()) is not None:
                guides.append(guide)
    return guides
