"""Byte ranges of a file. What a rank reads of a checkpoint goes through here, and is counted."""

from __future__ import annotations

import os
from pathlib import Path

from configs.errors import CheckpointError


class RangeReader:
    """Reads byte ranges of one file through a file descriptor: no mapping that keeps pages resident."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDONLY)
        self.size = os.fstat(self._fd).st_size
        self.bytes_read = 0

    def read(self, offset: int, length: int) -> bytearray:
        """Bytes [offset, offset + length); raises CheckpointError when the file ends before."""
        buffer = bytearray(length)
        self.read_into(offset, memoryview(buffer))
        return buffer

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fills `view` with the bytes from `offset`."""
        done = 0
        while done < len(view):
            count = os.preadv(self._fd, [view[done:]], offset + done)
            if count == 0:
                raise CheckpointError(f"{self.path} ends at byte {self.size}, its tensors need more; download it again")
            done += count
        self.bytes_read += done

    def read_strided(self, offset: int, stride: int, count: int, length: int) -> bytearray:
        """`count` pieces of `length` bytes, `stride` apart, joined; the gaps are not read."""
        if length == stride:
            return self.read(offset, count * length)
        buffer = bytearray(count * length)
        view = memoryview(buffer)
        for i in range(count):
            self.read_into(offset + i * stride, view[i * length : (i + 1) * length])
        return buffer

    def close(self) -> None:
        """Closes the file."""
        os.close(self._fd)
