"""Turns a chat completions request into a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cluster.openai.openai_request import (
    AssistantTurn,
    ChatRequest,
    Message,
    ToolMessage,
)
from cluster.openai.tool_fields import parse_tools
from cluster.requests.images import LeftOut
from cluster.requests.shapes import Other
from cluster.text.conversation import Call, Conversation, TemplateOption, Turn
from configs.errors import RequestError

_OWN_VARIABLES = frozenset({"chat_template", "tokenize", "messages", "tools", "documents", "add_generation_prompt"})


def conversation(request: ChatRequest, left_out: LeftOut) -> Conversation:
    """The conversation that the model continues. What the model is not shown is added to `left_out`. Raises
    RequestError with the path of the wrong field."""
    for i, tool in enumerate(request.tools or ()):
        if tool.get("type", "function") != "function":
            left_out.unknown(f"tools.{tool['type']}", f"tools[{i}]")
    tools = parse_tools(request.tools, request.tool_choice, request.parallel_tool_calls)
    turns = [_turn(message, f"messages[{i}]", left_out) for i, message in enumerate(request.messages)]
    options = []
    for name, value in (request.chat_template_kwargs or {}).items():
        path = f"chat_template_kwargs.{name}"
        if name in _OWN_VARIABLES:
            raise RequestError(f"{path} is not allowed.", code="unsupported_parameter", param=path)
        options.append(TemplateOption(name, value, path))
    if request.reasoning_effort is not None:
        options.append(TemplateOption("reasoning_effort", request.reasoning_effort, "reasoning_effort"))
    if request.continue_final_message and not turns[-1].text:
        raise RequestError(
            "The final message has no content to continue; give it some.", param="continue_final_message"
        )
    return Conversation(
        turns=turns,
        tools=tools,
        documents=request.documents,
        options=options,
        continue_final=bool(request.continue_final_message),
        add_generation_prompt=request.add_generation_prompt is not False,
        add_special_tokens=bool(request.add_special_tokens),
    )


def _turn(message: Message, path: str, left_out: LeftOut) -> Turn:
    text = _text(message.content, f"{path}.content", left_out)
    if isinstance(message, AssistantTurn):
        calls = tuple(
            Call(call.function.name, call.function.arguments or {}, call.id) for call in message.tool_calls or ()
        )
        return Turn(
            role="assistant",
            text=text or message.refusal or "",
            thinking=message.reasoning_content or message.reasoning or "",
            calls=calls,
            name=message.name,
            path=f"{path}.tool_calls" if calls else f"{path}.role",
        )
    if isinstance(message, ToolMessage):
        return Turn(role="tool", text=text, call_id=message.tool_call_id, name=message.name, path=f"{path}.role")
    # `developer` is the newer name of `system`; templates only know `system`.
    return Turn(role="user" if message.role == "user" else "system", text=text, name=message.name, path=f"{path}.role")


def _text(content: str | Sequence[Any] | None, path: str, left_out: LeftOut) -> str:
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for i, part in enumerate(content or ()):
        if isinstance(part, Other):
            texts += left_out.text(part, f"{path}[{i}]")
        else:
            texts.append(part.refusal if part.type == "refusal" else part.text)
    return "\n".join(texts)
