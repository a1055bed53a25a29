"""Shared memory between the processes of one node: a nameless segment, and waiting on a word of it.

A segment is a memfd: it has no name in any file system, so nothing is left behind however its processes end. Its
address is a line of text that lets another process of the same user open it through /proc while its creator lives.

Words are aligned int64. One process owns a word and is its only writer; its value only grows, so a waiter asks for
"at least". Waiting spins a while, then sleeps in a futex: the kernel compares the word under its own lock before it
puts the caller to sleep, so an update between the look and the sleep is never missed.
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
"""Words written by different processes lie this far apart: two cache lines, since x86 fetches them in pairs."""
LINE_WORDS = LINE_BYTES // 8

_NUM_HEADER_LINES = 8
_NONCE_BYTES = 16  # at offset 0; an attacher checks it: process ids and descriptors are reused
_DEAD_WORD = LINE_WORDS  # 0 alive, 1 dead; the reason follows the word
_REASON_START = LINE_BYTES + 8
_REASON_END = _NUM_HEADER_LINES * LINE_BYTES

FIRST_WORD = _REASON_END // 8
"""Words from here on are the caller's."""

_FUTEX_NUMBER = {"x86_64": 202, "aarch64": 98}
_FUTEX_WAIT = 0  # without FUTEX_PRIVATE_FLAG: the waiters are other processes
_FUTEX_WAKE = 1
_EVERYONE = 2**31 - 1
# A sleeper looks up this often: for its deadline, and for a death whose wake-up it missed.
_SLICE_S = 0.05


class Segment:
    """A mapping of shared memory: a header, then whatever its user lays out.

    Attributes:
        nbytes: size of the mapping.
        words: the mapping as int64.
        base: address of the mapping in this process.
        closed: `close` was called here.
        ordered: the processor keeps stores in order and loads in order, as x86 does; else readers must fence.
    """

    def __init__(self, fd: int, mapping: mmap.mmap, nonce: str, creator_pid: int) -> None:
        self.nbytes = len(mapping)
        self._fd = fd  # -1 in an attacher
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
                f"parallel.all_reduce=shared_memory and the shared step channel know x86_64 and aarch64, not "
                f"{platform.machine()}; choose parallel.all_reduce=gloo"
            )
        self._futex_number = ctypes.c_long(number)
        # A handle of our own: argument types set on it are nobody else's.
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall
        self._syscall.restype = ctypes.c_long

    @classmethod
    def create(cls, nbytes: int) -> Segment:
        """A new segment of zeros, at least `nbytes` long after its header. Pages cost memory when first touched."""
        nbytes = -(-(nbytes + _REASON_END) // mmap.PAGESIZE) * mmap.PAGESIZE
        fd = os.memfd_create("lockstep", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, nbytes)
        # A shorter file would turn the other processes' reads into SIGBUS.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        nonce = secrets.token_hex(_NONCE_BYTES)
        segment = cls(fd, mmap.mmap(fd, nbytes), nonce, os.getpid())
        segment._mapping[:_NONCE_BYTES] = bytes.fromhex(nonce)
        return segment

    @classmethod
    def attach(cls, address: str) -> Segment:
        """Maps the segment that `address` names.

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
        """Text from which `attach` finds the segment, as long as its creator holds it open."""
        assert self._fd >= 0, "only the creator's open segment has an address"
        return f"{self._creator_pid}:{self._fd}:{self._nonce}"

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Bytes [offset, offset + nbytes) of the segment, writable."""
        return memoryview(self._mapping)[offset : offset + nbytes]

    def forget_address(self) -> None:
        """Lets no one attach any more; who has stays attached."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def close(self) -> None:
        """Gives the mapping up; later waits raise. The memory goes with the last view of it in the last process."""
        self.forget_address()
        self.closed = True
        closed = bytearray(_REASON_END)
        self._mapping = closed
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(closed))
        self.words = memoryview(closed).cast("q")
        self.declare_dead("the shared memory segment is closed", [])

    # Waiting and publishing.

    def publish(self, word: int, value: int, sleepers: memoryview) -> None:
        """Stores `value` in `word`, which this process owns, after everything it wrote before; wakes waiters.

        Args:
            sleepers: the slice of `words` where those who may wait for this word mark that they sleep.
        """
        if not self.ordered:
            self.fence()
        self.words[word] = value
        # The store must be visible before the look at the sleepers: a sleeper marks itself, then looks at the word.
        # Without the fence each could miss the other's store.
        self.fence()
        if any(sleepers):
            self.wake(word)

    def wait_at_least(self, word: int, target: int, *, sleeper: int, timeout_s: float, spin_s: float) -> bool:
        """Waits until `word` is at least `target`; what its owner wrote before is then visible.

        Args:
            sleeper: the word in which the caller marks that it sleeps; nobody else writes it.

        Returns:
            False when `timeout_s` passed first.

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
        """Orders all memory accesses of this thread before it against all after it.

        x86 keeps stores in order and loads in order; only a load may pass an older store, and any locked instruction
        stops that: taking a lock is one. On aarch64 a lock is no full fence, but the kernel's futex wake begins with
        one (it must order the caller's store against its own look at the waiters), so a wake nobody waits for serves.
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
        """Why the segment was declared dead; None while it lives."""
        if not self.words[_DEAD_WORD]:
            return None
        reason = bytes(self._mapping[_REASON_START:_REASON_END])
        return reason.rstrip(b"\0").decode(errors="replace")

    def check_alive(self) -> None:
        """Raises EngineError with the reason if the segment was declared dead."""
        if self.words[_DEAD_WORD]:
            raise EngineError(self.death or "the shared memory segment was given up")

    def declare_dead(self, reason: str, words: Iterable[int]) -> None:
        """Ends every wait on the segment with EngineError(reason), now those on `words`. The first reason stays."""
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
        # A futex is 32 bits: the low half of the word, which is the first on the little-endian machines we know.
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
            # The value changed, the slice ended, a signal came: the caller looks again in each case.
            if error not in (11, 110, 4):
                raise OSError(error, f"futex: {os.strerror(error)}")


def _unreachable(pid: str, why: str) -> EngineError:
    return EngineError(
        f"cannot open the shared memory of process {pid}: {why}. Its ranks must run on one node, in one PID "
        f"namespace and as one user; else set parallel.all_reduce=gloo"
    )
