"""Writes answers of /v1/messages: one message, and the events of a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec

from cluster.anthropic import message_objects as objects
from cluster.anthropic.message_objects import ContentBlock, MessageUsage, TextBlock, ThinkingBlock
from cluster.messages.engine import FinishReason
from cluster.requests.answer import AnswerWriter
from cluster.requests.blocks import BlockBuilder
from cluster.requests.generation import Delta
from cluster.requests.job import Run, Usage
from cluster.text.tools.events import CallStarted, Content, Reasoning
from configs.errors import RequestError

_encode = msgspec.json.Encoder().encode
_DELTAS: Mapping[type[ContentBlock], Callable[[str], objects.BlockDelta]] = {
    TextBlock: objects.TextDelta,
    ThinkingBlock: objects.ThinkingDelta,
    objects.ToolUseBlock: objects.InputJsonDelta,
}


def sse(event: objects.MessageEvent) -> bytes:
    """`event` as a server-sent event with its name."""
    return b"event: %s\ndata: %s\n\n" % (str(type(event).__struct_config__.tag).encode(), _encode(event))


def message_usage(usage: Usage) -> MessageUsage:
    """Token counts in Anthropic's form, in which `input_tokens` does not include cached tokens."""
    cached = usage.prompt_tokens_details.cached_tokens
    return MessageUsage(usage.prompt_tokens - cached, usage.completion_tokens, cached)


class MessageWriter(BlockBuilder, AnswerWriter):
    """Writes answers of /v1/messages."""

    def __init__(self, run: Run, model_name: str, request_id: str) -> None:
        """`request_id` is shown by an error in the stream."""
        BlockBuilder.__init__(self)
        AnswerWriter.__init__(self, run)
        self._message = objects.AnthropicMessage(id=run.job.id, model=model_name, usage=MessageUsage(0, 0, 0))
        self._request_id = request_id
        self._last: Delta | None = None
        self._called = False

    def events(self, deltas: Sequence[Delta]) -> Iterator[bytes]:
        if self._last is None:
            self._message.usage = message_usage(self.run.usage())
            yield sse(objects.MessageStart(self._message)) + sse(objects.Ping())
        for delta in deltas:
            for event in delta.events:
                self._called = self._called or isinstance(event, CallStarted)
                yield self.tell(event)
            self._last = delta

    def end(self) -> Iterable[bytes]:
        events = [*self._close()]
        message, stop = self._message, self._stop()
        message.usage = message_usage(self.run.usage())
        message.stop_reason, message.stop_sequence = stop.stop_reason, stop.stop_sequence
        return (*events, sse(objects.MessageDelta(stop, message.usage)), sse(objects.MessageStop()))

    def whole(self) -> Iterable[bytes]:
        self.end()
        return (_encode(self._message),)

    def failed(self, error: RequestError) -> bytes:
        return sse(objects.AnthropicError.of(error, self._request_id))

    @property
    def _index(self) -> int:
        return len(self._message.content) - 1

    def _begun(self, event: Content | Reasoning | CallStarted) -> bytes:
        block: ContentBlock
        match event:
            case Reasoning():
                block = ThinkingBlock()
            case Content():
                block = TextBlock()
            case CallStarted(_, call_id, name):
                block = objects.ToolUseBlock(call_id, name)
        self._message.content.append(block)
        return sse(objects.ContentBlockStart(self._index, block))

    def _grown(self, text: str) -> bytes:
        return sse(objects.ContentBlockDelta(self._index, _DELTAS[type(self._message.content[-1])](text)))

    def _close(self) -> Iterator[bytes]:
        if self._open is None:
            return
        block, text = self._message.content[-1], "".join(self._texts)
        if isinstance(block, TextBlock):
            block.text = text
        elif isinstance(block, ThinkingBlock):
            block.thinking = text
        else:
            block.input = _object(text)
        self._open = None
        yield sse(objects.ContentBlockStop(self._index))

    def _stop(self) -> objects.Stop:
        """The reason why the model stopped, and the stop sequence if one ended the text."""
        last = self._last
        assert last is not None, "a sequence ends with a delta"
        if last.finish_reason is FinishReason.LENGTH:
            return objects.Stop("max_tokens", None)
        if isinstance(last.stop_reason, str):
            return objects.Stop("stop_sequence", last.stop_reason)
        return objects.Stop("tool_use" if self._called else "end_turn", None)


def _object(text: str) -> dict[str, object]:
    """The JSON object in `text`. Empty if the answer was cut off inside it, or the model wrote something else."""
    try:
        decoded = msgspec.json.decode(text or "{}")
    except msgspec.DecodeError:
        return {}
    return decoded if isinstance(decoded, dict) else {}
