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
from tests.helpers.scripted_engine import EOS, MODEL, Run, Stack, error_of, prompt_ids

EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"type": "function", "name": "weather", "strict": False, "parameters": CITY}
NAMESPACE = {"type": "namespace", "name": "mcp__w", "description": "w", "tools": [WEATHER]}
SHELL = {"type": "function", "name": "exec_command", "description": "Runs a command.", "parameters": CITY}
CODEX: dict[str, Any] = {
    "model": MODEL,
    "instructions": "You are a coding agent.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandbox: read-only."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Weather in Oslo?"}]},
    ],
    "tools": [
        SHELL,
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
        NAMESPACE,
        {"type": "web_search", "external_web_access": False},
        {"type": "image_generation", "output_format": "png"},
        {"type": "local_shell"},
        {"type": "tool_search", "execution": "client"},
        {"type": "mcp", "server_label": "a", "server_url": "http://192.0.2.1"},
        {"type": "code_interpreter", "container": {"type": "auto"}},
        {"type": "file_search", "vector_store_ids": ["v"]},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": None,
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199",
}
KINDS = ("custom", "web_search", "image_generation", "local_shell", "tool_search", "mcp", "code_interpreter")
LEFT_OUT = [f"tools.{kind}" for kind in (*KINDS, "file_search")]
CALL = '<tool_call>\n{"name": "mcp__w__weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def replying(smollm2: Tokenizer, *replies: str) -> dict[str, Any]:
    """Options of `run`: what the model writes, in turn."""
    written = [[*smollm2.encode(reply, add_special_tokens=False), EOS] for reply in replies]
    return {"replies": written, "max_model_len": 2048}


def prompt(stack: Stack) -> str:
    """The last prompt's text."""
    return stack.model.tokenizer.decode(prompt_ids(stack.coordinator.requests[-1]), skip_special_tokens=False)


async def answered(stack: Stack, body: dict[str, Any]) -> tuple[Response, list[dict[str, Any]], httpx.Response]:
    """The response to `body` whole, and the events of its stream, both as the openai package reads them."""
    whole = await stack.http.post("/v1/responses", json=body)
    assert whole.status_code == 200, whole.text
    streamed = await stack.http.post("/v1/responses", json={**body, "stream": True})
    events = [json.loads(it.split("\ndata: ")[1]) for it in streamed.text.split("\n\n")[:-1]]
    for event in events:
        EVENT.validate_python(event)
    assert streamed.headers.get("x-ignored-fields") == whole.headers.get("x-ignored-fields")
    return Response.model_validate(whole.json()), events, whole


# --- Tools ------------------------------------------------------------------------------------------------------------


def test_codex_0_171_calls_a_function_of_a_namespace_by_two_fields(run: Run, smollm2: Tokenizer) -> None:
    async def scenario(stack: Stack) -> None:
        _, events, whole = await answered(stack, CODEX)
        assert whole.headers["x-ignored-fields"].split(",") == LEFT_OUT
        assert all(name in prompt(stack) for name in ('"exec_command"', '"mcp__w__weather"'))
        assert "apply_patch" not in prompt(stack)
        assert whole.json()["tools"] == CODEX["tools"]
        [call] = whole.json()["output"]
        assert (call["namespace"], call["name"], call["arguments"]) == ("mcp__w", "weather", '{"city": "Oslo"}')
        named = [event.get("item") or event for event in events if "name" in (event.get("item") or event)]
        assert [(it["namespace"], it["name"]) for it in named] == [("mcp__w", "weather")] * 3
        final = events[-1]["response"]["output"]
        assert (final[0]["namespace"], final[0]["name"]) == ("mcp__w", "weather")

        # Codex sends the call and its output back.
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "4 C"}
        await answered(stack, {**CODEX, "input": [*CODEX["input"], call, output]})
        assert '{"name": "mcp__w__weather", "arguments": {"city": "Oslo"}}' in prompt(stack)
        assert "4 C" in prompt(stack)

    run(scenario, **replying(smollm2, CALL, CALL, "It is cold."))


