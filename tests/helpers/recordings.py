"""Requests of real clients, in tests/clients/recorded, each in a file that is named by client and version.

The clients came from their packages and ran as in tests/whole/test_clients.py. A server that was scripted by hand
answered those with `history` in their name, with items of OpenAI's and Anthropic's own. Some needed settings of the
client: `max_tokens: -1` of Qwen Code, `store`, `truncation`, `speed` and `contextManagement` of opencode, and names of
models that the client knows, such as gpt-5.5. Ids, paths and times are replaced, images are a few bytes, long texts are
cut at "…", and only tools that matter are left.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import httpx

from tests.conftest import ROOT
from tests.helpers.scripted_engine import Stack, prompt_ids

FOLDER = ROOT / "tests" / "clients" / "recorded"
OMITTED = "[image omitted: this model reads text only]"


@dataclass(frozen=True)
class Recording:
    """One request."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]

    async def replay(self, stack: Stack, *, stream: bool, **fields: Any) -> httpx.Response:
        """The answer to the request, streamed or whole, with `fields` in place of its own."""
        return await send(stack, self.path, {**self.body, **fields}, stream=stream, headers=self.headers)


def recorded(name: str) -> Recording:
    """The recording in the file `name`.json."""
    return Recording(**json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8")))


async def send(
    stack: Stack, path: str, body: dict[str, Any], *, stream: bool, headers: dict[str, str] | None = None
) -> httpx.Response:
    """The answer to `body`, streamed or whole. Whole ones have no `stream_options`, as OpenAI's API demands."""
    fields = {name: value for name, value in body.items() if stream or name != "stream_options"}
    return await stack.http.post(path, json={**fields, "stream": stream}, headers=headers)


def prompt_of(stack: Stack) -> str:
    """The text of the last prompt."""
    return stack.model.tokenizer.decode(prompt_ids(stack.coordinator.requests[-1]), skip_special_tokens=False)
