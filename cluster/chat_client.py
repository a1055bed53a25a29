"""`python -m cluster chat`: a line-by-line conversation with any OpenAI endpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
from rich.console import Console

from configs.errors import EngineError

_CONNECT_TIMEOUT_S = 5.0
_READ_TIMEOUT_S = 300.0


def run_chat(url: str, model: str | None, temperature: float) -> None:
    """Reads lines, streams answers; ends at an empty line or end of input.

    Raises:
        EngineError: the endpoint cannot be reached or answers with an error.
    """
    console = Console(highlight=False)
    timeout = httpx.Timeout(_READ_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S)
    with httpx.Client(base_url=url.rstrip("/"), timeout=timeout, trust_env=False) as client:
        try:
            model = model or client.get("/models").raise_for_status().json()["data"][0]["id"]
            console.print(f"{model} at {url}; an empty line ends the chat")
            messages: list[dict[str, str]] = []
            while line := _read_line(console):
                messages.append({"role": "user", "content": line})
                answer = ""
                for piece in _stream(client, {"model": model, "messages": messages, "temperature": temperature}):
                    console.print(piece, end="", markup=False)
                    answer += piece
                console.print()
                messages.append({"role": "assistant", "content": answer})
        except httpx.HTTPError as error:
            raise EngineError(f"{url} does not answer: {error}") from None


def _read_line(console: Console) -> str:
    try:
        return console.input("[bold]> [/bold]").strip()
    except (EOFError, KeyboardInterrupt):
        return ""


def _stream(client: httpx.Client, body: dict[str, object]) -> Iterator[str]:
    with client.stream("POST", "/chat/completions", json={**body, "stream": True}) as response:
        if response.is_error:
            response.read()
            raise EngineError(f"{response.status_code}: {response.text}")
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise EngineError(event["error"]["message"])
            for choice in event["choices"]:
                yield choice["delta"].get("content") or ""
