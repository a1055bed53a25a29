"""Writes answers of /v1/responses: one response object, and the events of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from cluster.messages.engine import FinishReason
from cluster.openai.openai_writer import token_logprobs
from cluster.openai.responses import response_objects as objects
from cluster.openai.wire import TokenLogprob
from cluster.requests.answer import AnswerWriter
from cluster.requests.blocks import BlockBuilder
from cluster.requests.generation import Delta
from cluster.requests.job import Run, Usage
from cluster.requests.json_parts import json_parts, long_list
from cluster.text.tokenizer import Tokenizer
from cluster.text.tools.events import CallStarted, Content, Event, Reasoning
from configs.errors import RequestError

_LOGPROB_BYTES = 128  # approximate bytes of memory


def sse_parts(event: objects.StreamEvent) -> Iterator[bytes]:
    """`event` as a server-sent event with its name, in parts."""
    yield b"event: %s\ndata: " % str(type(event).__struct_config__.tag).encode()
    yield from json_parts(event)
    yield b"\n\n"


class ResponseBuilder(BlockBuilder):
    """One growing response: call `begin`, then `tell` any number of times, then one of `finish`, `cancel` and `fail`.
    The last events, which may be long, are made while the caller reads them."""

    def __init__(self, response: objects.Response, names: Mapping[str, tuple[str, str]] | None = None) -> None:
        """`response` must have no output. It belongs to this object from now on. `names` is
        `ResponseTools.names`, or None if no function is in a namespace."""
        super().__init__()
        self.response = response
        self._names = names or {}
        self.num_bytes = 0
        """Approximate bytes of the response's output."""
        self._next_number = 0
        self._logprobs: list[TokenLogprob] = []
        """Log probabilities of the open message's tokens."""
        self._fresh: Sequence[TokenLogprob] = ()
        """Log probabilities of the open message's last piece."""

    @property
    def ended(self) -> bool:
        """Whether the response's last event has been made."""
        return self.response.status in ("completed", "incomplete", "failed", "cancelled")

    @property
    def begun(self) -> bool:
        """Whether the response's first event has been made."""
        return self._next_number > 0

    def begin(self) -> bytes:
        """Begins the response, and returns its first two events."""
        created = self._event(objects.ResponseCreated, response=self.response)
        return created + self._event(objects.ResponseInProgress, response=self.response)

    def tell(self, event: Event, logprobs: Sequence[TokenLogprob] = ()) -> bytes:
        """Adds an event of the model's output. Only text keeps log probabilities, because reasoning and calls have no
        field for them."""
        self._fresh = logprobs if isinstance(event, Content) else ()
        return super().tell(event)

    def finish(self, usage: Usage, *, cut: bool) -> Iterator[bytes]:
        """Ends the response because the model has ended. `cut` tells whether `max_output_tokens` or the context ended
        it, not the model itself."""
        self._count(usage)
        yield from self._close("incomplete" if cut else "completed")
        if cut:
            self.response.incomplete_details = objects.IncompleteDetails("max_output_tokens")
            yield from self._end("incomplete", objects.ResponseIncomplete)
        else:
            self.response.completed_at = int(time.time())
            yield from self._end("completed", objects.ResponseCompleted)

    def cancel(self, usage: Usage) -> Iterator[bytes]:
        """Ends the response because the caller cancelled it."""
        self._count(usage)
        yield from self._close("incomplete")
        # OpenAI has no separate event for a cancelled response.
        yield from self._end("cancelled", objects.ResponseIncomplete)

    def fail(self, code: str, message: str) -> bytes:
        """Ends the response with an error."""
        self.response.error = objects.ResponseError(code, message)
        return b"".join((*self._close("incomplete"), *self._end("failed", objects.ResponseFailed)))

    def abandon(self, usage: Usage) -> None:
        """Cancels the response unless it has ended, because its reader has left. `fail` may still be called."""
        if not self.ended:
            self._count(usage)
            self.response.status = "cancelled"

    def encoded(self) -> Iterator[bytes]:
        """Yields the current response as JSON, in parts."""
        self._settle()
        return json_parts(self.response)

    @property
    def _index(self) -> int:
        return len(self.response.output) - 1

    @property
    def _place(self) -> dict[str, Any]:
        """The fields by which events identify the open item."""
        return {"output_index": self._index, "item_id": self.response.output[-1].id}

    def _begun(self, event: Content | Reasoning | CallStarted) -> bytes:
        self._logprobs = []
        name = uuid.uuid4().hex
        item: objects.OutputItem
        match event:
            case Reasoning():
                item = objects.ReasoningItem(f"rs_{name}")
            case Content():
                item = objects.OutputMessage(f"msg_{name}")
            case CallStarted(_, call_id, function):
                namespace, called = self._names.get(function, (msgspec.UNSET, function))
                item = objects.CallItem(f"fc_{name}", call_id, called, namespace=namespace)
        self.response.output.append(item)
        events = self._event(objects.OutputItemAdded, output_index=self._index, item=item)
        if isinstance(item, objects.CallItem):
            return events
        # The part is added only now, because a separate event shows it.
        self._settle()
        return events + self._event(objects.ContentPartAdded, **self._place, part=item.content[0])

    def _grown(self, text: str) -> bytes:
        self.num_bytes += len(text)
        if self._open is CallStarted:
            return self._event(objects.FunctionCallArgumentsDelta, **self._place, delta=text)
        if self._open is Reasoning:
            return self._event(objects.ReasoningTextDelta, **self._place, delta=text)
        self._logprobs += self._fresh
        self.num_bytes += sum(_LOGPROB_BYTES * (1 + len(row.top_logprobs)) for row in self._fresh)
        return self._event(objects.OutputTextDelta, **self._place, delta=text, logprobs=list(self._fresh))

    def _settle(self) -> str:
        """Writes the open item's text into the item, and returns the text."""
        if self._open is None:
            return ""
        item, text = self.response.output[-1], "".join(self._texts)
        self._texts = [text]
        if isinstance(item, objects.CallItem):
            item.arguments = text
        elif isinstance(item, objects.OutputMessage):
            item.content = [objects.OutputText(text, logprobs=long_list(self._logprobs))]
        else:
            item.content = [objects.ReasoningText(text)]
        return text

    def _close(self, status: objects.ItemStatus = "completed") -> Iterator[bytes]:
        if self._open is None:
            return
        item, text, place = self.response.output[-1], self._settle(), self._place
        self._open = None
        item.status = status
        if isinstance(item, objects.CallItem):
            named = {"name": item.name, "namespace": item.namespace}
            yield self._event(objects.FunctionCallArgumentsDone, **place, arguments=text, **named)
        else:
            [part] = item.content
            if isinstance(part, objects.OutputText):
                yield from self._parts(objects.OutputTextDone, **place, text=text, logprobs=part.logprobs)
            else:
                yield self._event(objects.ReasoningTextDone, **place, text=text)
            yield from self._parts(objects.ContentPartDone, **place, part=part)
        yield from self._parts(objects.OutputItemDone, output_index=self._index, item=item)

    def _end(self, status: objects.Status, kind: Callable[..., objects.StreamEvent]) -> Iterator[bytes]:
        self.response.status = status
        return self._parts(kind, response=self.response)

    def _count(self, usage: Usage) -> None:
        self.response.usage = objects.ResponseUsage(
            usage.prompt_tokens,
            objects.InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
            usage.completion_tokens,
            objects.OutputTokensDetails(usage.completion_tokens_details.reasoning_tokens),
            usage.total_tokens,
        )

    def _event(self, kind: Callable[..., objects.StreamEvent], **fields: object) -> bytes:
        return b"".join(self._parts(kind, **fields))

    def _parts(self, kind: Callable[..., objects.StreamEvent], **fields: object) -> Iterator[bytes]:
        number, self._next_number = self._next_number, self._next_number + 1
        return sse_parts(kind(sequence_number=number, **fields))


