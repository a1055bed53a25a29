"""Deltas to the bytes a client reads: SSE chunks in their fixed order, or one whole answer.

A writer belongs to one request. Order of a stream: `begin`, any number of `chunks`, `end`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from cluster.messages import FinishReason, TokenLogprobs
from cluster.openai.generation import Delta
from cluster.openai.protocol import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Head,
    Reason,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from cluster.openai.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"
_LOWEST_LOGPROB = -9999.0  # JSON has no -inf; this is what clients know
_REASONS: dict[FinishReason, Reason] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
}
_encode = msgspec.json.Encoder().encode


def event(message: msgspec.Struct) -> bytes:
    """`message` as one server-sent event."""
    return b"data: " + _encode(message) + b"\n\n"


class AnswerWriter(Protocol):
    """Writes one request's answer, streamed (`begin`, `chunks`, `end`) or whole (`collect`, `whole`)."""

    def begin(self, num_choices: int) -> bytes: ...

    def chunks(self, deltas: Sequence[Delta]) -> bytes: ...

    def end(self, usage: Usage) -> bytes: ...

    def collect(self, deltas: Sequence[Delta]) -> None: ...

    def whole(self, num_choices: int, usage: Usage) -> bytes: ...


class _Collected:
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


class _Writer:
    def __init__(self, head: Head, tokenizer: Tokenizer, num_logprobs: int, *, include_usage: bool) -> None:
        """`num_logprobs`: -1 none, k the sampled token's and the k likeliest."""
        self._head = head
        self._tokenizer = tokenizer
        self._num_logprobs = num_logprobs
        self._include_usage = include_usage
        # Null in every chunk but the last one, absent when not asked for.
        self._chunk_usage: msgspec.UnsetType | None = None if include_usage else msgspec.UNSET
        self._collected: dict[int, _Collected] = {}

    def collect(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            self._collected.setdefault(delta.index, _Collected()).add(delta)

    def _top(self, logprobs: TokenLogprobs, sampled: int) -> list[tuple[int, float]]:
        """(id, logprob) of the k likeliest, and of the sampled token when it is not one of them."""
        k = self._num_logprobs
        top = [(id_, _finite(lp)) for id_, lp in zip(logprobs.top_ids[:k], logprobs.top_logprobs[:k], strict=True)]
        if k and all(id_ != sampled for id_, _ in top):
            top.append((sampled, _finite(logprobs.logprob)))
        return top


class ChatWriter(_Writer):
    """Answers of /v1/chat/completions."""

    def begin(self, num_choices: int) -> bytes:
        return b"".join(
            self._event([ChatChunkChoice(index, ChatDelta(role="assistant", content=""))])
            for index in range(num_choices)
        )

    def chunks(self, deltas: Sequence[Delta]) -> bytes:
        events = []
        for delta in deltas:
            if delta.text or delta.logprobs:
                logprobs = self._logprobs(delta.token_ids, delta.logprobs)
                events.append(
                    self._event([ChatChunkChoice(delta.index, ChatDelta(content=delta.text), logprobs=logprobs)])
                )
            if delta.finish_reason is not None:
                choice = ChatChunkChoice(
                    delta.index,
                    ChatDelta(),
                    finish_reason=_REASONS[delta.finish_reason],
                    stop_reason=delta.stop_reason,
                )
                events.append(self._event([choice]))
        return b"".join(events)

    def end(self, usage: Usage) -> bytes:
        return self._event([], usage) + DONE if self._include_usage else DONE

    def whole(self, num_choices: int, usage: Usage) -> bytes:
        choices = []
        for index in range(num_choices):
            got = self._collected[index]
            choices.append(
                ChatChoice(
                    index,
                    AssistantMessage("".join(got.text)),
                    self._logprobs(got.token_ids, got.logprobs),
                    _REASONS[got.finish_reason],
                    got.stop_reason,
                )
            )
        head = self._head
        return _encode(ChatCompletion(head.id, head.created, head.model, choices, usage, head.system_fingerprint))

    def _event(self, choices: list[ChatChunkChoice], usage: Usage | None = None) -> bytes:
        head = self._head
        shown = self._chunk_usage if usage is None else usage
        return event(ChatChunk(head.id, head.created, head.model, choices, shown, head.system_fingerprint))

    def _logprobs(self, token_ids: list[int], logprobs: list[TokenLogprobs]) -> ChatLogprobs | None:
        if self._num_logprobs < 0:
            return None
        tokenizer = self._tokenizer
        content = []
        for token, row in zip(token_ids, logprobs, strict=True):
            top = [
                TopLogprob(tokenizer.token_text(id_), lp, list(tokenizer.token_bytes(id_)))
                for id_, lp in self._top(row, token)
            ]
            raw = list(tokenizer.token_bytes(token))
            content.append(TokenLogprob(tokenizer.token_text(token), _finite(row.logprob), raw, top))
        return ChatLogprobs(content)


class CompletionWriter(_Writer):
    """Answers of /v1/completions."""

    def begin(self, num_choices: int) -> bytes:
        return b""

    def chunks(self, deltas: Sequence[Delta]) -> bytes:
        events = []
        for delta in deltas:
            if delta.text or delta.logprobs:
                logprobs = self._logprobs(delta.token_ids, delta.logprobs, delta.text_offsets)
                events.append(self._event([CompletionChoice(delta.index, delta.text, logprobs, None)]))
            if delta.finish_reason is not None:
                reason = _REASONS[delta.finish_reason]
                events.append(self._event([CompletionChoice(delta.index, "", None, reason, delta.stop_reason)]))
        return b"".join(events)

    def end(self, usage: Usage) -> bytes:
        return self._event([], usage) + DONE if self._include_usage else DONE

    def whole(self, num_choices: int, usage: Usage) -> bytes:
        choices = []
        for index in range(num_choices):
            got = self._collected[index]
            logprobs = self._logprobs(got.token_ids, got.logprobs, got.text_offsets)
            reason = _REASONS[got.finish_reason]
            choices.append(CompletionChoice(index, "".join(got.text), logprobs, reason, got.stop_reason))
        head = self._head
        return _encode(Completion(head.id, head.created, head.model, choices, usage, head.system_fingerprint))

    def _event(self, choices: list[CompletionChoice], usage: Usage | None = None) -> bytes:
        head = self._head
        shown = self._chunk_usage if usage is None else usage
        return event(Completion(head.id, head.created, head.model, choices, shown, head.system_fingerprint))

    def _logprobs(
        self, token_ids: list[int], logprobs: list[TokenLogprobs], offsets: list[int]
    ) -> CompletionLogprobs | None:
        if self._num_logprobs < 0:
            return None
        text = self._tokenizer.token_text
        return CompletionLogprobs(
            tokens=[text(token) for token in token_ids],
            token_logprobs=[_finite(row.logprob) for row in logprobs],
            top_logprobs=[
                {text(id_): lp for id_, lp in self._top(row, token)}
                for token, row in zip(token_ids, logprobs, strict=True)
            ],
            text_offset=offsets,
        )


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST_LOGPROB)
