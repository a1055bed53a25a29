"""The coordinator's end of the unix socket to its Engine replica: length-prefixed msgpack in both directions.

A thread reads, and the step loop takes what it has read: a unix socket holds a few hundred kilobytes, so a reader that
came by once a step would take many steps for a large message, and everything behind it would wait as long. The loop
writes by itself and never blocks on it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import selectors
import socket
import threading
import time

import msgspec

from cluster.messages.engine import EngineToCoordinator, StepOutput
from parallel.sockets import is_ours, pack_frame, pid_of, whole_frames

logger = logging.getLogger(__name__)

_RECEIVE_BYTES = 1 << 18
_MAX_UNTAKEN_BYTES = 64 << 20
# While no descriptor is left the listener stays readable: without a pause the thread would take a whole core.
_ACCEPT_AGAIN_S = 1.0


class EngineSocket:
    """One peer at a time; `start` begins to read what it sends.

    The address is in Linux's abstract namespace: no file to leave behind. Only processes of the same user may connect.
    """

    def __init__(self, *, max_untaken_bytes: int = _MAX_UNTAKEN_BYTES) -> None:
        """`max_untaken_bytes`: of messages not yet polled; while there are more, the thread reads no further."""
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.address = f"\0lockstep-{os.getpid()}-{secrets.token_hex(8)}"
        self._listener.bind(self.address)
        self._listener.listen(1)
        self._listener.setblocking(False)
        self._peer: socket.socket | None = None  # set by the thread that accepts, dropped by the loop
        self._unsent = bytearray()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(EngineToCoordinator)
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._max_untaken_bytes = max_untaken_bytes
        self._untaken: list[EngineToCoordinator] = []
        self._num_untaken_bytes = 0
        self._is_lost = False
        self._closed = False
        self._taken = threading.Condition()  # guards the four above
        self._thread = threading.Thread(target=self._receive, name="engine-socket", daemon=True)

    def start(self) -> None:
        """Lets the Engine in; to be called once."""
        self._thread.start()

    @property
    def peer_pid(self) -> int | None:
        """Process id of the Engine, while it is connected; callable from another thread."""
        with contextlib.suppress(OSError):  # it has just gone
            return None if (peer := self._peer) is None else pid_of(peer)
        return None

    def wake(self) -> None:
        """Makes a blocked `poll` return; callable from another thread."""
        with contextlib.suppress(OSError):
            self._wake_writer.send(b"\0")

    def poll(self, timeout_s: float) -> tuple[list[EngineToCoordinator], bool]:
        """All messages that have arrived, and whether the peer went away; waits `timeout_s` for something to come."""
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj is self._wake_reader:
                self._wake_reader.recv(4096)
            else:
                self._write()
        with self._taken:
            messages, self._untaken, self._num_untaken_bytes = self._untaken, [], 0
            lost, self._is_lost = self._is_lost, False
            self._taken.notify()
        if lost:
            self._drop_peer()
        return messages, lost

    def send(self, output: StepOutput) -> None:
        """Queues one message and writes what the socket takes now."""
        if self._peer is None:
            return
        self._unsent += pack_frame(self._encoder.encode(output))
        self._write()

    def flush(self, timeout_s: float) -> None:
        """Writes what is queued, unless the peer takes longer than `timeout_s` to read it."""
        deadline = time.monotonic() + timeout_s
        while self._unsent and self._peer is not None and (left := deadline - time.monotonic()) > 0:
            self.poll(left)

    def close(self) -> None:
        """Ends the thread and closes every socket; the address is gone with them."""
        with self._taken:
            self._closed = True
            self._taken.notify()
        if self._thread.is_alive():
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
            self._thread.join()
        self._selector.close()
        for end in (self._peer, self._listener, self._wake_reader, self._wake_writer):
            if end is not None:
                end.close()
        self._peer = None

    # The loop's side

    def _write(self) -> None:
        assert self._peer is not None, "a write without a peer"
        try:
            while self._unsent:
                del self._unsent[: self._peer.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()  # the thread sees the loss, and the next poll says so
        is_watched = self._peer in self._selector.get_map()
        if self._unsent and not is_watched:
            self._selector.register(self._peer, selectors.EVENT_WRITE)
        elif is_watched and not self._unsent:
            self._selector.unregister(self._peer)

    def _drop_peer(self) -> None:
        assert self._peer is not None, "no peer to drop"
        self._unsent.clear()
        if self._peer in self._selector.get_map():
            self._selector.unregister(self._peer)
        self._peer.close()
        self._peer = None

    # The thread's side

    def _receive(self) -> None:
        """Accepts and reads until the socket is closed."""
        received = bytearray()
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._listener, selectors.EVENT_READ)
                while not self._closed:
                    for key, _ in selector.select():
                        if key.fileobj is self._listener:
                            if (peer := self._accept()) is not None:
                                selector.register(peer, selectors.EVENT_READ)
                        elif not self._read(received):
                            selector.unregister(key.fileobj)
                            received.clear()
                            self._lose()
        finally:
            self._lose()

    def _accept(self) -> socket.socket | None:
        try:
            peer, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                logger.warning("the Engine cannot connect: no file descriptor is left (ulimit -n)")
                time.sleep(_ACCEPT_AGAIN_S)
            return None  # the caller may have hung up, or this end is being closed
        if not is_ours(peer) or self._peer is not None:
            logger.warning("refused a connection to the engine socket: another user's, or one too many")
            peer.close()
            return None
        peer.setblocking(False)
        self._peer = peer
        return peer

    def _read(self, received: bytearray) -> bool:
        """Reads on behind `received`, and hands over the messages that are whole. False: the peer is lost."""
        assert self._peer is not None, "a read event without a peer"
        try:
            chunk = self._peer.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        received += chunk
        if frames := whole_frames(received):
            try:
                with memoryview(received) as view:
                    messages = [self._decoder.decode(view[frame]) for frame in frames]
            except msgspec.DecodeError:
                logger.exception("the Engine sent what is not a message: its connection ends")
                return False
            del received[: frames[-1].stop]
            self._hand_over(messages, frames[-1].stop)
        return bool(chunk)

    def _hand_over(self, messages: list[EngineToCoordinator], num_bytes: int) -> None:
        """Lets the loop take `messages`; waits while it has too many to take."""
        with self._taken:
            is_first = not self._untaken
            self._untaken += messages
            self._num_untaken_bytes += num_bytes
        if is_first:
            self.wake()
        with self._taken:
            self._taken.wait_for(lambda: self._closed or self._num_untaken_bytes <= self._max_untaken_bytes)

    def _lose(self) -> None:
        with self._taken:
            self._is_lost = self._peer is not None
        self.wake()
