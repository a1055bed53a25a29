"""Deltas to the bytes a client reads: SSE chunks in their fixed order, or one whole answer.

A writer belongs to one request. Order of a stream: `begin`, any number of `chunks`, `end`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from cluster.messages import FinishReason, TokenLogprobs
from cluster.openai.generation import Delta
from cluster.openai.tokenizer import Tokenizer
from cluster.openai.wire import Head, Reason, Usage

DONE = b"data: [DONE]\n\n"
_LOWEST_LOGPROB = -9999.0  # JSON has no -inf; this is what clients know
REASONS: dict[FinishReason, Reason] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
}
encode = msgspec.json.Encoder().encode


def event(message: msgspec.Struct) -> bytes:
    """`message` as one server-sent event."""
    return b"data: " + encode(message) + b"\n\n"


class AnswerWriter(Protocol):
    """Writes one request's answer, streamed (`begin`, `chunks`, `end`) or whole (`collect`, `whole`)."""

    def begin(self, num_choices: int) -> bytes: ...

    def chunks(self, deltas: Sequence[Delta]) -> bytes: ...

    def end(self, usage: Usage) -> bytes: ...

    def collect(self, deltas: Sequence[Delta]) -> None: ...

    def whole(self, num_choices: int, usage: Usage) -> bytes: ...


class Collected:
    """The deltas of one choice of a whole answer."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.text_offsets: list[int] = []
        self.finish_reason: FinishReason = FinishReason.ABORT
        self.stop_reason: int | str | None = None

    def add(self, delta: Delta) -> None:
        self.text.append(delta.text)
        if delta.logprobs:
            self.token_ids += delta.token_ids
            self.logprobs += delta.logprobs
            self.text_offsets += delta.text_offsets
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


class BaseWriter:
    """What the writers of both OpenAI routes share."""

    def __init__(self, head: Head, tokenizer: Tokenizer, num_logprobs: int, *, include_usage: bool) -> None:
        """`num_logprobs`: -1 none, k the sampled token's and the k likeliest."""
        self._head = head
        self._tokenizer = tokenizer
        self._num_logprobs = num_logprobs
        self._include_usage = include_usage
        # Null in every chunk but the last one, absent when not asked for.
        self._chunk_usage: msgspec.UnsetType | None = None if include_usage else msgspec.UNSET
        self._collected: dict[int, Collected] = {}

    def collect(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            self._collected.setdefault(delta.index, Collected()).add(delta)

    def _top(self, logprobs: TokenLogprobs, sampled: int) -> list[tuple[int, float]]:
        """(id, logprob) of the k likeliest, and of the sampled token when it is not one of them."""
        k = self._num_logprobs
        top = [(id_, finite(lp)) for id_, lp in zip(logprobs.top_ids[:k], logprobs.top_logprobs[:k], strict=True)]
        if k and all(id_ != sampled for id_, _ in top):
            top.append((sampled, finite(logprobs.logprob)))
        return top


def finite(logprob: float) -> float:
    """`logprob`, or the lowest number clients know for minus infinity."""
    return max(logprob, _LOWEST_LOGPROB)
