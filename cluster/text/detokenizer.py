"""Tokens to text as they come: incremental decoding. What in the text ends it is in `stops`.

Owns the state between two steps of one sequence. The pieces of text it returns, joined, are the text of the whole
sequence whatever the steps were: a stream and a single answer cannot differ.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

from tokenizers import Tokenizer as RustTokenizer

_PRIMING_TOKENS = 6  # 11-71 us; priming with a 128k prompt takes 36 ms of the event loop
_REPLACEMENT = "�"
_MAX_PENDING_TOKENS = 16  # longest undecided run: a joined emoji is at most this many byte tokens


class ByteDetokenizer:
    """Decoder of byte-level vocabularies (GPT-2's kind): the text is the UTF-8 of the tokens' bytes, so each token is
    independent of all others. Needs no prompt, so none of it can leak, and equals the full decode exactly.
    """

    __slots__ = ("_decode", "_token_bytes")

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        """`token_bytes` gives a token's raw bytes; nothing for one that is not to be seen."""
        self._token_bytes = token_bytes
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode

    def push(self, token_id: int) -> str:
        """Text that `token_id` made certain; empty while a character is incomplete."""
        return self._decode(self._token_bytes(token_id))

    def flush(self) -> str:
        """The text still held at the end: U+FFFD for an unfinished character."""
        return self._decode(b"", True)


class StreamDetokenizer:
    """Decoder of every other vocabulary (byte fallback, word pieces), where a token's text depends on its neighbours.

    The prompt's last tokens are given as context, so that a first word keeps its leading space.
    """

    __slots__ = ("_context", "_hidden", "_known", "_pending", "_tokenizer")

    def __init__(
        self, tokenizer: RustTokenizer, prompt_ids: Sequence[int] = (), hidden: frozenset[int] = frozenset()
    ) -> None:
        """`hidden`: ids that are not to be seen."""
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._pending: list[int] = []  # tokens whose text is not out yet
        self._go_on([id_ for id_ in prompt_ids[-_MAX_PENDING_TOKENS:] if id_ not in hidden][-_PRIMING_TOKENS:])

    def push(self, token_id: int) -> str:
        """Text that `token_id` made certain; empty while a character is incomplete."""
        if token_id in self._hidden:
            return ""
        self._pending.append(token_id)
        text = self.flush()
        if text and not text.endswith(_REPLACEMENT):
            self._go_on(self._pending)
        # A real U+FFFD in the output never becomes certain: without a bound the window grows and costs O(n^2).
        elif len(self._pending) >= _MAX_PENDING_TOKENS:
            self._go_on([*self._context, *self._pending][-_PRIMING_TOKENS:])
        else:
            return ""
        return text

    def flush(self) -> str:
        """The text still held at the end: U+FFFD for an unfinished character."""
        if not self._pending:
            return ""
        text = self._decode([*self._context, *self._pending])
        return text[len(self._known) :] if text.startswith(self._known) else self._decode(self._pending)

    def _go_on(self, context: Sequence[int]) -> None:
        """Makes `context` what comes before the next tokens, less those that end inside a character: the text of half
        an emoji would not begin the text of the whole."""
        self._context = list(context)
        while (known := self._decode(self._context)).endswith(_REPLACEMENT):
            self._context.pop()
        self._known = known
        self._pending = []

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False)) if ids else ""


Detokenizer = ByteDetokenizer | StreamDetokenizer
"""The decoder of one sequence, one token at a time."""
