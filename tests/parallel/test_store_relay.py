"""The way of ranks on other nodes to their rendezvous store."""

from __future__ import annotations

import os
import resource
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from torch.distributed import TCPStore

from configs.errors import EngineError
from parallel.channel.store_relay import STORE_HOST, StoreGate, open_relay
from parallel.collectives.group import TensorParallelGroup

LIMIT = timedelta(seconds=3)


@pytest.fixture
def master() -> TCPStore:
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())
    store.set("secret", "an NCCL id")
    return store


@pytest.fixture
def gate(master: TCPStore) -> Iterator[StoreGate]:
    """At another address than the store's: the node's own, as far as the ranks know."""
    gate = StoreGate("127.0.0.5", master.port)
    yield gate
    gate.close()


def client(port: int, host: str = "127.0.0.1") -> TCPStore:
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=LIMIT)


def test_who_does_not_prove_the_key_reaches_no_store(master: TCPStore, gate: StoreGate) -> None:
    host, port, key = gate.address.rsplit(":", 2)
    with pytest.raises(RuntimeError):  # also torch's own errors
        client(int(port), host).get("secret")
    with pytest.raises(EngineError):
        open_relay(f"{host}:{port}:{'0' * len(key)}", 3.0)
    assert master.get("secret") == b"an NCCL id"


def test_a_stranger_who_says_nothing_keeps_no_rank_waiting(master: TCPStore, gate: StoreGate) -> None:
    host, port, _ = gate.address.rsplit(":", 2)
    with socket.create_connection((host, int(port))):
        assert client(open_relay(gate.address, 3.0)).get("secret") == b"an NCCL id"


def test_a_closed_gate_takes_nobody_and_keeps_whom_it_has(master: TCPStore, gate: StoreGate) -> None:
    address = gate.address
    store = client(open_relay(address, 3.0))
    gate.close()
    with pytest.raises(EngineError):
        open_relay(address, 3.0)
    store.set("later", "x" * 300_000)
    assert master.get("later") == b"x" * 300_000


def test_a_gate_accepts_again_after_file_descriptors_ran_out(gate: StoreGate) -> None:
    host, port, _ = gate.address.rsplit(":", 2)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as caller:
        caller.settimeout(10)
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        try:
            caller.connect((host, int(port)))
            time.sleep(0.2)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert caller.recv(1)  # its challenge


def test_ranks_meet_through_the_gate(master: TCPStore, gate: StoreGate) -> None:
    master.set(STORE_HOST, "127.0.0.5")

    def rank_main(rank: int) -> float:
        group = TensorParallelGroup.create(
            rank=rank,
            size=3,
            store=client(open_relay(gate.address, 3.0)),
            device="cpu",
            strategy="gloo",
            timeout_s=10.0,
        )
        total = float(group.all_reduce(torch.full((1,), 10.0**rank)))
        group.close()
        return total

    with ThreadPoolExecutor(3) as ranks:
        assert list(ranks.map(rank_main, range(3))) == [111.0] * 3
