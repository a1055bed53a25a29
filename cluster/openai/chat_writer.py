"""Deltas to the bytes of /v1/chat/completions: chunks of a stream in their fixed order, or one whole answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from cluster.engine.messages import FinishReason, TokenLogprobs
from cluster.openai.echo import prompt_logprobs_json
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
    Head,
    PromptLogprobsJson,
    Reason,
    ToolCall,
    ToolCallDelta,
)
from cluster.openai.writer import REASONS, AnswerOptions, AnswerWriter, token_logprobs
from cluster.requests.generation import Delta
from cluster.requests.job import Job, Usage
from cluster.requests.json_parts import DONE, event, json_parts, long_list
from cluster.text.tokenizer import Tokenizer
from cluster.text.tools.events import Arguments, CallStarted, Content, Event, Reasoning, collect


class ChatWriter(AnswerWriter):
    """Answers of /v1/chat/completions."""

    def __init__(self, head: Head, job: Job, tokenizer: Tokenizer, options: AnswerOptions) -> None:
        super().__init__(head, job, tokenizer, options)
        self._calling: set[int] = set()  # choices whose stream has a call

    def begin(self, num_choices: int) -> Iterator[bytes]:
        ids = self._token_ids(self._job.prompts[0])
        for index in range(num_choices):
            yield self._event([ChatChunkChoice(index, ChatDelta(role="assistant", content=""))], prompt_token_ids=ids)

    def chunks(self, deltas: Sequence[Delta]) -> Iterator[bytes]:
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
                if i == 0:  # what is said of the tokens is said once
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

    def end(self, usage: Usage) -> bytes:
        return self._event([], usage) + DONE if self._options.include_usage else DONE

    def whole(self, num_choices: int, usage: Usage) -> Iterator[bytes]:
        head = self._head
        return json_parts(
            ChatCompletion(
                head.id,
                head.created,
                head.model,
                long_list(self._choice(index) for index in range(num_choices)),
                usage,
                head.system_fingerprint,
                self._token_ids(self._job.prompts[0]),
                self._prompt_logprobs(),
            )
        )

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

    def _encoded_chunk(self, index: int, text: str) -> bytes:
        return self._event([ChatChunkChoice(index, ChatDelta(content=text))])

    def _shape(self, event: Event) -> ChatDelta | None:
        """`event` as clients read it; None when it is not shown."""
        match event:
            case Content(text):
                return ChatDelta(content=text)
            case Reasoning(text):
                return ChatDelta(reasoning_content=text, reasoning=text) if self._options.reasoning else None
            case CallStarted(index, id_, name):
                return ChatDelta(tool_calls=[ToolCallDelta(index, FunctionDelta("", name), id_, "function")])
            case Arguments(index, fragment):
                return ChatDelta(tool_calls=[ToolCallDelta(index, FunctionDelta(fragment))])

    def _message(self, events: Sequence[Event]) -> AssistantMessage:
        parsed = collect(events)
        message = AssistantMessage(parsed.content)
        if parsed.reasoning and self._options.reasoning:
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

    def _event(
        self,
        choices: list[ChatChunkChoice],
        usage: Usage | None = None,
        prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET,
    ) -> bytes:
        head = self._head
        shown = self._chunk_usage() if usage is None else usage
        return event(
            ChatChunk(head.id, head.created, head.model, choices, shown, head.system_fingerprint, prompt_token_ids)
        )

    def _logprobs(self, token_ids: list[int], logprobs: Sequence[TokenLogprobs]) -> ChatLogprobs | None:
        if self._num_logprobs < 0:
            return None
        sampling = self._job.sampling[0][0]
        return ChatLogprobs(long_list(token_logprobs(sampling, token_ids, logprobs, self._tokenizer, self._name)))

    def _prompt_logprobs(self) -> PromptLogprobsJson | msgspec.UnsetType:
        whole = self._collected[0].prompt_logprobs
        k = self._options.num_prompt_logprobs
        if k < 0 or whole is None:
            return msgspec.UNSET
        return long_list(prompt_logprobs_json(whole, self._job.prompts[0], k, self._tokenizer))
