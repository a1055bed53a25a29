"""What requests say of their tools, and the grammars that make an answer call them."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer

from cluster.openai.responses.response_tools import read_tools
from cluster.openai.responses.responses_request import InputTokensRequest
from cluster.requests.images import LeftOut
from cluster.structured.compiler import GrammarCompiler
from cluster.structured.spec import schema_grammar
from cluster.text.answer_parser import AnswerFormat, AnswerReader
from cluster.text.reasoning import REASONING_STYLES
from cluster.text.tokenizer import Tokenizer
from cluster.text.tools import harmony
from cluster.text.tools.events import collect
from cluster.text.tools.grammar import CallGrammar, SpecialId, after_reasoning
from cluster.text.tools.styles import STYLES, StyleName
from cluster.text.tools.tool_use import ToolMode, ToolUse
from configs.errors import RequestError
from configs.schema import ServerConfig
from tests.helpers.chats import parse_tools

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer"}},
            "required": ["city"],
            "additionalProperties": False,
            "$defs": {"city": {"enum": ["Paris", "Rome"]}},
        },
        "strict": True,
    },
}
NOW = {"type": "function", "function": {"name": "now"}}


def use(tools: object, choice: object = None, parallel: bool | None = None) -> ToolUse:
    parsed = parse_tools(tools, choice, parallel)
    assert parsed is not None
    return parsed


def test_the_forms_of_tool_choice() -> None:
    assert parse_tools(None) is None
    assert parse_tools([], "auto") is None
    assert use([NOW]).mode is ToolMode.AUTO
    assert use([NOW], "none").mode is ToolMode.NONE
    both = use([WEATHER, NOW], "required")
    assert both.mode is ToolMode.REQUIRED
    assert [tool.name for tool in both.callable] == ["get_weather", "now"]
    assert both.parallel
    named = use([WEATHER, NOW], {"type": "function", "function": {"name": "now"}})
    assert named.mode is ToolMode.NAMED
    assert [tool.name for tool in named.callable] == ["now"]
    assert [tool.name for tool in named.tools] == ["get_weather", "now"]
    assert not named.parallel
    assert not use([NOW], parallel=False).parallel
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "now"}}]}
    some = use([WEATHER, NOW], {"type": "allowed_tools", "allowed_tools": allowed})
    assert some.mode is ToolMode.REQUIRED
    assert [tool.name for tool in some.callable] == ["now"]


def flat_tools(tools: Any, choice: Any) -> ToolUse | None:
    request = InputTokensRequest(input="hi", tools=tools, tool_choice=choice)
    return read_tools(request, LeftOut(ServerConfig())).use


def test_responses_have_functions_in_the_place_of_tools() -> None:
    tools = [{"type": "function", "name": "now", "description": None}, {"name": "f", "strict": True}]
    parsed = flat_tools(tools, {"type": "allowed_tools", "mode": "required", "tools": [{"name": "f"}]})
    assert parsed is not None
    assert [tool.shown["function"].keys() for tool in parsed.tools] == [
        {"name", "parameters"},
        {"name", "strict", "parameters"},
    ]
    assert ([tool.name for tool in parsed.callable], parsed.mode) == (["f"], ToolMode.REQUIRED)
    for choice, param in (
        ({"type": "function", "name": "g"}, "tool_choice.name"),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"name": "g"}]}, "tool_choice.tools[0].name"),
    ):
        with pytest.raises(RequestError) as raised:
            flat_tools(tools, choice)
        assert raised.value.param == param


def test_a_tool_without_parameters_takes_none() -> None:
    [tool] = use([{"type": "function", "function": {"name": "now", "parameters": {}}}]).tools
    assert tool.parameters == {"type": "object", "properties": {}}
    assert tool.shown["function"]["parameters"] == {"type": "object", "properties": {}}
    assert not tool.strict


def _function(**fields: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", **fields}}]


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        ({}, None, "tools"),
        ([NOW] * 513, None, "tools"),
        ([1], None, "tools[0]"),
        ([{"type": 1}], None, "tools[0].type"),
        ([{"type": "function"}], None, "tools[0].function"),
        ([{"type": "function", "function": {}}], None, "tools[0].function.name"),
        (_function(name=""), None, "tools[0].function.name"),
        (_function(name="a b"), None, "tools[0].function.name"),
        (_function(name="a\n"), None, "tools[0].function.name"),
        (_function(name="a" * 129), None, "tools[0].function.name"),
        ([NOW, NOW], None, "tools[1].function.name"),
        (_function(description=1), None, "tools[0].function.description"),
        (_function(strict="yes"), None, "tools[0].function.strict"),
        (_function(parameters=[]), None, "tools[0].function.parameters"),
        (_function(parameters={"type": "string"}), None, "tools[0].function.parameters.type"),
        (_function(parameters={"properties": []}), None, "tools[0].function.parameters.properties"),
        ([NOW], "any", "tool_choice"),
        ([NOW], 1, "tool_choice"),
        ([NOW], {"type": "function"}, "tool_choice.function"),
        ([NOW], {"type": "function", "function": {"name": "f"}}, "tool_choice.function.name"),
        ([NOW], {"type": "custom"}, "tool_choice.type"),
        ([NOW], {"type": "allowed_tools"}, "tool_choice.allowed_tools"),
        ([NOW], {"type": "allowed_tools", "allowed_tools": {"mode": "none"}}, "tool_choice.allowed_tools.mode"),
        ([NOW], {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}, "tool_choice.allowed_tools.tools"),
        (None, "required", "tool_choice"),
        ([], {"type": "function", "function": {"name": "f"}}, "tool_choice"),
    ],
)
def test_what_is_wrong_with_tools_is_named_by_its_path(tools: object, choice: object, param: str) -> None:
    with pytest.raises(RequestError) as raised:
        parse_tools(tools, choice)
    assert raised.value.param == param
    assert raised.value.status == 400


# --- Grammars ---------------------------------------------------------------------------------------------------------

Accepts = Callable[[str, str], bool | None]


@pytest.fixture(scope="module")
def matching(smollm2: Tokenizer) -> LLTokenizer:
    return from_tokenizer(smollm2._fast)


@pytest.fixture
def accepts(smollm2: Tokenizer, matching: LLTokenizer) -> Accepts:
    """Whether a grammar takes a text and lets it end there; None when it takes it and wants more."""

    def accepts(grammar: str, text: str) -> bool | None:
        matcher = LLMatcher(matching, grammar)
        assert not matcher.is_error(), matcher.get_error()
        ids = smollm2.encode(text, add_special_tokens=False)
        if matcher.try_consume_tokens(ids) < len(ids):
            return False
        return True if matcher.is_accepting() else None

    return accepts


def no_specials(tag: str) -> int | None:
    return None


def calls_of(name: StyleName, special_id: SpecialId = no_specials) -> CallGrammar:
    """Calls of both tools."""
    tools = use([WEATHER, NOW]).callable
    compiler = GrammarCompiler({})
    arguments = [compiler.compile(schema_grammar(tool.parameters, tool.param, strict=tool.strict)) for tool in tools]
    return CallGrammar([tool.name for tool in tools], arguments, STYLES[name], special_id)


CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.mark.parametrize("name", [name for name, it in STYLES.items() if it.layout is not None and not it.layout.head])
def test_forced_calls_are_calls_that_the_format_reads_back(name: StyleName, accepts: Accepts) -> None:
    style = STYLES[name]
    layout = style.layout
    assert layout is not None
    one, several = calls_of(name).alone(parallel=False), calls_of(name).alone(parallel=True)
    rome = f'{{"name": "get_weather", "{layout.arguments_key}": {{"city": "Rome", "days": 3}}}}'
    now = f'{{"name": "now", "{layout.arguments_key}": {{}}}}'
    single = layout.begin + rome + layout.end
    double = layout.begin + rome + layout.separator + now + layout.end
    assert accepts(one, single) is True
    assert accepts(one, double) is False
    assert accepts(several, single) is True
    assert accepts(several, double) is True
    assert accepts(several, single.replace("Rome", "Oslo")) is False
    assert accepts(several, single.replace("get_weather", "get_time")) is False
    assert accepts(several, "Rome is") is False
    assert accepts(several, "") is None

    reader = AnswerReader(AnswerFormat(calls=style, tools={"get_weather": {}, "now": {}}))
    parsed = collect(reader.read(double, ended=True))
    assert parsed.content == ""
    assert [(call.name, call.arguments) for call in parsed.calls] == [
        ("get_weather", '{"city": "Rome", "days": 3}'),
        ("now", "{}"),
    ]


def test_calls_in_text_are_bound_where_they_begin_and_nowhere_else(accepts: Accepts) -> None:
    grammar = calls_of("hermes").in_text()
    assert accepts(grammar, 'Hello, <tool_ca {"name": "x"}') is True
    assert accepts(grammar, f"Let me see.\n{CALL}\n{CALL}") is True
    assert accepts(grammar, f"Let me see.\n{CALL.replace('Rome', 'Oslo')}") is False
    assert accepts(grammar, "<tool_call>\n{") is None
    now = '{"name": "now", "arguments": {}}'
    assert accepts(calls_of("mistral").in_text(), f"So: [TOOL_CALLS][{now}, {now}]") is True


def test_an_answer_with_a_grammar_may_be_a_call_instead(accepts: Accepts) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    answer = GrammarCompiler({}).compile(schema_grammar(schema, "response_format", strict=True))
    grammar = calls_of("hermes").or_answer(answer, parallel=True)
    thinking = after_reasoning(grammar, REASONING_STYLES["think"], no_specials, is_open=True)
    for prefix, either in (("", grammar), ("So.</think>", thinking)):
        assert accepts(either, f'{prefix}{{"ok": true}}') is True
        assert accepts(either, f"{prefix}{CALL}\n{CALL}") is True
        assert accepts(either, f"{prefix}{CALL}ok") is False
        assert accepts(either, f"{prefix}Yes.") is False


def test_tags_that_are_special_tokens_are_written_as_tokens(smollm2: Tokenizer, matching: LLTokenizer) -> None:
    # The model has no such tags: two of its special tokens stand for them.
    [begin, end] = sorted(smollm2._special_ids)[3:5]
    calls = calls_of("hermes", {"<tool_call>": begin, "</tool_call>": end}.get)
    tokens = [begin, *smollm2.encode('\n{"name": "now", "arguments": {}}\n', add_special_tokens=False), end]
    for grammar in (calls.alone(parallel=True), calls.in_text()):
        matcher = LLMatcher(matching, grammar)
        assert matcher.try_consume_tokens(tokens) == len(tokens), matcher.get_error()
        assert matcher.is_accepting()
    [begin_thinking, end_thinking] = sorted(smollm2._special_ids)[5:7]
    ids = {"<think>": begin_thinking, "</think>": end_thinking}
    grammar = after_reasoning(calls.alone(parallel=True), REASONING_STYLES["think"], ids.get, is_open=False)
    thought = [begin_thinking, *smollm2.encode("Hm.", add_special_tokens=False), end_thinking]
    for answer in ([*thought, *tokens], tokens):
        matcher = LLMatcher(matching, grammar)
        assert matcher.try_consume_tokens(answer) == len(answer), matcher.get_error()
        assert matcher.is_accepting()


def test_gpt_oss_thinks_and_then_answers_or_calls_on_the_channel_that_is_asked_for(
    smollm2: Tokenizer, matching: LLTokenizer
) -> None:
    # The model has no such tags: special tokens of its own stand for them.
    style, ids = REASONING_STYLES["harmony"], dict(zip(harmony.TAGS, sorted(smollm2._special_ids)[3:], strict=False))
    call = calls_of("harmony", ids.get).alone(parallel=True)
    answer = json.dumps({"grammars": [{"json_schema": {"const": {}}}]})
    thought = f"{harmony.ANALYSIS}Hm.{harmony.END}{harmony.NEXT}"
    for grammar, is_call, head, other in (
        (call, True, harmony.CALL.format("now"), harmony.FINAL),
        (answer, False, harmony.FINAL, harmony.CALL.format("now")),
    ):
        made = after_reasoning(grammar, style, ids.get, is_open=False, is_call=is_call)
        for text, is_right in ((f"{thought}{head}", True), (head, True), (other, False), (f"{thought}{other}", False)):
            pieces = filter(None, re.split(r"(<\|[a-z]+\|>)", f"{text}{{}}"))
            encoded = [[ids[it]] if it in ids else smollm2.encode(it, add_special_tokens=False) for it in pieces]
            tokens = list(itertools.chain(*encoded))
            matcher = LLMatcher(matching, made)
            assert (matcher.try_consume_tokens(tokens) == len(tokens)) == is_right, (text, matcher.get_error())
            assert matcher.is_accepting() == is_right


def test_thinking_comes_before_a_forced_call(accepts: Accepts) -> None:
    grammar = calls_of("hermes").alone(parallel=True)
    opened = after_reasoning(grammar, REASONING_STYLES["think"], no_specials, is_open=True)
    assert accepts(opened, f"I call <tool_call> now.\n</think>\n\n{CALL}") is True
    assert accepts(opened, "I call it now.") is None
    assert accepts(opened, "I call it now.</think>No.") is False
    maybe = after_reasoning(grammar, REASONING_STYLES["think"], no_specials, is_open=False)
    assert accepts(maybe, f"<think>\nI call it now.\n</think>\n\n{CALL}") is True
    assert accepts(maybe, CALL) is True
    assert accepts(maybe, "No.") is False
