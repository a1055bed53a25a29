"""The model's thinking, told apart from its answer by the tags around it.

Thinking is what an answer begins with, or what the prompt has left open: a tag anywhere else is text.
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
    """The tags around a model's thinking."""

    name: ReasoningName
    begin: str
    end: str
    then: str = ""
    """Text between the thinking and what follows it; whitespace where it is empty."""
    answer: str = ""
    """Text that what follows begins with, where it is no call."""
    read_rest: Callable[[TextStream, Sink], Reading[None]] | None = None
    """Reads all that follows the thinking, calls among it. None: that is text, and calls in a format of their own."""
    special: tuple[str, ...] = ()
    """See `tags`; empty: begin and end."""

    @property
    def tags(self) -> tuple[str, ...]:
        """Tags that a tokenizer may have as special tokens, which an answer's text must then show."""
        return self.special or (self.begin, self.end)

    def is_open(self, prompt: str, continued: str = "") -> bool:
        """Whether an answer begins inside the thinking.

        Args:
            prompt: what it is an answer to; the end is enough.
            continued: what there is of the answer already, at the prompt's end.
        """
        if continued:
            return continued.rfind(self.begin) > continued.rfind(self.end)
        return prompt.rstrip(SPACE).endswith(self.begin)

    def is_over(self, prompt: str, continued: str = "") -> bool:
        """Whether an answer begins behind the thinking; arguments as of `is_open`."""
        if continued and self.answer:
            return True  # a template writes it before the answer's text
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
    """The tags that a chat template knows; None when it knows none."""
    for style in REASONING_STYLES.values():
        if style.begin in template or (style.end in template and not style.special):
            return style.name
    return None


def read_reasoning(text: TextStream, sink: Sink, style: ReasoningStyle, *, is_open: bool) -> Reading[bool]:
    """Reads the thinking an answer begins with, tags and the whitespace around them included; whether there was some.

    `is_open`: the opening tag is in the prompt.
    """
    space = yield from text.skip_space()
    # A model may write the tag again that its template has already written.
    if not (yield from text.skip(style.begin)) and not is_open:
        sink.content(space)
        return False
    yield from text.skip_space()
    if (yield from text.take_until((style.end,), sink.reasoning)):
        sink.end_reasoning()
    return True
