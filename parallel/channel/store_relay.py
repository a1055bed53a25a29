"""Connects ranks on other nodes to their rendezvous store.

torch's TCPStore has no key: anybody who reaches its port can read and change what the ranks tell each other. So it
listens on loopback.

The coordinator opens a `StoreGate` beside the store, at an address that the other nodes reach. A connection to the gate
has to prove the gate's key, as the ends of the step channel do; then the gate relays its bytes to the store. A rank
opens a port on its own loopback (`open_relay`) and gives it to its TCPStore.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from collections.abc import Callable

from configs.errors import LockstepError
from parallel.channel.tcp_channel import TcpListener, connect

STORE_HOST = "lockstep/host"
"""Store key under which the coordinator puts its address for other nodes. Absent if all ranks are on one node."""
_PART_BYTES = 1 << 16
_ACCEPT_AGAIN_S = 1.0  # pause after a failed accept, for example without file descriptors
_CLOSED = (errno.EBADF, errno.EINVAL)


class StoreGate:
    """Relays connections that prove the key to a store on this node's loopback."""

    def __init__(self, host: str, store_port: int) -> None:
        """Listens on a free port of `host`, an address of this node. Raises EngineError if `host` is no address of this
        node."""
        self._listener = TcpListener.create(host)
        self._store_port = store_port
        self.address = self._listener.address
        """Address for `open_relay`. It holds the key: give it only to the ranks."""
        _relay_each(self._listener.sock, self._reach_store)

    def close(self) -> None:
        """Accepts no more connections. Open connections stay open."""
        self._listener.close()

    def _reach_store(self, caller: socket.socket) -> socket.socket:
        self._listener.admit(caller)
        return socket.create_connection(("127.0.0.1", self._store_port))


def open_relay(address: str, timeout_s: float) -> int:
    """Opens a port on loopback and returns it. Connections to the port reach the store behind the gate at `address`.
    The port stays open while the process lives.

    Raises:
        DeadlineError: the gate did not answer within `timeout_s`.
        EngineError: the gate cannot be reached, or does not take the key.
    """

    connect(address, 0, timeout_s=timeout_s).close()  # raises if the gate cannot be reached or refuses the key
    listener = socket.create_server(("127.0.0.1", 0))
    _relay_each(listener, lambda _: connect(address, 0, timeout_s=timeout_s).detach())
    return int(listener.getsockname()[1])


def _relay_each(listener: socket.socket, reach: Callable[[socket.socket], socket.socket]) -> None:
    """Starts a thread that joins each connection of `listener` to the connection that `reach` makes for it, until
    `listener` is closed. A connection for which `reach` raises is closed."""

    def relay(one: socket.socket) -> None:
        with one, contextlib.suppress(OSError, LockstepError), reach(one) as other:
            for end in (one, other):
                end.settimeout(None)
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            back = threading.Thread(target=_copy, args=(other, one), daemon=True)
            back.start()
            _copy(one, other)
            back.join()

    def serve() -> None:
        while True:
            try:
                one, _ = listener.accept()
            except OSError as error:
                if error.errno in _CLOSED:
                    return
                time.sleep(_ACCEPT_AGAIN_S)
                continue
            threading.Thread(target=relay, args=(one,), daemon=True).start()

    threading.Thread(target=serve, name="store relay", daemon=True).start()


def _copy(source: socket.socket, target: socket.socket) -> None:
    """Sends what arrives at `source` to `target` until either ends, then ends both."""
    with contextlib.suppress(OSError):
        while part := source.recv(_PART_BYTES):
            target.sendall(part)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
