"""Answers of /generate: one object per sequence, either whole or after each step.

A stream's objects are cumulative, like SGLang's: each contains the whole text so far. Only the last object contains the
likeliest tokens, which would otherwise make up most of the stream.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from cluster.messages.engine import FinishReason
from cluster.requests.answer import AnswerWriter
from cluster.requests.generation import Collected, Delta
from cluster.requests.job import Run
from cluster.requests.json_parts import DONE, event_parts, finite, json_parts, long_list
from cluster.text.tokenizer import Tokenizer

Entry = tuple[float | None, int, str | None]
"""Log probability, token id, and the token's text, or null if texts were not requested."""


class MatchedStop(msgspec.Struct, tag_field="type", tag="stop"):
    """The answer ended with an end of sequence, a stop string or a stop token."""

    matched: int | str | None


class ReachedLength(msgspec.Struct, tag_field="type", tag="length"):
    """The answer used up `max_new_tokens` or the context."""

    length: int


class WasAborted(msgspec.Struct, tag_field="type", tag="abort"):
    """The request was cancelled before its answer ended, for example by POST /abort_request."""

    message: str


class MetaInfo(msgspec.Struct, kw_only=True):
    """Facts about a sequence besides its text."""

    id: str
    finish_reason: MatchedStop | ReachedLength | WasAborted | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    e2e_latency: float | msgspec.UnsetType = msgspec.UNSET
    """Seconds from the start of the request. Present once the sequence has ended."""
    input_token_logprobs: list[Entry] | msgspec.UnsetType = msgspec.UNSET
    output_token_logprobs: list[Entry] | msgspec.UnsetType = msgspec.UNSET
    input_top_logprobs: list[list[Entry] | None] | msgspec.UnsetType = msgspec.UNSET
    output_top_logprobs: list[list[Entry]] | msgspec.UnsetType = msgspec.UNSET
    output_token_ids_logprobs: list[list[Entry]] | msgspec.UnsetType = msgspec.UNSET


class NativeAnswer(msgspec.Struct):
    """One sequence so far."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int | msgspec.UnsetType = msgspec.UNSET
    """Index of the sequence. Present in a stream of several sequences."""


class NativeWriter(AnswerWriter):
    """Writes answers of /generate."""

    def __init__(
        self,
        run: Run,
        tokenizer: Tokenizer,
        starts: Sequence[int],
        ids: Sequence[str],
        *,
        as_list: bool,
        with_text: bool,
    ) -> None:
        """Args:
        starts: position in each prompt from which log probabilities of its tokens are returned. -1 for none.
        ids: `meta_info.id` for each prompt.
        as_list: whether whole answers are a list, and streamed ones have an index.
        with_text: whether log probabilities include the texts of their tokens.
        """
        super().__init__(run)
        self._as_list = as_list
        prompts = [index // run.job.num_choices for index in range(run.job.num_outputs)]
        self._outputs = [
            _Output(run, index, tokenizer, ids[prompt], starts[prompt], with_text)
            for index, prompt in enumerate(prompts)
        ]

    def add(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            self._outputs[delta.index].add(delta)

    def whole(self) -> Iterator[bytes]:
        shown = long_list(output.shown() for output in self._outputs)
        return json_parts(shown if self._as_list else self._outputs[0].shown())

    def events(self, deltas: Sequence[Delta]) -> Iterator[bytes]:
        for delta in deltas:
            self._outputs[delta.index].add(delta)
            shown = self._outputs[delta.index].shown()
            shown.index = delta.index if self._as_list else msgspec.UNSET
            yield from event_parts(shown)

    def end(self) -> Iterable[bytes]:
        return (DONE,)


@dataclass(slots=True)
class _Output:
    """One sequence so far."""

    run: Run
    index: int
    tokenizer: Tokenizer
    name: str
    start: int
    with_text: bool
    begin: float = field(default_factory=time.monotonic)
    got: Collected = field(default_factory=Collected)
    logprobs: list[Entry] = field(default_factory=list)
    prompt: list[Entry] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        """Adds what one step produced for the sequence."""
        self.got.add(delta)
        for token, row in zip(delta.token_ids, delta.logprobs, strict=False):
            self.logprobs.append(self._entry(row.logprob, token))

    def shown(self) -> NativeAnswer:
        """The object that shows the sequence to clients."""
        output = self.run.output(self.index)
        sampling, prefilled = output.stream.sampling, output.stream.prefilled
        has_ended = self.got.finish_reason is not None
        meta = MetaInfo(
            id=self.name,
            finish_reason=self._reason(),
            prompt_tokens=len(self.run.job.prompt_of(self.index)),
            completion_tokens=output.num_tokens,
            cached_tokens=0 if prefilled is None else prefilled.num_cached_tokens,
        )
        if has_ended:
            meta.e2e_latency = round(time.monotonic() - self.begin, 6)
        if sampling.num_logprobs >= 0:
            meta.input_token_logprobs = long_list(self._prompt_entries())
            meta.output_token_logprobs = long_list(self.logprobs)
            if sampling.num_logprobs and has_ended:
                meta.output_top_logprobs = long_list(self._likeliest(slice(sampling.num_logprobs)))
                if self.start >= 0:
                    meta.input_top_logprobs = long_list(self._prompt_top_logprobs())
            if sampling.logprob_token_ids and has_ended:
                meta.output_token_ids_logprobs = long_list(self._likeliest(slice(sampling.num_logprobs, None)))
        return NativeAnswer("".join(self.got.text), self.got.token_ids, meta)

    def _entry(self, logprob: float | None, token: int) -> Entry:
        text = self.tokenizer.token_text(token) if self.with_text else None
        return None if logprob is None else finite(logprob), token, text

    def _likeliest(self, places: slice) -> Iterator[list[Entry]]:
        """For each token of the answer: the entries `places` of the engine's list of log probabilities."""
        for row in self.got.logprobs:
            yield [self._entry(logprob, id_) for id_, logprob in row.top[places]]

    def _prompt_entries(self) -> Iterator[Entry]:
        """The prompt's tokens from `start` on, cached for all objects of a stream. The first prompt token has no log
        probability."""
        yield from self.prompt
        if self.got.prompt_logprobs is None:
            return
        prompt, logprobs = self.run.job.prompt_of(self.index), self.got.prompt_logprobs.logprobs
        for position in range(self.start + len(self.prompt), len(prompt)):
            entry = self._entry(float(logprobs[position - 1]) if position else None, prompt[position])
            self.prompt.append(entry)
            yield entry

    def _prompt_top_logprobs(self) -> Iterator[list[Entry] | None]:
        """For each prompt token from `start` on: the likeliest tokens at its position."""
        if self.got.prompt_logprobs is None:
            return
        if self.start == 0:
            yield None
        first = max(self.start - 1, 0)
        for ids, logprobs in zip(
            self.got.prompt_logprobs.top_ids[first:], self.got.prompt_logprobs.top_logprobs[first:], strict=True
        ):
            yield [self._entry(value, id_) for value, id_ in zip(logprobs.tolist(), ids.tolist(), strict=True)]

    def _reason(self) -> MatchedStop | ReachedLength | WasAborted | None:
        got = self.got
        match got.finish_reason:
            case None:
                return None
            case FinishReason.LENGTH:
                return ReachedLength(len(got.token_ids))
            case FinishReason.STOP:
                matched = got.stop_reason
                if matched is None and got.token_ids:
                    matched = got.token_ids[-1]  # the token that ended the sequence
                return MatchedStop(matched)
        return WasAborted("The request was cancelled.")
