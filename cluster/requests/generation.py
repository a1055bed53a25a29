"""Turns engine streams into text, for `/v1/...` and `python -m cluster generate`.

For each sequence, this module decodes tokens, finds stop strings, counts tokens and decides why the sequence ends. It
knows neither HTTP nor JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.messages.engine import Finished, FinishReason, TokenLogprobs
from cluster.requests.engine_client import RequestStream, WholePromptLogprobs
from cluster.text.answer_parser import AnswerFormat, AnswerReader
from cluster.text.stops import TextEnd, TextOptions
from cluster.text.tokenizer import Tokenizer
from cluster.text.tools.events import Event
from configs.errors import DeadlineError, EngineError, GuideError, LockstepError, NotANumberError, OverloadedError


@dataclass(slots=True)
class Delta:
    """What one read of its stream produced for one sequence."""

    index: int
    text: str
    """Text that is certain. Text that may become part of a stop string or of a whole character comes later."""
    token_ids: list[int]
    """New tokens, including the one that ended the sequence. Their text may come in a later delta."""
    logprobs: Sequence[TokenLogprobs] = ()
    """Log probabilities of each of `token_ids`. Empty if the request does not want them."""
    text_offsets: Sequence[int] = ()
    """Number of characters decoded before each of `token_ids`, if the request wants log probabilities."""
    finish_reason: FinishReason | None = None
    """Why the sequence ended, on its last delta only."""
    stop_reason: int | str | None = None
    """The stop string, stop pattern or id of `stop_token_ids` that ended the sequence. None for end of sequence."""
    prompt_logprobs: WholePromptLogprobs | None = None
    """Only on the first delta with a token, if the request wants prompt log probabilities."""
    events: Sequence[Event] = ()
    """The events into which the `text` of a chat answer was parsed."""


class Collected:
    """All deltas of one sequence so far, joined."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.events: list[Event] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.text_offsets: list[int] = []
        self.prompt_logprobs: WholePromptLogprobs | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None

    def add(self, delta: Delta) -> None:
        """Adds one delta."""
        self.text.append(delta.text)
        self.events += delta.events
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.text_offsets += delta.text_offsets
        self.prompt_logprobs = self.prompt_logprobs or delta.prompt_logprobs
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


class Output:
    """One sequence being generated."""

    def __init__(
        self,
        index: int,
        stream: RequestStream,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        options: TextOptions,
        form: AnswerFormat | None = None,
    ) -> None:
        """`form`: how the text is parsed into reasoning, content and calls. None if it is not parsed."""
        self.index = index
        self.stream = stream
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None
        self._options = options
        self._detokenizer = tokenizer.detokenizer(
            prompt_ids,
            skip_special_tokens=options.skip_special_tokens,
            shown=frozenset() if form is None else form.tags,
        )
        self._reader = None if form is None else AnswerReader(form)
        self._end = TextEnd(options)
        self._num_chars = 0

    @property
    def num_reasoning_tokens(self) -> int:
        """Number of reasoning tokens among `num_tokens`."""
        return 0 if self._reader is None else self._reader.num_reasoning_tokens

    def advance(self) -> Delta:
        """Decodes the tokens that have arrived since the last call.

        Raises:
            OverloadedError: a queue limit refused the request.
            DeadlineError: the request's deadline passed in the engine.
            GuideError: the request's grammar cannot be followed.
            EngineError: the engine failed.
        """
        chunk = self.stream.take()
        end = chunk.finished
        if end is not None and end.reason is FinishReason.ERROR:
            raise engine_failure(end)
        if self._options.prompt_only:
            self.finish_reason = None if end is None else FinishReason.LENGTH
            return Delta(self.index, "", [], finish_reason=self.finish_reason, prompt_logprobs=chunk.prompt_logprobs)
        silent = len(chunk.token_ids)
        if end is not None and end.stop_token_id is not None and not self._options.include_stop:
            silent -= 1  # the token that ended the sequence counts, but is not shown
        certain_text = ""
        num_taken = len(chunk.token_ids)
        offsets = []
        delta = Delta(self.index, "", chunk.token_ids, chunk.logprobs or (), prompt_logprobs=chunk.prompt_logprobs)
        for i, token in enumerate(chunk.token_ids):
            offsets.append(self._num_chars)
            text = self._detokenizer.push(token) if i < silent else ""
            self._num_chars += len(text)
            certain, matched = self._end.push(text, may_end=self.num_tokens + i >= self.stream.sampling.min_tokens)
            certain_text += certain
            if matched is not None:
                num_taken = i + 1
                delta.finish_reason, delta.stop_reason = FinishReason.STOP, matched
                self.stream.abort()
                break
        if delta.finish_reason is None and end is not None:
            certain_text += self._finish(delta, end)
        delta.text = certain_text
        if num_taken < len(chunk.token_ids):
            delta.token_ids = chunk.token_ids[:num_taken]
        if chunk.logprobs is not None:
            delta.logprobs, delta.text_offsets = chunk.logprobs[:num_taken], offsets[:num_taken]
        self.num_tokens += num_taken
        self.finish_reason = delta.finish_reason
        if self._reader is not None:
            ended = delta.finish_reason is not None
            cut = delta.finish_reason is not FinishReason.STOP or delta.stop_reason is not None
            delta.events = self._reader.read(delta.text, offsets, ended=ended, cut=cut)
            if ended and self._reader.cuts_call and delta.finish_reason is FinishReason.STOP:
                # Clients run the calls of an answer with STOP. An answer cut inside a call ends with LENGTH instead.
                self.finish_reason = delta.finish_reason = FinishReason.LENGTH
        return delta

    def _finish(self, delta: Delta, end: Finished) -> str:
        """Returns the text that was held back until the end. It may complete a stop string that ends in U+FFFD."""
        certain, matched = self._end.push(self._detokenizer.flush())
        if matched is not None:
            delta.finish_reason, delta.stop_reason = FinishReason.STOP, matched
            return certain
        delta.finish_reason = end.reason
        if end.stop_token_id in self.stream.sampling.stop_token_ids:
            delta.stop_reason = end.stop_token_id
        return certain + self._end.flush()


def engine_failure(end: Finished) -> LockstepError:
    """The exception for a request that ended with `FinishReason.ERROR`."""
    message = end.error or "the engine failed"
    match end.error_code:
        case "engine_overloaded":
            return OverloadedError(message, retry_after_s=end.retry_after_s or 1.0)
        case "deadline_exceeded":
            return DeadlineError(message)
        case "grammar_error":
            return GuideError(message)
        case "not_a_number":
            return NotANumberError(message)
    return EngineError(message, public_message=end.public_message)
