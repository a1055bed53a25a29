"""Memory that outlives the process that made it, so that a new process of a rank finds what the old one left.

Each block is memory behind a file descriptor: a memfd on a CPU, one of the driver's on a GPU. A block exists while a
process maps it or holds a descriptor of it. The keeper, a thread of the process that watches the ranks, holds one of
each block, so the blocks exist until the keeper ends or drops them. The keeper has no context on any device.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import mmap
import os
import resource
import secrets
import socket
import threading
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from configs.errors import EngineError
from parallel.sockets import is_ours

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)

_MAX_MESSAGE_BYTES = 64 << 10
_TIMEOUT_S = 5.0
_CRASH = "crash"
_ALIGNMENT_BYTES = 256


def room_for(num_bytes: int) -> int:
    """Bytes of a block that `num_bytes` take, rounded up so that the next tensor is aligned for any kernel."""
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


WEIGHTS = ("layer ", "weights")
"""Prefixes of the names of blocks with weights: those of a layer, and those outside layers."""


def kv_block(layer_id: int) -> str:
    """The name of the block with a layer's KV. No layer's name is a prefix of another's."""
    return f"kv {layer_id:04}"


def state_block(layer_id: int) -> str:
    """The name of the block with a layer's recurrent states. It is dropped with the layer's KV."""
    return f"{kv_block(layer_id)} state"


class _Block(msgspec.Struct, frozen=True):
    """A message about a block. A rank's request has the name alone to find a block, the size and a descriptor to store
    one, or a note to store. An answer has the size and the note only if a descriptor comes with it."""

    rank: int
    name: str
    num_bytes: int = 0
    note: str | None = None


class Keeper:
    """Holds the blocks of the ranks of one group, by rank and name.

    Its address is in Linux's abstract namespace, and only processes of the same user may connect.
    """

    def __init__(self) -> None:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each layer of each rank has two blocks
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.address = f"\0lockstep-persistent-{os.getpid()}-{secrets.token_hex(8)}"
        self._listener.bind(self.address)
        self._listener.listen()
        self._lock = threading.Lock()
        self._blocks: dict[tuple[int, str], tuple[int, _Block]] = {}
        threading.Thread(target=self._serve, name="keeper", daemon=True).start()

    def num_bytes(self, rank: int) -> int:
        """Bytes of the blocks of a rank."""
        with self._lock:
            return sum(block.num_bytes for (of_rank, _), (_, block) in self._blocks.items() if of_rank == rank)

    def crash(self, rank: int) -> str:
        """The traceback of a crashed process of the rank, written by `write_down_crashes`. Empty without a crash."""
        with self._lock:
            fd, _ = self._blocks.get((rank, _CRASH), (-1, None))
            return "" if fd < 0 else os.pread(fd, _MAX_MESSAGE_BYTES, 0).decode(errors="replace")

    def drop(self, rank: int | None = None, name: str = "") -> None:
        """Drops the blocks with names that begin with `name`, of one rank, or of all if `rank` is None."""
        with self._lock:
            for key in list(self._blocks):
                if rank in (None, key[0]) and key[1].startswith(name):
                    os.close(self._blocks.pop(key)[0])

    def close(self) -> None:
        """Ends the thread and drops all blocks."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.drop()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:  # closed
                return
            with peer:
                peer.settimeout(_TIMEOUT_S)
                try:
                    if is_ours(peer):
                        self._answer(peer)
                except (OSError, msgspec.DecodeError):  # a rank that dies during a call needs no answer
                    _log.warning("a call to the keeper failed; please report this bug", exc_info=True)

    def _answer(self, peer: socket.socket) -> None:
        requested, fds = _receive(peer)
        with self._lock:
            key = (requested.rank, requested.name)
            held = self._blocks.get(key)
            if fds:
                self._blocks[key] = (fds[0], requested)
                if held is not None:
                    os.close(held[0])
            elif held is not None and requested.note is not None:
                self._blocks[key] = (held[0], msgspec.structs.replace(held[1], note=requested.note))
            elif held is not None:
                socket.send_fds(peer, [msgspec.msgpack.encode(held[1])], [held[0]])
                return
        peer.send(msgspec.msgpack.encode(_Block(requested.rank, requested.name)))


class Found(NamedTuple):
    """A block that the keeper holds."""

    memory: torch.Tensor
    """[num_bytes] uint8: the block's contents."""
    note: str


