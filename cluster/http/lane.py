"""Lanes: how the bodies of streamed answers get from a replica to the proxy that holds the clients' connections.

Ray Serve carries every part of a response as an object of its own, through two event loops and a pickle at each end:
0.4 ms of processor time a token. Where proxy and replica share a node, a lane carries the parts instead: one unix
socket for all of a replica's streams. Everything else, routing, headers, cancellation and the end, stays Serve's.

The proxy names its address and a stream in a header of the request; both are random, and both ends check the other's
user. A replica that cannot reach the address answers through Serve.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import secrets
import socket
import struct
from collections.abc import Callable
from typing import Protocol

logger = logging.getLogger(__name__)

HEADER = b"x-lockstep-lane"
_VALUE = re.compile(rb"(lockstep-lane-\d{1,10}-[0-9a-f]{32})/(\d{1,20})")
_PART = struct.Struct("<QI")  # stream, bytes that follow; _END: nothing follows, the body is complete
_FLOW = struct.Struct("<QB")  # stream, 1 full or 0 writable: from proxy to replica
_END = 0xFFFFFFFF
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid of SO_PEERCRED
# Written together: each write costs a system call, but the first client should not wait for the last one's part.
_PARTS_A_WRITE = 16
_WRITE_BUFFER_BYTES = 1 << 20


class Connection(Protocol):
    """What a stream's parts are written to."""

    def write_part(self, part: bytes) -> None: ...


# ---- the proxy's end


class LaneStream:
    """The client's end of one streamed body, in the proxy."""

    def __init__(self, connection: Connection) -> None:
        self.ended = asyncio.Event()
        """The body is complete, or no more of it can come."""
        self._connection = connection
        self._started = False
        self._early: list[bytes] = []  # parts that overtook the head of the response
        self._lane: _ProxyLane | None = None

    def start(self) -> None:
        """To be called when the head of the response has been written."""
        self._started = True
        for part in self._early:
            self._connection.write_part(part)
        self._early.clear()

    def take(self, part: bytes, lane: _ProxyLane) -> None:
        self._lane = lane
        if self._started:
            self._connection.write_part(part)
        else:
            self._early.append(part)

    def tell_full(self, stream_id: int, full: bool) -> bool:
        """Tells the replica that the client's connection is full, or no longer; False when no lane leads there."""
        return self._lane is not None and self._lane.tell_full(stream_id, full)


class LaneHub:
    """All lanes that lead to one proxy."""

    def __init__(self) -> None:
        self._streams: dict[int, LaneStream] = {}
        self._name = f"lockstep-lane-{os.getpid()}-{secrets.token_hex(16)}"
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Takes lanes from now on; calling it again does nothing."""
        if self._server is None:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(f"\0{self._name}")
            loop = asyncio.get_running_loop()
            self._server = await loop.create_unix_server(lambda: _ProxyLane(self._streams), sock=listener)

    def close(self) -> None:
        """Takes no more lanes."""
        if self._server is not None:
            self._server.close()

    def add(self, stream: LaneStream) -> tuple[int, bytes]:
        """The id of a new stream, and the header's value that names it."""
        stream_id = secrets.randbits(63)
        self._streams[stream_id] = stream
        return stream_id, f"{self._name}/{stream_id}".encode()

    def remove(self, stream_id: int) -> None:
        """What still comes for the stream is dropped."""
        del self._streams[stream_id]


class _ProxyLane(asyncio.Protocol):
    """One replica's lane."""

    def __init__(self, streams: dict[int, LaneStream]) -> None:
        self._streams = streams
        self._received = b""
        self._carried: set[int] = set()  # streams that are not complete
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if _peer_is_us(transport):
            self._transport = transport  # type: ignore[assignment]  # uvloop's is no asyncio.Transport
        else:
            logger.warning("a lane of another user was refused")
            transport.close()

    def data_received(self, data: bytes) -> None:
        if self._transport is None:
            return
        if self._received:
            data = self._received + data
        start, length = 0, len(data)
        while length - start >= _PART.size:
            stream_id, size = _PART.unpack_from(data, start)
            begin = start + _PART.size
            end = begin if size == _END else begin + size
            if end > length:
                break
            start = end
            if (stream := self._streams.get(stream_id)) is None:
                continue  # its client has left
            if size == _END:
                self._carried.discard(stream_id)
                stream.ended.set()
            else:
                self._carried.add(stream_id)
                stream.take(data[begin:end], self)
        self._received = data[start:]

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        for stream_id in self._carried:
            if (stream := self._streams.get(stream_id)) is not None:
                stream.ended.set()

    def tell_full(self, stream_id: int, full: bool) -> bool:
        if self._transport is None:
            return False
        self._transport.write(_FLOW.pack(stream_id, full))
        return True


