"""A hundred turns of an agent: how much of each prompt the prefix cache has, and when the first token comes.

    python -m benchmarks.turns CONFIG [--set KEY=VALUE ...] [--turns 100] [--surfaces NAME,...] [--json OUT]

The endpoint is started for the run. On each of three surfaces (chat completions, responses, messages) the vendor's own
client holds one conversation: every third turn the model must call a tool, otherwise it may. The client then appends
the answer, the results of calls, and another question. Prints for each surface:
  hits   cached prompt tokens over those that the whole pages of the previous prompt and answer have, over all turns
  first  ms to the first event with a part of the answer, in the median of the first and of the last tenth of the turns
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai

from benchmarks.report import Report, circumstances
from benchmarks.serving import endpoint

_SYSTEM = "You look after the canal's locks. " * 20
_SCHEMA = {
    "type": "object",
    "properties": {"lock": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["lock"],
    "additionalProperties": False,
}
_TOOL = {"name": "read_gauge", "description": "Reads a lock's gauge.", "parameters": _SCHEMA}
_MAX_TOKENS = 24
_CALL_EVERY = 3


@dataclass
class Turn:
    """Token counts and time of one turn."""

    prompt: int
    cached: int
    answer: int
    first_ms: float


def _question(turn: int) -> str:
    return f"Turn {turn}: what does the keeper of lock {turn % 9 + 1} do when the water is {turn} centimetres too high?"


def _result(turn: int) -> str:
    return "\n".join(f"gauge {line}: {turn * line} cm" for line in range(1, 3))


def _ms_since(began: float) -> float:
    return 1e3 * (time.perf_counter() - began)


def chat(url: str, model: str, num_turns: int) -> list[Turn]:
    """The conversation on /v1/chat/completions."""
    client, turns = openai.OpenAI(base_url=url, api_key="none", max_retries=0), []
    messages: list[Any] = [{"role": "system", "content": _SYSTEM}]
    for turn in range(num_turns):
        calls = turn % _CALL_EVERY == 1
        messages.append({"role": "user", "content": _question(turn)})
        began, first_ms, text, usage = time.perf_counter(), 0.0, "", None
        tool_calls: dict[int, dict[str, Any]] = {}
        for chunk in client.chat.completions.create(  # type: ignore[call-overload]  # it takes no plain dicts
            model=model,
            messages=messages,
            tools=[{"type": "function", "function": {**_TOOL, "strict": True}}],
            tool_choice="required" if calls else "auto",
            max_tokens=_MAX_TOKENS,
            stream=True,
            stream_options={"include_usage": True},
        ):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                if choice.delta.content or choice.delta.tool_calls:
                    first_ms = first_ms or _ms_since(began)
                text += choice.delta.content or ""
                for call in choice.delta.tool_calls or ():
                    called = tool_calls.setdefault(
                        call.index, {"id": call.id, "name": call.function.name, "arguments": ""}
                    )
                    called["arguments"] += call.function.arguments or ""
        assert usage is not None, "the last chunk has the usage"
        assert usage.prompt_tokens_details is not None, "the usage says what was cached"
        cached = usage.prompt_tokens_details.cached_tokens or 0
        turns.append(Turn(usage.prompt_tokens, cached, usage.completion_tokens, first_ms))
        said = [{"id": it.pop("id"), "type": "function", "function": it} for it in tool_calls.values()]
        messages.append({"role": "assistant", "content": text} | ({"tool_calls": said} if said else {}))
        messages += [{"role": "tool", "tool_call_id": it["id"], "content": _result(turn)} for it in said]
    return turns


def responses(url: str, model: str, num_turns: int) -> list[Turn]:
    """The conversation on /v1/responses, with all of it in each request."""
    client, turns = openai.OpenAI(base_url=url, api_key="none", max_retries=0), []
    items: list[Any] = []
    for turn in range(num_turns):
        calls = turn % _CALL_EVERY == 1
        items.append({"role": "user", "content": _question(turn)})
        began, first_ms, response = time.perf_counter(), 0.0, None
        for event in client.responses.create(  # type: ignore[call-overload]  # it takes no plain dicts
            model=model,
            instructions=_SYSTEM,
            input=items,
            tools=[{"type": "function", "strict": True, **_TOOL}],
            tool_choice="required" if calls else "auto",
            max_output_tokens=_MAX_TOKENS,
            store=False,
            stream=True,
        ):
            if event.type.endswith(".delta"):
                first_ms = first_ms or _ms_since(began)
            response = getattr(event, "response", response)
        assert response is not None, "a stream ends with the response"
        usage = response.usage
        turns.append(Turn(usage.input_tokens, usage.input_tokens_details.cached_tokens, usage.output_tokens, first_ms))
        for item in response.output:
            items.append(item.model_dump(exclude_none=True))
            if item.type == "function_call":
                items.append({"type": "function_call_output", "call_id": item.call_id, "output": _result(turn)})
    return turns


def messages(url: str, model: str, num_turns: int) -> list[Turn]:
    """The conversation on /v1/messages."""
    client = anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key="none", max_retries=0)
    turns: list[Turn] = []
    history: list[Any] = []
    results: list[Any] = []
    for turn in range(num_turns):
        calls = turn % _CALL_EVERY == 1
        history.append({"role": "user", "content": [*results, {"type": "text", "text": _question(turn)}]})
        tool = {"name": _TOOL["name"], "description": _TOOL["description"], "input_schema": _SCHEMA}
        began, first_ms = time.perf_counter(), 0.0
        with client.messages.stream(
            model=model,
            system=_SYSTEM,
            messages=history,
            tools=[tool],  # type: ignore[list-item]
            tool_choice={"type": "any" if calls else "auto"},  # type: ignore[arg-type]
            max_tokens=_MAX_TOKENS,
        ) as stream:
            for event in stream:
                if event.type == "content_block_delta":
                    first_ms = first_ms or _ms_since(began)
            message = stream.get_final_message()
        cached = message.usage.cache_read_input_tokens or 0
        turns.append(Turn(message.usage.input_tokens + cached, cached, message.usage.output_tokens, first_ms))
        history.append({"role": "assistant", "content": [block.model_dump() for block in message.content]})
        uses = [block.id for block in message.content if block.type == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": use, "content": _result(turn)} for use in uses]
    return turns


SURFACES: dict[str, Callable[[str, str, int], list[Turn]]] = {
    "chat completions": chat,
    "responses": responses,
    "messages": messages,
}


def summary(turns: list[Turn], page_size: int) -> dict[str, Any]:
    """The figures of one conversation."""
    # The engine has no KV of an answer's last token.
    could = [(turn.prompt + turn.answer - 1) // page_size * page_size for turn in turns[:-1]]
    tenth = max(len(turns) // 10, 1)
    first, last = ([turn.first_ms for turn in part] for part in (turns[1 : 1 + tenth], turns[-tenth:]))
    return {
        "turns": len(turns),
        "last_prompt_tokens": turns[-1].prompt,
        "hits": round(sum(turn.cached for turn in turns[1:]) / sum(could), 4),
        "least_hits": round(min(turn.cached / most for turn, most in zip(turns[1:], could, strict=True)), 4),
        "first_ms": [round(statistics.median(part), 1) for part in (first, last)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("config")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--turns", type=int, default=100)
    parser.add_argument("--surfaces", type=lambda text: text.split(","), default=list(SURFACES))
    parser.add_argument("--json", type=Path, metavar="OUT")
    arguments = parser.parse_args()
    report = Report(arguments.json, **circumstances(), config=arguments.config, overrides=arguments.overrides)
    with endpoint(arguments.config, arguments.overrides) as url:
        model = httpx.get(f"{url}/models").json()["data"][0]["id"]
        info = httpx.get(f"{url.removesuffix('/v1')}/metrics").text
        page_size = int(info.partition('page_size="')[2].partition('"')[0])
        for name in arguments.surfaces:
            figures = summary(SURFACES[name](url, model, arguments.turns), page_size)
            print(f"{name}: {json.dumps(figures)}")
            report.add(**{name: figures})


if __name__ == "__main__":
    main()
