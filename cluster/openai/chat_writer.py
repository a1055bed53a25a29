"""Deltas to the bytes of /v1/chat/completions: chunks of a stream in their fixed order, or one whole answer."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from cluster.messages import TokenLogprobs
from cluster.openai.echo import finite, prompt_logprobs_json
from cluster.openai.generation import Delta
from cluster.openai.wire import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    PromptLogprobsJson,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from cluster.openai.writer import DONE, REASONS, BaseWriter, encode, event


class ChatWriter(BaseWriter):
    """Answers of /v1/chat/completions."""

    def begin(self, num_choices: int) -> bytes:
        ids = self._token_ids(self._job.prompts[0])
        return b"".join(
            self._event([ChatChunkChoice(index, ChatDelta(role="assistant", content=""))], prompt_token_ids=ids)
            for index in range(num_choices)
        )

    def chunks(self, deltas: Sequence[Delta]) -> bytes:
        events = []
        for delta in deltas:
            if self._shows(delta):
                choice = ChatChunkChoice(
                    delta.index,
                    ChatDelta(content=delta.text),
                    logprobs=self._logprobs(delta.token_ids, delta.logprobs),
                    token_ids=self._token_ids(delta.token_ids),
                )
                events.append(self._event([choice]))
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
        return self._event([], usage) + DONE if self._options.include_usage else DONE

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
                    self._token_ids(got.token_ids),
                )
            )
        head = self._head
        return encode(
            ChatCompletion(
                head.id,
                head.created,
                head.model,
                choices,
                usage,
                head.system_fingerprint,
                self._token_ids(self._job.prompts[0]),
                self._prompt_logprobs(),
            )
        )

    def _event(
        self,
        choices: list[ChatChunkChoice],
        usage: Usage | None = None,
        prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET,
    ) -> bytes:
        head = self._head
        shown = self._chunk_usage() if usage is None else usage
        return event(
            ChatChunk(head.id, head.created, head.model, choices, shown, head.system_fingerprint, prompt_token_ids)
        )

    def _logprobs(self, token_ids: list[int], logprobs: list[TokenLogprobs]) -> ChatLogprobs | None:
        if self._num_logprobs < 0:
            return None
        raw = self._tokenizer.token_bytes
        content = []
        for token, row in zip(token_ids, logprobs, strict=True):
            top = [TopLogprob(self._name(id_), lp, list(raw(id_))) for id_, lp in self._top(row, token)]
            content.append(TokenLogprob(self._name(token), finite(row.logprob), list(raw(token)), top))
        return ChatLogprobs(content)

    def _prompt_logprobs(self) -> PromptLogprobsJson | msgspec.UnsetType:
        scores = self._collected[0].prompt_logprobs
        k = self._options.num_prompt_logprobs
        if k < 0 or scores is None:
            return msgspec.UNSET
        return prompt_logprobs_json(scores, self._job.prompts[0], k, self._tokenizer)