def test_codex_0_171_says_hi_with_one_namespace_and_a_web_search(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        tools = [NAMESPACE, {"type": "web_search", "external_web_access": False}]
        body = {"model": MODEL, "input": "hi", "max_output_tokens": 8, "tools": tools}
        response, _, whole = await answered(stack, body)
        assert response.output_text
        assert whole.headers["x-ignored-fields"] == "tools.web_search"
        counted = await stack.http.post("/v1/responses/input_tokens", json=body)
        assert counted.json()["input_tokens"] == response.usage.input_tokens
        assert counted.headers["x-ignored-fields"] == "tools.web_search"

    run(scenario, max_model_len=1024)


def test_two_namespaces_of_codex_0_171_may_have_one_function(run: Run, smollm2: Tokenizer) -> None:
    spaces = [{**NAMESPACE, "name": name} for name in ("a", "b")]
    replies = [CALL.replace("mcp__w__", prefix) for prefix in ("b__", "a__", "") for _ in range(2)]

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
        {"type": "function", "namespace": "mcp__w", "name": "weather"},
        {"type": "function", "name": "weather"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]},
    ],
)
def test_tool_choice_names_a_function_of_a_namespace(run: Run, smollm2: Tokenizer, choice: dict[str, Any]) -> None:
    async def scenario(stack: Stack) -> None:
        response, _, _ = await answered(stack, {**CODEX, "tool_choice": choice})
        [call] = response.output
        assert (call.namespace, call.name) == ("mcp__w", "weather")
        assert "mcp__w__weather" in (stack.coordinator.requests[-1].sampling.grammar or "")

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
        reply = await stack.http.post("/v1/responses", json=CODEX)
        assert error_of(reply, 400, "unsupported_parameter")["param"] == "tools[1]"

    run(scenario, ServerConfig(strict_fields=True))


# --- Histories that began elsewhere -----------------------------------------------------------------------------------

