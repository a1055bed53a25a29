"""Chats from the JSON of a request: the turns, the tools and the form of the answer."""

from __future__ import annotations

from typing import Any

from cluster.openai.chat_turns import conversation
from cluster.openai.openai_request import ChatRequest, check_request
from cluster.requests.images import LeftOut
from cluster.requests.json_body import validated
from cluster.requests.sampling_fields import SamplingFields
from cluster.structured.spec import GrammarSpec
from cluster.text.conversation import Turn
from cluster.text.tools.tool_use import ToolUse
from configs.schema import ServerConfig

MESSAGES = [{"role": "user", "content": "x"}]


def parse_turns(messages: Any) -> list[Turn]:
    """The turns of a request's messages."""
    return list(_conversation(messages=messages).turns)


def parse_tools(tools: Any, choice: Any = None, parallel_tool_calls: bool | None = None) -> ToolUse | None:
    """The tools of a request."""
    return _conversation(tools=tools, tool_choice=choice, parallel_tool_calls=parallel_tool_calls).tools


def read_grammar(**fields: Any) -> GrammarSpec | None:
    """The grammar that the fields of a request ask for."""
    return validated(SamplingFields, fields).grammar()


def _conversation(**fields: Any) -> Any:
    request, _ = check_request(ChatRequest, {"model": "m", "messages": MESSAGES, **fields}, ServerConfig())
    return conversation(request, LeftOut(ServerConfig()))
