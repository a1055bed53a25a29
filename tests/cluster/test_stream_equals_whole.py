"""A stream and a whole answer say the same: text, log probabilities, token ids, reasons and counts, for random answers
under random fields, however many tokens a step brings."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from cluster.text.tokenizer import Tokenizer
from tests.helpers.scripted_engine import EOS, Run, Stack, events

NUM_EXAMPLES = 60


def random_reply(tokenizer: Tokenizer, rng: random.Random) -> list[int]:
    emoji = tokenizer.encode("👩‍👩‍👧‍👦 漢字 né", add_special_tokens=False)
    reply = [rng.randrange(17, tokenizer.vocab_size) for _ in range(rng.randrange(1, 12))]
    for _ in range(rng.randrange(4)):
        at = rng.randrange(len(reply) + 1)
        reply[at:at] = rng.choice([emoji[: rng.randrange(len(emoji) + 1)], [rng.randrange(3, 17)]])
    return [*reply, EOS] if rng.random() < 0.5 else [*reply, 100]


def random_fields(tokenizer: Tokenizer, rng: random.Random, reply: list[int]) -> dict[str, Any]:
    text = tokenizer.decode(reply, skip_special_tokens=False)
    start = rng.randrange(len(text))
    stop = text[start : start + rng.randrange(1, 6)]
    optional = {
        "stop": [stop, "\N{REPLACEMENT CHARACTER}"][: rng.randrange(1, 3)],
        "stop_regex": "[aeiou]{2}",
        "stop_token_ids": [rng.choice(reply)],
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "min_tokens": rng.randrange(1, 5),
        "return_token_ids": True,
        "n": 2,
        "ignore_eos": True,
    }
    return {name: value for name, value in optional.items() if rng.random() < 0.4} | {
        "max_tokens": rng.randrange(5, 40)
    }


def joined(parts: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The aligned lists of several chunks as one."""
    return {name: [entry for part in parts for entry in part[name]] for name in parts[0]} if parts else None


def of_whole(body: dict[str, Any], index: int) -> dict[str, Any]:
    choice = body["choices"][index]
    return {
        "text": choice["text"] if "text" in choice else choice["message"]["content"],
        "logprobs": choice["logprobs"],
        "token_ids": choice.get("token_ids"),
        "prompt_token_ids": choice.get("prompt_token_ids", body.get("prompt_token_ids")),
        "ends": [(choice["finish_reason"], choice["stop_reason"])],
        "usage": body["usage"],
    }


def of_stream(chunks: list[Any], index: int, *, token_ids: bool) -> dict[str, Any]:
    own = [chunk for chunk in chunks if chunk["choices"] and chunk["choices"][0]["index"] == index]
    choices = [chunk["choices"][0] for chunk in own]
    prompts = [chunk.get("prompt_token_ids") or chunk["choices"][0].get("prompt_token_ids") for chunk in own]
    return {
        "text": "".join(
            choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices
        ),
        "logprobs": joined([choice["logprobs"] for choice in choices if choice["logprobs"]]),
        "token_ids": [id_ for choice in choices for id_ in choice.get("token_ids", [])] if token_ids else None,
        "prompt_token_ids": next((ids for ids in prompts if ids), None),
        "ends": [(c["finish_reason"], c["stop_reason"]) for c in choices if c["finish_reason"]],
        "usage": chunks[-1]["usage"],
    }


@pytest.mark.parametrize("route", ["chat", "complete"])
def test_a_stream_joined_is_the_whole_answer(run: Run, smollm2: Tokenizer, route: str) -> None:
    rng = random.Random(3)

    async def scenario(stack: Stack) -> None:
        ask = stack.chat if route == "chat" else stack.complete
        for _ in range(NUM_EXAMPLES):
            stack.coordinator.reply = random_reply(smollm2, rng)
            stack.coordinator.burst = rng.randrange(1, 5)
            fields = random_fields(smollm2, rng, stack.coordinator.reply)
            if route == "chat":
                fields |= {"logprobs": True, "top_logprobs": rng.randrange(3)} if rng.random() < 0.5 else {}
            else:
                fields |= {"logprobs": rng.randrange(3)} if rng.random() < 0.5 else {}
                fields |= {"echo": True} if rng.random() < 0.3 and fields.get("n", 1) == 1 else {}
            whole, streamed = await asyncio.gather(
                ask(**fields), ask(**fields, stream=True, stream_options={"include_usage": True})
            )
            assert whole.status_code == 200, (fields, whole.text)
            body, chunks = whole.json(), events(streamed)[:-1]
            for index in range(fields.get("n", 1)):
                ids = "return_token_ids" in fields
                assert of_stream(chunks, index, token_ids=ids) == of_whole(body, index), fields

    run(scenario)


def test_chunks_of_text_alone_are_like_any_other(run: Run, smollm2: Tokenizer) -> None:
    """They take a shorter way than chunks that show more."""

    async def scenario(stack: Stack) -> None:
        stack.coordinator.reply = smollm2.encode('a "quoted"\n\\ 😀 \x00 text', add_special_tokens=False)
        for ask in (stack.chat, stack.complete):
            plain, fuller = [
                [{**chunk, "id": "", "created": 0} for chunk in events(await ask(stream=True, **fields))[:-1]]
                for fields in ({}, {"return_token_ids": True})
            ]
            for chunk in fuller:
                chunk.pop("prompt_token_ids", None)
                for name in ("token_ids", "prompt_token_ids"):
                    chunk["choices"][0].pop(name, None)
            # Token ids have chunks of their own where a token's text is still held, or where the prompt's are shown.
            assert [c for c in plain if _text(c)] == [c for c in fuller if _text(c)]

    run(scenario)


def _text(chunk: dict[str, Any]) -> str:
    choice = chunk["choices"][0]
    text: str = choice["text"] if "text" in choice else choice["delta"].get("content", "")
    return text