PICTURE = {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo=", "detail": "auto"}
FILE = {"type": "input_file", "file_id": "f"}
NESTED = json.loads("[" * 900 + "]" * 900)
ASKED = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Go on."}]}
HISTORY: list[tuple[str, list[dict[str, Any]], list[str], str]] = [
    (
        "codex 0.171 apply_patch",
        [
            {
                "type": "custom_tool_call",
                "call_id": "c1",
                "name": "apply_patch",
                "input": "*** End",
                "status": "done",
            },
            {"type": "custom_tool_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "Done"}]},
        ],
        ['{"name": "apply_patch", "arguments": {"input": "*** End"}}', "<tool_response>\nDone\n"],
        "",
    ),
    (
        "codex 0.171 local_shell, whose output is a function's",
        [
            {"type": "local_shell_call", "call_id": "c2", "action": {"type": "exec", "command": ["ls"]}},
            {"type": "function_call_output", "call_id": "c2", "output": "README.md"},
        ],
        ['{"name": "local_shell", "arguments": {"type": "exec", "command": ["ls"]}}', "<tool_response>\nREADME.md\n"],
        "",
    ),
    (
        "openai 3.52 local_shell",
        [
            {"type": "local_shell_call", "id": "l1", "call_id": "c3", "action": {"type": "exec", "command": ["ls"]}},
            {"type": "local_shell_call_output", "id": "c3", "output": "README.md"},
            {"type": "local_shell_call_output", "id": "unknown", "output": "LICENSE"},
        ],
        ["<tool_response>\nREADME.md\n", "LICENSE"],
        "",
    ),
    (
        "codex 0.171 reasoning",
        [
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": "gAAAA"},
            {
                "type": "web_search_call",
                "id": "ws_1",
                "status": "completed",
                "action": {"type": "search", "query": "a"},
            },
            {"type": "image_generation_call", "id": "ig_1", "status": "completed", "result": "iVBORw0KGgo="},
            {"type": "compaction", "encrypted_content": "gAAAA"},
            {"type": "ghost_snapshot", "ghost_commit": {"id": "a"}},
            {
                "type": "message",
                "role": "assistant",
                "phase": "final",
                "content": [{"type": "output_text", "text": "Y"}],
            },
        ],
        ["assistant\nY"],
        "input.reasoning,input.web_search_call,input.image_generation_call,input.compaction,input.ghost_snapshot",
    ),
    (
        "openai-agents 0.24 hosted tools",
        [
            {"type": "file_search_call", "id": "fs_1", "queries": ["a"], "results": [{"text": "found"}]},
            {
                "type": "code_interpreter_call",
                "id": "ci_1",
                "code": "1 + 1",
                "outputs": [{"type": "logs", "logs": "2"}],
            },
            {
                "type": "code_interpreter_call",
                "id": "ci_2",
                "code": "x",
                "outputs": [{"type": "image", "url": "data:x"}],
            },
            {"type": "mcp_list_tools", "id": "ml_1", "server_label": "s", "tools": []},
            {
                "type": "mcp_call",
                "id": "m_1",
                "server_label": "s",
                "name": "roll",
                "arguments": '{"n": 2}',
                "output": "7",
            },
            {"type": "shell_call", "call_id": "s1", "action": {"commands": ["pwd"]}},
            {"type": "shell_call_output", "call_id": "s1", "output": [{"stdout": "/home", "stderr": ""}]},
        ],
        [
            "<tool_response>\nfound\n",
            '{"name": "code_interpreter", "arguments": {"code": "1 + 1"}}',
            "<tool_response>\n2\n",
            "<tool_response>\n[image omitted: this model reads text only]\n",
            '{"name": "roll", "arguments": {"n": 2}}',
            "<tool_response>\n7\n",
            '{"stdout":"/home","stderr":""}',
        ],
        "input.mcp_list_tools",
    ),
    (
        "codex 0.171 view_image",
        [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "See"}, PICTURE]},
            {"type": "function_call", "call_id": "c4", "name": "view_image", "arguments": "{}"},
            {
                "type": "function_call_output",
                "call_id": "c4",
                "output": [PICTURE, FILE],
            },
        ],
        [
            "See\n[image omitted: this model reads text only]<",
            "\n[image omitted: this model reads text only]\n[file omitted: this model reads text only]\n<",
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
            assert text in prompt(stack), prompt(stack)
        assert "iVBOR" not in prompt(stack)
        assert "gAAAA" not in prompt(stack)
        # A later turn reads the stored history, and names nothing of it again.
        _, _, later = await answered(stack, {"model": MODEL, "previous_response_id": response.id, "input": "And?"})
        assert "x-ignored-fields" not in later.headers
        for text in shown:
            assert text in prompt(stack)

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


def test_ai_sdk_6_0_326_refers_to_items_of_stored_responses(run: Run, smollm2: Tokenizer) -> None:
    async def scenario(stack: Stack) -> None:
        asked = {"role": "user", "content": [{"type": "input_text", "text": "Weather in Oslo?"}]}
        body: dict[str, Any] = {"model": MODEL, "input": [asked], "tools": [NAMESPACE], "store": True}
        response, _, _ = await answered(stack, body)
        [call] = response.output
        items = [
            asked,
            {"type": "item_reference", "id": call.id},
            {"type": "function_call_output", "call_id": call.call_id, "output": "4 C"},
        ]
        said, _, whole = await answered(stack, {**body, "input": items})
        assert "x-ignored-fields" not in whole.headers
        assert '{"name": "mcp__w__weather", "arguments": {"city": "Oslo"}}' in prompt(stack)
        counted = await stack.http.post("/v1/responses/input_tokens", json={**body, "input": items})
        assert counted.json()["input_tokens"] == said.usage.input_tokens
        # The second response is stored with the item itself, so its conversation goes on without the first one.
        await stack.http.delete(f"/v1/responses/{response.id}")
        later = {"model": MODEL, "previous_response_id": said.id, "input": "And?"}
        assert (await stack.http.post("/v1/responses", json=later)).status_code == 200
        lost = await stack.http.post("/v1/responses", json={**body, "input": items, "store": False})
        error = error_of(lost, 404, "item_not_found")
        assert "send the item itself" in error["message"]

    run(scenario, **replying(smollm2, CALL, CALL, "Cold.", "Cold.", "Bye."))


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
def test_openai_agents_0_24_with_truncation_auto_keeps_what_is_newest(run: Run, num_turns: int, num_calls: int) -> None:
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
        ids, text = prompt_ids(stack.coordinator.requests[-1]), prompt(stack)
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
            assert ("the early output" in prompt(stack)) == is_there
            assert "Go on." in prompt(stack)
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
