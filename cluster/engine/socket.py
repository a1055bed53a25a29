"""The coordinator's end of the unix socket to its Engine replica: length-prefixed msgpack in both directions.

One thread reads, and the step loop takes the messages that the thread has read. A unix socket buffers only a few
hundred kilobytes: if the loop read once per step, a large message would take many steps, and delay every later message.
The loop writes to the socket itself, and never blocks on it.
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
# Seconds to wait without file descriptors. The listener stays readable, so the thread would use a whole core.
_ACCEPT_AGAIN_S = 1.0


class EngineSocket:
    """Accepts one peer at a time. `start` begins to read. The address is in Linux's abstract namespace, so no file
    remains. Only processes of the same user may connect."""

    def __init__(self, *, max_untaken_bytes: int = _MAX_UNTAKEN_BYTES) -> None:
        """Creates the socket. Reading stops while messages that were not polled exceed `max_untaken_bytes`."""
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.address = f"\0lockstep-{os.getpid()}-{secrets.token_hex(8)}"
        self._listener.bind(self.address)
        self._listener.listen(1)
        self._listener.setblocking(False)
        self._peer: socket.socket | None = None  # set by the accepting thread, cleared by the loop
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
        self._taken = threading.Condition()  # guards the four attributes above
        self._thread = threading.Thread(target=self._receive, name="engine-socket", daemon=True)

    def start(self) -> None:
        """Starts accepting the Engine replica. Call this once."""
        self._thread.start()

    @property
    def peer_pid(self) -> int | None:
        """Process id of the Engine replica while it is connected. Any thread may read it."""
        with contextlib.suppress(OSError):  # the peer has just disconnected
            return None if (peer := self._peer) is None else pid_of(peer)
        return None

    def wake(self) -> None:
        """Makes a blocked `poll` return. Any thread may call this."""
        with contextlib.suppress(OSError):
            self._wake_writer.send(b"\0")

    def poll(self, timeout_s: float) -> tuple[list[EngineToCoordinator], bool]:
        """Waits up to `timeout_s` for a message. Returns all messages, and whether the peer disconnected."""
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
        """Queues one message, and writes the part that the socket accepts now."""
        if self._peer is None:
            return
        self._unsent += pack_frame(self._encoder.encode(output))
        self._write()

    def flush(self, timeout_s: float) -> None:
        """Writes the queued messages, for at most `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while self._unsent and self._peer is not None and (left := deadline - time.monotonic()) > 0:
            self.poll(left)

    def close(self) -> None:
        """Ends the thread and closes all sockets. No process can connect to the address afterwards."""
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

    # Methods of the loop's thread.

    def _write(self) -> None:
        assert self._peer is not None, "a write without a peer"
        try:
            while self._unsent:
                del self._unsent[: self._peer.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()  # the reading thread sees the loss, and the next poll reports it
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

    # Methods of the reading thread.

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
                logger.warning("the Engine cannot connect: no file descriptor is left; raise ulimit -n")
                time.sleep(_ACCEPT_AGAIN_S)
            return None  # the caller may have disconnected, or this end is being closed
        if not is_ours(peer) or self._peer is not None:
            logger.warning(
                "refused a connection to the engine socket: another user's, or a second one of the Engine; see what "
                "else connects"
            )
            peer.close()
            return None
        peer.setblocking(False)
        self._peer = peer
        return peer

    def _read(self, received: bytearray) -> bool:
        """Reads more bytes into `received`, and hands complete messages over. Returns False if the peer is lost."""
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
                logger.exception(
                    "the Engine sent an invalid message, so its connection is closed; please report this bug"
                )
                return False
            del received[: frames[-1].stop]
            self._hand_over(messages, frames[-1].stop)
        return bool(chunk)

    def _hand_over(self, messages: list[EngineToCoordinator], num_bytes: int) -> None:
        """Gives `messages` to the loop. Waits while the loop has too many bytes to take."""
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
