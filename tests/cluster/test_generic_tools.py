"""Tools for models whose chat template cannot show them: what is told instead, and that whole loops work with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.text.chat_template import ChatTemplate
from cluster.text.conversation import Conversation
from cluster.text.formats import ModelFormats
from cluster.text.prompt_encoder import render
from cluster.text.tokenizer import Tokenizer
from configs.schema import ServerConfig
from tests.helpers.chats import parse_tools, parse_turns
from tests.helpers.scripted_engine import EOS, Run, Stack, error_of, prompt_ids, runner

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL: dict[str, Any] = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'},
}
WRITTEN = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
LOOP: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather in Oslo?"},
    {"role": "assistant", "content": "I look.", "tool_calls": [CALL, CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "4 C"},
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    {"role": "user", "content": "And?"},
]

# In the manner of ChatML, of one that leaves system messages out, of Gemma and of Mistral 7B.
CHATML = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
DEAF = "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)
GEMMA = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + ALTERNATING
)
TEMPLATES = {"chatml": CHATML, "deaf": DEAF, "alternating": ALTERNATING, "gemma": GEMMA}


def rendered(source: str, messages: list[dict[str, Any]], *choice: Any) -> str:
    template = ChatTemplate(source, {})
    generic = ModelFormats.of(template, ServerConfig()).generic
    assert generic is not None
    turns = generic.turns(parse_turns(messages), parse_tools([WEATHER], *choice))
    return template.render([turn.message() for turn in turns])


@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES)
def test_a_template_is_told_of_tools_calls_and_results_in_turns_that_alternate(source: str) -> None:
    text = rendered(source, LOOP)
    parts = ["Be brief.", json.dumps(WEATHER), "Weather in Oslo?", "I look.", WRITTEN, "4 C", "rain", "And?"]
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    system = "<system>" if source == CHATML else "<user>"
    assert text.startswith(f"{system}Be brief.\n\n")
    assert text.count("<user>") == 2
    assert text.endswith(
        f"<assistant>I look.\n\n{WRITTEN}\n{WRITTEN}<user>"
        "<tool_response>\n4 C\n</tool_response>\n\n<tool_response>\nrain\n</tool_response>\n\nAnd?"
    )


def test_the_words_the_model_is_told_are_those_of_the_guide() -> None:
    guide = (Path(__file__).resolve().parents[2] / "docs/guides/api.md").read_text()
    text = rendered(CHATML, [{"role": "user", "content": "hi"}])
    told = text.removeprefix("<system>").removesuffix("<user>hi").replace(json.dumps(WEATHER), "{…}")
    assert told in guide
    assert "Use one tool at a time." in rendered(CHATML, LOOP, "auto", False)


def test_tools_that_may_not_be_called_are_not_told_of_and_earlier_calls_are() -> None:
    text = rendered(CHATML, LOOP, "none")
    assert "You can use tools" not in text
    assert WRITTEN in text
    assert rendered(CHATML, LOOP[1:2], "none") == "<user>Weather in Oslo?"


def test_calls_are_told_of_as_the_named_parser_reads_them() -> None:
    generic = ModelFormats.of(ChatTemplate(CHATML, {}), ServerConfig(tool_call_parser="llama3_json")).generic
    assert generic is not None
    system, _, called, *_ = generic.turns(parse_turns(LOOP), parse_tools([WEATHER]))
    assert '{"name": "<name of the tool>", "parameters": {<its arguments>}}' in system.text
    assert '{"name": "get_weather", "parameters": {"city": "Oslo"}}' in called.text


# --- Through HTTP, with a model whose template shows no tools ---------------------------------------------------------


@pytest.fixture
def ask(smollm2_path: Path, tmp_path: Path) -> Run:
    tokenizer = Tokenizer.load(smollm2_path)
    run = runner(tokenizer, tmp_path)

    def go(scenario: Any, text: str = WRITTEN, **options: Any) -> None:
        run(scenario, reply=[*tokenizer.encode(text, add_special_tokens=False), EOS], max_model_len=1024, **options)

    return go


def prompt_of(stack: Stack) -> str:
    return stack.model.tokenizer.decode(prompt_ids(stack.coordinator.requests[-1]), skip_special_tokens=False)


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_model_without_tools_in_its_template_calls_them(ask: Run, choice: Any) -> None:
    async def scenario(stack: Stack) -> None:
        response = await stack.chat(tools=[WEATHER], tool_choice=choice)
        [call] = response.json()["choices"][0]["message"]["tool_calls"]
        assert call["function"]["arguments"] == '{"city": "Oslo"}'
        assert response.headers["x-tool-template"] == "generic"
        assert json.dumps(WEATHER) in prompt_of(stack)
        assert "x-tool-template" not in (await stack.chat()).headers
        [card] = (await stack.http.get("/v1/models")).json()["data"]
        assert card["tool_template"] == "generic"

    ask(scenario)


def test_every_surface_takes_a_call_and_its_result(ask: Run) -> None:
    async def scenario(stack: Stack) -> None:
        responses = [await stack.chat(messages=LOOP, tools=[WEATHER])]
        use = {"type": "tool_use", "id": "call_1", "name": "get_weather", "input": {"city": "Oslo"}}
        result = {"type": "tool_result", "tool_use_id": "call_1", "content": "4 C"}
        body: dict[str, Any] = {"model": stack.model.model_name, "max_tokens": 4}
        turns = [LOOP[1], {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
        tools = [{"name": "get_weather", "input_schema": WEATHER["function"]["parameters"]}]
        responses.append(await stack.http.post("/v1/messages", json={**body, "messages": turns, "tools": tools}))
        item = {"type": "function_call", "call_id": "call_1", **CALL["function"]}
        items = [LOOP[1], item, {"type": "function_call_output", "call_id": "call_1", "output": "4 C"}]
        body = {"model": stack.model.model_name, "input": items, "tools": [{"type": "function", **WEATHER["function"]}]}
        responses.append(await stack.http.post("/v1/responses", json=body))
        # A client may leave the tools out once it has what it wanted.
        responses.append(await stack.chat(messages=LOOP))
        for response, request in zip(responses, stack.coordinator.requests, strict=True):
            assert response.status_code == 200, response.text
            assert response.headers["x-tool-template"] == "generic"
            text = stack.model.tokenizer.decode(prompt_ids(request))
            assert WRITTEN in text
            assert "<tool_response>\n4 C\n</tool_response>" in text

    ask(scenario, "It rains.")


def test_hostile_conversations_cost_time_in_proportion_and_no_error_of_the_server(ask: Run) -> None:
    async def scenario(stack: Stack) -> None:
        # Turns of one role become one: adding each to the text before it would take minutes.
        many = [{"role": "user", "content": "x" * 90}] * 40_000
        error_of(await stack.chat(messages=many, tools=[WEATHER]), 400, "context_length_exceeded")
        nested: Any = {}
        for _ in range(400):
            nested = {"properties": {"a": nested}}
        deep = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", **nested}}}
        assert (await stack.chat(tools=[deep])).status_code in (200, 400)

    ask(scenario, timeout_s=20)


# --- Calls that were cut off, given back as history -------------------------------------------------------------------

WITH_CALLS = "{{ tools }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
TAKES = {
    "json": WITH_CALLS + "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}<tool_call>",
    "text": WITH_CALLS + "{{ '<tool_call>' + c.function.arguments }}{% endfor %}{% endfor %}",
    "pairs": WITH_CALLS + "{% for k, v in c.function.arguments | items %}{{ v }}{% endfor %}{% endfor %}{% endfor %}"
    "<tool_call>",
    "generic": CHATML,
}


@pytest.mark.parametrize("source", TAKES.values(), ids=TAKES)
def test_a_truncated_call_in_the_history_is_shown_as_it_is(source: str, smollm2_path: Path, tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text(source)
    tokenizer = Tokenizer.load(smollm2_path, chat_template=str(file))
    cut = {**CALL, "function": {"name": "get_weather", "arguments": '{"city": "Os'}}
    turns = parse_turns([LOOP[1], {"role": "assistant", "tool_calls": [cut, CALL]}, LOOP[3]])
    formats = ModelFormats.of(tokenizer.template, ServerConfig())
    assert (formats.generic is None) == (source != CHATML)
    text = render(Conversation(turns=turns), tokenizer.template, formats)
    assert '{"city": "Os' in text.replace('\\"', '"')
    assert "Oslo" in text.split("Os", 2)[2]
