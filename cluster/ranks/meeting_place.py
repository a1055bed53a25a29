"""The rendezvous store of a group's ranks. It is in the coordinator's process, so it survives the death of any rank."""

from __future__ import annotations

import socket
from typing import Any

import ray

from parallel.channel.store_relay import STORE_HOST, StoreGate


class MeetingPlace:
    """The rendezvous store of `size` ranks. A single rank needs no store. The store listens on loopback; ranks on other
    nodes reach it through a gate that requires a key."""

    def __init__(self, size: int, *, one_node: bool) -> None:
        self.host = "127.0.0.1" if one_node else ray.util.get_node_ip_address()
        """Address of this node to which the ranks connect."""
        self._store = _open_store() if size > 1 else None
        self._gate: StoreGate | None = None
        self.store: int | str = 0 if self._store is None else self._store.port
        """Argument of `RankActor.join`: the store's port on loopback, or the gate's address. 0 for a single rank."""
        if self._store is not None and not one_node:
            self._store.set(STORE_HOST, self.host)
            self._gate = StoreGate(self.host, self._store.port)
            self.store = self._gate.address

    def close(self) -> None:
        """Closes the gate."""
        if self._gate is not None:
            self._gate.close()


def _open_store() -> Any:
    """Opens a TCPStore that listens only on loopback. By default, it would listen on every interface, without a key."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not declared; torch takes seconds

    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
