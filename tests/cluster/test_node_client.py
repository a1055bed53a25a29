"""The openai package for Node, against the real endpoint over two ranks."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Endpoint


@pytest.mark.slow
@pytest.mark.ray
def test_the_node_package_chats_calls_tools_parses_and_responds(node_package: Path, endpoint: Endpoint) -> None:
    command = ["node", "openai_client.mjs", f"{endpoint.url}/v1", endpoint.model]
    done = subprocess.run(command, cwd=node_package, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    got: dict[str, Any] = json.loads(done.stdout)
    assert got["models"] == [endpoint.model]
    assert got["retrieved"] == endpoint.model
    choice = got["chat"]["choices"][0]
    assert choice["message"]["content"]
    assert got["streamed"]["text"] == choice["message"]["content"]
    assert got["streamed"]["finish_reason"] == choice["finish_reason"]
    assert got["streamed"]["usage"]["completion_tokens"] == got["chat"]["usage"]["completion_tokens"]
    assert "Paris" in got["completion"]
    assert got["completionStreamed"] == got["completion"]
    for called in (got["called"], got["calledStreamed"]):
        assert called["finish_reason"] == "tool_calls"
        [call] = called["message"]["tool_calls"]
        assert call["function"]["name"] == "get_weather"
        arguments = json.loads(call["function"]["arguments"])
        assert arguments["city"] in ("Rome", "Oslo")
        assert isinstance(arguments["celsius"], bool)
    calls = [got[name]["message"]["tool_calls"][0]["function"] for name in ("called", "calledStreamed")]
    assert calls[0]["arguments"] == calls[1]["arguments"], "the seed is the same"
    assert set(got["person"]) == {"name", "age"}
    assert 1 <= got["person"]["age"] <= 99
    assert got["response"]["text"]
    assert got["responseRetrieved"] == got["responseStreamed"] == got["response"]["text"]
    assert got["responseEvents"][0] == "response.created"
    assert got["responseEvents"][-1] in ("response.completed", "response.incomplete")
    assert got["error"] == {"kind": "NotFoundError", "status": 404, "code": "model_not_found"}
    assert got["aborted"] is True
