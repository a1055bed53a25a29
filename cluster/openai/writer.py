"""Deltas to the bytes a client reads: SSE chunks in their fixed order, or one whole answer.

A writer belongs to one request. Order of a stream: `begin`, any number of `chunks`, `end`. What is long is made as it
is read (`json_parts`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import chain

import msgspec

from cluster.engine.client import WholePromptLogprobs
from cluster.engine.messages import FinishReason, SamplingParams, TokenLogprobs
from cluster.http.response import HttpResponse
from cluster.openai.wire import Head, Reason, TokenLogprob, TopLogprob
from cluster.requests.generation import Delta
from cluster.requests.job import Job, Run, Usage
from cluster.requests.json_parts import finite, gathered
from cluster.text.tokenizer import Tokenizer
from cluster.text.tools.events import Event

REASONS: dict[FinishReason, Reason] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
}
encode = msgspec.json.Encoder().encode
_MARK = "\ue000text\ue000"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """What an answer shows besides its text."""

    include_usage: bool = False
    """In a last chunk of a stream; whole answers always have it."""
    usage: Callable[[], Usage] | None = None
    """The usage so far, to be in every chunk."""
    token_ids: bool = False
    """Those of the prompt and of the answer."""
    tokens_as_ids: bool = False
    """Log probabilities name tokens `token_id:<id>` and not by their text."""
    num_prompt_logprobs: int = -1
    """-1: no field `prompt_logprobs`."""
    reasoning: bool = True
    """The model's thinking, where the answer is one in a chat."""


class Collected:
    """The deltas of one choice of a whole answer."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.events: list[Event] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.text_offsets: list[int] = []
        self.prompt_logprobs: WholePromptLogprobs | None = None
        self.finish_reason: FinishReason = FinishReason.ABORT
        self.stop_reason: int | str | None = None

    def add(self, delta: Delta) -> None:
        self.text.append(delta.text)
        self.events += delta.events
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.text_offsets += delta.text_offsets
        self.prompt_logprobs = self.prompt_logprobs or delta.prompt_logprobs
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


class AnswerWriter(ABC):
    """Writes one request's answer, streamed (`begin`, `chunks`, `end`) or whole (`collect`, `whole`)."""

    def __init__(self, head: Head, job: Job, tokenizer: Tokenizer, options: AnswerOptions) -> None:
        self._head = head
        self._job = job
        self._tokenizer = tokenizer
        self._options = options
        sampling = job.sampling[0][0]
        self._num_logprobs = sampling.num_logprobs
        # Null in every chunk but the last one, absent when not asked for.
        self._no_usage: msgspec.UnsetType | None = None if options.include_usage else msgspec.UNSET
        self._collected: dict[int, Collected] = {}
        self._text_only = self._num_logprobs < 0 and not options.token_ids and options.usage is None
        self._frames: dict[int, tuple[bytes, bytes]] = {}  # what stands around the text of a choice's chunks

    @abstractmethod
    def begin(self, num_choices: int) -> Iterator[bytes]: ...

    @abstractmethod
    def chunks(self, deltas: Sequence[Delta]) -> Iterator[bytes]: ...

    @abstractmethod
    def end(self, usage: Usage) -> bytes: ...

    @abstractmethod
    def whole(self, num_choices: int, usage: Usage) -> Iterator[bytes]: ...

    def collect(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            self._collected.setdefault(delta.index, Collected()).add(delta)

    def _text_chunk(self, index: int, text: str) -> bytes:
        """A chunk that shows nothing but text, as most do: what stands around it is encoded once."""
        frame = self._frames.get(index)
        if frame is None:
            before, _, after = self._encoded_chunk(index, _MARK).rpartition(encode(_MARK))
            frame = self._frames[index] = before, after
        return frame[0] + encode(text) + frame[1]

    @abstractmethod
    def _encoded_chunk(self, index: int, text: str) -> bytes:
        """The same, all of it encoded."""

    def _chunk_usage(self) -> Usage | msgspec.UnsetType | None:
        return self._no_usage if self._options.usage is None else self._options.usage()

    def _token_ids(self, ids: list[int]) -> list[int] | msgspec.UnsetType:
        return ids if self._options.token_ids else msgspec.UNSET

    def _has_tokens(self, delta: Delta) -> bool:
        """Whether `delta` has something to show of its tokens besides their text."""
        return bool(delta.logprobs or (self._options.token_ids and delta.token_ids))

    def _name(self, token_id: int) -> str:
        """A token in log probabilities."""
        return f"token_id:{token_id}" if self._options.tokens_as_ids else self._tokenizer.token_text(token_id)

    def _top(self, row: TokenLogprobs, sampled: int) -> list[tuple[int, float]]:
        return top_logprobs(self._job.sampling[0][0], row, sampled)


def written(
    run: Run, writer: AnswerWriter, *, streamed: bool, headers: Mapping[str, str] | None = None
) -> HttpResponse:
    """`run` as `writer` writes it, with its Server-Timing beside `headers`."""
    shown = dict(headers or {})
    return HttpResponse(_stream(run, writer, shown) if streamed else _whole(run, writer, shown), streamed, shown)


async def _stream(run: Run, writer: AnswerWriter, headers: dict[str, str]) -> AsyncGenerator[bytes, None]:
    begun = False
    async with aclosing(run.deltas()) as steps:
        async for deltas in steps:
            parts = writer.chunks(deltas)
            if not begun:
                begun = True
                headers["server-timing"] = run.server_timing()
                parts = chain(writer.begin(run.job.num_outputs), parts)
            for part in gathered(parts):
                yield part
    yield writer.end(run.usage())


async def _whole(run: Run, writer: AnswerWriter, headers: dict[str, str]) -> AsyncGenerator[bytes, None]:
    async with aclosing(run.deltas()) as steps:
        async for deltas in steps:
            writer.collect(deltas)
    headers["server-timing"] = run.server_timing()
    for part in gathered(writer.whole(run.job.num_outputs, run.usage())):
        yield part


def top_logprobs(sampling: SamplingParams, row: TokenLogprobs, sampled: int) -> list[tuple[int, float]]:
    """(id, logprob) of the k likeliest, of those asked for by id, and of the sampled token when it is not there."""
    k, extra = sampling.num_logprobs, len(sampling.logprob_token_ids)
    pairs = row.top
    top = dict(pairs[:k])
    if extra:
        for id_, logprob in pairs[-extra:]:
            top.setdefault(id_, logprob)
    if k:
        top.setdefault(sampled, row.logprob)
    return [(id_, finite(logprob)) for id_, logprob in top.items()]


def token_logprobs(
    sampling: SamplingParams,
    token_ids: Sequence[int],
    rows: Sequence[TokenLogprobs],
    tokenizer: Tokenizer,
    name: Callable[[int], str],
) -> Iterator[TokenLogprob]:
    """Each of `token_ids` as the answers of chats show it.

    Args:
        rows: one for each token.
        name: what a token is called.
    """
    raw = tokenizer.token_bytes
    for token, row in zip(token_ids, rows, strict=True):
        top = [TopLogprob(name(id_), logprob, tuple(raw(id_))) for id_, logprob in top_logprobs(sampling, row, token)]
        yield TokenLogprob(name(token), finite(row.logprob), tuple(raw(token)), tuple(top))
