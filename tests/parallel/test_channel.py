"""The step channel: the shared-memory ring and its TCP twin, with readers as threads and as forked processes."""

from __future__ import annotations

import os
import random
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from configs.errors import DeadlineError, EngineError
from parallel.channel.ring import FrameReader, FrameWriter, Ring
from parallel.channel.tcp_channel import Connection, TcpListener, TcpReader, TcpWriter, connect
from tests.helpers.forks import start_forked

SLOT_BYTES = 4096


@dataclass
class Channel:
    writer: FrameWriter
    readers: list[FrameReader]


def in_thread(body: Callable[[], Any]) -> Callable[[], Any]:
    """Starts `body`; the returned call waits for its result or raises its error."""
    outcome: dict[str, Any] = {}

    def run() -> None:
        try:
            outcome["result"] = body()
        except BaseException as error:  # noqa: BLE001 - raised in the test
            outcome["error"] = error

    thread = threading.Thread(target=run)
    thread.start()

    def finish() -> Any:
        thread.join(20)
        assert not thread.is_alive()
        if "error" in outcome:
            raise outcome["error"]
        return outcome["result"]

    return finish


def ring_channel(num_readers: int) -> Channel:
    ring = Ring.create(num_readers=num_readers, slots=4, slot_bytes=SLOT_BYTES, spin_us=0)
    return Channel(ring.writer(), [Ring.attach(ring.address).reader(i) for i in range(num_readers)])


def tcp_channel(num_readers: int, host: str = "127.0.0.1") -> Channel:
    listener = TcpListener.create(host)
    accepted = in_thread(lambda: listener.accept(num_readers, timeout_s=10))
    ends = [connect(listener.address, index, timeout_s=10) for index in range(num_readers)]
    writer = TcpWriter(accepted(), max_frame_bytes=SLOT_BYTES)
    listener.close()
    return Channel(writer, [TcpReader(end, max_frame_bytes=SLOT_BYTES) for end in ends])


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected TCP sockets; socketpair makes only unix ones."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        return ours, server.accept()[0]


@pytest.fixture(params=[ring_channel, tcp_channel], ids=["ring", "tcp"])
def make_channel(request: pytest.FixtureRequest) -> Iterator[Callable[[int], Channel]]:
    made: list[Channel] = []

    def make(num_readers: int) -> Channel:
        made.append(request.param(num_readers))
        return made[-1]

    yield make
    for channel in made:
        channel.writer.close()
        for reader in channel.readers:
            reader.close()


def test_every_reader_gets_every_frame_in_order(make_channel: Callable[[int], Channel]) -> None:
    channel = make_channel(3)
    chance = random.Random(1)
    frames = [chance.randbytes(chance.choice((0, 1, 7, 1000, SLOT_BYTES))) for _ in range(500)]
    waits = [in_thread(lambda r=reader: [r.recv(10) for _ in frames]) for reader in channel.readers]
    for frame in frames:
        channel.writer.send(frame, 10)
    for wait in waits:
        assert wait() == frames


def test_slow_and_fast_ends_lose_nothing(make_channel: Callable[[int], Channel]) -> None:
    channel = make_channel(2)

    def read(reader: FrameReader, seed: int) -> list[bytes]:
        chance = random.Random(seed)
        got = []
        for _ in range(300):
            if chance.random() < 0.05:
                time.sleep(chance.random() * 0.005)
            got.append(reader.recv(10))
        return got

    waits = [in_thread(lambda i=i, r=reader: read(r, i)) for i, reader in enumerate(channel.readers)]
    chance = random.Random(9)
    frames = [i.to_bytes(4, "little") for i in range(300)]
    for frame in frames:
        if chance.random() < 0.05:
            time.sleep(chance.random() * 0.005)
        channel.writer.send(frame, 10)
    for wait in waits:
        assert wait() == frames


def test_polling_gets_what_is_there_and_never_waits(make_channel: Callable[[int], Channel]) -> None:
    channel = make_channel(1)
    [reader] = channel.readers
    waits = []
    for _ in range(200):
        began = time.perf_counter()
        assert reader.poll() is None
        waits.append(time.perf_counter() - began)
    assert statistics.median(waits) < 500e-6
    began = time.monotonic()
    for frame in (b"one", b"two"):
        channel.writer.send(frame, 5)
    polled = []
    while len(polled) < 2:  # TCP takes its time
        assert time.monotonic() - began < 10
        if (frame := reader.poll()) is not None:
            polled.append(frame)
    assert polled == [b"one", b"two"]
    assert reader.poll() is None
    channel.writer.send(b"three", 5)
    assert reader.recv(5) == b"three"
    channel.writer.fail("enough")
    poll_until_it_fails = in_thread(lambda: [reader.poll() for _ in iter(lambda: time.monotonic() - began < 10, False)])
    with pytest.raises(EngineError, match="enough"):
        poll_until_it_fails()


