"""Tokens to text as they come: incremental decoding. What in the text ends it is in `stops`.

Owns the state between two steps of one sequence. The pieces of text it returns, joined, are the text of the whole
sequence whatever the steps were: a stream and a single answer cannot differ.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

from tokenizers import Tokenizer as RustTokenizer
from tokenizers.decoders import DecodeStream

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
        """What is still held at the end: U+FFFD for an unfinished character."""
        return self._decode(b"", True)


class StreamDetokenizer:
    """Decoder of every other vocabulary (byte fallback, word pieces), where a token's text depends on its neighbours.

    The prompt's last tokens are given as context, so that a first word keeps its leading space.
    """

    __slots__ = ("_context", "_hidden", "_pending", "_stream", "_tokenizer")

    def __init__(
        self, tokenizer: RustTokenizer, prompt_ids: Sequence[int] = (), hidden: frozenset[int] = frozenset()
    ) -> None:
        """`hidden`: ids that are not to be seen."""
        self._tokenizer = tokenizer
        self._hidden = hidden
        context = [id_ for id_ in prompt_ids[-_MAX_PENDING_TOKENS:] if id_ not in hidden]
        self._context = self._safe_tail(context)
        self._pending: list[int] = []  # tokens whose text is not out yet
        self._stream = self._new_stream()

    def push(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        self._pending.append(token_id)
        try:
            text = self._stream.step(self._tokenizer, token_id)
        except (
            Exception
        ) as error:  # tokenizers raises bare Exception: https://github.com/vllm-project/vllm/issues/17448
            if "Invalid prefix" not in str(error):
                raise
            return self._restart()
        if text is not None:
            self._context = [*self._context, *self._pending][-_PRIMING_TOKENS:]
            self._pending.clear()
            return str(text)
        # A real U+FFFD in the output never becomes certain: without a bound the window grows and costs O(n^2).
        return self._restart() if len(self._pending) >= _MAX_PENDING_TOKENS else ""

    def flush(self) -> str:
        return self._decode_pending() if self._pending else ""

    def _restart(self) -> str:
        text = self._decode_pending()
        self._context = self._safe_tail([*self._context, *self._pending])
        self._pending.clear()
        self._stream = self._new_stream()
        return text

    def _decode_pending(self) -> str:
        known = self._decode(self._context)
        text = self._decode([*self._context, *self._pending])
        return text[len(known) :] if text.startswith(known) else self._decode(self._pending)

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def _new_stream(self) -> DecodeStream:
        return DecodeStream(ids=self._context, skip_special_tokens=False)

    def _safe_tail(self, ids: Sequence[int]) -> list[int]:
        """The last few of `ids`, less those that end inside a character: a stream primed with half an emoji returns the
        prompt's text with its first step (https://github.com/vllm-project/vllm/issues/48853)."""
        tail = list(ids[-_PRIMING_TOKENS:])
        while tail and self._decode(tail).endswith(_REPLACEMENT):
            tail.pop()
        return tail


Detokenizer = ByteDetokenizer | StreamDetokenizer
"""The decoder of one sequence, one token at a time."""
