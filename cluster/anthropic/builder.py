"""Builds one message from what the model says, and the events that tell of it.

A message is the same whether it is streamed or not: the events of a whole answer are made and dropped. Order of the
calls: `begin`, any number of `think`, `say`, `call` and `argue` as the model goes from one to the other, `finish`.
"""

from __future__ import annotations

import msgspec

from cluster.anthropic.objects import (
    AnthropicMessage,
    ContentBlock,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    InputJsonDelta,
    MessageDelta,
    MessageEvent,
    MessageStart,
    MessageStop,
    MessageUsage,
    Ping,
    Stop,
    StopReason,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)
from cluster.requests.job import Usage

_encode = msgspec.json.Encoder().encode


def sse(event: MessageEvent) -> bytes:
    """`event` as a server-sent event with its name."""
    return b"event: %s\ndata: %s\n\n" % (str(type(event).__struct_config__.tag).encode(), _encode(event))


def message_usage(usage: Usage) -> MessageUsage:
    """Tokens as Anthropic counts them: those found in the prefix cache apart."""
    cached = usage.prompt_tokens_details.cached_tokens
    return MessageUsage(usage.prompt_tokens - cached, usage.completion_tokens, cached)


class MessageBuilder:
    """One message as it grows. Every method returns the events to send, encoded."""

    def __init__(self, message_id: str, model_name: str) -> None:
        self.message = AnthropicMessage(id=message_id, model=model_name, usage=MessageUsage(0, 0, 0))
        self._open: ContentBlock | None = None
        self._texts: list[str] = []  # of the open block

    def begin(self, usage: Usage) -> bytes:
        """The message begins; `usage` counts the prompt."""
        self.message.usage = message_usage(usage)
        return sse(MessageStart(self.message)) + sse(Ping())

    def think(self, text: str) -> bytes:
        """More of the thinking."""
        events = b"" if isinstance(self._open, ThinkingBlock) else self._switch(ThinkingBlock())
        self._texts.append(text)
        return events + sse(ContentBlockDelta(self._index, ThinkingDelta(text)))

    def say(self, text: str) -> bytes:
        """More of the text."""
        events = b"" if isinstance(self._open, TextBlock) else self._switch(TextBlock())
        self._texts.append(text)
        return events + sse(ContentBlockDelta(self._index, TextDelta(text)))

    def call(self, call_id: str, name: str) -> bytes:
        """The model uses the tool `name`; its input follows."""
        return self._switch(ToolUseBlock(call_id, name))

    def argue(self, arguments: str) -> bytes:
        """More of the JSON of the last `call`'s input."""
        assert isinstance(self._open, ToolUseBlock), "arguments belong to a call"
        self._texts.append(arguments)
        return sse(ContentBlockDelta(self._index, InputJsonDelta(arguments)))

    def finish(self, reason: StopReason, stop_sequence: str | None, usage: Usage) -> bytes:
        """The model has ended."""
        events = self._close()
        message = self.message
        message.usage = message_usage(usage)
        message.stop_reason, message.stop_sequence = reason, stop_sequence
        return events + sse(MessageDelta(Stop(reason, stop_sequence), message.usage)) + sse(MessageStop())

    def encoded(self) -> bytes:
        """The finished message."""
        return _encode(self.message)

    @property
    def _index(self) -> int:
        return len(self.message.content) - 1

    def _switch(self, block: ContentBlock) -> bytes:
        events = self._close()
        self.message.content.append(block)
        self._open = block
        return events + sse(ContentBlockStart(self._index, block))

    def _close(self) -> bytes:
        block = self._open
        if block is None:
            return b""
        text = "".join(self._texts)
        if isinstance(block, TextBlock):
            block.text = text
        elif isinstance(block, ThinkingBlock):
            block.thinking = text
        else:
            block.input = _object(text)
        self._open, self._texts = None, []
        return sse(ContentBlockStop(self._index))


def _object(text: str) -> dict[str, object]:
    """The JSON object `text` spells; empty where the model was cut off inside it, or wrote something else."""
    try:
        decoded = msgspec.json.decode(text or "{}")
    except msgspec.DecodeError:
        return {}
    return decoded if isinstance(decoded, dict) else {}
