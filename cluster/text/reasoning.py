"""Separates the model's reasoning from its answer, by the tags around the reasoning.

Only text at the beginning of an answer, or after a tag that the prompt has opened, is reasoning. A tag anywhere else is
ordinary text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from cluster.text.tools import harmony
from cluster.text.tools.sink import Sink
from cluster.text.tools.text_stream import SPACE, Reading, TextStream

ReasoningName = Literal["think", "mistral", "harmony"]


@dataclass(frozen=True, slots=True)
class ReasoningStyle:
    """The tags around a model's reasoning."""

    name: ReasoningName
    begin: str
    end: str
    then: str = ""
    """Text between the reasoning and the answer. If empty, only whitespace."""
    answer: str = ""
    """Text with which the answer begins, unless it is a call."""
    read_rest: Callable[[TextStream, Sink], Reading[None]] | None = None
    """Parses everything after the reasoning, including calls. If None, the rest is text, with calls in a separate
    format."""
    special: tuple[str, ...] = ()
    """Value of `tags`. If empty, `begin` and `end` are used."""

    @property
    def tags(self) -> tuple[str, ...]:
        """Tags that may be special tokens, which an answer's text must then show."""
        return self.special or (self.begin, self.end)

    def is_open(self, prompt: str, continued: str = "") -> bool:
        """Whether an answer begins inside the reasoning.

        Args:
            prompt: the prompt, or its last part.
            continued: the beginning of the answer at the prompt's end, if the request continues an answer. Else empty.
        """
        if continued:
            return continued.rfind(self.begin) > continued.rfind(self.end)
        return prompt.rstrip(SPACE).endswith(self.begin)

    def is_over(self, prompt: str, continued: str = "") -> bool:
        """Whether an answer begins after the reasoning. Has the arguments of `is_open`."""
        if continued and self.answer:
            return True  # a template writes `answer` before the text
        return self.end in continued if continued else prompt.rstrip(SPACE).endswith(self.end)


REASONING_STYLES: Mapping[ReasoningName, ReasoningStyle] = {
    style.name: style
    for style in (
        ReasoningStyle("think", "<think>", "</think>"),  # Qwen 3, DeepSeek R1 and V3.1, and most others
        ReasoningStyle("mistral", "[THINK]", "[/THINK]"),
        ReasoningStyle(
            "harmony",
            harmony.ANALYSIS,
            harmony.END,
            then=harmony.NEXT,
            answer=harmony.FINAL,
            read_rest=harmony.read_messages,
            special=harmony.TAGS,
        ),
    )
}


def detect_reasoning(template: str) -> ReasoningName | None:
    """The name of the reasoning tags in a chat template. None if it has no known tags."""
    for style in REASONING_STYLES.values():
        if style.begin in template or (style.end in template and not style.special):
            return style.name
    return None


def read_reasoning(text: TextStream, sink: Sink, style: ReasoningStyle, *, is_open: bool) -> Reading[bool]:
    """Reads the reasoning at the beginning of an answer, with its tags and the whitespace around them. Returns whether
    the answer begins with reasoning.

    Args:
        is_open: whether the prompt contains the opening tag.
    """
    space = yield from text.skip_space()
    # A model may repeat the tag that its template has already written.
    if not (yield from text.skip(style.begin)) and not is_open:
        sink.content(space)
        return False
    yield from text.skip_space()
    if (yield from text.take_until((style.end,), sink.reasoning)):
        sink.end_reasoning()
    return True
