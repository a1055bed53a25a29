"""Turns a request of /v1/messages into a conversation."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.anthropic.messages_request import (
    Block,
    CountTokensRequest,
    MessagesRequest,
    TextParam,
    ThinkingParam,
    ToolChoiceParam,
    ToolParam,
    ToolResultParam,
    ToolUseParam,
)
from cluster.structured.spec import GrammarSpec, schema_grammar
from cluster.text.conversation import Call, Conversation, TemplateOption, Turn
from cluster.text.tools.tool_use import Tool, ToolChoice, ToolMode, function_tool, tool_use
from configs.errors import RequestError

_MODES = {"auto": ToolMode.AUTO, "any": ToolMode.REQUIRED, "tool": ToolMode.NAMED, "none": ToolMode.NONE}


def conversation(request: CountTokensRequest) -> Conversation:
    """The conversation that the model continues. Raises RequestError with the path of the wrong field."""
    turns = _turns(request)
    if not turns:
        raise RequestError("messages has only system messages, all empty; add a user message.", param="messages")
    if len(turns) > 1 and turns[-1] == Turn(role="assistant", path=turns[-1].path):
        turns.pop()  # The last turn is an answer that was cut off before its first text.
    # If the last turn is the assistant's, it is the beginning of the answer.
    continued = turns[-1].role == "assistant"
    if continued and not turns[-1].text:
        raise RequestError("The final message has no content to continue; leave it out.", param=turns[-1].path)
    options = []
    if request.thinking is not None and request.thinking.type != "adaptive":
        options.append(TemplateOption("enable_thinking", request.thinking.type == "enabled", "thinking"))
    if request.output_config is not None and request.output_config.effort is not None:
        options.append(TemplateOption("reasoning_effort", request.output_config.effort, "output_config.effort"))
    choice = request.tool_choice
    return Conversation(
        turns=turns,
        tools=tool_use(
            [_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools or ())],
            ToolChoice() if choice is None else _tool_choice(choice),
            parallel=choice is None or not choice.disable_parallel_tool_use,
        ),
        options=options,
        continue_final=continued,
        add_generation_prompt=not continued,
    )


def output_grammar(request: MessagesRequest) -> GrammarSpec | None:
    """The grammar that `output_config.format` asks for, or None. Raises RequestError for a schema that is too long."""
    output = request.output_config
    if output is None or output.format is None:
        return None
    return schema_grammar(output.format.schema_, "output_config.format.schema", strict=True)


def _tool(tool: ToolParam, path: str) -> Tool:
    options = tool.model_dump(include={"description", "strict"}, exclude_none=True)
    function = {"name": tool.name, "parameters": tool.input_schema, **options}
    return function_tool(function, path, parameters_name="input_schema")


def _tool_choice(choice: ToolChoiceParam) -> ToolChoice:
    if choice.type != "tool":
        return ToolChoice(_MODES[choice.type])
    if choice.name is None:
        raise RequestError("tool_choice.name is required.", code="missing_required_parameter", param="tool_choice.name")
    return ToolChoice(ToolMode.NAMED, {"tool_choice.name": choice.name})


def _turns(request: CountTokensRequest) -> list[Turn]:
    turns = []
    if request.system not in (None, []):
        turns.append(Turn(role="system", text=_text(request.system)))
    for i, message in enumerate(request.messages):
        path, content = f"messages[{i}].content", message.content
        blocks = [TextParam(type="text", text=content)] if isinstance(content, str) else content
        if message.role == "assistant":
            turns.append(_assistant_turn(blocks, path))
            continue
        results = [(j, block) for j, block in enumerate(blocks) if isinstance(block, ToolResultParam)]
        turns += [_result_turn(result, f"{path}[{j}]") for j, result in results]
        if len(results) < len(blocks):
            turns.append(Turn(role=message.role, text=_text(blocks), path=path))
    return turns


def _text(content: str | Sequence[Block]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(block.text for block in content if isinstance(block, TextParam))


def _assistant_turn(blocks: Sequence[Block], path: str) -> Turn:
    uses = [(i, block) for i, block in enumerate(blocks) if isinstance(block, ToolUseParam)]
    return Turn(
        role="assistant",
        text=_text(blocks),
        thinking="\n".join(block.thinking for block in blocks if isinstance(block, ThinkingParam)),
        calls=tuple(Call(use.name, use.input, use.id) for _, use in uses),
        path=f"{path}[{uses[0][0]}]" if uses else path,
    )


def _result_turn(result: ToolResultParam, path: str) -> Turn:
    text = _text(result.content or "")
    if result.is_error:
        text = f"Error:\n{text}" if text else "Error:"  # a template has no field for errors
    return Turn(role="tool", text=text, call_id=result.tool_use_id, path=path)
