"""Answers that are a list of blocks (thinking, texts, calls), of which the last is open while the model writes it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from cluster.text.tools.events import Arguments, CallStarted, Content, Event, Reasoning


class BlockBuilder(ABC):
    """One answer as it grows, and the events that tell of it, encoded.

    An answer is the same whether it is streamed or not: the events of a whole one are made and dropped.
    """

    def __init__(self) -> None:
        self._open: type[Event] | None = None
        """The type of the event that the open block began with. None: no block is open."""
        self._texts: list[str] = []
        """Pieces of the open block."""

    def tell(self, event: Event) -> bytes:
        """The model wrote on."""
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
        """A block begins with `event`; its text follows."""

    @abstractmethod
    def _grown(self, text: str) -> bytes:
        """`text` was added to the open block."""

    @abstractmethod
    def _close(self) -> Iterable[bytes]:
        """The open block, if one is open, has all its text."""
