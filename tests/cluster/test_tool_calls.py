"""Tools and thinking through HTTP, over a scripted engine: what the model is shown, and what clients read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from cluster.text.tokenizer import Tokenizer
from configs.schema import ServerConfig
from tests.helpers.scripted_engine import EOS, MODEL, Run, Stack, error_of, events, runner, served

# In the manner of Qwen 3: Hermes' calls, thinking that can be turned off, earlier calls and results.
TEMPLATE = r"""
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Call with <tool_call>
{"name": <name>, "arguments": <object>}
</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>
{{ call.function | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}<|im_start|>assistant
{% if enable_thinking is defined %}{{ '<think>\n' if enable_thinking else '<think>\n\n</think>\n\n' }}{% endif %}"""
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
QUESTION: list[Any] = [{"role": "user", "content": "hi"}]

Say = Callable[..., list[int]]


@pytest.fixture(scope="module")
def qwen(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    template = tmp_path_factory.mktemp("template") / "qwen.jinja"
    template.write_text(TEMPLATE)
    return Tokenizer.load(smollm2_path, chat_template=str(template))


@pytest.fixture
def ask(qwen: Tokenizer, tmp_path: Path) -> Run:
    """run(scenario, text=..., **script): the engine answers every request with `text`."""
    run = runner(qwen, tmp_path)

    def go(scenario: Any, text: str = "", server: ServerConfig | None = None, **script: Any) -> None:
        run(scenario, server, 1024, reply=[*qwen.encode(text, add_special_tokens=False), EOS], **script)

    return go


def prompt_of(stack: Stack, qwen: Tokenizer) -> str:
    ids = memoryview(stack.coordinator.requests[-1].prompt).cast("i").tolist()
    return qwen.decode(ids, skip_special_tokens=False)


def test_a_call_is_told_apart_from_text(ask: Run, qwen: Tokenizer) -> None:
    async def scenario(stack: Stack) -> None:
        body = (await stack.chat(tools=[WEATHER])).json()
        [choice] = body["choices"]
        message = choice["message"]
        [call] = message.pop("tool_calls")
        assert call.pop("id").startswith("call_")
        assert call == {"type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
        assert message == {"role": "assistant", "content": None, "refusal": None}
        assert choice["finish_reason"] == "tool_calls"
        assert body["usage"]["completion_tokens"] == len(stack.coordinator.reply)
        assert json.dumps(WEATHER) in prompt_of(stack, qwen)

    ask(scenario, CALL)


def test_a_stream_of_calls_has_openais_shape(ask: Run) -> None:
    async def scenario(stack: Stack) -> None:
        *chunks, done = events(await stack.chat(tools=[WEATHER], stream=True, logprobs=True))
        assert done == "[DONE]"
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert deltas[-1] == {}
        assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
        assert "".join(delta.get("content", "") for delta in deltas) == "Wait."
        by_index: dict[int, list[Any]] = {0: [], 1: []}
        for delta in deltas:
            for call in delta.get("tool_calls", ()):
                by_index[call.pop("index")].append(call)
        for first, *others in by_index.values():
            assert first.pop("id").startswith("call_")
            assert first == {"type": "function", "function": {"name": "get_weather", "arguments": ""}}
            assert all(set(other) == {"function"} for other in others)
            assert all(set(other["function"]) == {"arguments"} for other in others)
            assert len(others) > 2, "arguments come as they are written"
            assert "".join(other["function"]["arguments"] for other in others) == '{"city": "Paris"}'
        # Every token's log probability is there once, whatever its text became.
        rows = [chunk["choices"][0]["logprobs"] for chunk in chunks]
        names = [entry["token"] for row in rows if row is not None for entry in row["content"]]
        assert len(names) == len(stack.coordinator.reply)
        assert "".join(names).startswith("Wait.\n<tool_call>")

    ask(scenario, f"Wait.\n{CALL}\n{CALL}")


def test_parallel_calls_can_be_turned_off(ask: Run) -> None:
    async def scenario(stack: Stack) -> None:
        body = (await stack.chat(tools=[WEATHER], parallel_tool_calls=False)).json()
        assert len(body["choices"][0]["message"]["tool_calls"]) == 1

    ask(scenario, f"{CALL}\n{CALL}")


def test_choices_call_on_their_own(ask: Run) -> None:
    async def scenario(stack: Stack) -> None:
        choices = (await stack.chat(tools=[WEATHER], n=2)).json()["choices"]
        ids = [choice["message"]["tool_calls"][0]["id"] for choice in choices]
        assert len(set(ids)) == 2
        chunks = events(await stack.chat(tools=[WEATHER], n=2, stream=True))[:-1]
        ends = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["finish_reason"]]
        assert [(end["index"], end["finish_reason"]) for end in ends] == [(0, "tool_calls"), (1, "tool_calls")]

    ask(scenario, CALL)


def test_without_a_call_tools_change_no_answer(ask: Run) -> None:
    async def scenario(stack: Stack) -> None:
        for fields in ({}, {"tools": [WEATHER]}, {"tools": [WEATHER], "tool_choice": "auto"}):
            [choice] = (await stack.chat(**fields)).json()["choices"]
            assert choice["message"] == {"role": "assistant", "content": "Hi.\n", "refusal": None}
            assert choice["finish_reason"] == "stop"

    ask(scenario, "Hi.\n")


def test_without_tools_to_call_a_call_is_text(ask: Run, qwen: Tokenizer) -> None:
    async def scenario(stack: Stack) -> None:
        for fields in ({}, {"tools": []}, {"tools": [WEATHER], "tool_choice": "none"}):
            [choice] = (await stack.chat(**fields)).json()["choices"]
            assert choice["message"]["content"] == CALL
            assert "get_weather" not in prompt_of(stack, qwen)
        other = {"type": "function", "function": {"name": "other"}}
        assert (await stack.chat(tools=[other])).json()["choices"][0]["message"]["content"] == CALL

    ask(scenario, CALL)


def test_a_call_cut_off_ends_for_length(ask: Run) -> None:
    async def scenario(stack: Stack) -> None:
        [choice] = (await stack.chat(tools=[WEATHER], max_tokens=20)).json()["choices"]
        assert choice["finish_reason"] == "length"
        arguments = choice["message"]["tool_calls"][0]["function"]["arguments"]
        assert '{"city": "Paris"}'.startswith(arguments)

    ask(scenario, CALL)


def test_calls_and_results_go_back_to_the_model(ask: Run, qwen: Tokenizer) -> None:
    async def scenario(stack: Stack) -> None:
        call = {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Paris"}'}}
        messages = [
            *QUESTION,
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Hm."},
            {"role": "tool", "tool_call_id": "a", "content": "rain"},
        ]
        assert (await stack.chat(messages=messages, tools=[WEATHER])).status_code == 200
        shown = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>'
        assert f"<|im_start|>assistant\n<think>Hm.</think>{shown}" in prompt_of(stack, qwen)
        assert "<|im_start|>tool\nrain<|im_end|>" in prompt_of(stack, qwen)

    ask(scenario, "It rains.")


def test_templates_that_join_arguments_to_text_get_them_as_text(
    smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = tmp_path / "deepseek.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ '<｜tool▁call▁begin｜>' + c.function.name + '<｜tool▁sep｜>' + c.function.arguments }}"
        "{% endfor %}{% endfor %}"
    )
    deepseek = Tokenizer.load(smollm2_path, chat_template=str(template))

    async def scenario(stack: Stack) -> None:
        call = {"id": "a", "function": {"name": "f", "arguments": {"city": "Paris"}}}
        messages = [*QUESTION, {"role": "assistant", "tool_calls": [call]}]
        assert (await stack.chat(messages=messages)).status_code == 200
        assert '<｜tool▁sep｜>{"city": "Paris"}' in prompt_of(stack, deepseek)

    runner(deepseek, tmp_path)(scenario, ServerConfig(tool_template="off"))


def test_without_the_generic_form_what_a_template_would_leave_out_is_refused(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        refused = error_of(await stack.chat(tools=[WEATHER]), 400, "unsupported_parameter")
        assert refused["param"] == "tools"
        call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        messages = [*QUESTION, {"role": "assistant", "tool_calls": [call]}]
        refused = error_of(await stack.chat(messages=messages), 400, "unsupported_parameter")
        assert refused["param"] == "messages[1].tool_calls"
        messages = [*QUESTION, {"role": "tool", "content": "rain"}]
        refused = error_of(await stack.chat(messages=messages), 400, "unsupported_parameter")
        assert refused["param"] == "messages[1].role"
        assert (await stack.chat(tools=[WEATHER], tool_choice="none")).status_code == 200

    run(scenario, ServerConfig(tool_template="off"))


def test_the_older_form_of_tools_is_refused(ask: Run) -> None:
    async def scenario(stack: Stack) -> None:
        for name, value in (("functions", [{"name": "f"}]), ("function_call", {"name": "f"})):
            assert error_of(await stack.chat(**{name: value}), 400, "unsupported_parameter")["param"] == name
        refused = error_of(
            await stack.chat(tools=[{"type": "function", "function": {}}]), 400, "missing_required_parameter"
        )
        assert refused["param"] == "tools[0].function.name"

    ask(scenario)


# --- Calls that are required ------------------------------------------------------------------------------------------

NAMED = {"type": "function", "function": {"name": "get_weather"}}


def grammar_of(stack: Stack) -> list[dict[str, Any]]:
    grammar = stack.coordinator.requests[-1].sampling.grammar
    assert grammar is not None
    parts: list[dict[str, Any]] = json.loads(grammar)["grammars"]
    return parts


@pytest.mark.parametrize(("choice", "reason"), [("required", "tool_calls"), (NAMED, "stop")])
def test_a_required_call_has_a_grammar_and_openais_reason(ask: Run, choice: Any, reason: str) -> None:
    async def scenario(stack: Stack) -> None:
        fields = {"tools": [WEATHER], "tool_choice": choice}
        [answer] = (await stack.chat(**fields)).json()["choices"]
        assert answer["finish_reason"] == reason
        assert answer["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Paris"}'
        # The model may think first: its template knows how.
        assert [part.get("name") for part in grammar_of(stack)] == [None, "answer", "arguments_0"]
        chunks = events(await stack.chat(stream=True, **fields))
        assert chunks[-2]["choices"][0]["finish_reason"] == reason
        body = {"chat_template_kwargs": {"enable_thinking": False}, **fields}
        assert (await stack.chat(**body)).status_code == 200
        assert [part.get("name") for part in grammar_of(stack)] == [None, "arguments_0"]

    ask(scenario, CALL)


def test_a_call_can_be_required_of_any_model(run: Run, smollm2: Tokenizer) -> None:
    reply = smollm2.encode('[{"name": "get_weather", "arguments": {"city": "Paris"}}]', add_special_tokens=False)

    async def scenario(stack: Stack) -> None:
        [answer] = (await stack.chat(tools=[WEATHER], tool_choice=NAMED)).json()["choices"]
        assert answer["message"]["tool_calls"][0]["function"]["name"] == "get_weather"
        assert "get_weather" in grammar_of(stack)[0]["lark_grammar"]

    run(scenario, ServerConfig(tool_template="off"), reply=[*reply, EOS])


def test_strict_tools_and_a_format_of_the_answer_share_a_grammar(ask: Run) -> None:
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}

    async def scenario(stack: Stack) -> None:
        await stack.chat(tools=[WEATHER])
        assert stack.coordinator.requests[-1].sampling.grammar is None
        await stack.chat(tools=[strict])
        assert [part.get("name") for part in grammar_of(stack)] == [None, "answer", "arguments_0"]
        await stack.chat(tools=[WEATHER], response_format={"type": "json_object"})
        assert [part.get("name") for part in grammar_of(stack)] == [None, "answer", "arguments_0", "response"]
        bad = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"minProperties": "x"}}}
        refused = error_of(await stack.chat(tools=[WEATHER, bad], tool_choice="required"), 400, "invalid_value")
        assert refused["param"] == "tools[1].function.parameters"

    ask(scenario, "Hi.")


# --- Thinking ---------------------------------------------------------------------------------------------------------


def test_thinking_is_kept_out_of_the_content_and_counted(ask: Run, qwen: Tokenizer) -> None:
    thought = "<think>\nWhy not?\n</think>"
    num_thought = len(qwen.encode(thought, add_special_tokens=False))

    async def scenario(stack: Stack) -> None:
        body = (await stack.chat()).json()
        message = {"role": "assistant", "content": "Yes.", "refusal": None}
        assert body["choices"][0]["message"] == {
            **message,
            "reasoning_content": "Why not?",
            "reasoning": "Why not?",
        }
        assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": num_thought}
        assert body["usage"]["completion_tokens"] == len(stack.coordinator.reply)
        hidden = (await stack.chat(include_reasoning=False)).json()
        assert hidden["choices"][0]["message"] == message
        assert hidden["usage"]["completion_tokens_details"] == {"reasoning_tokens": num_thought}

        fields = {"stream": True, "stream_options": {"include_usage": True}}
        *chunks, usage, _ = events(await stack.chat(**fields))
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        for name in ("reasoning_content", "reasoning"):
            assert "".join(delta.get(name, "") for delta in deltas) == "Why not?"
        assert "".join(delta.get("content", "") for delta in deltas) == "Yes."
        assert usage["usage"]["completion_tokens_details"] == {"reasoning_tokens": num_thought}
        chunks = events(await stack.chat(include_reasoning=False, **fields))[:-2]
        assert not any("reasoning" in chunk["choices"][0]["delta"] for chunk in chunks)

    ask(scenario, f"{thought}\n\nYes.")


def test_an_answer_may_begin_inside_the_thinking(ask: Run, qwen: Tokenizer) -> None:
    async def scenario(stack: Stack) -> None:
        opened = (await stack.chat(chat_template_kwargs={"enable_thinking": True})).json()
        assert prompt_of(stack, qwen).endswith("<think>\n")
        message = opened["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("Why not?", "Yes.")
        num_thought = len(qwen.encode("Why not?</think>", add_special_tokens=False))
        assert opened["usage"]["completion_tokens_details"] == {"reasoning_tokens": num_thought}
        closed = (await stack.chat(chat_template_kwargs={"enable_thinking": False})).json()
        assert prompt_of(stack, qwen).endswith("</think>\n\n")
        assert closed["choices"][0]["message"]["content"] == "Why not?</think>Yes."
        assert closed["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
        body = {"messages": [*QUESTION, {"role": "assistant", "content": "<think>So"}], "continue_final_message": True}
        continued = (await stack.chat(**body)).json()
        assert continued["choices"][0]["message"]["reasoning_content"] == "Why not?"

    ask(scenario, "Why not?</think>Yes.")


def test_thinking_that_is_cut_off_is_all_there_is(ask: Run) -> None:
    async def scenario(stack: Stack) -> None:
        body = (await stack.chat(max_tokens=5)).json()
        message = body["choices"][0]["message"]
        assert (message["content"], body["choices"][0]["finish_reason"]) == ("", "length")
        assert "Why".startswith(message["reasoning"][:3])
        assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 5}

    ask(scenario, "<think>Why not? Because.</think>")


def test_formats_can_be_turned_off(ask: Run) -> None:
    async def scenario(stack: Stack) -> None:
        message = (await stack.chat(tools=[WEATHER])).json()["choices"][0]["message"]
        assert message == {"role": "assistant", "content": f"<think>Hm.</think>{CALL}", "refusal": None}

    server = ServerConfig(tool_call_parser="none", reasoning_parser="none")
    ask(scenario, f"<think>Hm.</think>{CALL}", server)


# --- Clients ----------------------------------------------------------------------------------------------------------


class GetWeather(BaseModel):
    """The weather of a city."""

    city: str


def test_the_openai_package_reads_calls_streamed_and_whole(ask: Run) -> None:
    async def scenario(stack: Stack) -> None:
        async with (
            served(stack.model) as url,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        ):
            fields: Any = {"model": MODEL, "messages": QUESTION}
            whole = await client.chat.completions.create(tools=[WEATHER], **fields)
            assert whole.choices[0].finish_reason == "tool_calls"
            assert whole.choices[0].message.tool_calls is not None
            # Its parser takes strict tools only; a grammar is none of this test's business.
            tool = openai.pydantic_function_tool(GetWeather, name="get_weather")
            async with client.chat.completions.stream(tools=[tool], **fields) as stream:
                kinds = [event.type async for event in stream]
                final = await stream.get_final_completion()
            assert kinds.count("tool_calls.function.arguments.done") == 2
            assert kinds.count("tool_calls.function.arguments.delta") > 4
            calls = final.choices[0].message.tool_calls
            assert calls is not None
            assert [call.function.parsed_arguments for call in calls] == [GetWeather(city="Paris")] * 2
            parsed = await client.chat.completions.parse(tools=[tool], **fields)
            calls = parsed.choices[0].message.tool_calls
            assert calls is not None
            assert calls[0].function.parsed_arguments == GetWeather(city="Paris")

    ask(scenario, f"{CALL}\n{CALL}")


def test_the_routes_of_other_apis_tell_the_same_answer(ask: Run) -> None:
    async def scenario(stack: Stack) -> None:
        tool = {"type": "function", "name": "get_weather", "parameters": WEATHER["function"]["parameters"]}
        response = (
            await stack.http.post("/v1/responses", json={"model": MODEL, "input": "hi", "tools": [tool]})
        ).json()
        assert [item["type"] for item in response["output"]] == ["reasoning", "message", "function_call"]
        assert response["output"][2]["arguments"] == '{"city": "Paris"}'
        assert response["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
        body = {"model": MODEL, "max_tokens": 99, "messages": QUESTION}
        body["tools"] = [{"name": "get_weather", "input_schema": WEATHER["function"]["parameters"]}]
        message = (await stack.http.post("/v1/messages", json=body)).json()
        assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use"]
        assert message["content"][2]["input"] == {"city": "Paris"}
        assert message["stop_reason"] == "tool_use"

    ask(scenario, f"<think>Hm.</think>Wait.\n{CALL}")
