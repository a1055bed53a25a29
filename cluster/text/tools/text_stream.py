"""Text that comes in pieces, read by generators as if it were whole.

A reader is a generator that yields when it needs the next piece. What it returns depends on the text alone, never on
where the pieces were cut, and every character is looked at a constant number of times.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeVar

_T = TypeVar("_T")
Reading = Generator[None, None, _T]
SPACE = " \t\r\n"
_DELIMITERS = SPACE + ",]}"
_MAX_NAME = 128


class TextStream:
    """The text of one answer, and how far it has been read.

    At most one mark is set at a time: it keeps the text read since, for a reader that may find out that what it read
    was something else.
    """

    __slots__ = ("_kept", "_mark", "_num_dropped", "_position", "_text", "cut", "ended", "is_call")

    def __init__(self) -> None:
        self.ended = False
        self.cut = False
        """It ended at a limit; set with `ended`."""
        self.is_call = False
        """Whether what is marked can only be a call, for what was read of it: a tag or the name of a tool."""
        self._text = ""
        self._position = 0
        self._num_dropped = 0
        self._kept: list[str] | None = None
        self._mark = 0

    @property
    def position(self) -> int:
        """Characters read so far."""
        return self._num_dropped + self._position

    def push(self, text: str) -> None:
        """Appends `text`. Readers leave at most the length of a tag unread, so this copies no more than that."""
        if self._kept is not None:
            self._kept.append(self._text[self._mark : self._position])
            self._mark = 0
        self._num_dropped += self._position
        self._text = self._text[self._position :] + text
        self._position = 0

    def mark(self, tag: str = "", *, is_call: bool = False) -> None:
        """Keeps what is read from here on, as if `tag` were read first. Sets `is_call`, which a tag says by itself."""
        self.is_call = is_call or bool(tag)
        self._kept = [tag]
        self._mark = self._position

    def unmark(self) -> str:
        """Removes the mark: the text read since it was set, tag included."""
        assert self._kept is not None, "no mark is set"
        text = "".join(self._kept) + self._text[self._mark : self._position]
        self._kept = None
        return text

    def peek(self) -> Reading[str]:
        """The next character, left unread; "" at the end."""
        while self._position == len(self._text):
            if self.ended:
                return ""
            yield
        return self._text[self._position]

    def skip_space(self) -> Reading[str]:
        """Reads whitespace: JSON's and no other."""
        space: list[str] = []
        while (char := (yield from self.peek())) and char in SPACE:
            space.append(char)
            self._position += 1
        return "".join(space)

    def skip(self, tag: str) -> Reading[bool]:
        """Reads `tag` if it is next; otherwise nothing."""
        while True:
            if self._text.startswith(tag, self._position):
                self._position += len(tag)
                return True
            if self.ended or not tag.startswith(self._text[self._position : self._position + len(tag)]):
                return False
            yield

    def skip_last(self, tag: str) -> Reading[bool]:
        """Reads `tag` if it is next, or as much of it as an answer holds that was cut off inside it."""
        if (yield from self.skip(tag)):
            return True
        rest = self._text[self._position :]
        if not (self.ended and rest and tag.startswith(rest)):
            return False
        self._position = len(self._text)
        return True

    def take_until(self, tags: tuple[str, ...], sink: Callable[[str], None]) -> Reading[str]:
        """Hands text to `sink` up to the first of `tags`, which is read too; returns it, "" at the end.

        No tag may contain another. Only the start of a tag is held back.
        """
        while True:
            text, start = self._text, self._position
            found = [(at, tag) for tag in tags if (at := text.find(tag, start)) >= 0]
            if found:
                at, tag = min(found)
                self._position = at + len(tag)
            else:
                at = len(text) - (0 if self.ended else _num_held(text, start, tags))
                tag = ""
                self._position = at
            if at > start:
                sink(text[start:at])
            if tag or self.ended:
                return tag
            yield

    def take_json(self, sink: Callable[[str], None], *, stop_at: str = "") -> Reading[bool]:
        """Hands the JSON value that is next to `sink`, piece by piece; whether it came to its end.

        It looks at brackets, strings and delimiters only: text that is wrong inside its brackets still has an end.

        Args:
            stop_at: characters that, outside strings, end the value before its brackets do (none of them JSON's): how
                the closing tag around a broken value begins.
        """
        depth = 0
        in_string = escaped = scalar = done = False
        while True:
            start = self._position
            end = len(self._text)
            for position in range(start, end):
                char = self._text[position]
                if in_string:
                    if escaped:
                        escaped = False
                    elif char == "\\":
                        escaped = True
                    elif char == '"':
                        in_string = False
                        done = not depth
                elif char in stop_at or (scalar and char in _DELIMITERS):
                    done, end = True, position
                    break
                elif scalar:
                    continue
                elif char == '"':
                    in_string = True
                elif char in "{[":
                    depth += 1
                elif char in "}]":
                    depth -= 1
                    done = depth <= 0
                elif not depth:
                    scalar = True
                if done:
                    end = position + 1
                    break
            self._position = end
            if end > start:
                sink(self._text[start:end])
            if done or self.ended:
                return done
            yield

    def take_name(self) -> Reading[str]:
        """Reads the characters that names of tools are made of; longer than any name, if there is no end to them."""
        name: list[str] = []
        while len(name) <= _MAX_NAME:
            char = yield from self.peek()
            if not (char and char.isascii() and (char.isalnum() or char in "_-.")):
                break
            name.append(char)
            self._position += 1
        return "".join(name)


def _num_held(text: str, start: int, tags: tuple[str, ...]) -> int:
    """Length of the longest start of a tag that `text[start:]` ends with."""
    lengths = (length for tag in tags for length in range(1, len(tag)) if text.endswith(tag[:length], start))
    return max(lengths, default=0)
