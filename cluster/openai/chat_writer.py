"""Deltas to the bytes of /v1/chat/completions: chunks of a stream in their fixed order, or one whole answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cluster.engine.messages import FinishReason, TokenLogprobs
from cluster.openai.openai_request import ChatRequest
from cluster.openai.openai_writer import REASONS, OpenAIWriter, token_logprobs
from cluster.openai.wire import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    FunctionCall,
    FunctionDelta,
    Reason,
    ToolCall,
    ToolCallDelta,
)
from cluster.requests.generation import Delta
from cluster.requests.job import Run
from cluster.requests.json_parts import json_parts, long_list
from cluster.requests.served_model import ServedModel
from cluster.text.tools.events import Arguments, CallStarted, Content, Event, Reasoning, collect


class ChatWriter(OpenAIWriter):
    """Answers of /v1/chat/completions."""

    _chunk = ChatChunk

    def __init__(self, run: Run, request: ChatRequest, model: ServedModel) -> None:
        super().__init__(run, request, model)
        self._shows_reasoning = request.include_reasoning is not False
        self._begun = False
        self._calling: set[int] = set()  # choices whose stream has a call

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
                if i == 0:  # facts about the tokens are told once
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
        more = {
            "prompt_token_ids": self._token_ids(self._job.prompts[0]),
            "prompt_logprobs": self._prompt_logprobs(0),
        }
        return json_parts(self._headed(ChatCompletion, choices, self.run.usage(), **more))

    def _choice(self, index: int) -> ChatChoice:
        got = self._collected[index]
        message = self._message(got.events)
        return ChatChoice(
            index,
            message,
            self._logprobs(got.token_ids, got.logprobs),
            self._reason(got.finish_reason, called=bool(message.tool_calls)),
            got.stop_reason,
            self._token_ids(got.token_ids),
        )

    def _text_choice(self, index: int, text: str) -> ChatChunkChoice:
        return ChatChunkChoice(index, ChatDelta(content=text))

    def _shape(self, event: Event) -> ChatDelta | None:
        """`event` as clients read it; None when it is not shown."""
        match event:
            case Content(text):
                return ChatDelta(content=text)
            case Reasoning(text):
                return ChatDelta(reasoning_content=text, reasoning=text) if self._shows_reasoning else None
            case CallStarted(index, id_, name):
                return ChatDelta(tool_calls=[ToolCallDelta(index, FunctionDelta("", name), id_, "function")])
            case Arguments(index, fragment):
                return ChatDelta(tool_calls=[ToolCallDelta(index, FunctionDelta(fragment))])

    def _message(self, events: Sequence[Event]) -> AssistantMessage:
        parsed = collect(events)
        message = AssistantMessage(parsed.content)
        if parsed.reasoning and self._shows_reasoning:
            message.reasoning_content = message.reasoning = parsed.reasoning
        if parsed.calls:
            message.tool_calls = [ToolCall(call.id, FunctionCall(call.name, call.arguments)) for call in parsed.calls]
            message.content = parsed.content or None
        return message

    def _reason(self, reason: FinishReason, *, called: bool) -> Reason:
        # OpenAI says `stop` of a call it was told to make.
        form = self._job.form
        if called and reason is FinishReason.STOP and form is not None and not form.call_is_named:
            return "tool_calls"
        return REASONS[reason]

    def _logprobs(self, token_ids: list[int], logprobs: Sequence[TokenLogprobs]) -> ChatLogprobs | None:
        if self._num_logprobs < 0:
            return None
        sampling = self._job.sampling[0][0]
        return ChatLogprobs(long_list(token_logprobs(sampling, token_ids, logprobs, self._tokenizer, self._name)))
