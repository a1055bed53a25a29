"""`python -m cluster chat`: a line-by-line conversation with any OpenAI endpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
from rich.console import Console

from configs.errors import ConfigError, EngineError

_CONNECT_TIMEOUT_S = 5.0
_READ_TIMEOUT_S = 300.0


def run_chat(url: str, model: str | None, temperature: float, *, api_key: str | None = None) -> None:
    """Reads lines, streams answers; ends at an empty line or end of input. Ctrl-C ends an answer, at the prompt it all.

    Args:
        url: of the endpoint; the scheme may be left out, and `/v1` where there is no path.

    Raises:
        ConfigError: `url` is none.
        EngineError: the endpoint cannot be reached or answers with an error.
    """
    console = Console(highlight=False, soft_wrap=True)
    base = _base_url(url)
    timeout = httpx.Timeout(_READ_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S)
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    with httpx.Client(base_url=base, headers=headers, timeout=timeout, trust_env=False) as client:
        try:
            model = model or _first_model(client)
            console.print(f"{model} at {base}; an empty line ends the chat")
            messages: list[dict[str, str]] = []
            while line := _read_line(console):
                messages.append({"role": "user", "content": line})
                answer = ""
                try:
                    for piece in _stream(client, {"model": model, "messages": messages, "temperature": temperature}):
                        console.print(piece, end="", markup=False)
                        answer += piece
                except KeyboardInterrupt:
                    answer += " ..."
                console.print()
                messages.append({"role": "assistant", "content": answer})
        except httpx.HTTPError as error:
            raise EngineError(f"nothing answers at {base} ({error}); is `cluster serve` running there?") from None


def _base_url(url: str) -> httpx.URL:
    try:
        parsed = httpx.URL(url if "://" in url else f"http://{url}")
    except httpx.InvalidURL as error:
        raise ConfigError(f"{url} is no URL: {error}") from None
    path = parsed.path.rstrip("/")
    return parsed.copy_with(path=path or "/v1")


def _first_model(client: httpx.Client) -> str:
    response = client.get("/models")
    try:
        name: str = response.raise_for_status().json()["data"][0]["id"]
    except (httpx.HTTPStatusError, ValueError, LookupError, TypeError):
        raise EngineError(
            f"{client.base_url} is no OpenAI endpoint: GET {response.url.path} answered {response.status_code}; give "
            "its base URL, which ends in /v1"
        ) from None
    return name


def _read_line(console: Console) -> str:
    try:
        return console.input("[bold]> [/bold]").strip()
    except (EOFError, KeyboardInterrupt):
        console.print()
        return ""


def _stream(client: httpx.Client, body: dict[str, object]) -> Iterator[str]:
    with client.stream("POST", "/chat/completions", json={**body, "stream": True}) as response:
        if response.is_error:
            response.read()
            raise EngineError(f"the endpoint answered {response.status_code}: {_error_text(response)}")
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise EngineError(event["error"]["message"])
            for choice in event["choices"]:
                yield choice["delta"].get("content") or ""


def _error_text(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return response.text
