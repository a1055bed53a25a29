"""`python -m cluster chat`: a line-by-line conversation with any OpenAI endpoint."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console

from cluster.commands.endpoint_client import EndpointClient


def run_chat(url: str, model: str | None, *, temperature: float | None, max_tokens: int | None) -> None:
    """Reads lines and streams answers until an empty line or end of input. Ctrl-C ends an answer, or at the prompt the
    chat. If `temperature` or `max_tokens` is None, the endpoint decides. Raises the errors of EndpointClient."""
    console = Console(highlight=False, soft_wrap=True)
    with EndpointClient(url) as endpoint:
        model = model or endpoint.first_model()
        console.print(f"{model} at {endpoint.url}; an empty line ends the chat")
        asked = {"temperature": temperature, "max_tokens": max_tokens}
        fields = {name: value for name, value in asked.items() if value is not None}
        messages: list[dict[str, str]] = []
        while line := _read_line(console):
            messages.append({"role": "user", "content": line})
            answer = ""
            try:
                body: dict[str, object] = {"model": model, "messages": messages, **fields}
                for piece in _stream(endpoint, body):
                    console.print(piece, end="", markup=False)
                    answer += piece
            except KeyboardInterrupt:
                answer += " ..."
            console.print()
            messages.append({"role": "assistant", "content": answer})


def _read_line(console: Console) -> str:
    try:
        return console.input("[bold]> [/bold]").strip()
    except (EOFError, KeyboardInterrupt):
        console.print()
        return ""


def _stream(endpoint: EndpointClient, body: dict[str, object]) -> Iterator[str]:
    for event in endpoint.events("POST", "chat/completions", {**body, "stream": True}):
        for choice in event["choices"]:
            yield choice["delta"].get("content") or ""
