"""The common part of sockets between our processes: frames with their length in front, and peers of one user."""

from __future__ import annotations

import os
import resource
import socket
import struct
from typing import TYPE_CHECKING

from configs.errors import EngineError

if TYPE_CHECKING:
    import asyncio

LENGTH = struct.Struct("<I")
"""The header of each frame: how many bytes it has."""
MAX_FRAME_BYTES = 256 << 20
"""A longer frame is taken for a broken peer."""
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid of SO_PEERCRED


def num_descriptors_left() -> int:
    """Number of file descriptors that this process may still open."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    try:
        # Linux counts them in the size since 6.2.
        return limit - (os.stat("/proc/self/fd").st_size or len(os.listdir("/proc/self/fd")))
    except OSError:
        return 0


def pack_frame(body: bytes) -> bytes:
    """`body` with its length in front."""
    return LENGTH.pack(len(body)) + body


def whole_frames(received: bytearray) -> list[slice]:
    """Spans of the bodies of the frames that `received`, which begins with one, has whole."""
    spans: list[slice] = []
    start = LENGTH.size
    while start <= len(received):
        end = start + LENGTH.unpack_from(received, start - LENGTH.size)[0]
        if end > len(received):
            break
        spans.append(slice(start, end))
        start = end + LENGTH.size
    return spans


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """The next frame's body. Raises asyncio.IncompleteReadError at the end and EngineError for an absurd length."""
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    if length > MAX_FRAME_BYTES:
        raise EngineError(f"frame of {length} bytes on the engine socket exceeds {MAX_FRAME_BYTES}")
    return await reader.readexactly(length)


def receive_frame(sock: socket.socket) -> bytes | None:
    """The next frame's body, and not a byte more; None at the end. Blocks."""
    length = _receive_exactly(sock, LENGTH.size)
    return None if length is None else _receive_exactly(sock, LENGTH.unpack(length)[0])


def is_ours(peer: socket.socket) -> bool:
    """Whether the other end of a unix socket belongs to this process' user."""
    return _credentials(peer)[1] == os.getuid()


def pid_of(peer: socket.socket) -> int:
    """The process that connected, or listened, at the other end of a unix socket."""
    return _credentials(peer)[0]


def _credentials(peer: socket.socket) -> tuple[int, int, int]:
    given = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(given)
    return pid, uid, gid


def _receive_exactly(sock: socket.socket, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        part = sock.recv(size - len(parts), socket.MSG_WAITALL)
        if not part:
            return None
        parts += part
    return bytes(parts)
