"""Calls the served model is made to write: they follow the grammar, and clients read them. At TP 2, behind Ray."""

from __future__ import annotations

import json
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

MESSAGES: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]


class GetWeather(BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Rome", "Oslo"]
    days: Literal[1, 2, 3]
    units: Literal["C", "F"] | None


class Alarm(BaseModel):
    """Sets an alarm."""

    hour: int
    is_loud: bool


TOOLS: list[Any] = [openai.pydantic_function_tool(GetWeather), openai.pydantic_function_tool(Alarm)]
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}


def test_required_calls_are_valid_whatever_the_seed(client: openai.OpenAI, endpoint: Any) -> None:
    names = set()
    reply = client.chat.completions.create(
        model=endpoint.model,
        messages=MESSAGES,
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=1,
        top_p=1,
        n=8,  # a seed each
        seed=0,
        max_tokens=64,
    )
    for choice in reply.choices:
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        assert choice.message.tool_calls is not None
        [call] = choice.message.tool_calls
        assert call.type == "function"
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
        names.add(call.function.name)
    assert names == set(SCHEMAS), "eight answers at temperature 1 use both tools"


@pytest.mark.slow
def test_a_named_call_streams_what_it_answers_whole(client: openai.OpenAI, endpoint: Any) -> None:
    fields: Any = {
        "model": endpoint.model,
        "messages": MESSAGES,
        "tools": TOOLS,
        "tool_choice": {"type": "function", "function": {"name": "GetWeather"}},
        "temperature": 0,
        "max_tokens": 64,
    }
    whole = client.chat.completions.create(**fields).choices[0]
    assert whole.finish_reason == "stop"
    assert whole.message.tool_calls is not None
    [call] = whole.message.tool_calls
    assert call.type == "function"
    chunks = list(client.chat.completions.create(stream=True, **fields))
    deltas = [delta for chunk in chunks for delta in chunk.choices[0].delta.tool_calls or ()]
    assert (deltas[0].type, deltas[0].index) == ("function", 0)
    assert deltas[0].id
    assert deltas[0].function is not None
    assert (deltas[0].function.name, deltas[0].function.arguments) == ("GetWeather", "")
    fragments = [delta.function.arguments or "" for delta in deltas[1:] if delta.function is not None]
    assert len(fragments) > 3
    assert "".join(fragments) == call.function.arguments
    assert chunks[-1].choices[0].finish_reason == "stop"


@pytest.mark.slow
def test_the_openai_packages_helpers_parse_the_arguments(client: openai.OpenAI, endpoint: Any) -> None:
    fields: Any = {"model": endpoint.model, "messages": MESSAGES, "tools": TOOLS, "tool_choice": "required"}
    fields |= {"parallel_tool_calls": False, "temperature": 0, "max_tokens": 64}
    parsed = client.chat.completions.parse(**fields).choices[0].message
    assert parsed.tool_calls is not None
    assert isinstance(parsed.tool_calls[0].function.parsed_arguments, GetWeather | Alarm)
    with client.chat.completions.stream(**fields) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
    assert [event.parsed_arguments for event in done] == [parsed.tool_calls[0].function.parsed_arguments]


@pytest.mark.slow
def test_an_agents_loop_works_though_the_template_shows_no_tools(client: openai.OpenAI, endpoint: Any) -> None:
    messages = [*MESSAGES]
    fields: Any = {"model": endpoint.model, "tools": TOOLS, "temperature": 0, "max_tokens": 64}
    first = client.chat.completions.with_raw_response.create(messages=messages, tool_choice="required", **fields)
    assert first.headers["x-tool-template"] == "generic"
    called = first.parse().choices[0].message
    assert called.tool_calls is not None
    messages.append(called.model_dump(exclude_none=True))
    messages += [{"role": "tool", "tool_call_id": call.id, "content": "Sunny, 25 C."} for call in called.tool_calls]
    second = client.chat.completions.create(messages=messages, tool_choice="auto", **fields)
    assert second.choices[0].message.content or second.choices[0].message.tool_calls
    assert second.usage is not None
    assert first.parse().usage.prompt_tokens < second.usage.prompt_tokens
    [card] = client.models.list().data
    assert card.to_dict()["tool_template"] == "generic"
