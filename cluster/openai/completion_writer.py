"""Deltas to the bytes of /v1/completions: chunks of a stream in their fixed order, or one whole answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import msgspec

from cluster.engine.client import WholePromptLogprobs
from cluster.engine.messages import TokenLogprobs
from cluster.openai.echo import Echo, prompt_logprobs_json, prompt_top_logprobs
from cluster.openai.wire import Completion, CompletionChoice, CompletionLogprobs, Head, PromptLogprobsJson
from cluster.openai.writer import REASONS, AnswerOptions, AnswerWriter
from cluster.requests.generation import Delta
from cluster.requests.job import Job, Usage
from cluster.requests.json_parts import DONE, event_parts, finite, json_parts, long_list
from cluster.text.tokenizer import Tokenizer


class CompletionWriter(AnswerWriter):
    """Answers of /v1/completions."""

    def __init__(
        self, head: Head, job: Job, tokenizer: Tokenizer, options: AnswerOptions, echoes: Sequence[Echo] | None = None
    ) -> None:
        """`echoes`: each prompt's text, to stand before its answers."""
        super().__init__(head, job, tokenizer, options)
        self._echoes = echoes
        self._begun: set[int] = set()  # choices of a stream that have had a chunk

    def begin(self, num_choices: int) -> Iterator[bytes]:
        return iter(())

    def chunks(self, deltas: Sequence[Delta]) -> Iterator[bytes]:
        for delta in deltas:
            if delta.index not in self._begun:
                self._begun.add(delta.index)
                yield from self._first(delta)
            if self._text_only and delta.text:
                yield self._text_chunk(delta.index, delta.text)
            elif delta.text or self._has_tokens(delta):
                logprobs = self._logprobs(delta.index, delta.token_ids, delta.logprobs, delta.text_offsets)
                ids = self._token_ids(delta.token_ids)
                yield self._event([CompletionChoice(delta.index, delta.text, logprobs, None, token_ids=ids)])
            if delta.finish_reason is not None:
                reason = REASONS[delta.finish_reason]
                yield self._event([CompletionChoice(delta.index, "", None, reason, delta.stop_reason)])

    def end(self, usage: Usage) -> bytes:
        return self._event([], usage) + DONE if self._options.include_usage else DONE

    def whole(self, num_choices: int, usage: Usage) -> Iterator[bytes]:
        head = self._head
        choices = long_list(self._choice(index) for index in range(num_choices))
        return json_parts(Completion(head.id, head.created, head.model, choices, usage, head.system_fingerprint))

    def _choice(self, index: int) -> CompletionChoice:
        got = self._collected[index]
        # Every choice of a prompt has the same; the first one asked for them.
        whole = self._collected[index - index % self._job.num_choices].prompt_logprobs
        text = "".join(got.text)
        if self._echoes is not None:
            text = self._echo(index).text + text
        return CompletionChoice(
            index,
            text,
            self._logprobs(index, got.token_ids, got.logprobs, got.text_offsets, whole),
            REASONS[got.finish_reason],
            got.stop_reason,
            self._token_ids(got.token_ids),
            self._token_ids(self._job.prompt_of(index)),
            self._prompt_logprobs(index, whole),
        )

    def _encoded_chunk(self, index: int, text: str) -> bytes:
        return self._event([CompletionChoice(index, text, None, None)])

    def _first(self, delta: Delta) -> Iterator[bytes]:
        """The chunk with the prompt, when it is asked for in any way."""
        if self._echoes is None and not self._options.token_ids:
            return
        text, logprobs = "", None
        if self._echoes is not None:
            text = self._echo(delta.index).text
            if delta.prompt_logprobs is not None:
                logprobs = self._logprobs(delta.index, [], (), (), delta.prompt_logprobs)
        ids = self._token_ids(self._job.prompt_of(delta.index))
        yield from self._event_parts([CompletionChoice(delta.index, text, logprobs, None, prompt_token_ids=ids)])

    def _event(self, choices: list[CompletionChoice], usage: Usage | None = None) -> bytes:
        return b"".join(self._event_parts(choices, usage))

    def _event_parts(self, choices: list[CompletionChoice], usage: Usage | None = None) -> Iterator[bytes]:
        head = self._head
        shown = self._chunk_usage() if usage is None else usage
        return event_parts(Completion(head.id, head.created, head.model, choices, shown, head.system_fingerprint))

    def _echo(self, index: int) -> Echo:
        assert self._echoes is not None, "asked for the text of a prompt that is not echoed"
        return self._echoes[index // self._job.num_choices]

    def _logprobs(
        self,
        index: int,
        token_ids: Sequence[int],
        rows: Sequence[TokenLogprobs],
        offsets: Sequence[int],
        whole: WholePromptLogprobs | None = None,
    ) -> CompletionLogprobs | None:
        """The tokens' log probabilities; with `whole` and an echo, the prompt's come first."""
        k = self._num_logprobs
        if k < 0:
            return None
        names, own, tops = (
            map(self._name, token_ids),
            (finite(row.logprob) for row in rows),
            self._tops(token_ids, rows),
        )
        before = 0 if self._echoes is None else len(self._echo(index).text)
        places = (before + offset for offset in offsets)
        if self._echoes is None or whole is None:
            return CompletionLogprobs(long_list(names), long_list(own), long_list(tops), long_list(places))
        prompt = self._job.prompt_of(index)
        return CompletionLogprobs(
            tokens=long_list(chain(map(self._name, prompt), names)),
            token_logprobs=long_list(chain([None], map(finite, whole.logprobs.tolist()), own)),
            top_logprobs=long_list(chain([None], map(self._by_name, prompt_top_logprobs(whole, prompt, k)), tops)),
            text_offset=long_list(chain(self._echo(index).offsets, places)),
        )

    def _tops(self, token_ids: Sequence[int], rows: Sequence[TokenLogprobs]) -> Iterator[dict[str, float]]:
        return (self._by_name(self._top(row, token)) for token, row in zip(token_ids, rows, strict=True))

    def _by_name(self, top: Sequence[tuple[int, float]]) -> dict[str, float]:
        """`top` by the tokens' text. Parts of a character have one text: of these the likeliest stays."""
        named: dict[str, float] = {}
        for id_, logprob in top:
            named.setdefault(self._name(id_), logprob)
        return named

    def _prompt_logprobs(self, index: int, whole: WholePromptLogprobs | None) -> PromptLogprobsJson | msgspec.UnsetType:
        k = self._options.num_prompt_logprobs
        if k < 0 or whole is None:
            return msgspec.UNSET
        return long_list(prompt_logprobs_json(whole, self._job.prompt_of(index), k, self._tokenizer))
