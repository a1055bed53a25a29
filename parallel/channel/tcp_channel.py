"""The step channel over TCP, for ranks on other nodes: the interfaces of ring.py, with one connection per reader.

Either side may listen. The coordinator listens for both directions: frames to the ranks, and results back. The address
contains a secret. Both ends prove that they know it (an HMAC over the other's random bytes) and never send it. Received
data is never unpickled.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import struct
import threading
import time
from collections.abc import Sequence

from configs.addresses import family_of, host_and_port
from configs.errors import DeadlineError, EngineError
from parallel.channel.ring import STEP_TIMEOUT
from parallel.sockets import LENGTH, pack_frame

_INIT_TIMEOUT = "parallel.init_timeout_s"

_FAILED = 0xFFFFFFFF  # Sent instead of a length: the channel failed. A second length and the reason follow.
_MAX_REASON_BYTES = 4096
_CHALLENGE_BYTES = 32
_HELLO = struct.Struct(f"<8sI{_CHALLENGE_BYTES}s{_CHALLENGE_BYTES}s")  # magic, index, proof, challenge
_MAGIC = b"LKSTEP01"
# Seconds in which a connection must prove the secret before the next one is served.
_HANDSHAKE_S = 5.0
# Sockets accept no infinite timeout, but a reader may wait without a limit.
_LONGEST_WAIT_S = 3600.0


class Connection:
    """One connected stream of frames. One thread at a time may read, and one may write."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.peer = peer
        self._sock = sock
        self._received = bytearray()
        self._death: str | None = None
        self._write_lock = threading.Lock()

    def write(self, frame: bytes, deadline: float, bound: str) -> None:
        """Sends one frame. Raises what FrameWriter.send raises. `bound` names the wait's limit in a DeadlineError."""
        with self._write_lock:
            self.check_alive()
            try:
                self._sock.settimeout(max(deadline - time.monotonic(), 1e-6))
                self._sock.sendall(pack_frame(frame))
            except TimeoutError:
                # A part of the frame may have been sent, so the stream cannot be used any more.
                self._death = f"{self.peer} took no frame within {bound}"
                raise DeadlineError(self._death) from None
            except OSError as error:
                raise self._broken(error.strerror or str(error)) from error

    def read(self, max_frame_bytes: int, deadline: float, bound: str) -> bytes:
        """Returns the next frame. Raises what FrameReader.recv raises. After a DeadlineError, received bytes are
        retained."""
        self.check_alive()
        self._fill(LENGTH.size, deadline, bound)
        (length,) = LENGTH.unpack_from(self._received)
        if length == _FAILED:
            self._fill(2 * LENGTH.size, deadline, bound)
            (length,) = LENGTH.unpack_from(self._received, LENGTH.size)
            reason = self._take(2 * LENGTH.size, min(length, _MAX_REASON_BYTES), deadline, bound)
            self._death = self._death or reason.decode(errors="replace")
            raise EngineError(self._death)
        if length > max_frame_bytes:
            self._death = f"{self.peer} sent a frame of {length} bytes; the channel was made for {max_frame_bytes}"
            raise EngineError(self._death)
        return self._take(LENGTH.size, length, deadline, bound)

    def fail(self, reason: str) -> None:
        """Tells the peer the reason if the stream still works, then shuts down both directions, which wakes blocked
        threads."""
        self._death = self._death or reason
        text = reason.encode()[:_MAX_REASON_BYTES]
        # A running send may hold the lock until its deadline. Then only the shutdown ends it, without the reason.
        locked = self._write_lock.acquire(timeout=0.1)
        try:
            if locked:
                self._sock.settimeout(0.1)
                self._sock.sendall(LENGTH.pack(_FAILED) + pack_frame(text))
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the peer is gone and cannot be told
        finally:
            if locked:
                self._write_lock.release()

    def check_alive(self) -> None:
        """Raises EngineError if the stream has failed."""
        if self._death is not None:
            raise EngineError(self._death)

    def close(self) -> None:
        """Closes the socket. The peer still reads the frames that were sent, then the end of the stream."""
        self._death = self._death or "this end of the channel is closed"
        self._sock.close()

    def detach(self) -> socket.socket:
        """Returns the socket, for bytes that are not frames. Do not use this object afterwards."""
        return self._sock

    def _take(self, start: int, count: int, deadline: float, bound: str) -> bytes:
        self._fill(start + count, deadline, bound)
        frame = bytes(self._received[start : start + count])
        del self._received[: start + count]
        return frame

    def _fill(self, count: int, deadline: float, bound: str) -> None:
        while len(self._received) < count:
            left = deadline - time.monotonic()
            try:
                # A timeout of 0 does not wait at all. Any other lasts at least a millisecond.
                self._sock.settimeout(min(max(left, 0.0), _LONGEST_WAIT_S))
                arrived = self._sock.recv(max(count - len(self._received), 1 << 16))
            except (TimeoutError, BlockingIOError):
                if left > _LONGEST_WAIT_S:
                    continue
                raise DeadlineError(f"no frame came from {self.peer} within {bound}; see what holds it up") from None
            except OSError as error:
                raise self._broken(error.strerror or str(error)) from error
            if not arrived:
                raise self._broken("it was closed there; see the log of that end")
            self._received += arrived

    def _broken(self, why: str) -> EngineError:
        self._death = self._death or f"the channel to {self.peer} broke: {why}"
        return EngineError(self._death)