def test_a_frame_that_never_comes_ends_in_a_deadline_that_names_its_setting(
    make_channel: Callable[[int], Channel],
) -> None:
    channel = make_channel(1)
    start = time.monotonic()
    with pytest.raises(DeadlineError, match=r"parallel\.step_timeout_s=0\.1"):
        channel.readers[0].recv(0.1)
    assert 0.09 < time.monotonic() - start < 5
    channel.writer.send(b"late", 10)  # the channel survives it
    assert channel.readers[0].recv(10) == b"late"


def test_an_oversized_frame_is_refused(make_channel: Callable[[int], Channel]) -> None:
    channel = make_channel(1)
    with pytest.raises(EngineError, match=r"4097 bytes exceeds the channel's 4096"):
        channel.writer.send(bytes(SLOT_BYTES + 1), 10)
    channel.writer.send(b"ok", 10)
    assert channel.readers[0].recv(10) == b"ok"


def test_failing_wakes_a_blocked_reader_and_ends_later_calls(make_channel: Callable[[int], Channel]) -> None:
    channel = make_channel(2)
    waits = [in_thread(lambda r=reader: r.recv(15)) for reader in channel.readers]
    time.sleep(0.05)
    start = time.monotonic()
    channel.writer.fail("rank 1 died")
    for wait in waits:
        with pytest.raises(EngineError, match="rank 1 died"):
            wait()
    assert time.monotonic() - start < 5
    with pytest.raises(EngineError, match="rank 1 died"):
        channel.readers[0].recv(10)
    with pytest.raises(EngineError, match="rank 1 died"):
        channel.writer.send(b"x", 10)


def test_a_reader_that_never_reads_ends_the_writer_at_the_deadline(make_channel: Callable[[int], Channel]) -> None:
    channel = make_channel(1)

    def fill() -> None:
        for _ in range(100_000):  # the kernel buffers some megabytes of TCP
            channel.writer.send(bytes(SLOT_BYTES), 0.2)

    with pytest.raises(DeadlineError, match=r"parallel\.step_timeout_s=0\.2"):
        fill()


def test_failing_wakes_a_blocked_writer(make_channel: Callable[[int], Channel]) -> None:
    channel = make_channel(1)

    def fill() -> None:
        for _ in range(100_000):
            channel.writer.send(bytes(SLOT_BYTES), 15)

    wait = in_thread(fill)
    time.sleep(0.3)
    start = time.monotonic()
    channel.writer.fail("recovery began")
    with pytest.raises(EngineError, match="recovery began"):
        wait()
    assert time.monotonic() - start < 5


def test_a_ring_crosses_processes_either_way() -> None:
    """The creator holds the writing end of one ring and the reading end of the other, as the coordinator does."""
    frames = Ring.create(num_readers=2, slots=8, slot_bytes=SLOT_BYTES, spin_us=20)
    results = [Ring.create(num_readers=1, slots=8, slot_bytes=SLOT_BYTES, spin_us=20) for _ in range(2)]

    def rank_main(rank: int, frames_address: str, results_address: str) -> None:
        reader, writer = Ring.attach(frames_address).reader(rank), Ring.attach(results_address).writer()
        while frame := reader.recv(10):
            writer.send(bytes([rank]) + frame, 10)
        reader.close()

    ranks = start_forked(rank_main, [(rank, frames.address, results[rank].address) for rank in range(2)])
    writer, readers = frames.writer(), [ring.reader(0) for ring in results]
    for step in range(200):
        frame = step.to_bytes(4, "little")
        writer.send(frame, 10)
        assert [reader.recv(10) for reader in readers] == [b"\0" + frame, b"\1" + frame]
    writer.send(b"", 10)
    for process in ranks:
        process.join(10)
        assert process.exitcode == 0
    assert [frames.reader_status(rank).num_received for rank in range(2)] == [201, 201]
    assert frames.reader_status(0).closed


def test_a_killed_reader_does_not_block_the_writer_for_ever_and_shows_a_stale_heartbeat() -> None:
    ring = Ring.create(num_readers=1, slots=4, slot_bytes=SLOT_BYTES, spin_us=0)
    assert ring.reader_status(0).heartbeat_age_s == float("inf")
    [process] = start_forked(lambda address: Ring.attach(address).reader(0).recv(30), [(ring.address,)])
    while ring.reader_status(0).heartbeat_age_s > 1:
        time.sleep(0.01)
    time.sleep(1.2)
    deadline = time.monotonic() + 10
    while ring.reader_status(0).heartbeat_age_s >= 1:  # a waiting reader goes on showing that it lives
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.join()
    writer = ring.writer()
    for _ in range(4):
        writer.send(b"x", 0.2)
    with pytest.raises(DeadlineError, match="reader 0 left no room among 4 frames"):
        writer.send(b"x", 0.2)
    assert ring.reader_status(0).heartbeat_age_s > 0.2
    assert ring.reader_status(0).num_received == 0


