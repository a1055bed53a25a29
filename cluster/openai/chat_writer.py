"""Deltas to the bytes of /v1/chat/completions: chunks of a stream in their fixed order, or one whole answer."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.messages import TokenLogprobs
from cluster.openai.generation import Delta
from cluster.openai.wire import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from cluster.openai.writer import DONE, REASONS, BaseWriter, encode, event, finite


class ChatWriter(BaseWriter):
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
                    finish_reason=REASONS[delta.finish_reason],
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
                    REASONS[got.finish_reason],
                    got.stop_reason,
                )
            )
        head = self._head
        return encode(ChatCompletion(head.id, head.created, head.model, choices, usage, head.system_fingerprint))

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
            content.append(TokenLogprob(tokenizer.token_text(token), finite(row.logprob), raw, top))
        return ChatLogprobs(content)
