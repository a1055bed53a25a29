"""Text that comes in pieces, which generators read as if it were whole.

A reader is a generator that yields when it needs the next piece. Its result depends only on the text, not on the
pieces, and it looks at every character a constant number of times.
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
    """The text of one answer, and how far it has been read. One mark at most is set at a time. From the mark on, the
    stream keeps the text, for a reader that may find out that it read something else."""

    __slots__ = ("_kept", "_mark", "_num_dropped", "_position", "_text", "cut", "ended", "is_call")

    def __init__(self) -> None:
        self.ended = False
        self.cut = False
        """Whether the text ended at a limit or a stop. Set with `ended`."""
        self.is_call = False
        """Whether the marked text can only be a call, because a tag or a tool's name was read."""
        self._text = ""
        self._position = 0
        self._num_dropped = 0
        self._kept: list[str] | None = None
        self._mark = 0

    @property
    def position(self) -> int:
        """Number of characters read so far."""
        return self._num_dropped + self._position

    def push(self, text: str) -> None:
        """Appends `text`. Readers leave at most a tag's length unread, so the call copies no more than that."""
        if self._kept is not None:
            self._kept.append(self._text[self._mark : self._position])
            self._mark = 0
        self._num_dropped += self._position
        self._text = self._text[self._position :] + text
        self._position = 0

    def mark(self, tag: str = "", *, is_call: bool = False) -> None:
        """Sets the mark at this position. `unmark` then returns `tag` before the marked text. A tag sets `is_call`."""
        self.is_call = is_call or bool(tag)
        self._kept = [tag]
        self._mark = self._position

    def unmark(self) -> str:
        """Removes the mark. Returns the text that was read since the mark was set, with the mark's tag."""
        assert self._kept is not None, "no mark is set"
        text = "".join(self._kept) + self._text[self._mark : self._position]
        self._kept = None
        return text

    def peek(self) -> Reading[str]:
        """Returns the next character, which stays unread, or "" at the end."""
        while self._position == len(self._text):
            if self.ended:
                return ""
            yield
        return self._text[self._position]

    def skip_space(self) -> Reading[str]:
        """Reads whitespace as JSON defines it, and returns it."""
        space: list[str] = []
        while (char := (yield from self.peek())) and char in SPACE:
            space.append(char)
            self._position += 1
        return "".join(space)

    def skip(self, tag: str) -> Reading[bool]:
        """Reads `tag` if it is next, otherwise nothing. Returns whether it was."""
        while True:
            if self._text.startswith(tag, self._position):
                self._position += len(tag)
                return True
            if self.ended or not tag.startswith(self._text[self._position : self._position + len(tag)]):
                return False
            yield

    def skip_last(self, tag: str) -> Reading[bool]:
        """Reads `tag` if it is next, or the part of it that ends a cut-off answer. Returns whether it was."""
        if (yield from self.skip(tag)):
            return True
        rest = self._text[self._position :]
        if not (self.ended and rest and tag.startswith(rest)):
            return False
        self._position = len(self._text)
        return True

    def take_until(self, tags: tuple[str, ...], sink: Callable[[str], None]) -> Reading[str]:
        """Passes text to `sink` up to the first of `tags`, which is read too. Returns that tag, or "" at the end. No
        tag may contain another one. Only text that may be the start of a tag is held back."""
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
        """Passes the next JSON value to `sink`, piece by piece. Returns whether the value is complete.

        The reader only looks at brackets, strings and delimiters, so it also finds the end of a value that is wrong
        inside.

        Args:
            stop_at: characters that end the value when they occur outside its strings, such as the first character of
                the closing tag after a broken value. JSON must not use them.
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
        """Reads characters that may be part of a tool's name. If they do not end, returns more than any name's
        length."""
        name: list[str] = []
        while len(name) <= _MAX_NAME:
            char = yield from self.peek()
            if not (char and char.isascii() and (char.isalnum() or char in "_-.")):
                break
            name.append(char)
            self._position += 1
        return "".join(name)


def _num_held(text: str, start: int, tags: tuple[str, ...]) -> int:
    """Length of the longest beginning of one of `tags` with which `text[start:]` ends."""
    lengths = (length for tag in tags for length in range(1, len(tag)) if text.endswith(tag[:length], start))
    return max(lengths, default=0)
