"""What agents send to /v1/responses, replayed over the scripted engine: tools in namespaces, tools that only OpenAI
runs, and histories that began elsewhere."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from cluster.openai.responses.response_turns import input_items, turns
from cluster.text.tokenizer import Tokenizer
from configs.schema import ServerConfig
from tests.helpers.recordings import OMITTED, prompt_of, recorded, send
from tests.helpers.scripted_engine import EOS, MODEL, Run, Stack, error_of, prompt_ids

EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"type": "function", "name": "weather", "strict": False, "parameters": CITY}
NAMESPACE = {"type": "namespace", "name": "mcp__w", "description": "w", "tools": [WEATHER]}
CODEX = recorded("codex-0.171.0-first-turn").body
AGENTS = recorded("openai-agents-0.24.0-history").body
CALL = '<tool_call>\n{"name": "mcp__sky__weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def replying(smollm2: Tokenizer, *replies: str) -> dict[str, Any]:
    """Options of `run`: what the model writes, in turn."""
    written = [[*smollm2.encode(reply, add_special_tokens=False), EOS] for reply in replies]
    return {"replies": written, "max_model_len": 2048}


async def answered(stack: Stack, body: dict[str, Any]) -> tuple[Response, list[dict[str, Any]], httpx.Response]:
    """The response to `body` whole, and the events of its stream, both as the openai package reads them."""
    whole = await send(stack, "/v1/responses", body, stream=False)
    assert whole.status_code == 200, whole.text
    streamed = await send(stack, "/v1/responses", body, stream=True)
    events = [json.loads(it.split("\ndata: ")[1]) for it in streamed.text.split("\n\n")[:-1]]
    for event in events:
        EVENT.validate_python(event)
    assert streamed.headers.get("x-ignored-fields") == whole.headers.get("x-ignored-fields")
    return Response.model_validate(whole.json()), events, whole


# --- Tools ------------------------------------------------------------------------------------------------------------


def test_codex_0_171_0_calls_a_function_of_a_namespace_by_two_fields(run: Run, smollm2: Tokenizer) -> None:
    async def scenario(stack: Stack) -> None:
        _, events, whole = await answered(stack, CODEX)
        assert all(name in prompt_of(stack) for name in ('"exec_command"', '"mcp__sky__weather"', '"mcp__sky__tides"'))
        assert whole.json()["tools"] == CODEX["tools"]
        [call] = whole.json()["output"]
        assert (call["namespace"], call["name"], call["arguments"]) == ("mcp__sky", "weather", '{"city": "Oslo"}')
        named = [event.get("item") or event for event in events if "name" in (event.get("item") or event)]
        assert [(it["namespace"], it["name"]) for it in named] == [("mcp__sky", "weather")] * 3
        final = events[-1]["response"]["output"]
        assert (final[0]["namespace"], final[0]["name"]) == ("mcp__sky", "weather")
        counted = await stack.http.post("/v1/responses/input_tokens", json=CODEX)
        assert counted.json()["input_tokens"] == whole.json()["usage"]["input_tokens"]
        assert counted.headers["x-ignored-fields"] == whole.headers["x-ignored-fields"]

    run(scenario, **replying(smollm2, CALL))


def test_two_namespaces_may_have_one_function(run: Run, smollm2: Tokenizer) -> None:
    spaces = [{**NAMESPACE, "name": name} for name in ("a", "b")]
    replies = [CALL.replace("mcp__sky__", prefix) for prefix in ("b__", "a__", "") for _ in range(2)]

    async def scenario(stack: Stack) -> None:
        body = {**CODEX, "tools": [*spaces, WEATHER]}
        for namespace in ("b", "a", None):
            response, events, _ = await answered(stack, body)
            for [item] in (response.output, Response.model_validate(events[-1]["response"]).output):
                assert (item.namespace, item.name) == (namespace, "weather")
        for other in (NAMESPACE, {**WEATHER, "name": "mcp__w__weather"}):
            twice = await stack.http.post("/v1/responses", json={**CODEX, "tools": [other, NAMESPACE]})
            assert error_of(twice, 400, "invalid_value")["param"] == "tools[1].tools[0].name"
        many = [{**WEATHER, "name": f"f{i}"} for i in range(300)]
        many = [{**NAMESPACE, "name": name, "tools": many} for name in ("a", "b")]
        many = await stack.http.post("/v1/responses", json={**CODEX, "tools": many})
        assert "512 functions" in error_of(many, 400, "invalid_value")["message"]

    run(scenario, **replying(smollm2, *replies))


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "namespace": "mcp__sky", "name": "weather"},
        {"type": "function", "name": "weather"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]},
    ],
)
def test_tool_choice_names_a_function_of_a_namespace(run: Run, smollm2: Tokenizer, choice: dict[str, Any]) -> None:
    async def scenario(stack: Stack) -> None:
        response, _, _ = await answered(stack, {**CODEX, "tool_choice": choice})
        [call] = response.output
        assert (call.namespace, call.name) == ("mcp__sky", "weather")
        assert "mcp__sky__weather" in (stack.coordinator.requests[-1].sampling.grammar or "")

    run(scenario, **replying(smollm2, CALL))


@pytest.mark.parametrize(
    ("choice", "code", "param"),
    [
        ({"type": "web_search"}, "invalid_value", "tool_choice.type"),
        ({"type": "custom", "name": "apply_patch"}, "invalid_value", "tool_choice.type"),
        ({"type": "function", "name": "apply_patch"}, "invalid_value", "tool_choice.name"),
        ({"type": "function", "namespace": "b", "name": "exec_command"}, "invalid_value", "tool_choice.name"),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp", "server_label": "a"}]},
            "invalid_value",
            "tool_choice.tools[0].type",
        ),
    ],
)
def test_tool_choice_of_a_tool_that_is_left_out_is_refused(run: Run, choice: Any, code: str, param: str) -> None:
    async def scenario(stack: Stack) -> None:
        for stream in (False, True):
            reply = await stack.http.post("/v1/responses", json={**CODEX, "tool_choice": choice, "stream": stream})
            assert error_of(reply, 400, code)["param"] == param
        body = {
            "model": MODEL,
            "input": "hi",
            "tools": [{"type": "web_search"}, {"type": ""}],
            "tool_choice": "required",
        }
        reply = await stack.http.post("/v1/responses", json=body)
        assert "needs tools that are functions" in error_of(reply, 400, "invalid_value")["message"]

    run(scenario)


def test_strict_fields_refuse_what_would_be_left_out(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        reply = await stack.http.post("/v1/responses", json=AGENTS)
        assert error_of(reply, 400, "unsupported_parameter")["param"] == "tools[1]"
        content = [{"type": "input_image", "image_url": "data:,"}]  # a setting of its own says what happens to images
        body = {"model": MODEL, "input": [{"role": "user", "content": content}]}
        assert (await stack.http.post("/v1/responses", json=body)).status_code == 200
        text = {"verbosity": "low"}
        reply = await stack.http.post("/v1/responses", json={"model": MODEL, "input": "hi", "text": text})
        assert error_of(reply, 400, "unsupported_parameter")["param"] == "text.verbosity"

    run(scenario, ServerConfig(strict_fields=True))


# --- Histories that began elsewhere -----------------------------------------------------------------------------------

PICTURE = {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo=", "detail": "auto"}
FILE = {"type": "input_file", "file_id": "f"}
NESTED = json.loads("[" * 900 + "]" * 900)
ASKED = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Go on."}]}
HISTORY: list[tuple[str, list[dict[str, Any]], list[str], str]] = [
    (
        "a local_shell, whose output is a function's",
        [
            {"type": "local_shell_call", "call_id": "c2", "action": {"type": "exec", "command": ["ls"]}},
            {"type": "function_call_output", "call_id": "c2", "output": "README.md"},
        ],
        ['{"name": "local_shell", "arguments": {"type": "exec", "command": ["ls"]}}', "<tool_response>\nREADME.md\n"],
        "",
    ),
    (
        "a local_shell, whose output has the id of its call",
        [
            {"type": "local_shell_call", "id": "l1", "call_id": "c3", "action": {"type": "exec", "command": ["ls"]}},
            {"type": "local_shell_call_output", "id": "c3", "output": "README.md"},
            {"type": "local_shell_call_output", "id": "unknown", "output": "LICENSE"},
        ],
        ["<tool_response>\nREADME.md\n", "LICENSE"],
        "",
    ),
    (
        "reasoning that only its server can read",
        [
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": "gAAAA"},
            {"type": "ghost_snapshot", "ghost_commit": {"id": "a"}},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Y"}]},
        ],
        ["assistant\nY"],
        "input.reasoning,input.ghost_snapshot",
    ),
    (
        "a shell, images and files",
        [
            {
                "type": "code_interpreter_call",
                "id": "ci_2",
                "code": "x",
                "outputs": [{"type": "image", "url": "data:x"}],
            },
            {"type": "shell_call", "call_id": "s1", "action": {"commands": ["pwd"]}},
            {"type": "shell_call_output", "call_id": "s1", "output": [{"stdout": "/home", "stderr": ""}]},
            {"type": "function_call", "call_id": "c4", "name": "view_image", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c4", "output": [PICTURE, FILE]},
        ],
        [
            f"<tool_response>\n{OMITTED}\n",
            '{"stdout":"/home","stderr":""}',
            f"\n{OMITTED}\n[file omitted: this model reads text only]\n<",
        ],
        "input.input_image,input.input_file",
    ),
]


@pytest.mark.parametrize(("items", "shown", "ignored"), [it[1:] for it in HISTORY], ids=[it[0] for it in HISTORY])
def test_a_history_of(run: Run, items: list[dict[str, Any]], shown: list[str], ignored: str) -> None:
    async def scenario(stack: Stack) -> None:
        asked = [{"role": "user", "content": "Begin."}, *items, ASKED]
        body = {"model": MODEL, "instructions": "Be kind.", "input": asked, "store": True}
        response, _, whole = await answered(stack, body)
        assert whole.headers.get("x-ignored-fields", "") == ignored
        for text in shown:
            assert text in prompt_of(stack), prompt_of(stack)
        assert "iVBOR" not in prompt_of(stack)
        assert "gAAAA" not in prompt_of(stack)
        # A later turn reads the stored history, and names nothing of it again.
        _, _, later = await answered(stack, {"model": MODEL, "previous_response_id": response.id, "input": "And?"})
        assert "x-ignored-fields" not in later.headers
        for text in shown:
            assert text in prompt_of(stack)

    run(scenario, max_model_len=2048)


def test_the_summary_of_reasoning_is_read_if_it_has_no_text() -> None:
    summary = [{"type": "summary_text", "text": "I look."}]
    given = [
        {"type": "reasoning", "summary": summary, "content": []},
        {"type": "message", "role": "user", "content": "a"},
    ]
    [said, _] = turns(input_items(given), None)
    assert said.thinking == "I look."


@pytest.mark.parametrize(
    "kind", ["custom_tool_call", "mcp_call", "shell_call_output", "file_search_call", "brand_new", ""]
)
@pytest.mark.parametrize("value", [None, 7, [], [[7]], {"type": ["input_image"]}, NESTED, "x"])
def test_nothing_in_an_item_of_another_server_fails_here(run: Run, kind: str, value: Any) -> None:
    fields = (
        "id",
        "call_id",
        "name",
        "input",
        "arguments",
        "output",
        "action",
        "queries",
        "results",
        "error",
        "content",
    )

    async def scenario(stack: Stack) -> None:
        item = {"type": kind, **dict.fromkeys(fields, value)}
        reply = await stack.http.post("/v1/responses", json={"model": MODEL, "input": [item, ASKED]})
        if value is NESTED and kind != "new" and reply.status_code != 200:
            assert "nested too deep" in error_of(reply, 400, "invalid_value")["message"]
        else:
            assert reply.status_code == 200, reply.text

    run(scenario, max_model_len=2048)


# --- Stored items, and conversations that do not fit ------------------------------------------------------------------


def long_run(num_turns: int, num_calls: int) -> list[dict[str, Any]]:
    """`num_turns` turns of a user with an answer, then a question with `num_calls` calls and their outputs."""
    items: list[dict[str, Any]] = [{"role": "developer", "content": "Rule one."}]
    for i in range(num_turns):
        items += [{"role": "user", "content": f"question {i}"}, {"role": "assistant", "content": f"answer {i}"}]
    items += [{"role": "user", "content": "the last question"}]
    for i in range(num_calls):
        call = {"type": "function_call", "call_id": f"c{i}", "name": "exec_command", "arguments": '{"city": "a"}'}
        items += [call, {"type": "function_call_output", "call_id": f"c{i}", "output": f"output {i} " + "word " * 20}]
    return items


@pytest.mark.parametrize(("num_turns", "num_calls"), [(0, 1), (1, 1), (40, 0), (40, 1), (3, 40), (0, 40)])
def test_truncation_auto_keeps_what_is_newest(run: Run, num_turns: int, num_calls: int) -> None:
    async def scenario(stack: Stack) -> None:
        body = {
            "model": MODEL,
            "instructions": "Be kind.",
            "input": long_run(num_turns, num_calls),
            "truncation": "auto",
            "max_output_tokens": 100,
        }
        response, events, _ = await answered(stack, body)
        assert response.truncation == events[-1]["response"]["truncation"] == "auto"
        ids, text = prompt_ids(stack.coordinator.requests[-1]), prompt_of(stack)
        assert response.usage.input_tokens == len(ids) <= 412
        for kept in ("Be kind.", "Rule one.", "the last question"):
            assert kept in text
        # Of the turns, only the oldest are missing, each with its answer; and of the calls, each with its output.
        turns_left = [i for i in range(num_turns) if f"question {i}<" in text]
        calls_left = [i for i in range(num_calls) if f"output {i} " in text]
        assert turns_left == [i for i in range(num_turns) if f"answer {i}<" in text]
        assert turns_left == list(range(num_turns - len(turns_left), num_turns))
        assert calls_left == list(range(num_calls - len(calls_left), num_calls))
        assert text.count('<tool_call>\n{"name"') == len(calls_left)
        assert bool(calls_left) == bool(num_calls)
        if len(calls_left) < num_calls:
            assert not turns_left
        # No turn was dropped without need.
        if num_turns + num_calls > 3:
            assert 412 - len(ids) < 80
        whole = await stack.http.post("/v1/responses", json={**body, "truncation": "disabled"})
        if num_turns + num_calls > 3:
            error_of(whole, 400, "context_length_exceeded")
        else:
            assert whole.json()["usage"]["input_tokens"] == len(ids)

    run(scenario, max_model_len=512)


def test_an_output_is_dropped_with_its_call_wherever_it_stands(run: Run) -> None:
    """Here the user spoke between the call and its output."""

    async def scenario(stack: Stack) -> None:
        call = {"type": "function_call", "call_id": "early", "name": "exec_command", "arguments": "{}"}
        output = {"type": "function_call_output", "call_id": "early", "output": "the early output"}
        items = [{"role": "user", "content": "word " * 150}, call, {"role": "user", "content": "Wait."}, output, ASKED]
        for size, is_there in ((10, True), (150, False)):
            items[0] = {"role": "user", "content": "word " * size}
            body = {"model": MODEL, "input": items, "truncation": "auto"}
            assert (await stack.http.post("/v1/responses", json=body)).status_code == 200
            assert ("the early output" in prompt_of(stack)) == is_there
            assert "Go on." in prompt_of(stack)
        # What may not be dropped is refused if it does not fit.
        body["input"] = [{"role": "user", "content": "word " * 300}]
        error_of(await stack.http.post("/v1/responses", json=body), 400, "context_length_exceeded")

    run(scenario, max_model_len=200)


def test_images_are_refused_in_responses_if_the_settings_refuse_them(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        content = [{"type": "input_text", "text": "see"}, {"type": "input_image", "image_url": "data:,"}]
        body = {"model": MODEL, "input": [{"role": "user", "content": content}]}
        error = error_of(await stack.http.post("/v1/responses", json=body), 400, "unsupported_parameter")
        assert error["message"].startswith("Could not process image input[0]")
        assert stack.coordinator.requests == []

    run(scenario, ServerConfig(images="refuse"))
