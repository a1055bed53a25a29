"""StepChannel: carries frames from one writer to several readers, through a ring in shared memory.

This module only transports bytes. worker/protocol.py defines the contents of a frame and checks them. tcp_channel.py
implements the same two interfaces over TCP, for ranks on other nodes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

from configs.errors import DeadlineError, EngineError
from parallel.shm import FIRST_WORD, LINE_BYTES, LINE_WORDS, Segment

STEP_TIMEOUT = "parallel.step_timeout_s"

# Interval at which a waiting reader writes its heartbeat.
_HEARTBEAT_S = 0.5
# The cursor of a reader that has closed. The writer never waits for it.
_GONE = 1 << 62


class FrameWriter(Protocol):
    """The writing end. One thread at a time may send. Any thread may call `fail`."""

    def send(self, frame: bytes, timeout_s: float) -> None:
        """Sends `frame` to every reader. Returns once the frame is in the channel.

        Raises:
            DeadlineError: a reader left no room within `timeout_s`.
            EngineError: the frame is too large for the channel, or the channel failed.
        """

    def fail(self, reason: str) -> None:
        """Fails the channel: current and later calls at both ends raise EngineError(reason)."""

    def close(self) -> None:
        """Closes this end. The readers are not told: send a last frame, or call `fail`, first."""


class FrameReader(Protocol):
    """A reading end, for one thread at a time. Every reader gets every frame, in order."""

    def recv(self, timeout_s: float) -> bytes:
        """Returns a copy of the next frame.

        Raises:
            DeadlineError: no frame came within `timeout_s`. A later call may still get it.
            EngineError: the channel failed.
        """

    def poll(self) -> bytes | None:
        """Returns the next frame, or None if there is none yet. Never waits. Raises EngineError if the channel
        failed."""

    def fail(self, reason: str) -> None:
        """Fails the channel, like `FrameWriter.fail`."""

    def close(self) -> None:
        """Closes this end. The writer no longer waits for it."""


@dataclass(frozen=True, slots=True)
class ReaderStatus:
    """The last state that a ring's reader published."""

    num_received: int
    """Number of frames that the reader has read."""
    heartbeat_age_s: float
    """Seconds since the reader last entered, left or waited in `recv`; infinite before the first call. The age grows
    while the reader computes."""
    closed: bool
    """Whether the reader closed its end."""


