"""The two messages of a step as bytes: what every section of them holds arrives, and what is no message is refused."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from configs.errors import EngineError
from worker.protocol import FrameKind, StepFrame, StepResult
from worker.sections import Message, Section

MESSAGES: list[type[StepFrame] | type[StepResult]] = [StepFrame, StepResult]


def sections_of(message: type[Message]) -> dict[str, Section[Any]]:
    return {name: part for name, part in vars(message).items() if isinstance(part, Section)}


def filled(message: type[Message], seed: int) -> tuple[dict[str, Any], dict[str, int]]:
    """Arrays of any bytes for all sections, and their lengths by name; some of them 0."""
    rng = np.random.default_rng(seed)
    sections = sections_of(message).values()
    names = {name for part in sections for name in (part.length, part.width) if isinstance(name, str)}
    lengths = {name: int(rng.integers(0, 4)) for name in sorted(names)}
    arrays = {}
    for part in sections:
        width = lengths[part.width] if isinstance(part.width, str) else part.width
        shape = (lengths[part.length],) if width is None else (lengths[part.length], width)
        content = rng.bytes(part.dtype.itemsize * int(np.prod(shape)))
        arrays[part.name] = np.frombuffer(content, part.dtype).reshape(shape)
    return arrays, lengths


@pytest.mark.parametrize("message", MESSAGES)
@pytest.mark.parametrize("seed", range(20))
def test_every_section_arrives_as_it_was_sent(message: type[StepFrame] | type[StepResult], seed: int) -> None:
    arrays, lengths = filled(message, seed)
    encoded = message(3, 1 << 40, **arrays).encode()
    assert len(encoded) == message.num_bytes(**lengths)
    for buffer in (encoded, memoryview(encoded)):
        decoded = message.decode(buffer)
        assert (decoded.generation, decoded.step) == (3, 1 << 40)
        for name, sent in arrays.items():
            got = getattr(decoded, name)
            assert got.tobytes() == sent.tobytes(), name
            assert got.dtype == sent.dtype
            # Where there is none of them, it does not matter how wide they are.
            assert got.shape == sent.shape or len(got) == len(sent) == 0, name


def test_a_section_that_nobody_filled_is_empty_and_takes_no_bytes() -> None:
    frame = StepFrame(1, 2, kind=FrameKind.CLOSE)
    assert len(frame.encode()) == StepFrame.num_bytes()
    decoded = StepFrame.decode(frame.encode())
    assert decoded.kind is FrameKind.CLOSE
    assert decoded.page_deltas.shape == (0, 3)
    assert not any(len(getattr(decoded, name)) for name in sections_of(StepFrame))


def test_a_message_has_only_the_sections_that_it_declares() -> None:
    with pytest.raises(TypeError, match="StepFrame has no sections \\['colours'\\]"):
        StepFrame(1, 1, colours=np.zeros(1, np.int32))


@pytest.mark.parametrize("message", MESSAGES)
def test_bytes_that_are_no_message_are_refused(message: type[StepFrame] | type[StepResult]) -> None:
    encoded = message(1, 2, **filled(message, 1)[0]).encode()
    with pytest.raises(EngineError, match="shorter than its header"):
        message.decode(encoded[:20])
    with pytest.raises(EngineError, match="begins with"):
        message.decode(b"x" + encoded[1:])
    for place in itertools.chain(range(4, 60), range(60, len(encoded), 7)):
        damaged = bytearray(encoded)
        damaged[place] ^= 1
        with pytest.raises(EngineError, match="checksum"):
            message.decode(bytes(damaged))