class ResponseWriter(AnswerWriter):
    """Writes answers of /v1/responses."""

    def __init__(self, run: Run, builder: ResponseBuilder, tokenizer: Tokenizer) -> None:
        super().__init__(run)
        self._builder = builder
        self._tokenizer = tokenizer
        self._reason = FinishReason.ABORT
        self._logprobs: list[TokenLogprob] = []  # log probabilities of tokens without text so far

    def events(self, deltas: Sequence[Delta]) -> Iterator[bytes]:
        if not self._builder.begun:
            yield self._builder.begin()
        sampling, tokenizer = self.run.job.sampling[0][0], self._tokenizer
        for delta in deltas:
            if delta.logprobs:
                self._logprobs += token_logprobs(
                    sampling, delta.token_ids, delta.logprobs, tokenizer, tokenizer.token_text
                )
            for event in delta.events:
                yield self._builder.tell(event, self._logprobs)
                self._logprobs = []
            self._reason = delta.finish_reason or self._reason

    def end(self) -> Iterator[bytes]:
        usage = self.run.usage()
        if self._reason is FinishReason.ABORT:
            return self._builder.cancel(usage)
        return self._builder.finish(usage, cut=self._reason is FinishReason.LENGTH)

    def whole(self) -> Iterator[bytes]:
        return self._builder.encoded()

    def failed(self, error: RequestError) -> bytes:
        return self._builder.fail("server_error" if error.status >= 500 else error.code, str(error))