class Ring:
    """A ring of `slots` frames of up to `slot_bytes` in shared memory, for one writer and `num_readers` readers on one
    node.

    The writer counts the frames that it wrote, and each reader those that it read. A slot is free again when every
    reader has passed it. Other processes can attach only while the creator lives and has not closed.
    """

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self.num_readers, self.slots, self.slot_bytes, self.spin_us = segment.words[FIRST_WORD : FIRST_WORD + 4]
        self.sleepers = FIRST_WORD + LINE_WORDS  # words that say who sleeps: the writer, then each reader
        self.head = self.sleepers + -(-(1 + self.num_readers) // LINE_WORDS) * LINE_WORDS
        self._first_cursor = self.head + LINE_WORDS
        self._first_slot = 8 * (self._first_cursor + self.num_readers * LINE_WORDS)
        self._stride = _slot_stride(self.slot_bytes)

    @classmethod
    def create(cls, *, num_readers: int, slots: int, slot_bytes: int, spin_us: int) -> Ring:
        """Creates an empty ring. The creator may be the writer, one of the readers, or neither.

        Args:
            spin_us: microseconds that a waiting end spins before it sleeps.

        Raises:
            ConfigError: this processor is not supported.
        """
        assert num_readers >= 1, "a ring needs a reader"
        assert slots >= 1, "a ring needs a slot"
        lines = 1 + -(-(1 + num_readers) // LINE_WORDS) + 1 + num_readers
        segment = Segment.create(lines * LINE_BYTES + slots * _slot_stride(slot_bytes))
        for i, value in enumerate((num_readers, slots, slot_bytes, spin_us)):
            segment.words[FIRST_WORD + i] = value
        return cls(segment)

    @classmethod
    def attach(cls, address: str) -> Ring:
        """Attaches to a ring that another process of this node created. Raises EngineError if that fails."""
        return cls(Segment.attach(address))

    @property
    def address(self) -> str:
        """The address for `attach`. Every process of the same user that has it can read and write frames."""
        return self._segment.address

    def writer(self) -> RingWriter:
        """The writing end. There may be only one."""
        return RingWriter(self, self._segment)

    def reader(self, index: int) -> RingReader:
        """Reading end `index` of `num_readers`. There may be only one per index."""
        assert 0 <= index < self.num_readers, f"reader {index} of {self.num_readers}"
        return RingReader(self, self._segment, index)

    def reader_status(self, index: int) -> ReaderStatus:
        """The last state of reader `index`, for any process. Raises EngineError after `close`."""
        if self._segment.closed:
            raise EngineError("the ring is closed; please report this bug")
        cursor, heartbeat = self._segment.words[self.cursor(index) : self.cursor(index) + 2]
        age_s = (time.monotonic_ns() - heartbeat) * 1e-9 if heartbeat else float("inf")
        return ReaderStatus(num_received=cursor % _GONE, heartbeat_age_s=age_s, closed=cursor >= _GONE)

    def fail(self, reason: str) -> None:
        """Fails the channel, like `FrameWriter.fail`. Any process that has attached may call this."""
        if self._segment.closed:
            return
        words = [self.head, *(self.cursor(index) for index in range(self.num_readers))]
        self._segment.declare_dead(reason, words)

    def close(self) -> None:
        """Unmaps the ring in this process; its ends cannot be used afterwards. After the creator's close, no process
        can attach."""
        self._segment.close()

    def cursor(self, index: int) -> int:
        """Index of the word in which reader `index` counts its frames. The next word is its heartbeat, in monotonic
        ns."""
        return self._first_cursor + index * LINE_WORDS

    def slot(self, number: int) -> int:
        """Offset of the slot of frame `number`: the length as int64, then the bytes."""
        return self._first_slot + (number % self.slots) * self._stride


class RingWriter:
    """The FrameWriter of a ring."""

    def __init__(self, ring: Ring, segment: Segment) -> None:
        self._ring = ring
        self._segment = segment
        self._slots = [segment.view(ring.slot(i), 8 + ring.slot_bytes) for i in range(ring.slots)]
        self._num_sent = segment.words[ring.head]
        self._free_until = self._num_sent  # frames below this number have a free slot for certain
        self._sleepers = segment.words[ring.sleepers + 1 : ring.sleepers + 1 + ring.num_readers]

    def send(self, frame: bytes, timeout_s: float) -> None:
        ring, length = self._ring, len(frame)
        if length > ring.slot_bytes:
            raise EngineError(
                f"a frame of {length} bytes exceeds the channel's {ring.slot_bytes}; please report this bug"
            )
        self._segment.check_alive()
        if self._num_sent >= self._free_until:
            self._wait_for_room(timeout_s)
        slot = self._slots[self._num_sent % ring.slots]
        slot[:8] = length.to_bytes(8, "little")
        slot[8 : 8 + length] = frame
        self._num_sent += 1
        self._segment.publish(ring.head, self._num_sent, self._sleepers)

    def fail(self, reason: str) -> None:
        self._ring.fail(reason)

    def close(self) -> None:
        self._slots.clear()

    def _wait_for_room(self, timeout_s: float) -> None:
        ring, segment = self._ring, self._segment
        cursors = [ring.cursor(index) for index in range(ring.num_readers)]
        deadline = time.monotonic() + timeout_s
        for index, cursor in enumerate(cursors):
            if not segment.wait_at_least(
                cursor,
                self._num_sent + 1 - ring.slots,
                sleeper=ring.sleepers,
                timeout_s=deadline - time.monotonic(),
                spin_s=ring.spin_us * 1e-6,
            ):
                raise DeadlineError(
                    f"reader {index} left no room among {ring.slots} frames for {STEP_TIMEOUT}={timeout_s:g}; "
                    f"its heartbeat is {ring.reader_status(index).heartbeat_age_s:.1f} s old; see what holds it up"
                )
        self._free_until = min(segment.words[cursor] for cursor in cursors) + ring.slots


class RingReader:
    """The FrameReader of a ring."""

    def __init__(self, ring: Ring, segment: Segment, index: int) -> None:
        self._ring = ring
        self._segment = segment
        self._slots = [segment.view(ring.slot(i), 8 + ring.slot_bytes) for i in range(ring.slots)]
        self._cursor = ring.cursor(index)
        self._sleeper = ring.sleepers + 1 + index
        self._writer_sleeps = segment.words[ring.sleepers : ring.sleepers + 1]
        self._num_received = segment.words[self._cursor]

    def recv(self, timeout_s: float) -> bytes:
        segment = self._segment
        segment.check_alive()
        segment.words[self._cursor + 1] = time.monotonic_ns()
        self._wait_for_frame(timeout_s)
        return self._take()

    def poll(self) -> bytes | None:
        segment = self._segment
        segment.check_alive()
        segment.words[self._cursor + 1] = time.monotonic_ns()
        if segment.words[self._ring.head] <= self._num_received:
            return None
        if not segment.ordered:
            segment.fence()
        return self._take()

    def _take(self) -> bytes:
        segment = self._segment
        slot = self._slots[self._num_received % self._ring.slots]
        length = int.from_bytes(slot[:8], "little")
        frame = bytes(slot[8 : 8 + length])
        self._num_received += 1
        segment.words[self._cursor + 1] = time.monotonic_ns()
        segment.publish(self._cursor, self._num_received, self._writer_sleeps)
        return frame

    def fail(self, reason: str) -> None:
        self._ring.fail(reason)

    def close(self) -> None:
        self._slots.clear()
        if not self._segment.closed:
            self._segment.publish(self._cursor, self._num_received + _GONE, self._writer_sleeps)

    def _wait_for_frame(self, timeout_s: float) -> None:
        ring, segment = self._ring, self._segment
        deadline = time.monotonic() + timeout_s
        spin_s = ring.spin_us * 1e-6
        while not segment.wait_at_least(
            ring.head,
            self._num_received + 1,
            sleeper=self._sleeper,
            timeout_s=min(deadline - time.monotonic(), _HEARTBEAT_S),
            spin_s=spin_s,
        ):
            spin_s = 0.0
            segment.words[self._cursor + 1] = time.monotonic_ns()
            if time.monotonic() >= deadline:
                raise DeadlineError(
                    f"no frame came within {STEP_TIMEOUT}={timeout_s:g}; see what holds the coordinator up"
                )


def _slot_stride(slot_bytes: int) -> int:
    return -(-(8 + slot_bytes) // LINE_BYTES) * LINE_BYTES
