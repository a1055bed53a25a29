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
from cluster.requests.images import LeftOut
from cluster.requests.shapes import Other
from cluster.structured.spec import GrammarSpec, schema_grammar
from cluster.text.conversation import Call, Conversation, TemplateOption, Turn
from cluster.text.tools.tool_use import Tool, ToolChoice, ToolMode, ToolUse, function_tool, tool_use
from configs.errors import RequestError

_MODES = {"auto": ToolMode.AUTO, "any": ToolMode.REQUIRED, "tool": ToolMode.NAMED, "none": ToolMode.NONE}
# Claude Code begins a text for Anthropic's accounts with this. It changes with every turn, so no turn would find the
# prompt of the one before in the prefix cache.
_BILLING = "x-anthropic-billing-header:"


def conversation(request: CountTokensRequest, left_out: LeftOut) -> Conversation:
    """The conversation that the model continues. What the model is not shown is added to `left_out`. Raises
    RequestError with the path of the wrong field."""
    turns = _turns(request, left_out)
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
    return Conversation(
        turns=turns,
        tools=_tools(request, left_out),
        options=options,
        continue_final=continued,
        add_generation_prompt=not continued,
    )


def output_grammar(request: MessagesRequest) -> GrammarSpec | None:
    """The grammar that `output_config.format` or `output_format` asks for, or None. Raises RequestError for a schema
    that is too long."""
    form, path = request.output_format, "output_format"
    if request.output_config is not None and request.output_config.format is not None:
        form, path = request.output_config.format, "output_config.format"
    return None if form is None else schema_grammar(form.schema_, f"{path}.schema", strict=True)


def _tools(request: CountTokensRequest, left_out: LeftOut) -> ToolUse | None:
    """The tools that the model is shown, once the turns are read. Tools that Anthropic defines, such as
    web_search_20250305, are left out."""
    tools, theirs, choice = [], [], request.tool_choice
    for i, tool in enumerate(request.tools or ()):
        if isinstance(tool, Other):
            left_out.unknown(f"tools.{tool.type}", f"tools[{i}]")
            name = (tool.model_extra or {}).get("name")
            theirs.append(name if isinstance(name, str) else tool.type)
        elif not tool.defer_loading or tool.name in left_out.loaded or (choice and tool.name == choice.name):
            tools.append(_tool(tool, f"tools[{i}]"))
    if choice is None:
        return tool_use(tools, ToolChoice(), parallel=True)
    if theirs and (choice.name in theirs if choice.type == "tool" else choice.type == "any" and not tools):
        raise RequestError(
            f"This server cannot run {theirs[0][:64]}: it has none of the tools that Anthropic defines, only "
            "tools with an input_schema, which the client runs. Leave tool_choice out.",
            code="unsupported_parameter",
            param="tool_choice",
        )
    return tool_use(tools, _tool_choice(choice), parallel=not choice.disable_parallel_tool_use)


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


def _turns(request: CountTokensRequest, left_out: LeftOut) -> list[Turn]:
    turns, system = [], request.system
    if isinstance(system, list):
        system = [block for block in system if not block.text.startswith(_BILLING)]
    if system not in (None, []):
        turns.append(Turn(role="system", text=_text(system, "system", left_out)))
    for i, message in enumerate(request.messages):
        path, content = f"messages[{i}].content", message.content
        blocks = [TextParam(type="text", text=content)] if isinstance(content, str) else content
        if message.role == "assistant":
            turns.append(_assistant_turn(blocks, path, left_out))
            continue
        results = [(j, block) for j, block in enumerate(blocks) if isinstance(block, ToolResultParam)]
        turns += [_result_turn(result, f"{path}[{j}]", left_out) for j, result in results]
        if len(results) < len(blocks):
            turns.append(Turn(role=message.role, text=_text(blocks, path, left_out), path=path))
    return turns


def _text(content: str | Sequence[Block], path: str, left_out: LeftOut) -> str:
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for j, block in enumerate(content):
        if isinstance(block, TextParam):
            texts.append(block.text)
        elif isinstance(block, Other):
            texts += left_out.text(block, f"{path}[{j}]")
    return "\n".join(texts)


def _assistant_turn(blocks: Sequence[Block], path: str, left_out: LeftOut) -> Turn:
    uses = [(i, block) for i, block in enumerate(blocks) if isinstance(block, ToolUseParam)]
    left_out.loaded.update(use.name for _, use in uses)
    return Turn(
        role="assistant",
        text=_text(blocks, path, left_out),
        thinking="\n".join(block.thinking for block in blocks if isinstance(block, ThinkingParam)),
        calls=tuple(Call(use.name, use.input, use.id) for _, use in uses),
        path=f"{path}[{uses[0][0]}]" if uses else path,
    )


def _result_turn(result: ToolResultParam, path: str, left_out: LeftOut) -> Turn:
    text = _text(result.content or "", f"{path}.content", left_out)
    if result.is_error:
        text = f"Error:\n{text}" if text else "Error:"  # a template has no field for errors
    return Turn(role="tool", text=text, call_id=result.tool_use_id, path=path)
