"""Shared memory between processes of one node: an anonymous segment, and waits on its words.

A segment is a memfd. It has no name in a file system, so nothing remains however its processes end. Its address is a
line of text with which another process of the same user can open it through /proc while its creator lives.

Words are aligned int64. One process owns a word and is its only writer. Its value only grows, so a waiter waits for "at
least". A waiter spins for a while, then sleeps on a futex. The kernel compares the word under its own lock before it
puts the caller to sleep, so no update is missed.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import platform
import secrets
import threading
import time
from collections.abc import Iterable

from configs.errors import ConfigError, EngineError

LINE_BYTES = 128
"""Distance between words that different processes write: two cache lines, because x86 fetches them in pairs."""
LINE_WORDS = LINE_BYTES // 8

_NUM_HEADER_LINES = 8
_NONCE_BYTES = 16  # Checked at offset 0 by attaching processes, because process ids and descriptors are reused.
_DEAD_WORD = LINE_WORDS  # 0 alive, 1 dead; the reason follows the word
_REASON_START = LINE_BYTES + 8
_REASON_END = _NUM_HEADER_LINES * LINE_BYTES

FIRST_WORD = _REASON_END // 8
"""Words from here on belong to the caller."""

_FUTEX_NUMBER = {"x86_64": 202, "aarch64": 98}
_FUTEX_WAIT = 0  # without FUTEX_PRIVATE_FLAG, because other processes wait too
_FUTEX_WAKE = 1
_EVERYONE = 2**31 - 1
# A sleeping waiter checks at this interval for its deadline, and for a death that did not wake it.
_SLICE_S = 0.05


class Segment:
    """A mapping of shared memory: a header, then the caller's layout.

    Attributes:
        nbytes: size of the mapping.
        words: the mapping as int64.
        base: address of the mapping in this process.
        closed: whether `close` was called here.
        ordered: whether the processor keeps the order of stores and of loads, like x86. If False, readers must fence.
    """

    def __init__(self, fd: int, mapping: mmap.mmap, nonce: str, creator_pid: int) -> None:
        self.nbytes = len(mapping)
        self._fd = fd  # -1 in a process that attached
        self._nonce = nonce
        self._creator_pid = creator_pid
        self._mapping: mmap.mmap | bytearray = mapping
        self.words = memoryview(mapping).cast("q")
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        self.ordered = platform.machine() == "x86_64"
        self.closed = False
        self._lock = threading.Lock()
        number = _FUTEX_NUMBER.get(platform.machine())
        if number is None:
            raise ConfigError(
                f"ranks of one node share memory on x86_64 and aarch64, not on {platform.machine()}; use one of these"
            )
        self._futex_number = ctypes.c_long(number)
        # A handle that no other code shares, because argument types are set on it.
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall
        self._syscall.restype = ctypes.c_long

    @classmethod
    def create(cls, nbytes: int) -> Segment:
        """Creates a segment of zeros with at least `nbytes` after its header. Pages take memory when first touched."""
        nbytes = -(-(nbytes + _REASON_END) // mmap.PAGESIZE) * mmap.PAGESIZE
        fd = os.memfd_create("lockstep", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, nbytes)
        # If the file shrank, reads in other processes would end in SIGBUS.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        nonce = secrets.token_hex(_NONCE_BYTES)
        segment = cls(fd, mmap.mmap(fd, nbytes), nonce, os.getpid())
        segment._mapping[:_NONCE_BYTES] = bytes.fromhex(nonce)
        return segment

    @classmethod
    def attach(cls, address: str) -> Segment:
        """Maps the segment with this address.

        Raises:
            EngineError: its creator is gone, runs on another node or in another PID namespace, or as another user.
        """
        pid, creator_fd, nonce = address.split(":")
        try:
            fd = os.open(f"/proc/{pid}/fd/{creator_fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise _unreachable(pid, error.strerror or str(error)) from error
        try:
            nbytes = os.fstat(fd).st_size
            if nbytes < _REASON_END:
                raise _unreachable(pid, "its memory is gone")
            mapping = mmap.mmap(fd, nbytes)
        finally:
            os.close(fd)
        if mapping[:_NONCE_BYTES] != bytes.fromhex(nonce):
            mapping.close()
            raise _unreachable(pid, "another process has taken its id")
        return cls(-1, mapping, nonce, int(pid))

    @property
    def address(self) -> str:
        """The address for `attach`, valid while the creator holds the segment open."""
        assert self._fd >= 0, "only the creator's open segment has an address"
        return f"{self._creator_pid}:{self._fd}:{self._nonce}"

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Bytes [offset, offset + nbytes) of the segment, writable."""
        return memoryview(self._mapping)[offset : offset + nbytes]

    def forget_address(self) -> None:
        """Prevents further `attach` calls. Attached processes stay attached."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def close(self) -> None:
        """Unmaps the segment; later waits raise. The memory is freed with its last view in the last process."""
        self.forget_address()
        self.closed = True
        closed = bytearray(_REASON_END)
        self._mapping = closed
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(closed))
        self.words = memoryview(closed).cast("q")
        self.declare_dead("the shared memory segment is closed", [])

    # Waiting and publishing.

    def publish(self, word: int, value: int, sleepers: memoryview) -> None:
        """Stores `value` in `word`, which this process owns, after all earlier writes of this process. Wakes waiters.

        Args:
            sleepers: the slice of `words` in which waiters of this word mark that they sleep.
        """
        if not self.ordered:
            self.fence()
        self.words[word] = value
        # The store must be visible before the sleepers are checked. A waiter first marks itself, then reads the word.
        # Without the fence, each could miss the other's store.
        self.fence()
        if any(sleepers):
            self.wake(word)

    def wait_at_least(self, word: int, target: int, *, sleeper: int, timeout_s: float, spin_s: float) -> bool:
        """Waits until `word` is at least `target`. All earlier writes of the word's owner are then visible.

        Args:
            sleeper: the word in which the caller marks that it sleeps. No other process writes it.

        Returns:
            False if `timeout_s` passed first.

        Raises:
            EngineError: the segment was declared dead meanwhile.
        """
        words = self.words
        if words[word] < target and not (spin_s > 0 and self._spin(word, target, spin_s)):
            deadline = time.monotonic() + timeout_s
            words[sleeper] = 1
            try:
                while (seen := words[word]) < target:
                    self.check_alive()
                    left = deadline - time.monotonic()
                    if left <= 0:
                        return False
                    self._sleep(word, seen, min(left, _SLICE_S))
            finally:
                words[sleeper] = 0
        if not self.ordered:
            self.fence()
        return True

    def fence(self) -> None:
        """Orders this thread's memory accesses before it against those after it.

        x86 keeps the order of stores and of loads; only a load may pass an older store. Any locked instruction prevents
        that, and taking a lock is one. On aarch64 a lock is no full fence, but the kernel's futex wake begins with one,
        so a wake without waiters is used.
        """
        if self.ordered:
            with self._lock:
                return
        self.wake(0)

    def wake(self, word: int) -> None:
        """Wakes every sleeper of `word`."""
        self._futex(word, _FUTEX_WAKE, _EVERYONE, None)

    # Death.

    @property
    def death(self) -> str | None:
        """The reason why the segment was declared dead. None while it is alive."""
        if not self.words[_DEAD_WORD]:
            return None
        reason = bytes(self._mapping[_REASON_START:_REASON_END])
        return reason.rstrip(b"\0").decode(errors="replace")

    def check_alive(self) -> None:
        """Raises EngineError with the reason if the segment was declared dead."""
        if self.words[_DEAD_WORD]:
            raise EngineError(self.death or "the shared memory segment was given up")

    def declare_dead(self, reason: str, words: Iterable[int]) -> None:
        """Declares the segment dead: every wait ends with EngineError(reason). Wakes waiters of `words` at once. The
        first reason counts."""
        if not self.words[_DEAD_WORD]:
            text = reason.encode()[: _REASON_END - _REASON_START]
            self._mapping[_REASON_START : _REASON_START + len(text)] = text
            self.fence()
            self.words[_DEAD_WORD] = 1
            self.fence()
        for word in words:
            self.wake(word)

    def _spin(self, word: int, target: int, spin_s: float) -> bool:
        words = self.words
        end = time.perf_counter() + spin_s
        while True:
            for _ in range(20):
                if words[word] >= target:
                    return True
            if time.perf_counter() > end:
                return False
            os.sched_yield()

    def _sleep(self, word: int, seen: int, timeout_s: float) -> None:
        seconds = int(timeout_s)
        timeout = (ctypes.c_long * 2)(seconds, int((timeout_s - seconds) * 1e9))
        self._futex(word, _FUTEX_WAIT, seen, timeout)

    def _futex(self, word: int, operation: int, value: int, timeout: ctypes.Array[ctypes.c_long] | None) -> None:
        # A futex has 32 bits: the lower half of the word, which comes first on little-endian machines.
        result = self._syscall(
            self._futex_number,
            ctypes.c_void_p(self.base + 8 * word),
            ctypes.c_int(operation),
            ctypes.c_uint32(value & 0xFFFFFFFF),
            timeout,
            None,
            ctypes.c_int(0),
        )
        if result < 0:
            error = ctypes.get_errno()
            # The value changed, the slice ended, or a signal came. The caller checks again in each case.
            if error not in (11, 110, 4):
                raise OSError(error, f"futex: {os.strerror(error)}")


def _unreachable(pid: str, why: str) -> EngineError:
    return EngineError(
        f"cannot open the shared memory of process {pid}: {why}. Its ranks must run on one node, in one PID "
        f"namespace and as one user; else set parallel.all_reduce=gloo"
    )
