"""Where a JSON value ends in text that comes in pieces. One pass, constant state.

It looks at brackets, strings and delimiters only: text that is wrong inside its brackets still has an end.
"""

from __future__ import annotations

_DELIMITERS = frozenset(" \t\r\n,]}")


class JsonScanner:
    """Finds the end of one value whose first character is the first one it is given."""

    __slots__ = ("_depth", "_escaped", "_in_string", "_scalar", "_stop_at", "done")

    def __init__(self, stop_at: str = "") -> None:
        """`stop_at`: characters that, outside strings, end the value before its brackets do (none of them JSON's):
        how the closing tag around a broken value begins."""
        self._stop_at = stop_at
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._scalar = False
        self.done = False

    def scan(self, text: str, start: int) -> int:
        """The end of what belongs to the value in `text[start:]`; `done` says whether it is the value's end."""
        for position in range(start, len(text)):
            char = text[position]
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._in_string = False
                    if not self._depth:
                        self.done = True
                        return position + 1
            elif char in self._stop_at or (self._scalar and char in _DELIMITERS):
                self.done = True
                return position
            elif self._scalar:
                continue
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    self.done = True
                    return position + 1
            elif not self._depth:
                self._scalar = True
        return len(text)
