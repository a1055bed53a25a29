"""Answers that are a list of blocks (reasoning, texts, tool calls). The last block, which the model still writes, is
the open block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from cluster.text.tools.events import Arguments, CallStarted, Content, Event, Reasoning


class BlockBuilder(ABC):
    """One growing answer and its encoded events. An answer that is sent whole goes the same way as a stream: its events
    are made and dropped."""

    def __init__(self) -> None:
        self._open: type[Event] | None = None
        """Type of the event that began the open block. None if no block is open."""
        self._texts: list[str] = []
        """Pieces of text of the open block."""

    def tell(self, event: Event) -> bytes:
        """Adds an event of the model's output, and returns the encoded events for it."""
        written = b""
        if not isinstance(event, Arguments) and (type(event) is not self._open or isinstance(event, CallStarted)):
            written = b"".join(self._close())
            self._open, self._texts = type(event), []
            written += self._begun(event)
        match event:
            case Content(text) | Reasoning(text) | Arguments(_, text):
                self._texts.append(text)
                written += self._grown(text)
        return written

    @abstractmethod
    def _begun(self, event: Content | Reasoning | CallStarted) -> bytes:
        """Begins a block with `event`. The block's text follows in `_grown`."""

    @abstractmethod
    def _grown(self, text: str) -> bytes:
        """Adds `text` to the open block."""

    @abstractmethod
    def _close(self) -> Iterable[bytes]:
        """Ends the open block, if there is one."""
