"""Chat templates: what they are given, what they cannot do, and that none takes longer than it may."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from jinja2.exceptions import SecurityError, TemplateError

from cluster.text.chat_template import ChatTemplate, TemplateLimitError
from cluster.text.conversation import Call, Conversation, Turn
from cluster.text.formats import ModelFormats
from cluster.text.prompt_encoder import render
from cluster.text.tokenizer import Tokenizer
from configs.errors import CheckpointError, ConfigError, RequestError
from configs.schema import ServerConfig
from tests.helpers.chats import parse_turns
from tests.helpers.scripted_engine import Run, Stack, error_of, runner

USER = [{"role": "user", "content": "hi"}]


def template(source: Any) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})


def test_messages_render_as_transformers_renders_them(smollm2_path: Path) -> None:
    tokenizer = Tokenizer.load(smollm2_path)
    conversations = [
        USER,
        [{"role": "system", "content": "Be brief."}, *USER, {"role": "assistant", "content": "ok"}, *USER],
    ]
    for messages in conversations:
        for opened in (True, False):
            expected = tokenizer._fast.apply_chat_template(messages, tokenize=False, add_generation_prompt=opened)
            assert tokenizer.template is not None
            assert tokenizer.template.render(messages, add_generation_prompt=opened) == expected


TOOL_TEMPLATE = """{{ bos_token }}{% for tool in tools or [] %}[tool {{ tool | tojson }}]{% endfor %}
{%- for m in messages -%}
<{{ m.role }}>{{ m.content }}
{%- for call in m.tool_calls or [] %}[{{ call.function.name }} {{ call.function.arguments.city }}]{% endfor -%}
{%- if m.tool_call_id %}#{{ m.tool_call_id }}{% endif -%}
{%- endfor %}"""


def test_tools_calls_and_results_reach_the_template() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Öl"}'}}
    turns = parse_turns(
        [
            *USER,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "rain"}]},
        ]
    )
    tool = {"type": "function", "function": {"name": "weather", "description": "<é>"}}
    text = template(TOOL_TEMPLATE).render([turn.message() for turn in turns], tools=[tool])
    assert text.startswith('<s>[tool {"type": "function", "function": {"name": "weather", "description": "<é>"}}]')
    assert text.endswith("<user>hi<assistant>[weather Öl]<tool>rain#c1")


def test_a_template_is_picked_by_what_a_request_brings() -> None:
    several = template({"default": "plain", "tool_use": "tools", "rag": "rag"})
    assert [several.render(USER), several.render(USER, tools=[{}]), several.render(USER, documents=[{}])] == [
        "plain",
        "tools",
        "rag",
    ]


def test_a_request_sets_only_variables_that_the_template_reads() -> None:
    made = template(
        "{% if enable_thinking is defined and enable_thinking %}T{% endif %}{% set mine = 1 %}{{ mine }}{{ bos_token }}"
        "{{ messages[0].content }}{{ strftime_now('%Y') if no_year is undefined }}{{ raise_exception('x') if bad }}"
    )
    assert [name for name in ("enable_thinking", "no_year", "bad") if made.takes(name)] == [
        "enable_thinking",
        "no_year",
        "bad",
    ]
    for name in ("mine", "bos_token", "messages", "strftime_now", "raise_exception", "range", "other", "tools"):
        assert not made.takes(name), name
    assert made.render(USER, variables={"enable_thinking": True, "no_year": 1}) == "T1<s>hi"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for m in messages %}[{{ m.content }}]</s>{% endfor %}", "[Well, "),
        (
            "{% for m in messages %}{{ m.content | trim }}<end>\n{% endfor %}{{ 'x' if add_generation_prompt }}",
            "Well, ",
        ),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %} tail", "Well, "),
    ],
)
def test_a_continued_message_ends_where_its_content_does(source: str, expected: str) -> None:
    messages = [{"role": "assistant", "content": "Well, "}]
    assert template(source).render(messages, continue_final_message=True) == expected


def test_a_template_that_drops_the_message_to_continue_refuses() -> None:
    with pytest.raises(TemplateError, match="final message"):
        template("nothing").render(USER, continue_final_message=True)


@pytest.mark.parametrize(
    "source",
    [
        "{{ lipsum.__globals__['os'].popen('id').read() }}",
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
    ],
)
def test_a_template_does_not_leave_its_sandbox(source: str) -> None:
    with pytest.raises(SecurityError):
        template(source).render(USER)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''['format'].__globals__ }}",
        "{% set n = namespace(__class__=1) %}{{ n.__class__ }}",
        "{{ '{0.__class__.__init__}'.format(messages) }}",
        "{{ self.__dict__ }}",
    ],
)
def test_what_a_template_may_not_see_is_nothing(source: str) -> None:
    assert template(source).render(USER) == ""


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
        "{% macro f(n) %}{{ f(n - 1) + f(n - 1) if n }}{% endmacro %}{{ f(60) }}",
        "{% set n = namespace(x=0) %}{% for i in range(99999) %}{% for j in messages * 9999 %}{% set n.x = n.x + 1 %}"
        "{% endfor %}{% endfor %}",
    ],
)
def test_an_endless_template_ends_in_time(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.text.chat_template.RENDER_TIMEOUT_S", 0.2)
    began = time.thread_time()
    with pytest.raises((TemplateLimitError, OverflowError)):
        template(source).render(USER)
    assert time.thread_time() - began < 2


def test_a_template_that_writes_without_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.text.chat_template.MAX_RENDERED_CHARS", 1000)
    with pytest.raises(TemplateLimitError, match="1000 characters"):
        template("{% for i in range(99999) %}x{% endfor %}").render(USER)


def with_template(smollm2_path: Path, tmp_path: Path, source: str) -> Tokenizer:
    file = tmp_path / "mine.jinja"
    file.write_text(source)
    return Tokenizer.load(smollm2_path, chat_template=str(file))


def test_others_are_served_while_a_template_hangs(smollm2_path: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("cluster.text.chat_template.RENDER_TIMEOUT_S", 4.0)
    source = "{% if hang %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}ok"
    run: Run = runner(with_template(smollm2_path, tmp_path, source), tmp_path)

    async def scenario(stack: Stack) -> None:
        hanging = [asyncio.create_task(stack.chat(chat_template_kwargs={"hang": True})) for _ in range(2)]
        await asyncio.sleep(0.1)
        assert (await stack.chat(max_tokens=1)).status_code == 200
        assert not any(task.done() for task in hanging)
        for task in hanging:
            error = error_of(await task, 400, "invalid_value")
            assert "took more than" in error["message"]

    run(scenario)


def test_one_bos_is_enough(smollm2_path: Path, tmp_path: Path) -> None:
    source = "{{ bos_token }}{{ bos_token }}{{ messages[0].content }}"
    run: Run = runner(with_template(smollm2_path, tmp_path, source), tmp_path)

    async def scenario(stack: Stack) -> None:
        assert (await stack.chat(return_token_ids=True, max_tokens=1)).json()["prompt_token_ids"].count(1) == 1

    run(scenario)


def test_a_template_that_is_not_jinja_is_a_wrong_setting(smollm2_path: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"server\.chat_template=.* is not Jinja") as caught:
        with_template(smollm2_path, tmp_path, "{% if %}")
    assert not isinstance(caught.value, CheckpointError)


def test_messages_a_template_did_not_foresee_are_the_callers_error(smollm2_path: Path, tmp_path: Path) -> None:
    tokenizer = with_template(smollm2_path, tmp_path, "{{ messages[5].content.nothing }}")
    with pytest.raises(RequestError, match="refuses these messages"):
        render(Conversation(turns=parse_turns(USER)), tokenizer.template, ModelFormats())


def test_ids_of_another_models_calls_are_shown_as_mistrals_templates_accept_them() -> None:
    source = (
        "{{ tools }}[TOOL_CALLS]{% for message in messages %}{% for call in message.tool_calls or [] %}"
        "{% if call.id|length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}{{ call.id }}"
        "{% endfor %}{% if message.role == 'tool' %}={{ message.tool_call_id }}{% endif %}{% endfor %}"
    )
    made = template(source)
    formats = ModelFormats.of(made, ServerConfig(tool_call_parser="mistral"))

    def shown(call_id: str) -> tuple[str, str]:
        call = Turn(role="assistant", calls=(Call("now", {}, call_id),))
        turns = [Turn(role="user", text="hi"), call, Turn(role="tool", text="12:00", call_id=call_id)]
        call_text, result = render(Conversation(turns=turns), made, formats).split("]")[-1].split("=")
        return call_text, result

    assert shown("abcdEFG12") == ("abcdEFG12", "abcdEFG12")
    one, other = shown("call_7f3a"), shown("toolu_01")
    assert one[0] == one[1] != other[0] == other[1]
    assert all(len(it) == 9 and it.isalnum() for it in (*one, *other))
