"""Deltas to the bytes of /v1/completions: chunks of a stream in their fixed order, or one whole answer."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.messages import TokenLogprobs
from cluster.openai.generation import Delta
from cluster.openai.wire import Completion, CompletionChoice, CompletionLogprobs, Usage
from cluster.openai.writer import DONE, REASONS, BaseWriter, encode, event, finite


class CompletionWriter(BaseWriter):
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
                reason = REASONS[delta.finish_reason]
                events.append(self._event([CompletionChoice(delta.index, "", None, reason, delta.stop_reason)]))
        return b"".join(events)

    def end(self, usage: Usage) -> bytes:
        return self._event([], usage) + DONE if self._include_usage else DONE

    def whole(self, num_choices: int, usage: Usage) -> bytes:
        choices = []
        for index in range(num_choices):
            got = self._collected[index]
            logprobs = self._logprobs(got.token_ids, got.logprobs, got.text_offsets)
            reason = REASONS[got.finish_reason]
            choices.append(CompletionChoice(index, "".join(got.text), logprobs, reason, got.stop_reason))
        head = self._head
        return encode(Completion(head.id, head.created, head.model, choices, usage, head.system_fingerprint))

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
            token_logprobs=[finite(row.logprob) for row in logprobs],
            top_logprobs=[
                {text(id_): lp for id_, lp in self._top(row, token)}
                for token, row in zip(token_ids, logprobs, strict=True)
            ],
            text_offset=offsets,
        )
