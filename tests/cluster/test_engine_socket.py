"""The coordinator's end of the socket: what the loop gets of what the Engine sends, and when."""

from __future__ import annotations

import random
import select
import socket
import threading
from collections.abc import Iterator

import msgspec
import pytest

from cluster.engine.socket import EngineSocket
from cluster.messages.engine import Abort, EngineToCoordinator, SamplingParams, StepOutput, Submit, shared_sampling
from parallel.sockets import pack_frame

MAX_UNTAKEN_BYTES = 8 << 20


@pytest.fixture
def engine_socket() -> Iterator[EngineSocket]:
    made = EngineSocket(max_untaken_bytes=MAX_UNTAKEN_BYTES)
    made.start()
    yield made
    made.close()


@pytest.fixture
def engine(engine_socket: EngineSocket) -> Iterator[socket.socket]:
    """The Engine's end. It gives up when its bytes are not taken."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as end:
        end.settimeout(10)
        end.connect(engine_socket.address)
        yield end


def submit_of(num_bytes: int) -> Submit:
    sampling, choices = shared_sampling([[SamplingParams(max_tokens=1)]])
    return Submit(first_id=num_bytes, prompts=[bytes(num_bytes)], sampling=sampling, choices=choices)


def packed(message: EngineToCoordinator) -> bytes:
    return pack_frame(msgspec.msgpack.encode(message))


def messages_before(chance: random.Random) -> list[EngineToCoordinator]:
    """A few large messages or many small ones, as many as may wait to be polled."""
    largest = chance.choice((1 << 10, 1 << 18, MAX_UNTAKEN_BYTES - 1000))
    messages: list[EngineToCoordinator] = []
    left = MAX_UNTAKEN_BYTES
    while len(messages) < 500:
        message = submit_of(chance.randint(largest // 2, largest)) if chance.random() < 0.8 else Abort([len(messages)])
        left -= len(packed(message))
        if left < 0:
            break
        messages.append(message)
    return messages


@pytest.mark.parametrize("seed", range(12))
def test_a_message_is_seen_within_three_polls_whatever_lies_before_it(
    engine_socket: EngineSocket, engine: socket.socket, seed: int
) -> None:
    chance = random.Random(seed)
    sent = [*messages_before(chance), chance.choice((Abort([7]), submit_of(8)))]
    for message in sent:  # nobody polls meanwhile, as in a step that takes long
        engine.sendall(packed(message))
    seen: list[EngineToCoordinator] = []
    for _ in range(3):
        if len(seen) < len(sent):
            seen += engine_socket.poll(5.0)[0]
    assert seen == sent


def test_what_nobody_polls_is_bounded_and_nothing_of_it_is_lost(
    engine_socket: EngineSocket, engine: socket.socket
) -> None:
    count = 40
    sender = threading.Thread(target=engine.sendall, args=(count * packed(submit_of(1 << 20)),))
    sender.start()
    sender.join(0.5)
    assert sender.is_alive(), f"{count} MiB were read that nobody polled"
    num_messages = 0
    while num_messages < count:
        messages, lost = engine_socket.poll(5.0)
        assert messages, "nothing came in five seconds"
        assert not lost
        num_messages += len(messages)
    sender.join()


def test_messages_sent_before_the_end_of_the_connection_are_seen_with_it(
    engine_socket: EngineSocket, engine: socket.socket
) -> None:
    engine.sendall(packed(Abort([1])) + packed(Abort([2]))[:5])
    engine.close()
    messages: list[EngineToCoordinator] = []
    lost = False
    for _ in range(3):
        if not lost:
            news, lost = engine_socket.poll(1.0)
            messages += news
    assert messages == [Abort([1])]
    assert lost


def test_garbage_ends_the_connection_and_the_next_one_is_heard(
    engine_socket: EngineSocket, engine: socket.socket
) -> None:
    engine.sendall(pack_frame(b"\xc1"))
    assert engine_socket.poll(5.0) == ([], True)
    assert engine.recv(1) == b""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.connect(engine_socket.address)
        other.sendall(packed(Abort([3])))
        assert engine_socket.poll(5.0) == ([Abort([3])], False)
        engine_socket.send(StepOutput(tokens=bytes(4)))
        assert len(other.recv(100)) > 4


def test_what_the_socket_does_not_take_at_once_is_sent_by_later_polls(
    engine_socket: EngineSocket, engine: socket.socket
) -> None:
    engine.sendall(packed(Abort([1])))
    assert engine_socket.poll(5.0)[0]
    output = StepOutput(tokens=bytes(8 << 20))
    engine_socket.send(output)
    received = bytearray()
    engine.setblocking(False)
    while len(received) < 8 << 20:
        assert select.select([engine], [], [], 5.0)[0], "the rest does not come"
        received += engine.recv(1 << 20)
        engine_socket.poll(0.0)
    assert bytes(received) == pack_frame(msgspec.msgpack.encode(output))


def test_closing_ends_the_thread_with_or_without_a_peer_and_when_it_was_never_started() -> None:
    for connects, starts in ((False, False), (False, True), (True, True)):
        made = EngineSocket()
        if starts:
            made.start()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as end:
            if connects:
                end.connect(made.address)
            made.close()
            assert not made._thread.is_alive()
