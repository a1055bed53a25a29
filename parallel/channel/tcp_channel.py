"""The step channel over TCP, for ranks on another node: the interfaces of channel.py, one connection per reader.

Either side may listen: frames go from the coordinator to the ranks and results come back, and the coordinator listens
for both. A secret in the address is proved by both ends (HMAC over the other's random bytes) and never sent; nothing
that arrives is unpickled.
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

_FAILED = 0xFFFFFFFF  # in place of a length: a second length and the reason follow, and the channel is over
_MAX_REASON_BYTES = 4096
_CHALLENGE_BYTES = 32
_HELLO = struct.Struct(f"<8sI{_CHALLENGE_BYTES}s{_CHALLENGE_BYTES}s")  # magic, index, proof, challenge
_MAGIC = b"LKSTEP01"
# How long a caller may take to prove itself before the next one is heard.
_HANDSHAKE_S = 5.0
# Sockets take no infinite timeout; a reader may wait for ever.
_LONGEST_WAIT_S = 3600.0


class Connection:
    """One connected stream of frames. Reads and writes are each for one thread at a time."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.peer = peer
        self._sock = sock
        self._received = bytearray()
        self._death: str | None = None
        self._write_lock = threading.Lock()

    def write(self, frame: bytes, deadline: float, bound: str) -> None:
        """Sends one frame. Raises as FrameWriter.send; `bound` is how a DeadlineError names what bounds the wait."""
        with self._write_lock:
            self.check_alive()
            try:
                self._sock.settimeout(max(deadline - time.monotonic(), 1e-6))
                self._sock.sendall(pack_frame(frame))
            except TimeoutError:
                # Part of the frame may be out: the stream cannot go on.
                self._death = f"{self.peer} took no frame within {bound}"
                raise DeadlineError(self._death) from None
            except OSError as error:
                raise self._broken(error.strerror or str(error)) from error

    def read(self, max_frame_bytes: int, deadline: float, bound: str) -> bytes:
        """The next frame. Raises as FrameReader.recv; after a DeadlineError what has arrived is kept."""
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
        """Tells the peer if the stream still takes it, then ends both directions, waking whoever waits on them."""
        self._death = self._death or reason
        text = reason.encode()[:_MAX_REASON_BYTES]
        # A send in progress holds the lock until its deadline; it is cut off instead.
        locked = self._write_lock.acquire(timeout=0.1)
        try:
            if locked:
                self._sock.settimeout(0.1)
                self._sock.sendall(LENGTH.pack(_FAILED) + pack_frame(text))
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the peer is gone: nobody is left to tell
        finally:
            if locked:
                self._write_lock.release()

    def check_alive(self) -> None:
        """Raises EngineError once the stream has failed."""
        if self._death is not None:
            raise EngineError(self._death)

    def close(self) -> None:
        """Closes the socket; the peer reads the end of the stream after the frames already sent."""
        self._death = self._death or "this end of the channel is closed"
        self._sock.close()

    def detach(self) -> socket.socket:
        """The socket, for bytes that are no frames. This object is not used any more."""
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
                # A timeout of 0 does not wait at all; the shortest other one is a millisecond.
                self._sock.settimeout(min(max(left, 0.0), _LONGEST_WAIT_S))
                arrived = self._sock.recv(max(count - len(self._received), 1 << 16))
            except (TimeoutError, BlockingIOError):
                if left > _LONGEST_WAIT_S:
                    continue
                raise DeadlineError(f"no frame came from {self.peer} within {bound}") from None
            except OSError as error:
                raise self._broken(error.strerror or str(error)) from error
            if not arrived:
                raise self._broken("the stream ended")
            self._received += arrived

    def _broken(self, why: str) -> EngineError:
        self._death = self._death or f"the channel to {self.peer} broke: {why}"
        return EngineError(self._death)


class TcpListener:
    """The place where the other ends of one channel connect."""

    def __init__(self, sock: socket.socket, token: str) -> None:
        self.sock = sock
        """Its connections have to pass `admit`."""
        self._token = token

    @classmethod
    def create(cls, host: str) -> TcpListener:
        """Listens on a free port of `host`, an address the other nodes reach.

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
        """The address that `connect` needs. It holds the channel's secret: pass it only to the ranks."""
        host, port = self.sock.getsockname()[:2]
        return f"{host}:{port}:{self._token}"

    def accept(self, num_peers: int, *, timeout_s: float) -> list[Connection]:
        """One connection for each index below `num_peers`, in index order.

        Whoever does not prove the secret is turned away. Raises DeadlineError when not all came within `timeout_s`.
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
                    f"channel ends {missing} did not connect within {_INIT_TIMEOUT}={timeout_s:g}"
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
        """Takes no more connections; those accepted live on."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for a connection
        self.sock.close()

    def admit(self, sock: socket.socket, timeout_s: float = _HANDSHAKE_S) -> int:
        """Returns the index of the peer that called, once the peer has proved the secret.

        Raises:
            OSError, EngineError: the caller does not know the secret, or did not prove it within `timeout_s`.
        """
        sock.settimeout(timeout_s)
        challenge = secrets.token_bytes(_CHALLENGE_BYTES)
        sock.sendall(challenge)
        magic, index, proof, counter_challenge = _HELLO.unpack(_read_exactly(sock, _HELLO.size))
        if magic != _MAGIC or not hmac.compare_digest(proof, _proof(self._token, b"connector", index, challenge)):
            raise EngineError("a stranger called the step channel")
        sock.sendall(_proof(self._token, b"listener", index, counter_challenge))
        return index


def connect(address: str, index: int, *, timeout_s: float) -> Connection:
    """Connects to the listener at `address` as its peer `index`.

    Raises:
        DeadlineError: nobody answered within `timeout_s`.
        EngineError: the listener is gone, or does not know the secret, or turned this end away.
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
        raise DeadlineError(f"{peer} did not answer within {_INIT_TIMEOUT}={timeout_s:g}") from None
    except OSError as error:
        raise EngineError(f"{peer} cannot be reached: {error.strerror or error}") from error
    if not hmac.compare_digest(answer, _proof(token, b"listener", index, challenge)):
        sock.close()
        raise EngineError(f"{peer} does not know the channel's secret")
    return Connection(sock, peer)


class TcpWriter:
    """FrameWriter over one connection per reader."""

    def __init__(self, connections: Sequence[Connection], *, max_frame_bytes: int) -> None:
        self._connections = list(connections)
        self._max_frame_bytes = max_frame_bytes

    def send(self, frame: bytes, timeout_s: float) -> None:
        if len(frame) > self._max_frame_bytes:
            raise EngineError(
                f"a frame of {len(frame)} bytes exceeds the {self._max_frame_bytes} that the channel was made for"
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
    """FrameReader over one connection."""

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
        """Ends the channel from the reading side."""
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
            raise OSError("the stream ended")
        data += part
    return data
