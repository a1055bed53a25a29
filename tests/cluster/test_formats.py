"""What a model's chat template and the settings make of a request with tools."""

from __future__ import annotations

import json
import logging
from typing import Any, get_args

import pytest

from cluster.text.chat_template import ChatTemplate
from cluster.text.formats import ModelFormats
from cluster.text.reasoning import REASONING_STYLES
from cluster.text.tools.styles import STYLES
from configs.errors import RequestError
from configs.schema import ServerConfig
from tests.helpers.chats import parse_tools

NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
STRICT: dict[str, Any] = {"type": "function", "function": {"name": "strict", "strict": True}}
QWEN = "{% if tools %}<tool_call>{% endif %}{{ message.tool_calls }}</think>"


def formats(template: str = QWEN, **settings: Any) -> ModelFormats:
    return ModelFormats.of(ChatTemplate(template, {}), ServerConfig(**settings))


def test_the_settings_name_the_formats_there_are() -> None:
    fields = ServerConfig.model_fields
    assert set(get_args(fields["tool_call_parser"].annotation)) == {"auto", "none", *STYLES}
    assert set(get_args(fields["reasoning_parser"].annotation)) == {"auto", "none", *REASONING_STYLES}


def test_formats_come_from_the_template_and_settings_win(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    found = formats()
    assert (found.calls, found.reasoning) == (STYLES["hermes"], REASONING_STYLES["think"])
    assert found.takes_tools
    assert found.takes_calls
    assert "server.tool_call_parser: auto -> hermes" in caplog.text
    named = formats(tool_call_parser="json", reasoning_parser="none")
    assert (named.calls, named.reasoning) == (STYLES["json"], None)
    assert "server.tool_call_parser=json, but the chat template shows the format hermes" in caplog.text
    assert formats("", tool_call_parser="mistral").calls is STYLES["mistral"]
    plain = formats("{{ messages }}", tool_template="off")
    assert (plain.calls, plain.reasoning, plain.takes_calls) == (None, None, False)
    assert ModelFormats.of(None, ServerConfig()).tool_template == "none"
    assert ModelFormats.of(None, ServerConfig()).calls is None


@pytest.mark.parametrize(
    ("template", "settings", "shown_by", "calls"),
    [
        (QWEN, {}, "own", "hermes"),
        (QWEN, {"tool_template": "generic"}, "generic", "hermes"),
        (QWEN, {"tool_call_parser": "none"}, "own", None),
        ("{{ messages }}", {}, "generic", "hermes"),
        ("{{ messages }}", {"tool_template": "off"}, "none", None),
        ("{{ messages }}", {"tool_call_parser": "none"}, "generic", None),
        ("{{ messages }}", {"tool_call_parser": "mistral"}, "generic", "mistral"),
        ("{{ messages }}", {"tool_call_parser": "qwen3_coder"}, "generic", "hermes"),
        # Tools without calls and results are half of a conversation; calls in a format that nothing reads are text.
        ("{{ tools }}<tool_call>", {}, "generic", "hermes"),
        ("{{ tools }}{{ messages[0].tool_calls }}", {}, "generic", "hermes"),
        ("{{ tools }}", {"tool_template": "off"}, "own", None),
    ],
)
def test_tools_are_shown_by_the_template_or_in_the_generic_form(
    template: str, settings: dict[str, Any], shown_by: str, calls: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    found = formats(template, **settings)
    assert found.tool_template == shown_by
    assert (None if found.calls is None else found.calls.name) == calls
    assert ("has no effect" in caplog.text) == (settings.get("tool_call_parser") == "qwen3_coder")


def test_tools_are_shown_only_where_they_may_be_called() -> None:
    found = formats()
    assert found.shown_tools(None) is None
    assert found.shown_tools(parse_tools([NOW], "none")) is None
    shown = found.shown_tools(parse_tools([NOW, STRICT], {"type": "function", "function": {"name": "now"}}))
    assert shown is not None
    assert [tool["function"]["name"] for tool in shown] == ["now", "strict"]


@pytest.mark.parametrize(
    ("template", "settings", "is_refused"),
    [
        (QWEN, {}, False),
        ("{{ messages }}", {}, True),
        ("{{ tools }}", {}, True),
        ("{{ tools }}", {"tool_call_parser": "json"}, False),
        ("{{ tools }}", {"tool_call_parser": "none"}, False),
        ("{{ messages }}", {"tool_call_parser": "json"}, True),
    ],
)
def test_without_the_generic_form_tools_are_refused_that_the_model_would_not_see_or_whose_calls_could_not_be_read(
    template: str, settings: dict[str, Any], is_refused: bool
) -> None:
    found = formats(template, tool_template="off", **settings)
    if is_refused:
        with pytest.raises(RequestError) as raised:
            found.shown_tools(parse_tools([NOW]))
        assert (raised.value.param, raised.value.code) == ("tools", "unsupported_parameter")
    else:
        assert found.shown_tools(parse_tools([NOW])) is not None
    # A call that is required is written by the grammar, and read as the grammar writes it.
    forced = parse_tools([NOW], "required")
    assert (found.shown_tools(forced) is not None) == ("tools" in template)
    assert found.answer_format(forced, "").calls is not None
    assert found.needs_grammar(forced, has_grammar=False)


def test_an_answer_is_read_as_its_request_and_prompt_say() -> None:
    found = formats()
    plain = found.answer_format(None, "<think>\n")
    assert (plain.calls, plain.reasoning, plain.starts_in_reasoning) == (None, REASONING_STYLES["think"], True)
    assert not found.answer_format(None, "assistant\n").starts_in_reasoning
    assert found.answer_format(parse_tools([NOW], "none"), "").calls is None
    auto = found.answer_format(parse_tools([NOW]), "")
    assert (auto.calls, auto.max_calls) == (STYLES["hermes"], None)
    assert list(auto.tools) == ["now"]
    assert found.answer_format(parse_tools([NOW], "auto", parallel_tool_calls=False), "").max_calls == 1
    one = found.answer_format(parse_tools([NOW, STRICT], {"type": "function", "function": {"name": "now"}}), "")
    assert (list(one.tools), one.max_calls) == (["now"], 1)
    # The format of Qwen 3 Coder has no grammar: a forced call is plain JSON.
    coder = formats("<function= <parameter= {{ tools }} {{ messages[0].tool_calls }}")
    assert coder.answer_format(parse_tools([NOW], "required"), "").calls is STYLES["json"]
    assert coder.answer_format(parse_tools([NOW]), "").calls is STYLES["qwen3_coder"]
    assert "<think>" in auto.tags
    assert "<tool_call>" in auto.tags


def test_only_what_binds_calls_needs_a_grammar() -> None:
    found = formats()
    assert not found.needs_grammar(None, has_grammar=True)
    assert not found.needs_grammar(parse_tools([NOW]), has_grammar=False)
    assert not found.needs_grammar(parse_tools([NOW, STRICT], "none"), has_grammar=True)
    assert found.needs_grammar(parse_tools([NOW, STRICT]), has_grammar=False)
    assert found.needs_grammar(parse_tools([NOW]), has_grammar=True)
    # Calls without a tag: nothing in a text shows where they begin.
    bare = formats(
        '"parameters": dictionary of argument name and its value {{ tools }} {{ messages[0].tool_calls }}',
    )
    assert bare.calls is STYLES["llama3_json"]
    assert not bare.needs_grammar(parse_tools([STRICT]), has_grammar=False)
    assert bare.needs_grammar(parse_tools([STRICT], "required"), has_grammar=True)
    with pytest.raises(RequestError) as raised:
        bare.needs_grammar(parse_tools([NOW]), has_grammar=True)
    assert raised.value.param == "tools"
    assert not formats(tool_call_parser="none").needs_grammar(parse_tools([STRICT]), has_grammar=True)


def test_a_grammar_is_put_together_for_how_tools_are_used() -> None:
    found = formats()
    anything = json.dumps({"grammars": [{"json_schema": {"type": "object"}}]})

    def grammar(use: Any, answer: str | None = None) -> list[Any]:
        made = found.call_grammar(use, [anything] * len(use.callable), lambda tag: None, answer)
        parts: list[Any] = json.loads(made)["grammars"]
        return parts

    one = grammar(parse_tools([NOW, STRICT], {"type": "function", "function": {"name": "now"}}))
    assert [part.get("name") for part in one] == [None, "arguments_0"]
    assert ")*" not in one[0]["lark_grammar"]
    assert "call)*" in grammar(parse_tools([NOW], "required"))[0]["lark_grammar"]
    assert "tail" in grammar(parse_tools([STRICT]))[0]["lark_grammar"]
    either = grammar(parse_tools([NOW]), anything)
    assert [part.get("name") for part in either] == [None, "arguments_0", "response"]


def test_a_prompt_says_whether_thinking_is_to_come() -> None:
    found = formats()
    assert found.answer_format(None, "<think>\n\n</think>\n\n").starts_after_reasoning
    assert not found.answer_format(None, "assistant\n").starts_after_reasoning
    assert found.answer_format(None, "x", "<think>a</think>b").starts_after_reasoning
    assert not found.answer_format(None, "x", "<think>a").starts_after_reasoning
