"""Writes answers of /v1/chat/completions: the chunks of a stream in their fixed order, or one whole answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cluster.messages.engine import FinishReason, TokenLogprobs
from cluster.openai import wire
from cluster.openai.openai_request import ChatRequest
from cluster.openai.openai_writer import REASONS, OpenAIWriter, token_logprobs
from cluster.openai.wire import ChatChunkChoice, ChatDelta
from cluster.requests.generation import Delta
from cluster.requests.job import Run
from cluster.requests.json_parts import json_parts, long_list
from cluster.requests.served_model import ServedModel
from cluster.text.tools.events import Arguments, CallStarted, Content, Event, Reasoning, collect


class ChatWriter(OpenAIWriter):
    """Writes answers of /v1/chat/completions."""

    _chunk = wire.ChatChunk

    def __init__(self, run: Run, request: ChatRequest, model: ServedModel) -> None:
        super().__init__(run, request, model)
        self._shows_reasoning = request.include_reasoning is not False
        self._begun = False
        self._calling: set[int] = set()  # choices that have streamed a call

    def events(self, deltas: Sequence[Delta]) -> Iterator[bytes]:
        if not self._begun:
            self._begun = True
            ids = self._token_ids(self._job.prompts[0])
            for index in range(self._job.num_outputs):
                role = ChatChunkChoice(index, ChatDelta(role="assistant", content=""))
                yield self._event([role], prompt_token_ids=ids)
        for delta in deltas:
            if self._text_only and delta.finish_reason is None and len(delta.events) == 1:
                [only] = delta.events
                if isinstance(only, Content):
                    yield self._text_chunk(delta.index, only.text)
                    continue
            shown = [shape for event in delta.events if (shape := self._shape(event)) is not None]
            if not shown and self._has_tokens(delta):
                shown = [ChatDelta(content="")]
            for i, shape in enumerate(shown):
                choice = ChatChunkChoice(delta.index, shape)
                if i == 0:  # facts about the tokens are sent once, with the first choice
                    choice.logprobs = self._logprobs(delta.token_ids, delta.logprobs)
                    choice.token_ids = self._token_ids(delta.token_ids)
                yield self._event([choice])
            if any(isinstance(event, CallStarted) for event in delta.events):
                self._calling.add(delta.index)
            if delta.finish_reason is not None:
                choice = ChatChunkChoice(
                    delta.index,
                    ChatDelta(),
                    finish_reason=self._reason(delta.finish_reason, called=delta.index in self._calling),
                    stop_reason=delta.stop_reason,
                )
                yield self._event([choice])

    def whole(self) -> Iterator[bytes]:
        choices = long_list(self._choice(index) for index in range(self._job.num_outputs))
        more = {"prompt_token_ids": self._token_ids(self._job.prompts[0]), "prompt_logprobs": self._prompt_logprobs(0)}
        return json_parts(self._headed(wire.ChatCompletion, choices, self.run.usage(), **more))

    def _choice(self, index: int) -> wire.ChatChoice:
        got = self._collected[index]
        message = self._message(got.events)
        return wire.ChatChoice(
            index,
            message,
            self._logprobs(got.token_ids, got.logprobs),
            self._reason(got.finish_reason or FinishReason.ABORT, called=bool(message.tool_calls)),
            got.stop_reason,
            self._token_ids(got.token_ids),
        )

    def _text_choice(self, index: int, text: str) -> ChatChunkChoice:
        return ChatChunkChoice(index, ChatDelta(content=text))

    def _shape(self, event: Event) -> ChatDelta | None:
        """The part of a chunk for `event`, in the client's form. None if `event` is not shown."""
        match event:
            case Content(text):
                return ChatDelta(content=text)
            case Reasoning(text):
                return ChatDelta(reasoning_content=text, reasoning=text) if self._shows_reasoning else None
            case CallStarted(index, id_, name):
                return ChatDelta(tool_calls=[wire.ToolCallDelta(index, wire.FunctionDelta("", name), id_, "function")])
            case Arguments(index, fragment):
                return ChatDelta(tool_calls=[wire.ToolCallDelta(index, wire.FunctionDelta(fragment))])

    def _message(self, events: Sequence[Event]) -> wire.AssistantMessage:
        parsed = collect(events)
        message = wire.AssistantMessage(parsed.content)
        if parsed.reasoning and self._shows_reasoning:
            message.reasoning_content = message.reasoning = parsed.reasoning
        if parsed.calls:
            message.tool_calls = [wire.ToolCall(it.id, wire.FunctionCall(it.name, it.arguments)) for it in parsed.calls]
            message.content = parsed.content or None
        return message

    def _reason(self, reason: FinishReason, *, called: bool) -> wire.Reason:
        # OpenAI's reason is `stop` for a call that the request required.
        form = self._job.form
        if called and reason is FinishReason.STOP and form is not None and not form.call_is_named:
            return "tool_calls"
        return REASONS[reason]

    def _logprobs(self, token_ids: list[int], logprobs: Sequence[TokenLogprobs]) -> wire.ChatLogprobs | None:
        if self._num_logprobs < 0:
            return None
        sampling = self._job.sampling[0][0]
        return wire.ChatLogprobs(long_list(token_logprobs(sampling, token_ids, logprobs, self._tokenizer, self._name)))
