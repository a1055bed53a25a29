"""Byte ranges of a file. A rank reads all checkpoint data through this module, which counts it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from configs.errors import CheckpointError

_PAGE_BYTES = 4096
_BLOCK_BYTES = 1 << 20
"""Bytes read at once if only pieces of rows are needed. They fit the second-level cache."""


class RangeReader:
    """Reads byte ranges of one file through a file descriptor, since a mapping would keep its pages in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDONLY)
        self.size = os.fstat(self._fd).st_size
        self.bytes_read = 0

    def read(self, offset: int, length: int) -> bytearray:
        """Bytes [offset, offset + length). Raises CheckpointError if the file ends before."""
        buffer = bytearray(length)
        self.read_into(offset, memoryview(buffer))
        return buffer

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fills `view` with the bytes from `offset`."""
        self._fill(offset, view)
        self.bytes_read += len(view)

    def read_strided(self, offset: int, stride: int, count: int, length: int) -> bytearray:
        """`count` pieces of `length` bytes, `stride` apart, joined. `bytes_read` counts only the pieces.

        Gaps of a page or more are not read. Smaller ones are read: skipping them would save no page, and a call for
        each row of thousands of experts would take longer than reading the gaps.
        """
        if length == stride:
            return self.read(offset, count * length)
        buffer = bytearray(count * length)
        view = memoryview(buffer)
        if stride - length >= _PAGE_BYTES:
            for i in range(count):
                self.read_into(offset + i * stride, view[i * length : (i + 1) * length])
            return buffer
        pieces = np.frombuffer(buffer, np.uint8).reshape(count, length)
        step = max(1, _BLOCK_BYTES // stride)
        block = bytearray(min(step, count) * stride)
        rows = np.frombuffer(block, np.uint8).reshape(-1, stride)
        for start in range(0, count, step):
            num = min(step, count - start)
            size = (num - 1) * stride + length  # not a whole stride, since the file may end here
            self._fill(offset + start * stride, memoryview(block)[:size])
            pieces[start : start + num] = rows[:num, :length]
        self.bytes_read += len(buffer)
        return buffer

    def close(self) -> None:
        """Closes the file."""
        os.close(self._fd)

    def _fill(self, offset: int, view: memoryview) -> None:
        done = 0
        while done < len(view):
            count = os.preadv(self._fd, [view[done:]], offset + done)
            if count == 0:
                raise CheckpointError(f"{self.path} ends at byte {self.size}, its tensors need more; download it again")
            done += count
