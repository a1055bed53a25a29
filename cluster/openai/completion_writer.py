"""Deltas to the bytes of /v1/completions: chunks of a stream in their fixed order, or one whole answer."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from cluster.engine_client import PromptScores
from cluster.messages import TokenLogprobs
from cluster.openai.echo import Echo, finite, prompt_logprobs_json, prompt_tops
from cluster.openai.generation import Delta
from cluster.openai.job import Job
from cluster.openai.tokenizer import Tokenizer
from cluster.openai.wire import Completion, CompletionChoice, CompletionLogprobs, Head, PromptLogprobsJson, Usage
from cluster.openai.writer import DONE, REASONS, AnswerOptions, BaseWriter, encode, event


class CompletionWriter(BaseWriter):
    """Answers of /v1/completions."""

    def __init__(
        self, head: Head, job: Job, tokenizer: Tokenizer, options: AnswerOptions, echoes: Sequence[Echo] | None = None
    ) -> None:
        """`echoes`: each prompt's text, to stand before its answers."""
        super().__init__(head, job, tokenizer, options)
        self._echoes = echoes
        self._begun: set[int] = set()  # choices of a stream that have had a chunk

    def begin(self, num_choices: int) -> bytes:
        return b""

    def chunks(self, deltas: Sequence[Delta]) -> bytes:
        events = []
        for delta in deltas:
            if delta.index not in self._begun:
                self._begun.add(delta.index)
                events.append(self._first(delta))
            if self._text_only and delta.text:
                events.append(self._text_chunk(delta.index, delta.text))
            elif delta.text or self._has_tokens(delta):
                logprobs = self._logprobs(delta.index, delta.token_ids, delta.logprobs, delta.text_offsets)
                ids = self._token_ids(delta.token_ids)
                events.append(self._event([CompletionChoice(delta.index, delta.text, logprobs, None, token_ids=ids)]))
            if delta.finish_reason is not None:
                reason = REASONS[delta.finish_reason]
                events.append(self._event([CompletionChoice(delta.index, "", None, reason, delta.stop_reason)]))
        return b"".join(events)

    def end(self, usage: Usage) -> bytes:
        return self._event([], usage) + DONE if self._options.include_usage else DONE

    def whole(self, num_choices: int, usage: Usage) -> bytes:
        choices = []
        for index in range(num_choices):
            got = self._collected[index]
            # Every choice of a prompt has the same scores; the first one asked for them.
            scores = self._collected[index - index % self._job.num_choices].prompt_logprobs
            text = "".join(got.text)
            logprobs = self._logprobs(index, got.token_ids, got.logprobs, got.text_offsets)
            if self._echoes is not None:
                text = self._echo(index).text + text
                logprobs = _joined(self._echoed_logprobs(index, scores), logprobs)
            choices.append(
                CompletionChoice(
                    index,
                    text,
                    logprobs,
                    REASONS[got.finish_reason],
                    got.stop_reason,
                    self._token_ids(got.token_ids),
                    self._token_ids(self._job.prompt_of(index)),
                    self._prompt_logprobs(index, scores),
                )
            )
        head = self._head
        return encode(Completion(head.id, head.created, head.model, choices, usage, head.system_fingerprint))

    def _encoded_chunk(self, index: int, text: str) -> bytes:
        return self._event([CompletionChoice(index, text, None, None)])

    def _first(self, delta: Delta) -> bytes:
        """The chunk with the prompt, when it is asked for in any way."""
        if self._echoes is None and not self._options.token_ids:
            return b""
        text, logprobs = "", None
        if self._echoes is not None:
            text = self._echo(delta.index).text
            logprobs = self._echoed_logprobs(delta.index, delta.prompt_logprobs)
        ids = self._token_ids(self._job.prompt_of(delta.index))
        return self._event([CompletionChoice(delta.index, text, logprobs, None, prompt_token_ids=ids)])

    def _event(self, choices: list[CompletionChoice], usage: Usage | None = None) -> bytes:
        head = self._head
        shown = self._chunk_usage() if usage is None else usage
        return event(Completion(head.id, head.created, head.model, choices, shown, head.system_fingerprint))

    def _echo(self, index: int) -> Echo:
        assert self._echoes is not None, "asked for the text of a prompt that is not echoed"
        return self._echoes[index // self._job.num_choices]

    def _logprobs(
        self, index: int, token_ids: list[int], logprobs: Sequence[TokenLogprobs], offsets: Sequence[int]
    ) -> CompletionLogprobs | None:
        if self._num_logprobs < 0:
            return None
        before = len(self._echo(index).text) if self._echoes is not None else 0
        return CompletionLogprobs(
            tokens=[self._name(token) for token in token_ids],
            token_logprobs=[finite(row.logprob) for row in logprobs],
            top_logprobs=[self._by_name(self._top(row, token)) for token, row in zip(token_ids, logprobs, strict=True)],
            text_offset=[before + offset for offset in offsets],
        )

    def _echoed_logprobs(self, index: int, scores: PromptScores | None) -> CompletionLogprobs | None:
        if self._num_logprobs < 0 or scores is None:
            return None
        ids = self._job.prompt_of(index)
        return CompletionLogprobs(
            tokens=[self._name(token) for token in ids],
            token_logprobs=[None, *(finite(logprob) for logprob in scores.logprobs.tolist())],
            top_logprobs=[None, *(self._by_name(top) for top in prompt_tops(scores, ids, self._num_logprobs))],
            text_offset=self._echo(index).offsets,
        )

    def _by_name(self, top: Sequence[tuple[int, float]]) -> dict[str, float]:
        """Of tokens with the same text, which parts of a character have, the likeliest stays."""
        named: dict[str, float] = {}
        for id_, logprob in top:
            named.setdefault(self._name(id_), logprob)
        return named

    def _prompt_logprobs(self, index: int, scores: PromptScores | None) -> PromptLogprobsJson | msgspec.UnsetType:
        k = self._options.num_prompt_logprobs
        if k < 0 or scores is None:
            return msgspec.UNSET
        return prompt_logprobs_json(scores, self._job.prompt_of(index), k, self._tokenizer)


def _joined(first: CompletionLogprobs | None, second: CompletionLogprobs | None) -> CompletionLogprobs | None:
    if first is None or second is None:
        return second
    return CompletionLogprobs(
        first.tokens + second.tokens,
        first.token_logprobs + second.token_logprobs,
        first.top_logprobs + second.top_logprobs,
        first.text_offset + second.text_offset,
    )