class PersistentMemory:
    """The blocks of one rank, shared by all of its processes.

    Args:
        address: the keeper's address.
        device: the device of the blocks.
    """

    def __init__(self, address: str, rank: int, device: torch.device) -> None:
        self._address = address
        self._rank = rank
        self._device = device

    @property
    def is_possible(self) -> bool:
        """Whether the device has memory that outlives a process."""
        if self._device.type != "cuda":
            return True
        from parallel.cuda_memory import outlives_processes

        return outlives_processes(self._device)

    def find(self, name: str) -> Found | None:
        """The block with that name, mapped. None if there is none. Raises EngineError if the keeper does not answer."""
        block, fds = self._call(_Block(self._rank, name))
        if not fds:
            return None
        try:
            return Found(self._mapped(fds[0], block.num_bytes), block.note or "")
        finally:
            os.close(fds[0])

    def existing(self, name: str, num_bytes: int) -> torch.Tensor:
        """The block with that name [num_bytes] uint8, with its contents. Raises EngineError if none has that size."""
        found = self.find(name)
        if found is None or len(found.memory) != num_bytes:
            raise EngineError(f"rank {self._rank} has no block {name!r} of {num_bytes} bytes in persistent memory")
        return found.memory

    def new(self, name: str, num_bytes: int) -> torch.Tensor:
        """A new block of zeros [num_bytes] uint8. In the keeper, it replaces a block with that name."""
        fd = self._descriptor(num_bytes)
        try:
            memory = self._mapped(fd, num_bytes)
            if self._device.type == "cuda":
                memory.zero_()
            self._call(_Block(self._rank, name, num_bytes), [fd])
        finally:
            os.close(fd)
        return memory

    def write_down_crashes(self) -> None:
        """Makes this process, if it crashes by a signal such as SIGSEGV or SIGABRT, write its traceback to a file that
        the keeper holds. SIGKILL writes nothing."""
        fd = os.memfd_create("lockstep-crash", os.MFD_CLOEXEC)  # open for the life of the process
        faulthandler.enable(fd)
        self._call(_Block(self._rank, _CRASH), [fd])

    def write_note(self, name: str, note: str) -> None:
        """Replaces the note of a block that the keeper holds."""
        self._call(_Block(self._rank, name, note=note))

    def _descriptor(self, num_bytes: int) -> int:
        if self._device.type == "cuda":
            from parallel.cuda_memory import new_descriptor

            return new_descriptor(num_bytes, self._device)
        fd = os.memfd_create("lockstep-persistent", os.MFD_CLOEXEC)
        os.ftruncate(fd, num_bytes)
        return fd

    def _mapped(self, fd: int, num_bytes: int) -> torch.Tensor:
        import torch  # the keeper does not need torch

        if self._device.type == "cuda":
            from parallel.cuda_memory import mapped

            return mapped(fd, num_bytes, self._device)
        return torch.frombuffer(mmap.mmap(fd, num_bytes), dtype=torch.uint8)

    def _call(self, block: _Block, fds: list[int] | None = None) -> tuple[_Block, list[int]]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as keeper:
            keeper.settimeout(_TIMEOUT_S)
            try:
                keeper.connect(self._address)
                socket.send_fds(keeper, [msgspec.msgpack.encode(block)], fds or [])
                return _receive(keeper)
            except (OSError, msgspec.DecodeError) as error:
                raise EngineError(f"rank {self._rank} cannot reach the keeper of its memory: {error!r}") from error


def _receive(peer: socket.socket) -> tuple[_Block, list[int]]:
    message, fds, _, _ = socket.recv_fds(peer, _MAX_MESSAGE_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
    return msgspec.msgpack.decode(message, type=_Block), fds
