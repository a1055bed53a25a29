"""Incremental decoding: tokens become text as they arrive. `stops` finds the end of the text.

A detokenizer has the state of one sequence between two steps. Its pieces, joined, are the same text for any division
into steps, so a stream and a whole answer cannot differ.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

from tokenizers import Tokenizer as RustTokenizer

# Number of context tokens. Decoding these takes 11 to 71 us; a context of 128k tokens would take 36 ms.
_PRIMING_TOKENS = 6
_REPLACEMENT = "�"
# Maximum number of tokens without certain text: a joined emoji has at most this many byte tokens
_MAX_PENDING_TOKENS = 16


class ByteDetokenizer:
    """Decoder for byte-level vocabularies, like GPT-2's. The text is the UTF-8 of the tokens' bytes, so no token
    depends on another. It needs no prompt, so nothing of a prompt can leak, and it equals a full decode exactly."""

    __slots__ = ("_decode", "_token_bytes")

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        """`token_bytes` returns a token's raw bytes, empty for a hidden token."""
        self._token_bytes = token_bytes
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes. Empty while a character is incomplete."""
        return self._decode(self._token_bytes(token_id))

    def flush(self) -> str:
        """The rest of the text at the end: U+FFFD for an unfinished character, else empty."""
        return self._decode(b"", True)


class StreamDetokenizer:
    """Decoder for all other vocabularies (byte fallback, word pieces), in which a token's text depends on its
    neighbours. The prompt's last tokens are the context, so that the first word keeps its leading space."""

    __slots__ = ("_context", "_hidden", "_known", "_pending", "_tokenizer")

    def __init__(
        self, tokenizer: RustTokenizer, prompt_ids: Sequence[int] = (), hidden: frozenset[int] = frozenset()
    ) -> None:
        """`hidden` has the ids of tokens that are not shown."""
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._pending: list[int] = []  # tokens that have no certain text yet
        self._go_on([id_ for id_ in prompt_ids[-_MAX_PENDING_TOKENS:] if id_ not in hidden][-_PRIMING_TOKENS:])

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes. Empty while a character is incomplete."""
        if token_id in self._hidden:
            return ""
        self._pending.append(token_id)
        text = self.flush()
        if text and not text.endswith(_REPLACEMENT):
            self._go_on(self._pending)
        # A real U+FFFD never becomes certain. Without a limit, the pending tokens would grow and cost O(n^2).
        elif len(self._pending) >= _MAX_PENDING_TOKENS:
            self._go_on([*self._context, *self._pending][-_PRIMING_TOKENS:])
        else:
            return ""
        return text

    def flush(self) -> str:
        """The rest of the text at the end: U+FFFD for an unfinished character, else empty."""
        if not self._pending:
            return ""
        text = self._decode([*self._context, *self._pending])
        return text[len(self._known) :] if text.startswith(self._known) else self._decode(self._pending)

    def _go_on(self, context: Sequence[int]) -> None:
        """Makes `context` the context of the next tokens. Last tokens that end inside a character are left out, because
        the text of half an emoji is no prefix of the emoji's text."""
        self._context = list(context)
        while (known := self._decode(self._context)).endswith(_REPLACEMENT):
            self._context.pop()
        self._known = known
        self._pending = []

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False)) if ids else ""


Detokenizer = ByteDetokenizer | StreamDetokenizer
"""The decoder of one sequence, token by token."""
