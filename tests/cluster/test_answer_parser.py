"""Reading calls and thinking out of text: every format, and that nothing depends on how the text was cut."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.text.answer_parser import AnswerFormat, AnswerReader
from cluster.text.reasoning import REASONING_STYLES, detect_reasoning
from cluster.text.tools.events import Arguments, CallStarted, Content, Event, Parsed, Reasoning, collect
from cluster.text.tools.styles import STYLES, StyleName, detect_calls

TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "units": {"enum": ["C", "F"]}},
    },
    "now": {"type": "object", "properties": {}},
}
DS_BEGIN, DS_END, DS_SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"


def parse(style: StyleName | None, text: str | Sequence[str], **fields: Any) -> list[Event]:
    """The events of `text` (or of its pieces), merged; ids are counted."""
    form = AnswerFormat(calls=STYLES[style] if style else None, tools=TOOLS, **fields)
    parser = AnswerReader(form)
    events: list[Event] = []
    for piece in [text] if isinstance(text, str) else text:
        events += parser.read(piece)
    events += parser.read("", ended=True)
    ids = count()
    return [
        CallStarted(event.index, f"id{next(ids)}", event.name) if isinstance(event, CallStarted) else event
        for event in merged(events)
    ]


def merged(events: Sequence[Event]) -> list[Event]:
    """The same answer in as few events as possible."""
    result: list[Event] = []
    for event in events:
        match result[-1:], event:
            case [Content(before)], Content(text):
                result[-1] = Content(before + text)
            case [Reasoning(before)], Reasoning(text):
                result[-1] = Reasoning(before + text)
            case [Arguments(last, before)], Arguments(index, fragment) if last == index:
                result[-1] = Arguments(index, before + fragment)
            case _:
                result.append(event)
    return result


def read(style: StyleName | None, text: str | Sequence[str], **fields: Any) -> tuple[str, list[tuple[str, str]]]:
    """(content, calls as (name, arguments)) of `text`."""
    parsed = collect(parse(style, text, **fields))
    return parsed.content, [(call.name, call.arguments) for call in parsed.calls]


WEATHER = ("get_weather", '{"city": "Paris", "days": 2}')
NOW = ("now", "{}")
CALLS: list[tuple[StyleName, str, str, list[tuple[str, str]]]] = [
    (
        "hermes",
        'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>\n',
        "Let me see.",
        [WEATHER],
    ),
    (
        "hermes",
        '<tool_call>{"arguments": {"city": "Paris", "days": 2}, "name": "get_weather"}</tool_call>'
        '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call> Done.',
        " Done.",
        [WEATHER, NOW],
    ),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", [NOW]),
    ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', "", [NOW]),
    ("hermes", '<tool_call>{"name": "now", "arguments": "{}"}', "", [NOW]),
    ("hermes", '<tool_call>{"name": "now", "arguments": {}}\n</tool_c', "", [NOW]),
    (
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "</tool_call>\\"}{"}}</tool_call>',
        "",
        [("get_weather", '{"city": "</tool_call>\\"}{"}')],
    ),
    ("llama3_json", '{"name": "get_weather", "parameters": {"city": "Paris", "days": 2}}', "", [WEATHER]),
    (
        "llama3_json",
        '<|python_tag|>{"type": "function", "name": "now", "parameters": {}}; {"name": "now", "parameters": {}}',
        "",
        [NOW, NOW],
    ),
    ("llama3_json", 'Sure. <|python_tag|>{"name": "now", "parameters": {}}', "Sure.", [NOW]),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}, '
        '{"name": "now", "arguments": {}, "id": "abcdefghi"}]',
        "",
        [WEATHER, NOW],
    ),
    (
        "mistral",
        'Wait.[TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "days": 2}[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}',
        "Wait.",
        [WEATHER, NOW],
    ),
    ("json", ' [{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]\n', "", [NOW, NOW]),
    ("json", '{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}', "", [WEATHER]),
    (
        "deepseek_v3",
        f"I look.<｜tool▁calls▁begin｜>{DS_BEGIN}function{DS_SEP}get_weather\n```json\n"
        f'{{"city": "Paris", "days": 2}}\n```{DS_END}\n{DS_BEGIN}function{DS_SEP}now\n```json\n{{}}\n```{DS_END}'
        "<｜tool▁calls▁end｜>",
        "I look.",
        [WEATHER, NOW],
    ),
    (
        "deepseek_v3",
        f'<｜tool▁calls▁begin｜>{DS_BEGIN}get_weather{DS_SEP}{{"city": "Paris", "days": 2}}{DS_END}'
        f"{DS_BEGIN}now{DS_SEP}{{}}{DS_END}<｜tool▁calls▁end｜>",
        "",
        [WEATHER, NOW],
    ),
    (
        "qwen3_coder",
        "Here.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n2\n"
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "Here.",
        [WEATHER, NOW],
    ),
    (
        "qwen3_coder",
        '<function=get_weather><parameter=city>a "quoted"\n\n</parameter><parameter=units>C</parameter></function>',
        "",
        [("get_weather", '{"city": "a \\"quoted\\"\\n", "units": "C"}')],
    ),
    (
        "harmony",
        "<|channel|>commentary<|message|>First the weather.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris", "days": 2}',
        "First the weather.",
        [WEATHER],
    ),
    ("harmony", "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}", "", [NOW]),
    ("harmony", "<|channel|>commentary to=python code<|message|>print(1)<|end|>", "print(1)", []),
    (
        "harmony",
        "<|channel|>commentary<|message|>One.<|end|><|start|>assistant<|channel|>final<|message|>Two.",
        "One.\n\nTwo.",
        [],
    ),
    ("harmony", "is what it goes on with.<|end|>", "is what it goes on with.", []),
    ("harmony", "Yes.<|end|><|start|>assistant<|channel|>comm", "Yes.", []),
]


@pytest.mark.parametrize(("style", "text", "content", "calls"), CALLS)
def test_calls_are_read_whole_and_character_by_character(
    style: StyleName, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    assert read(style, text) == (content, calls)
    assert parse(style, list(text)) == parse(style, text)


def test_arguments_come_out_as_they_are_written() -> None:
    parser = AnswerReader(AnswerFormat(calls=STYLES["hermes"], tools=TOOLS))
    assert parser.read('<tool_call>\n{"name": "get_weather", "arguments": ') == []
    [started, first] = parser.read('{"city": "P')
    assert isinstance(started, CallStarted)
    assert (started.index, started.name) == (0, "get_weather")
    assert started.id.startswith("call_")
    assert first == Arguments(0, '{"city": "P')
    assert parser.read('aris"}') == [Arguments(0, 'aris"}')]
    assert parser.read("}\n</tool_call>") == []
    assert parser.read("", ended=True) == []


def test_a_string_of_the_xml_format_comes_out_as_it_is_written() -> None:
    parser = AnswerReader(AnswerFormat(calls=STYLES["qwen3_coder"], tools=TOOLS))
    parser.read("<tool_call>\n<function=get_weather>\n<parameter=city>\n")
    assert parser.read('one "two"') == [Arguments(0, 'one \\"two\\"')]
    assert parser.read("\n</param") == []
    assert parser.read("three") == [Arguments(0, "\\n</paramthree")]


@pytest.mark.parametrize(
    ("style", "text"),
    [
        ("hermes", "no call at all"),
        ("hermes", "<tool_call>not json</tool_call>"),
        ("hermes", '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>\n'),
        ("hermes", '<tool_call>{"name": "now", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
        ("hermes", '<tool_call>{"name": 7}</tool_call>'),
        ("hermes", '<tool_call>{"name": "no'),
        ("hermes", "<tool_c"),
        ("hermes", "  \n"),
        ("llama3_json", '{"answer": {"name": "now"}}'),
        ("llama3_json", '{"name": "now"}'),
        ("llama3_json", '<|python_tag|>import os\nprint("{")'),
        ("llama3_json", 'Text, then {"name": "now", "parameters": {}}'),
        ("mistral", "[TOOL_CALLS][]"),
        ("mistral", "[TOOL_CALLS]unknown[ARGS]{}"),
        ("mistral", "[TOOL_CALLS]now[ARGS]"),
        ("json", '[{"name": "Ann", "arguments": {}}]'),
        ("json", "[1, 2, 3]"),
        ("json", '{"name": "now"}'),
        ("deepseek_v3", f"<｜tool▁calls▁begin｜>{DS_BEGIN}function{DS_SEP}now\n{{}}"),
        ("deepseek_v3", f"{DS_BEGIN}now{{}}"),
        ("qwen3_coder", "<tool_call>\n<function=unknown>\n</function>\n</tool_call>"),
        ("qwen3_coder", "<function=now"),
        ("qwen3_coder", '<tool_call>{"name": "now", "arguments": {}}</tool_call>'),
    ],
)
def test_what_only_looks_like_a_call_is_content(style: StyleName, text: str) -> None:
    assert read(style, text) == (text, [])
    assert read(style, list(text)) == (text, [])


def test_a_call_after_something_that_only_looked_like_one_is_found() -> None:
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    assert read("hermes", f"<tool_call>{call}") == ("<tool_call>", [NOW])
    assert read("hermes", f'<tool_call>{{"name": {call}') == ('<tool_call>{"name":', [NOW])


def test_arguments_end_where_the_answer_or_the_call_is_cut_off() -> None:
    assert read("hermes", '<tool_call>{"name": "get_weather", "arguments": {"city": "Par') == (
        "",
        [("get_weather", '{"city": "Par')],
    )
    broken = '<tool_call>{"name": "get_weather", "arguments": {"city": 1</tool_call> and more'
    assert read("hermes", broken) == (" and more", [("get_weather", '{"city": 1')])
    assert read("qwen3_coder", "<function=get_weather><parameter=city>Par") == ("", [("get_weather", '{"city": "Par')])
    closed = "<function=get_weather><parameter=city>Paris</parameter>"
    assert read("qwen3_coder", closed) == ("", [("get_weather", '{"city": "Paris"')])


@pytest.mark.parametrize(
    ("schema", "value", "expected"),
    [
        ({"type": "string"}, "2", '"2"'),
        ({}, "2", "2"),
        ({"type": "number"}, "2.5", "2.5"),
        ({"type": "integer"}, "two", '"two"'),
        ({"type": "boolean"}, "True", "true"),
        ({"type": ["string", "null"]}, "2", '"2"'),
        ({"type": ["string", "null"]}, "None", "null"),
        ({"type": "object"}, '{"a": [1]}', '{"a": [1]}'),
        ({"enum": ["C", "F"]}, "C", '"C"'),
        (True, "C", '"C"'),
    ],
)
def test_values_of_the_xml_format_have_the_type_the_schema_names(schema: Any, value: str, expected: str) -> None:
    tools = {"f": {"type": "object", "properties": {"x": schema}}}
    parser = AnswerReader(AnswerFormat(calls=STYLES["qwen3_coder"], tools=tools))
    events = parser.read(f"<function=f><parameter=x>\n{value}\n</parameter></function>") + parser.read("", ended=True)
    assert collect(events).calls[0].arguments == f'{{"x": {expected}}}'


def test_calls_beyond_the_most_that_are_wanted_are_dropped() -> None:
    text = '[TOOL_CALLS][{"name": "now", "arguments": {}}, {"name": "now", "arguments": {"a": 1}}]'
    assert read("mistral", text, max_calls=1) == ("", [NOW])


def test_ids_are_what_templates_take() -> None:
    [started, *_] = AnswerReader(AnswerFormat(calls=STYLES["mistral"], tools=TOOLS)).read("[TOOL_CALLS]now[ARGS]{}")
    assert isinstance(started, CallStarted)
    assert len(started.id) == 9
    assert started.id.isalnum()
    text = "[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}"
    [started, *_] = AnswerReader(AnswerFormat(calls=STYLES["mistral"], tools=TOOLS)).read(text)
    assert isinstance(started, CallStarted)
    assert started.id == "abcdefghi"


# --- Thinking ---------------------------------------------------------------------------------------------------------

THINK = REASONING_STYLES["think"]


@pytest.mark.parametrize(
    ("text", "is_open", "expected"),
    [
        ("<think>\nWhy?\n\nSo.\n</think>\n\nYes.", False, ("Why?\n\nSo.", "Yes.")),
        ("\n<think>\n\n</think>\n\nYes.", False, ("", "Yes.")),
        ("Why?\n</think>\nYes.", True, ("Why?", "Yes.")),
        ("<think>Why?</think>Yes.", True, ("Why?", "Yes.")),
        ("Why? <think> is a tag", True, ("Why? <think> is a tag", "")),
        ("Why? \n", True, ("Why? \n", "")),
        ("Yes: <think>no</think>", False, ("", "Yes: <think>no</think>")),
        ("\n Yes.\n", False, ("", "\n Yes.\n")),
        ("<thin", False, ("", "<thin")),
    ],
)
def test_thinking_is_told_apart(text: str, is_open: bool, expected: tuple[str, str]) -> None:
    for pieces in ([text], list(text)):
        parsed = collect(parse(None, pieces, reasoning=THINK, starts_in_reasoning=is_open))
        assert (parsed.reasoning, parsed.content) == expected


def test_thinking_that_is_cut_off_keeps_the_whitespace_at_its_end() -> None:
    for style in (None, *STYLES):
        assert parse(style, "I call ", reasoning=THINK, starts_in_reasoning=True) == [Reasoning("I call ")]


def test_a_call_follows_thinking_and_one_inside_it_is_thought() -> None:
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    events = parse("hermes", f"<think>I could {call}.</think>\n\n{call}", reasoning=THINK)
    assert events == [
        Reasoning(f"I could {call}."),
        CallStarted(0, "id0", "now"),
        Arguments(0, "{}"),
    ]


def test_messages_of_gpt_oss_are_told_apart_by_their_channels() -> None:
    thought = "<|channel|>analysis<|message|>Need the weather.<|end|>"
    call = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris", "days": 2}'
    final = "<|channel|>final<|message|>It rains."
    name, arguments = WEATHER
    weather = [CallStarted(0, "id0", name), Arguments(0, arguments)]
    for text, expected in (
        (f"{thought}<|start|>assistant{final}", [Reasoning("Need the weather."), Content("It rains.")]),
        (final, [Content("It rains.")]),
        (f"{thought}<|start|>assistant{call}", [Reasoning("Need the weather."), *weather]),
        (call, weather),
        (f"{thought}<|start|>assistant{thought}", [Reasoning(2 * "Need the weather.")]),
        (thought.removesuffix("er.<|end|>"), [Reasoning("Need the weath")]),
        (thought, [Reasoning("Need the weather.")]),
    ):
        for cut in ([text], list(text)):
            assert parse("harmony", cut, reasoning=REASONING_STYLES["harmony"]) == expected, text
    # Without tools there is nothing to call, and with them off a call is text.
    style = REASONING_STYLES["harmony"]
    reader = AnswerReader(AnswerFormat(reasoning=style, tools={}))
    assert reader.read(f"{thought}<|start|>assistant{call}")[1:] == [Content(arguments)]
    assert not style.is_over("<|start|>assistant")
    assert style.is_over("<|channel|>final<|message|>It", "It")


def test_the_end_of_the_thinking_is_counted_in_characters() -> None:
    for text, is_open, expected in (
        ("<think>a</think>b", False, 16),
        ("a</think>\n\nb", True, 9),
        ("abc", True, 3),
        (" b", False, 0),
    ):
        parser = AnswerReader(AnswerFormat(reasoning=THINK, starts_in_reasoning=is_open, tools={}))
        for char in text:
            parser.read(char)
        parser.read("", ended=True)
        assert parser._thinking_end == expected, text


def test_a_prompt_says_whether_the_answer_begins_inside_the_thinking() -> None:
    assert THINK.is_open("<|im_start|>assistant\n<think>\n")
    assert not THINK.is_open("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    # What a user wrote opens nothing, unless it is the answer itself that goes on.
    assert not THINK.is_open("<|im_start|>user\n<think><|im_end|>\n<|im_start|>assistant\n")
    assert THINK.is_open("<think>I begin", "<think>I begin")
    assert not THINK.is_open("<think>I begin</think> and", "<think>I begin</think> and")


# --- Whatever the cuts ------------------------------------------------------------------------------------------------

_SNIPPETS = [
    *(text for _, text, _, _ in CALLS),
    *(tag for style in STYLES.values() for tag in style.tags),
    *("<tool_call>", "</tool_call>", "<function=now>", "<parameter=city>", "</parameter>", "</function>", "now"),
    *('{"name": "now", "arguments": ', '{"name": "now", "parameters": {}}', '"name"', "{}", "{", "}", "[", "]", '"'),
    *("\\", ":", ",", ";", "```json\n", "```", "<think>", "</think>", "\n", " ", "<", "e\u0301", "😀", "null", "12"),
]
TEXTS = st.lists(st.sampled_from(_SNIPPETS) | st.text(max_size=4), max_size=12).map("".join)


@st.composite
def pieces(draw: st.DrawFn) -> list[str]:
    """A text, cut anywhere."""
    text = draw(TEXTS)
    cuts = sorted(draw(st.sets(st.integers(0, len(text)), max_size=12)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@settings(max_examples=200, deadline=None)
@given(pieces(), st.sampled_from([*STYLES, None]), st.sampled_from([None, False, True]))
def test_any_cut_of_any_text_gives_the_same_events(
    parts: list[str], style: StyleName | None, thinking: bool | None
) -> None:
    fields = {} if thinking is None else {"reasoning": THINK, "starts_in_reasoning": thinking}
    whole = parse(style, "".join(parts), **fields)
    assert parse(style, parts, **fields) == whole
    assert parse(style, list("".join(parts)), **fields) == whole


@settings(max_examples=200, deadline=None)
@given(TEXTS, st.sampled_from([style for style in STYLES if style != "harmony"]))  # all text has heads there
def test_a_text_without_a_call_is_its_own_content(text: str, style: StyleName) -> None:
    parsed = collect(parse(style, text))
    assert parsed == Parsed(text, "", []) or parsed.calls


WORDS = st.lists(
    st.sampled_from(["So", " it is.", "\n", "{1}", "<b>", "<tool_call", "[x]", "<tool_call>{", "é"]), max_size=4
)


@settings(max_examples=200, deadline=None)
@given(st.lists(WORDS.map("".join), min_size=1, max_size=5))
def test_text_around_calls_is_content_less_the_whitespace_at_their_tags(texts: list[str]) -> None:
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    content, calls = read("hermes", call.join(texts))
    assert calls == [NOW] * (len(texts) - 1)
    assert "".join(content.split()) == "".join("".join(texts).split())


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(st.text(max_size=8), st.recursive(st.text() | st.integers() | st.none(), st.lists, max_leaves=6)),
    st.booleans(),
    st.text(alphabet=st.characters(exclude_characters="<[{｜"), max_size=20),
)
def test_any_arguments_come_back_as_they_were_written(arguments: dict[str, Any], ascii_: bool, before: str) -> None:
    text = json.dumps(arguments, ensure_ascii=ascii_)
    expected = [("now", text)]
    assert read("hermes", f'{before}<tool_call>\n{{"name": "now", "arguments": {text}}}\n</tool_call>')[1] == expected
    assert read("llama3_json", f'{{"name": "now", "parameters": {text}}}')[1] == expected
    assert read("mistral", f"{before}[TOOL_CALLS]now[ARGS]{text}")[1] == expected
    assert read("json", f'[{{"name": "now", "arguments": {text}}}]')[1] == expected
    assert read("deepseek_v3", f"{before}{DS_BEGIN}now{DS_SEP}{text}{DS_END}")[1] == expected


@pytest.mark.parametrize("style", list(STYLES))
def test_hostile_texts_take_linear_time(style: StyleName) -> None:
    def seconds(unit: str, num_chars: int, *, whole: bool) -> float:
        text = unit * (num_chars // len(unit))
        parser = AnswerReader(AnswerFormat(calls=STYLES[style], tools=TOOLS))
        started = time.thread_time()
        for piece in [text] if whole else [text[i : i + 4] for i in range(0, len(text), 4)]:
            parser.read(piece)
        parser.read("", ended=True)
        return time.thread_time() - started

    for unit in (
        *STYLES[style].tags[:2],
        '<tool_call>{"a": ',
        '[TOOL_CALLS][{"a": "',
        "[",
        "\n",
        '\\"',
        "<function=now>",
    ):
        for whole in (True, False):
            # Quadratic work would take 64 times as long for 8 times the text.
            limit = 24 * max(seconds(unit, 6_000, whole=whole), 5e-3)
            assert any(seconds(unit, 48_000, whole=whole) < limit for _ in range(2)), unit


# --- Which format a template asks for ---------------------------------------------------------------------------------

QWEN3 = r"""
    {{- "\n</tools>\n\nFor each function call, return a json object with function name and arguments within <tool_call>"
    "</tool_call> XML tags:\n<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call>"
    }}{%- if '</think>' in content %}{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"""
TEMPLATES: list[tuple[str, StyleName | None, str | None]] = [
    (QWEN3, "hermes", "think"),
    (r"""{{- '\n<tool_call>\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}""", "hermes", None),
    (
        r"""{{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its """
        r"""value}. ' }}{{- "Do not use variables.\n\n" }}""",
        "llama3_json",
        None,
    ),
    (
        """{{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}""",
        "harmony",
        "harmony",
    ),
    ("{{ '<|user|>' + message['content'] + '<|end|>' }}", None, None),  # Phi
    (r"""{{- "[TOOL_CALLS] [" }}{%- for tool_call in tool_calls %}""", "mistral", None),
    (r"""[TOOL_CALLS]{{- tool.function.name -}}[ARGS]{{- tool.function.arguments | tojson -}}""", "mistral", None),
    (r"""{{- '[THINK]' + block['thinking'] + '[/THINK]' }}{{ '[TOOL_CALLS]' }}""", "mistral", "mistral"),
    (
        r"""{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>'}}"""
        r"""{% if '</think>' in content %}{% endif %}{{'<｜Assistant｜><think>\n'}}""",
        "deepseek_v3",
        "think",
    ),
    (
        r"""format:\n\n<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n""",
        "qwen3_coder",
        None,
    ),
    (r"""<function=example_function_name>{{"{{"}}"example_name": "example_value"}}</function>""", None, None),
    (
        r"""<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>""",
        None,
        None,
    ),
    (
        "{% for message in messages %}{{'<|im_start|>' + message['role'] + message['content']}}{% endfor %}",
        None,
        None,
    ),
]


@pytest.mark.parametrize(("template", "calls", "reasoning"), TEMPLATES)
def test_the_format_is_read_off_the_chat_template(template: str, calls: str | None, reasoning: str | None) -> None:
    assert detect_calls(template) == calls
    assert detect_reasoning(template) == reasoning
