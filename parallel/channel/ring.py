"""StepChannel: how frames travel from one writer to its readers, and the shared-memory ring that carries them.

Owns transport alone: a frame is bytes here. What is in it, and whether it is whole and in order, worker/protocol.py
says. The same two interfaces over TCP, for ranks on another node, are in tcp_channel.py.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

from configs.errors import DeadlineError, EngineError
from parallel.shm import FIRST_WORD, LINE_BYTES, LINE_WORDS, Segment

STEP_TIMEOUT = "parallel.step_timeout_s"

# A waiting reader shows that it lives this often.
_HEARTBEAT_S = 0.5
# A cursor no writer catches up with: this reader is gone, do not wait for it.
_GONE = 1 << 62


class FrameWriter(Protocol):
    """The writing end. One thread at a time sends; `fail` may come from any."""

    def send(self, frame: bytes, timeout_s: float) -> None:
        """Hands `frame` to every reader; returns once it is in the channel.

        Raises:
            DeadlineError: a reader left no room within `timeout_s`.
            EngineError: the frame is larger than the channel was made for, or the channel failed.
        """

    def fail(self, reason: str) -> None:
        """Ends the channel: every blocked or later call at either end raises EngineError(reason)."""

    def close(self) -> None:
        """Lets this end go. It tells the readers nothing: send a last frame, or fail, before."""


class FrameReader(Protocol):
    """A reading end, for one thread at a time. Every reader gets every frame sent, in order."""

    def recv(self, timeout_s: float) -> bytes:
        """The next frame, as bytes of the caller's own.

        Raises:
            DeadlineError: none came within `timeout_s`; a later call may still get it.
            EngineError: the channel failed.
        """

    def poll(self) -> bytes | None:
        """The next frame if it is there; never waits. Raises EngineError when the channel failed."""

    def fail(self, reason: str) -> None:
        """FrameWriter.fail, from the reading side."""

    def close(self) -> None:
        """Lets this end go; the writer no longer waits for it."""


@dataclass(frozen=True, slots=True)
class ReaderStatus:
    """The last state that a reader of a ring showed."""

    num_received: int
    """Frames it took out."""
    heartbeat_age_s: float
    """Seconds since it last entered, left or waited in `recv`; infinite before its first. Grows while it computes."""
    closed: bool
    """It closed its end."""


class Ring:
    """`slots` frames of up to `slot_bytes` in shared memory, one writer, `num_readers` readers, on one node.

    The writer counts the frames it put in, each reader those it took out; a slot is free again when every reader is
    past it. The creator keeps the memory reachable: whoever attaches must do so while it lives and has not closed.
    """

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self.num_readers, self.slots, self.slot_bytes, self.spin_us = segment.words[FIRST_WORD : FIRST_WORD + 4]
        self.sleepers = FIRST_WORD + LINE_WORDS  # the writer's mark, then the readers'
        self.head = self.sleepers + -(-(1 + self.num_readers) // LINE_WORDS) * LINE_WORDS
        self._first_cursor = self.head + LINE_WORDS
        self._first_slot = 8 * (self._first_cursor + self.num_readers * LINE_WORDS)
        self._stride = _slot_stride(self.slot_bytes)

    @classmethod
    def create(cls, *, num_readers: int, slots: int, slot_bytes: int, spin_us: int) -> Ring:
        """A new, empty ring. The creator may be its writer, one of its readers, or neither.

        Args:
            spin_us: how long a waiting end spins before it sleeps.

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
        """The ring another process of this node created. Raises EngineError when it cannot be reached."""
        return cls(Segment.attach(address))

    @property
    def address(self) -> str:
        """The address that `attach` needs. Whoever has it and runs as the same user can read and write the frames."""
        return self._segment.address

    def writer(self) -> RingWriter:
        """The writing end; only one in all."""
        return RingWriter(self, self._segment)

    def reader(self, index: int) -> RingReader:
        """Reading end `index` of `num_readers`; only one for each index."""
        assert 0 <= index < self.num_readers, f"reader {index} of {self.num_readers}"
        return RingReader(self, self._segment, index)

    def reader_status(self, index: int) -> ReaderStatus:
        """The last state of reader `index`; any process may ask. Raises EngineError after `close`."""
        if self._segment.closed:
            raise EngineError("the ring is closed")
        cursor, heartbeat = self._segment.words[self.cursor(index) : self.cursor(index) + 2]
        age_s = (time.monotonic_ns() - heartbeat) * 1e-9 if heartbeat else float("inf")
        return ReaderStatus(num_received=cursor % _GONE, heartbeat_age_s=age_s, closed=cursor >= _GONE)

    def fail(self, reason: str) -> None:
        """Ends the channel from either side, or from a third: FrameWriter.fail."""
        if self._segment.closed:
            return
        words = [self.head, *(self.cursor(index) for index in range(self.num_readers))]
        self._segment.declare_dead(reason, words)

    def close(self) -> None:
        """Gives this process's mapping up; its ends are unusable after. The creator's close ends `attach` for all."""
        self._segment.close()

    def cursor(self, index: int) -> int:
        """The word that counts what reader `index` took out; the next word is its heartbeat, in monotonic ns."""
        return self._first_cursor + index * LINE_WORDS

    def slot(self, number: int) -> int:
        """Offset of the slot of frame `number`: its length as int64, then its bytes."""
        return self._first_slot + (number % self.slots) * self._stride


class RingWriter:
    """FrameWriter of a ring."""

    def __init__(self, ring: Ring, segment: Segment) -> None:
        self._ring = ring
        self._segment = segment
        self._slots = [segment.view(ring.slot(i), 8 + ring.slot_bytes) for i in range(ring.slots)]
        self._num_sent = segment.words[ring.head]
        self._free_until = self._num_sent  # frames below this number certainly find their slot free
        self._sleepers = segment.words[ring.sleepers + 1 : ring.sleepers + 1 + ring.num_readers]

    def send(self, frame: bytes, timeout_s: float) -> None:
        ring, length = self._ring, len(frame)
        if length > ring.slot_bytes:
            raise EngineError(f"a frame of {length} bytes exceeds the {ring.slot_bytes} that the channel was made for")
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
                    f"its heartbeat is {ring.reader_status(index).heartbeat_age_s:.1f} s old"
                )
        self._free_until = min(segment.words[cursor] for cursor in cursors) + ring.slots


class RingReader:
    """FrameReader of a ring."""

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
                raise DeadlineError(f"no frame came within {STEP_TIMEOUT}={timeout_s:g}")


def _slot_stride(slot_bytes: int) -> int:
    return -(-(8 + slot_bytes) // LINE_BYTES) * LINE_BYTES
