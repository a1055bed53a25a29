"""Regular expressions that end a text. RE2 searches them in linear time, over a window of bounded length."""

from __future__ import annotations

import re2

from configs.errors import RequestError

_WINDOW_CHARS = 256
"""Maximum length of a match that is found. Searching a window takes 3 us, and 40 us for the worst accepted pattern."""
_MAX_CHARS = 256
_MAX_PROGRAM_SIZE = 1000
_ASSERTIONS = frozenset("AzZbBG")


class StopRegex:
    """One checked pattern. It has no state of a text."""

    __slots__ = ("_at_end", "_pattern", "source")

    def __init__(self, source: str, param: str) -> None:
        """Raises RequestError, naming `param`, if the pattern is invalid, too large, matches the empty text, or has
        assertions."""
        self.source = source
        if not 0 < len(source) <= _MAX_CHARS:
            raise RequestError(f"{param} must have 1 to {_MAX_CHARS} characters.", param=param)
        if _has_assertion(source):
            # An assertion would depend on text that has not come yet.
            raise RequestError(f"{param} must not use ^, $, \\A, \\z, \\b or \\B.", param=param)
        options = re2.Options()
        options.log_errors = False
        options.max_mem = 1 << 20
        try:
            self._pattern = re2.compile(source, options)
            self._at_end = re2.compile(rf"(?:{source})\z", options)
        except re2.error as error:
            reason = error.args[0].decode("utf-8", "replace") if isinstance(error.args[0], bytes) else str(error)
            raise RequestError(f"{param} must be a regular expression of RE2: {reason}.", param=param) from None
        if self._at_end.programsize > _MAX_PROGRAM_SIZE:
            raise RequestError(f"{param} is too large; use smaller counts.", param=param)
        if self._pattern.fullmatch("") is not None:
            raise RequestError(f"{param} matches the empty text; let it match at least one character.", param=param)

    def first_end(self, before: str, text: str) -> int | None:
        """Number of characters of `text` up to the end of the first match that ends in `text`. None without a match.

        Args:
            before: text before `text`, at least as much of it as a match may include.
        """
        before = before[-_WINDOW_CHARS:]
        if self._pattern.search(before + text) is None:
            return None
        for end in range(1, len(text) + 1):
            if self._at_end.search((before + text[:end])[-_WINDOW_CHARS:]) is not None:
                return end
        return None

    @staticmethod
    def window(before: str, text: str) -> str:
        """The last characters of `before` and `text`, which the next call needs."""
        return (before + text)[-_WINDOW_CHARS:]


def _has_assertion(source: str) -> bool:
    """Whether an unescaped ^ or $, or an escape that is an assertion, occurs outside a character class."""
    in_class = False
    chars = enumerate(source)
    for i, char in chars:
        if char == "\\":
            _, escaped = next(chars, (0, ""))
            if escaped == "Q" or (not in_class and escaped in _ASSERTIONS and escaped):
                return True
        elif in_class:
            in_class = char != "]" or source[i - 1] == "[" or source[i - 2 : i] == "[^"
        elif char == "[":
            in_class = True
        elif char in "^$":
            return True
    return False