class TcpListener:
    """Accepts the connections of one channel's other ends."""

    def __init__(self, sock: socket.socket, token: str) -> None:
        self.sock = sock
        """The listening socket. Its connections must pass `admit`."""
        self._token = token

    @classmethod
    def create(cls, host: str) -> TcpListener:
        """Listens on a free port of `host`, an address that the other nodes can reach.

        Raises:
            EngineError: `host` is not an address of this machine.
        """
        try:
            sock = socket.create_server((host, 0), family=family_of(host))
        except OSError as error:
            raise EngineError(
                f"cannot listen on host={host}: {error.strerror}; give an address of this node"
            ) from error
        return cls(sock, secrets.token_hex(16))

    @property
    def address(self) -> str:
        """The address for `connect`. It contains the channel's secret: give it only to the ranks."""
        host, port = self.sock.getsockname()[:2]
        return f"{host}:{port}:{self._token}"

    def accept(self, num_peers: int, *, timeout_s: float) -> list[Connection]:
        """Accepts one connection per index below `num_peers` and returns them in index order. Connections that do not
        prove the secret are closed.

        Raises:
            DeadlineError: not all peers came within `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        connections: dict[int, Connection] = {}
        while len(connections) < num_peers:
            missing = sorted(set(range(num_peers)) - set(connections))
            left = deadline - time.monotonic()
            try:
                if left <= 0:
                    raise TimeoutError
                self.sock.settimeout(left)
                sock, address = self.sock.accept()
            except TimeoutError:
                for connection in connections.values():
                    connection.close()
                raise DeadlineError(
                    f"channel ends {missing} did not connect within {_INIT_TIMEOUT}={timeout_s:g}; see their logs"
                ) from None
            try:
                index = self.admit(sock, min(_HANDSHAKE_S, left))
            except (OSError, EngineError):
                sock.close()
                continue
            if index not in missing:
                sock.close()
                continue
            connections[index] = Connection(sock, f"channel end {index} at {address[0]}")
        return [connections[index] for index in range(num_peers)]

    def close(self) -> None:
        """Accepts no more connections. Accepted ones stay open."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits in accept
        self.sock.close()

    def admit(self, sock: socket.socket, timeout_s: float = _HANDSHAKE_S) -> int:
        """Checks that a connected peer knows the secret, and returns the peer's index.

        Raises:
            OSError, EngineError: the peer does not know the secret, or did not prove it within `timeout_s`.
        """
        sock.settimeout(timeout_s)
        challenge = secrets.token_bytes(_CHALLENGE_BYTES)
        sock.sendall(challenge)
        magic, index, proof, counter_challenge = _HELLO.unpack(_read_exactly(sock, _HELLO.size))
        if magic != _MAGIC or not hmac.compare_digest(proof, _proof(self._token, b"connector", index, challenge)):
            raise EngineError("refused a connection to the step channel, because it did not prove the secret")
        sock.sendall(_proof(self._token, b"listener", index, counter_challenge))
        return index


