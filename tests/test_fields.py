"""What happens to fields that a route does not know, or that ask for what this server does not do: alike everywhere."""

from __future__ import annotations

from typing import Any

import pytest

from configs.schema import ServerConfig
from tests.scripted_engine import MODEL, Run, Stack

MESSAGES = [{"role": "user", "content": "hi"}]
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4},
    "/v1/score": {"query": "a", "items": ["b"], "label_token_ids": [1]},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [5]},
}


@pytest.mark.parametrize("path", ROUTES)
def test_an_unknown_field_is_ignored_and_named_in_a_header(run: Run, path: str) -> None:
    async def scenario(stack: Stack) -> None:
        reply = await stack.http.post(path, json={"model": MODEL, **ROUTES[path], "modle": 1})
        assert reply.status_code == 200, reply.text
        assert reply.headers["x-ignored-fields"] == "modle"
        known = await stack.http.post(path, json={"model": MODEL, **ROUTES[path]})
        assert "x-ignored-fields" not in known.headers

    run(scenario)


@pytest.mark.parametrize("path", ROUTES)
def test_strict_mode_refuses_an_unknown_field_and_names_the_nearest(run: Run, path: str) -> None:
    async def scenario(stack: Stack) -> None:
        reply = await stack.http.post(path, json={"model": MODEL, **ROUTES[path], "modle": 1})
        assert reply.status_code == 400
        assert "Did you mean model?" in reply.json()["error"]["message"]

    run(scenario, ServerConfig(strict_fields=True))


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/chat/completions", {"web_search_options": {}}),
        ("/v1/responses", {"conversation": "conv_1"}),
        ("/v1/responses", {"prompt": {"id": "p"}}),
        ("/v1/responses", {"guided_json": {}}),
        ("/v1/messages", {"mcp_servers": [{"type": "url"}]}),
        ("/v1/messages", {"container": "c"}),
    ],
)
def test_a_field_that_would_change_the_answer_is_refused_by_name(run: Run, path: str, field: dict[str, Any]) -> None:
    async def scenario(stack: Stack) -> None:
        reply = await stack.http.post(path, json={"model": MODEL, **ROUTES[path], **field})
        assert reply.status_code == 400
        assert f"{next(iter(field))} is not supported" in reply.json()["error"]["message"]

    run(scenario)


@pytest.mark.parametrize("stream", [{}, {"stream": True}])
@pytest.mark.parametrize("path", [*list(ROUTES)[:5], "/generate"])
def test_every_answer_of_the_engine_says_where_its_time_went(run: Run, path: str, stream: dict[str, Any]) -> None:
    async def scenario(stack: Stack) -> None:
        if path == "/v1/score" and stream:
            pytest.skip("scores are not streamed")
        body = {"text": "hi"} if path == "/generate" else {"model": MODEL, **ROUTES[path]}
        reply = await stack.http.post(path, json={**body, **stream})
        assert reply.status_code == 200, reply.text
        assert reply.headers["server-timing"].startswith("queue;dur=")

    run(scenario)