# ---- the replica's end


class ReplicaLane(asyncio.Protocol):
    """A replica's lane to one proxy."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._parts: list[bytes] = []
        self._flush_scheduled = False
        self._readers: dict[int, Callable[[bool], None]] = {}
        self._received = b""
        self._transport: asyncio.Transport | None = None
        self._fd = -1
        self._writable = asyncio.Event()
        self._writable.set()

    @property
    def is_open(self) -> bool:
        """Whether what is written arrives."""
        return self._transport is not None

    def add(self, stream_id: int, on_full: Callable[[bool], None]) -> None:
        """Begins a stream; `on_full` hears when its client's connection is full, and when it no longer is."""
        self._readers[stream_id] = on_full

    def remove(self, stream_id: int) -> None:
        """Ends a stream, complete or not."""
        self._readers.pop(stream_id, None)

    async def write(self, stream_id: int, part: bytes) -> None:
        """Sends a part of a stream's body. Raises ConnectionError when the proxy is gone."""
        if self._transport is None:
            raise ConnectionError("the proxy is gone")
        self._parts += (_PART.pack(stream_id, len(part)), part)
        if len(self._parts) >= 2 * _PARTS_A_WRITE:
            self._flush()
        elif not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)
        if not self._writable.is_set():
            await self._writable.wait()

    def end(self, stream_id: int) -> None:
        """Says that a stream's body is complete."""
        self._parts.append(_PART.pack(stream_id, _END))
        self._flush()

    def _flush(self) -> None:
        self._flush_scheduled = False
        data = b"".join(self._parts)
        self._parts.clear()
        if self._transport is None or not data:
            return
        # uvloop writes when all that is ready has run: the first client would wait for the last one's part.
        if not self._transport.get_write_buffer_size():
            with contextlib.suppress(OSError):
                data = data[os.write(self._fd, data) :]
        if data:
            self._transport.write(data)

    # ---- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if _peer_is_us(transport):
            self._transport = transport  # type: ignore[assignment]  # uvloop's is no asyncio.Transport
            self._transport.set_write_buffer_limits(high=_WRITE_BUFFER_BYTES)  # type: ignore[union-attr]
            self._fd = transport.get_extra_info("socket").fileno()
        else:
            logger.warning("a proxy of another user was refused")
            transport.close()

    def data_received(self, data: bytes) -> None:
        data = self._received + data
        whole = len(data) - len(data) % _FLOW.size
        for stream_id, full in _FLOW.iter_unpack(data[:whole]):
            if (on_full := self._readers.get(stream_id)) is not None:
                on_full(bool(full))
        self._received = data[whole:]

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._writable.set()


class Lanes:
    """A replica's lanes, one to each proxy that asked for one."""

    def __init__(self) -> None:
        self._lanes: dict[bytes, ReplicaLane | None] = {}  # None: cannot be reached

    async def find(self, headers: list[tuple[bytes, bytes]]) -> tuple[ReplicaLane, int] | None:
        """The lane and the stream that a request's headers name; None when there is none to be had."""
        values = [value for name, value in headers if name == HEADER]
        match = _VALUE.fullmatch(values[0]) if len(values) == 1 else None
        if match is None:
            return None
        address, stream_id = match[1], int(match[2])
        lane = self._lanes.get(address)
        if lane is None and address not in self._lanes:
            lane = self._lanes[address] = await _connect(address)
        if lane is None or stream_id >= 1 << 63:
            return None
        if not lane.is_open:
            del self._lanes[address]
            return None
        return lane, stream_id


async def _connect(address: bytes) -> ReplicaLane | None:
    # Connected here and not by the loop: uvloop refuses addresses of the abstract namespace.
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(b"\0" + address)
        sock.setblocking(False)
        _, lane = await asyncio.get_running_loop().create_unix_connection(ReplicaLane, sock=sock)
    except OSError as error:
        with contextlib.suppress(OSError):
            sock.close()
        logger.info("no lane to a proxy, whose streams go through Ray Serve: %s", error.strerror)
        return None
    return lane


def _peer_is_us(transport: asyncio.BaseTransport) -> bool:
    peer = transport.get_extra_info("socket")
    _, uid, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return bool(uid == os.getuid())