def connect(address: str, index: int, *, timeout_s: float) -> Connection:
    """Connects to the listener at `address` as its peer `index`.

    Raises:
        DeadlineError: the listener did not answer within `timeout_s`.
        EngineError: the listener is gone, does not know the secret, or refused this end.
    """
    host, port, token = address.rsplit(":", 2)
    peer = f"the channel's listener at {host_and_port(host, int(port))}"
    try:
        sock = socket.create_connection((host, int(port)), timeout=timeout_s)
        sock.settimeout(timeout_s)
        challenge = secrets.token_bytes(_CHALLENGE_BYTES)
        proof = _proof(token, b"connector", index, _read_exactly(sock, _CHALLENGE_BYTES))
        sock.sendall(_HELLO.pack(_MAGIC, index, proof, challenge))
        answer = _read_exactly(sock, _CHALLENGE_BYTES)
    except TimeoutError:
        raise DeadlineError(f"{peer} did not answer within {_INIT_TIMEOUT}={timeout_s:g}; see its log") from None
    except OSError as error:
        raise EngineError(f"{peer} cannot be reached: {error.strerror or error}") from error
    if not hmac.compare_digest(answer, _proof(token, b"listener", index, challenge)):
        sock.close()
        raise EngineError(f"{peer} does not know the channel's secret; please report this bug")
    return Connection(sock, peer)


class TcpWriter:
    """A FrameWriter over one connection per reader."""

    def __init__(self, connections: Sequence[Connection], *, max_frame_bytes: int) -> None:
        self._connections = list(connections)
        self._max_frame_bytes = max_frame_bytes

    def send(self, frame: bytes, timeout_s: float) -> None:
        if len(frame) > self._max_frame_bytes:
            raise EngineError(
                f"a frame of {len(frame)} bytes exceeds the channel's {self._max_frame_bytes}; please report this bug"
            )
        deadline = time.monotonic() + timeout_s
        for connection in self._connections:
            connection.write(frame, deadline, f"{STEP_TIMEOUT}={timeout_s:g}")

    def fail(self, reason: str) -> None:
        for connection in self._connections:
            connection.fail(reason)

    def close(self) -> None:
        for connection in self._connections:
            connection.close()


class TcpReader:
    """A FrameReader over one connection."""

    def __init__(self, connection: Connection, *, max_frame_bytes: int) -> None:
        self._connection = connection
        self._max_frame_bytes = max_frame_bytes

    def recv(self, timeout_s: float) -> bytes:
        return self._connection.read(
            self._max_frame_bytes, time.monotonic() + timeout_s, f"{STEP_TIMEOUT}={timeout_s:g}"
        )

    def poll(self) -> bytes | None:
        try:
            return self._connection.read(self._max_frame_bytes, time.monotonic(), "a poll")
        except DeadlineError:
            return None

    def fail(self, reason: str) -> None:
        """Fails the channel from the reading side."""
        self._connection.fail(reason)

    def close(self) -> None:
        self._connection.close()


def _proof(token: str, role: bytes, index: int, challenge: bytes) -> bytes:
    return hmac.digest(token.encode(), role + LENGTH.pack(index) + challenge, "sha256")


def _read_exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = sock.recv(count - len(data))
        if not part:
            raise OSError("it closed the connection; see its log")
        data += part
    return data
