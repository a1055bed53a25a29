"""Helpers for sockets between Lockstep's processes: frames with a length prefix, and checks of the peer's user."""

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
"""The header of each frame: the number of bytes."""
MAX_FRAME_BYTES = 256 << 20
"""A peer that sends a longer frame is considered broken."""
_CREDENTIALS = struct.Struct("3i")  # pid, uid and gid of SO_PEERCRED


def num_descriptors_left() -> int:
    """Number of file descriptors that this process may still open."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    try:
        # Since Linux 6.2, the directory's size is the number of open descriptors.
        return limit - (os.stat("/proc/self/fd").st_size or len(os.listdir("/proc/self/fd")))
    except OSError:
        return 0


def pack_frame(body: bytes) -> bytes:
    """`body` with its length prefix."""
    return LENGTH.pack(len(body)) + body


def whole_frames(received: bytearray) -> list[slice]:
    """Ranges of the bodies of all complete frames in `received`, which begins with a frame."""
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
    """Reads the next frame's body. Raises asyncio.IncompleteReadError at the end of the stream, and EngineError if the
    length is too large."""
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    if length > MAX_FRAME_BYTES:
        raise EngineError(f"frame of {length} bytes on the engine socket exceeds {MAX_FRAME_BYTES}")
    return await reader.readexactly(length)


def receive_frame(sock: socket.socket) -> bytes | None:
    """Reads the next frame's body and not a byte more. Returns None at the end of the stream. Blocks."""
    length = _receive_exactly(sock, LENGTH.size)
    return None if length is None else _receive_exactly(sock, LENGTH.unpack(length)[0])


def is_ours(peer: socket.socket) -> bool:
    """Whether the process at the other end of a unix socket belongs to this process's user."""
    return _credentials(peer)[1] == os.getuid()


def pid_of(peer: socket.socket) -> int:
    """Process id of the other end of a unix socket."""
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
