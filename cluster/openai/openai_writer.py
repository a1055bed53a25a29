"""The common part of answers of chats and completions: choices, log probabilities, and the chunks of a stream."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from cluster.messages.engine import FinishReason, SamplingParams, TokenLogprobs
from cluster.openai.echo import prompt_logprobs_json
from cluster.openai.openai_request import ChatRequest, CompletionRequest, StreamOptions
from cluster.openai.wire import ChatChunk, Completion, PromptLogprobsJson, Reason, TokenLogprob, TopLogprob
from cluster.requests.answer import AnswerWriter
from cluster.requests.engine_client import WholePromptLogprobs
from cluster.requests.generation import Collected, Delta
from cluster.requests.job import Run, Usage
from cluster.requests.json_parts import DONE, event_parts, finite, long_list
from cluster.requests.served_model import ServedModel
from cluster.text.tokenizer import Tokenizer

REASONS: dict[FinishReason, Reason] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
}
_encode = msgspec.json.Encoder().encode
_MARK = "\ue000text\ue000"


class OpenAIWriter(AnswerWriter):
    """Writes the answer to a request of chats or completions."""

    _chunk: type[ChatChunk | Completion]

    def __init__(self, run: Run, request: ChatRequest | CompletionRequest, model: ServedModel) -> None:
        super().__init__(run)
        self._job = run.job
        self._model = model
        self._tokenizer = model.tokenizer
        self._created = int(time.time())
        self._num_logprobs = request.num_logprobs
        self._num_prompt_logprobs = request.num_prompt_logprobs
        self._shows_ids = bool(request.return_token_ids)
        self._names_ids = bool(request.return_tokens_as_token_ids)
        options = request.stream_options or StreamOptions()
        self._include_usage = bool(options.include_usage)
        self._usage_in_all = self._include_usage and bool(options.continuous_usage_stats)
        self._collected: defaultdict[int, Collected] = defaultdict(Collected)
        self._text_only = self._num_logprobs < 0 and not self._shows_ids and not self._usage_in_all
        self._frames: dict[int, tuple[bytes, bytes]] = {}  # the bytes before and after the text in each choice's chunks

    def add(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            self._collected[delta.index].add(delta)

    def end(self) -> Iterable[bytes]:
        return (self._event([], self.run.usage()), DONE) if self._include_usage else (DONE,)

    def _text_chunk(self, index: int, text: str) -> bytes:
        """A chunk that only contains text, as most chunks do. The bytes around the text are encoded once."""
        frame = self._frames.get(index)
        if frame is None:
            before, _, after = self._event([self._text_choice(index, _MARK)]).rpartition(_encode(_MARK))
            frame = self._frames[index] = before, after
        return frame[0] + _encode(text) + frame[1]

    @abstractmethod
    def _text_choice(self, index: int, text: str) -> msgspec.Struct:
        """The choice of a chunk that only contains text."""

    def _event(self, choices: Sequence[msgspec.Struct], usage: Usage | None = None, **more: Any) -> bytes:
        return b"".join(self._event_parts(choices, usage, **more))

    def _event_parts(
        self, choices: Sequence[msgspec.Struct], usage: Usage | None = None, **more: Any
    ) -> Iterator[bytes]:
        """Yields a chunk of a stream. `more` has fields that only some chunks contain."""
        # With include_usage, the usage is null in every chunk but the last. Without it, the field is absent.
        shown: Any = usage or (None if self._include_usage else msgspec.UNSET)
        if self._usage_in_all:
            shown = self.run.usage()
        return event_parts(self._headed(self._chunk, choices, shown, **more))

    def _headed(self, kind: Callable[..., msgspec.Struct], choices: object, usage: object, **more: Any) -> Any:
        """Makes a `kind` with the fields that every message of this answer has."""
        model = self._model
        return kind(self._job.id, self._created, model.model_name, choices, usage, model.system_fingerprint, **more)

    def _token_ids(self, ids: list[int]) -> list[int] | msgspec.UnsetType:
        return ids if self._shows_ids else msgspec.UNSET

    def _has_tokens(self, delta: Delta) -> bool:
        """Whether `delta` has log probabilities or token ids to show."""
        return bool(delta.logprobs or (self._shows_ids and delta.token_ids))

    def _name(self, token_id: int) -> str:
        """The name of a token in log probabilities."""
        return f"token_id:{token_id}" if self._names_ids else self._tokenizer.token_text(token_id)

    def _whole_prompt_logprobs(self, index: int) -> WholePromptLogprobs | None:
        # Only the first choice of a prompt requested them, since they are the same for all choices.
        return self._collected[index - index % self._job.num_choices].prompt_logprobs

    def _prompt_logprobs(self, index: int) -> PromptLogprobsJson | msgspec.UnsetType:
        k, whole = self._num_prompt_logprobs, self._whole_prompt_logprobs(index)
        if k < 0 or whole is None:
            return msgspec.UNSET
        return long_list(prompt_logprobs_json(whole, self._job.prompt_of(index), k, self._tokenizer))


def top_logprobs(sampling: SamplingParams, row: TokenLogprobs, sampled: int) -> list[tuple[int, float]]:
    """(id, logprob) of the `num_logprobs` likeliest tokens and of the tokens requested by id. If `num_logprobs` is
    above 0, also of the sampled token."""
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
    """Each of `token_ids` with its log probabilities in `rows`, as in chat answers. `name` returns a token's name."""
    raw = tokenizer.token_bytes
    for token, row in zip(token_ids, rows, strict=True):
        top = [TopLogprob(name(id_), logprob, tuple(raw(id_))) for id_, logprob in top_logprobs(sampling, row, token)]
        yield TokenLogprob(name(token), finite(row.logprob), tuple(raw(token)), tuple(top))
