"""Builds one response from what the model says, and the events that tell of it.

A response is the same whether it is streamed or not: the events of a whole answer are made and dropped. Order of the
calls: `begin`, any number of `think`, `say`, `call` and `argue` as the model goes from one to the other, then one of
`finish`, `cancel` and `fail`.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence

from cluster.openai.responses import objects
from cluster.openai.responses.objects import (
    CallItem,
    ItemStatus,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
    Response,
    StreamEvent,
)
from cluster.openai.wire import TokenLogprob
from cluster.requests.job import Usage
from cluster.requests.json_parts import json_parts, long_list

_LOGPROB_BYTES = 128  # of memory, about


def sse_parts(event: StreamEvent) -> Iterator[bytes]:
    """`event` as a server-sent event with its name."""
    yield b"event: %s\ndata: " % str(type(event).__struct_config__.tag).encode()
    yield from json_parts(event)
    yield b"\n\n"


class ResponseBuilder:
    """One response as it grows. Every method returns the events to send, encoded; the last ones, which may be long, as
    they are read."""

    def __init__(self, response: Response) -> None:
        """`response` has no output yet; it is this object's from here on."""
        self.response = response
        self.num_bytes = 0
        """Memory that its output takes, about."""
        self._next_number = 0
        self._open: OutputItem | None = None
        self._texts: list[str] = []  # of the open item
        self._logprobs: list[TokenLogprob] = []

    @property
    def ended(self) -> bool:
        """Whether the response's last event has been made."""
        return self.response.status in ("completed", "incomplete", "failed", "cancelled")

    @property
    def begun(self) -> bool:
        """Whether its first event has been made."""
        return self._next_number > 0

    def queue(self) -> bytes:
        """A background response that has not begun."""
        self.response.status = "queued"
        return self._event(objects.ResponseCreated, response=self.response) + self._event(
            objects.ResponseQueued, response=self.response
        )

    def begin(self) -> bytes:
        """The response is in progress."""
        created = b"" if self.begun else self._event(objects.ResponseCreated, response=self.response)
        self.response.status = "in_progress"
        return created + self._event(objects.ResponseInProgress, response=self.response)

    def think(self, text: str) -> bytes:
        """More of the reasoning."""
        events = b""
        if not isinstance(self._open, ReasoningItem):
            events = self._switch(ReasoningItem(f"rs_{uuid.uuid4().hex}"))
            events += self._part(objects.ContentPartAdded, part=ReasoningText())
        self._texts.append(text)
        self.num_bytes += len(text)
        return events + self._part(objects.ReasoningTextDelta, delta=text)

    def say(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> bytes:
        """More of the message."""
        events = b""
        if not isinstance(self._open, OutputMessage):
            events = self._switch(OutputMessage(f"msg_{uuid.uuid4().hex}"))
            events += self._part(objects.ContentPartAdded, part=OutputText())
        self._texts.append(text)
        self._logprobs += logprobs
        self.num_bytes += len(text) + sum(_LOGPROB_BYTES * (1 + len(row.top_logprobs)) for row in logprobs)
        return events + self._part(objects.OutputTextDelta, delta=text, logprobs=list(logprobs))

    def call(self, call_id: str, name: str) -> bytes:
        """The model calls the function `name`; its arguments follow."""
        return self._switch(CallItem(f"fc_{uuid.uuid4().hex}", call_id, name))

    def argue(self, arguments: str) -> bytes:
        """More of the arguments of the last `call`."""
        assert isinstance(self._open, CallItem), "arguments belong to a call"
        self._texts.append(arguments)
        self.num_bytes += len(arguments)
        return self._event(
            objects.FunctionCallArgumentsDelta,
            output_index=self._index,
            item_id=self._open.id,
            delta=arguments,
        )

    def finish(self, usage: Usage, *, cut: bool) -> Iterator[bytes]:
        """The model has ended.

        Args:
            cut: by `max_output_tokens` or the context, and not by itself.
        """
        self._count(usage)
        yield from self._close("incomplete" if cut else "completed")
        if cut:
            self.response.incomplete_details = objects.IncompleteDetails("max_output_tokens")
            yield from self._end("incomplete", objects.ResponseIncomplete)
        else:
            self.response.completed_at = int(time.time())
            yield from self._end("completed", objects.ResponseCompleted)

    def cancel(self, usage: Usage) -> Iterator[bytes]:
        """The caller wants no more of it."""
        self._count(usage)
        yield from self._close("incomplete")
        # OpenAI has no event of its own for it.
        yield from self._end("cancelled", objects.ResponseIncomplete)

    def fail(self, code: str, message: str) -> bytes:
        """An error ended it."""
        self.response.error = objects.ResponseError(code, message)
        return b"".join((*self._close("incomplete"), *self._end("failed", objects.ResponseFailed)))

    def abandon(self, usage: Usage) -> None:
        """Nobody reads on: it is cancelled unless it has ended. `fail` may still follow."""
        if not self.ended:
            self._count(usage)
            self.response.status = "cancelled"

    def encoded(self) -> Iterator[bytes]:
        """The response as it is now, in parts."""
        self._settle()
        return json_parts(self.response)

    @property
    def _index(self) -> int:
        return len(self.response.output) - 1

    def _switch(self, item: OutputItem) -> bytes:
        events = b"".join(self._close("completed"))
        self.response.output.append(item)
        self._open = item
        events += self._event(objects.OutputItemAdded, output_index=self._index, item=item)
        # Only now: the part comes with an event of its own.
        if isinstance(item, OutputMessage):
            item.content = [OutputText()]
        elif isinstance(item, ReasoningItem):
            item.content = [ReasoningText()]
        return events

    def _settle(self) -> str:
        """The open item's text, which is also written into it."""
        text = "".join(self._texts)
        self._texts = [text]
        if isinstance(self._open, CallItem):
            self._open.arguments = text
        elif isinstance(self._open, OutputMessage):
            self._open.content = [OutputText(text, logprobs=long_list(self._logprobs))]
        elif isinstance(self._open, ReasoningItem):
            self._open.content = [ReasoningText(text)]
        return text

    def _close(self, status: ItemStatus) -> Iterator[bytes]:
        item = self._open
        if item is None:
            return
        text = self._settle()
        self._open, self._texts, self._logprobs = None, [], []
        item.status = status
        place = {"output_index": self._index, "item_id": item.id}
        if isinstance(item, CallItem):
            yield self._event(objects.FunctionCallArgumentsDone, **place, arguments=text, name=item.name)
        else:
            [part] = item.content
            if isinstance(part, OutputText):
                yield from self._parts(objects.OutputTextDone, **place, text=text, logprobs=part.logprobs)
            else:
                yield self._event(objects.ReasoningTextDone, **place, text=text)
            yield from self._parts(objects.ContentPartDone, **place, part=part)
        yield from self._parts(objects.OutputItemDone, output_index=self._index, item=item)

    def _end(self, status: objects.Status, kind: Callable[..., StreamEvent]) -> Iterator[bytes]:
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

    def _part(self, kind: Callable[..., StreamEvent], **fields: object) -> bytes:
        assert self._open is not None, "a part belongs to an item"
        return self._event(kind, output_index=self._index, item_id=self._open.id, **fields)

    def _event(self, kind: Callable[..., StreamEvent], **fields: object) -> bytes:
        return b"".join(self._parts(kind, **fields))

    def _parts(self, kind: Callable[..., StreamEvent], **fields: object) -> Iterator[bytes]:
        number, self._next_number = self._next_number, self._next_number + 1
        return sse_parts(kind(sequence_number=number, **fields))