def test_a_closed_reader_is_not_waited_for() -> None:
    ring = Ring.create(num_readers=2, slots=2, slot_bytes=64, spin_us=0)
    writer, reader = ring.writer(), ring.reader(1)
    ring.reader(0).close()
    for i in range(10):
        writer.send(bytes([i]), 10)
        assert reader.recv(10) == bytes([i])
    assert ring.reader_status(0).closed
    assert not ring.reader_status(1).closed


def test_any_holder_of_a_ring_can_fail_it() -> None:
    ring = Ring.create(num_readers=1, slots=2, slot_bytes=64, spin_us=0)
    Ring.attach(ring.address).fail("rank 0: out of memory")
    with pytest.raises(EngineError, match="rank 0: out of memory"):
        ring.writer().send(b"x", 10)


def test_an_address_whose_creator_let_go_is_refused() -> None:
    ring = Ring.create(num_readers=1, slots=2, slot_bytes=64, spin_us=0)
    address = ring.address
    stranger = os.open("/dev/zero", os.O_RDONLY)
    try:
        pid, _, nonce = address.split(":")
        with pytest.raises(EngineError, match=r"cannot open the shared memory"):
            Ring.attach(f"{pid}:{stranger}:{nonce}")
        with pytest.raises(EngineError, match="another process has taken its id"):
            Ring.attach(address[:-32] + "0" * 32)
    finally:
        os.close(stranger)
    ring.close()
    with pytest.raises(EngineError, match=r"cannot open the shared memory of process \d+"):
        Ring.attach(address)
    with pytest.raises(EngineError, match="closed"):
        ring.reader_status(0)


def test_closing_a_ring_twice_or_before_its_ends_is_harmless() -> None:
    ring = Ring.create(num_readers=1, slots=2, slot_bytes=64, spin_us=0)
    writer, reader = ring.writer(), ring.reader(0)
    ring.close()
    ring.close()
    with pytest.raises(EngineError, match="closed"):
        writer.send(b"x", 10)
    with pytest.raises(EngineError, match="closed"):
        reader.recv(10)
    reader.close()
    writer.close()


def test_a_tcp_channel_works_over_ipv6(ipv6_loopback: str) -> None:
    channel = tcp_channel(2, ipv6_loopback)
    channel.writer.send(b"hello", 10)
    assert [reader.recv(5) for reader in channel.readers] == [b"hello", b"hello"]
    channel.writer.close()
    with pytest.raises(EngineError, match=r"listener at \[::1\]:\d+ broke"):
        channel.readers[0].recv(5)


def test_a_tcp_peer_that_goes_away_ends_the_readers_wait() -> None:
    channel = tcp_channel(1)
    channel.writer.send(b"last", 10)
    channel.writer.close()
    assert channel.readers[0].recv(10) == b"last"
    with pytest.raises(EngineError, match="closed"):
        channel.readers[0].recv(5)


def test_a_tcp_frame_larger_than_this_side_allows_is_refused_before_it_is_read() -> None:
    ours, theirs = tcp_pair()
    reader = TcpReader(Connection(ours, "rank 3"), max_frame_bytes=100)
    theirs.sendall((1 << 30).to_bytes(4, "little"))
    with pytest.raises(EngineError, match="rank 3 sent a frame of 1073741824 bytes"):
        reader.recv(10)
    reader.close()
    theirs.close()


def test_a_tcp_deadline_inside_a_frame_loses_no_bytes() -> None:
    ours, theirs = tcp_pair()
    reader = TcpReader(Connection(ours, "rank 3"), max_frame_bytes=100)
    theirs.sendall(b"\x05\0\0\0he")
    with pytest.raises(DeadlineError):
        reader.recv(0.05)
    theirs.sendall(b"llo")
    assert reader.recv(10) == b"hello"
    reader.close()
    theirs.close()


def test_strangers_are_turned_away_and_do_not_take_a_place() -> None:
    listener = TcpListener.create("127.0.0.1")
    host, port, _ = listener.address.split(":")
    accepted = in_thread(lambda: listener.accept(1, timeout_s=10))
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(80))
        with pytest.raises(EngineError, match="cannot be reached"):
            connect(f"{host}:{port}:{'0' * 32}", 0, timeout_s=5)
    end = connect(listener.address, 0, timeout_s=5)
    (connection,) = accepted()
    TcpWriter([connection], max_frame_bytes=100).send(b"hello", 10)
    assert TcpReader(end, max_frame_bytes=100).recv(10) == b"hello"
    end.close()
    connection.close()
    listener.close()


def test_a_tcp_end_that_does_not_connect_is_named() -> None:
    listener = TcpListener.create("127.0.0.1")
    with pytest.raises(DeadlineError, match=r"channel ends \[0, 1\] did not connect within parallel\.init_timeout_s"):
        listener.accept(2, timeout_s=0.1)
    listener.close()
