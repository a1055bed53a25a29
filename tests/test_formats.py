"""What a model's chat template and the settings make of a request with tools."""

from __future__ import annotations

import logging
from typing import Any, get_args

import pytest

from cluster.openai.formats import ModelFormats
from cluster.openai.reasoning import REASONING_STYLES
from cluster.openai.tools.request import parse_tools
from cluster.openai.tools.styles import STYLES
from configs.errors import RequestError
from configs.schema import ServerConfig

NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
STRICT: dict[str, Any] = {"type": "function", "function": {"name": "strict", "strict": True}}
QWEN = "{% if tools %}<tool_call>{% endif %}{{ message.tool_calls }}</think>"


def formats(template: str = QWEN, *, reads_tools: bool = True, **settings: Any) -> ModelFormats:
    return ModelFormats.of(template, reads_tools=reads_tools, server=ServerConfig(**settings))


def no_specials(tag: str) -> int | None:
    return None


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
    plain = formats("{{ messages }}", reads_tools=False)
    assert (plain.calls, plain.reasoning, plain.takes_calls) == (None, None, False)


def test_tools_are_shown_only_where_they_may_be_called() -> None:
    found = formats()
    assert found.shown_tools(None) is None
    assert found.shown_tools(parse_tools([NOW], "none")) is None
    shown = found.shown_tools(parse_tools([NOW, STRICT], {"type": "function", "function": {"name": "now"}}))
    assert shown is not None
    assert [tool["function"]["name"] for tool in shown] == ["now", "strict"]


@pytest.mark.parametrize(
    ("template", "reads_tools", "settings", "is_refused"),
    [
        (QWEN, True, {}, False),
        ("{{ messages }}", False, {}, True),
        ("{{ tools }}", True, {}, True),
        ("{{ tools }}", True, {"tool_call_parser": "json"}, False),
        ("{{ tools }}", True, {"tool_call_parser": "none"}, False),
        ("{{ messages }}", False, {"tool_call_parser": "json"}, True),
    ],
)
def test_tools_are_refused_that_the_model_would_not_see_or_whose_calls_could_not_be_read(
    template: str, reads_tools: bool, settings: dict[str, Any], is_refused: bool
) -> None:
    found = formats(template, reads_tools=reads_tools, **settings)
    if is_refused:
        with pytest.raises(RequestError) as raised:
            found.shown_tools(parse_tools([NOW]))
        assert (raised.value.param, raised.value.code) == ("tools", "unsupported_parameter")
    else:
        assert found.shown_tools(parse_tools([NOW])) is not None
    # A call that is required is written by the grammar, and read as the grammar writes it.
    forced = parse_tools([NOW], "required")
    assert (found.shown_tools(forced) is not None) == reads_tools
    assert found.answer_format(forced, "").calls is not None
    assert found.call_grammar(forced, no_specials) is not None


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
    coder = formats("<function= <parameter=")
    assert coder.answer_format(parse_tools([NOW], "required"), "").calls is STYLES["json"]
    assert coder.answer_format(parse_tools([NOW]), "").calls is STYLES["qwen3_coder"]
    assert "<think>" in auto.tags
    assert "<tool_call>" in auto.tags


def test_only_strict_tools_bind_an_answer_that_is_free_to_call_or_not() -> None:
    found = formats()
    assert found.call_grammar(None, no_specials) is None
    assert found.call_grammar(parse_tools([NOW]), no_specials) is None
    assert found.call_grammar(parse_tools([NOW, STRICT], "none"), no_specials) is None
    grammar = found.call_grammar(parse_tools([NOW, STRICT]), no_specials)
    assert grammar is not None
    assert "tail: TEXT" in grammar
    assert formats("<function= <parameter=").call_grammar(parse_tools([STRICT]), no_specials) is None
