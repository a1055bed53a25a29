"""The openai package against the real model at tensor_parallel_size 2: every group of fields, streamed and whole."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from cluster.text.tokenizer import Tokenizer

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

MESSAGES: list[Any] = [{"role": "user", "content": "Name three fruits."}]
EOS = 2
PROMPT = "The sun rises in the"


@pytest.fixture
def complete(client: openai.OpenAI, endpoint: Any) -> Callable[..., Any]:
    """A completion: whole, after checking that `streamed` it gives the same text, reason and usage."""

    def ask(
        *,
        prompt: Any = PROMPT,
        max_tokens: int = 8,
        extra: dict[str, Any] | None = None,
        streamed: bool = True,
        **fields: Any,
    ) -> Any:
        body: dict[str, Any] = {"model": endpoint.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        body |= fields
        whole = client.completions.create(**body, extra_body=extra)
        if not streamed:
            return whole
        chunks = list(
            client.completions.create(**body, extra_body=extra, stream=True, stream_options={"include_usage": True})
        )
        for choice in whole.choices:
            own = [part.choices[0] for part in chunks if part.choices and part.choices[0].index == choice.index]
            assert "".join(part.text for part in own) == choice.text
            assert own[-1].finish_reason == choice.finish_reason
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
        return whole

    return ask


@pytest.fixture
def chat(client: openai.OpenAI, endpoint: Any) -> Callable[..., Any]:
    """A chat's answer: whole, after checking that streaming it gives the same text, reason and usage."""

    def ask(
        *, messages: Any = MESSAGES, max_tokens: int = 8, extra: dict[str, Any] | None = None, **fields: Any
    ) -> Any:
        body: dict[str, Any] = {"model": endpoint.model, "messages": messages, "max_tokens": max_tokens}
        body |= {"temperature": 0, **fields}
        whole = client.chat.completions.create(**body, extra_body=extra)
        chunks = list(
            client.chat.completions.create(
                **body, extra_body=extra, stream=True, stream_options={"include_usage": True}
            )
        )
        for choice in whole.choices:
            own = [part.choices[0] for part in chunks if part.choices and part.choices[0].index == choice.index]
            assert own[0].delta.role == "assistant"
            assert "".join(part.delta.content or "" for part in own) == choice.message.content
            assert own[-1].finish_reason == choice.finish_reason
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
        return whole

    return ask


@pytest.mark.slow
def test_usage_is_the_clients_own_count(complete: Any, chat: Any, smollm2: Tokenizer) -> None:
    reply = complete(extra={"return_token_ids": True})
    choice = reply.choices[0]
    assert choice.prompt_token_ids == smollm2.encode(PROMPT, add_special_tokens=True)
    assert reply.usage.prompt_tokens == len(choice.prompt_token_ids)
    assert reply.usage.completion_tokens == len(choice.token_ids) == 8
    assert smollm2.decode(choice.token_ids) == choice.text
    answer = chat(extra={"return_token_ids": True})
    assert answer.usage.prompt_tokens == len(answer.prompt_token_ids)
    assert answer.usage.completion_tokens == len(answer.choices[0].token_ids)
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0
    assert answer.system_fingerprint.startswith("lockstep-")


def test_min_tokens_holds_the_end_back(chat: Any) -> None:
    at_once = {"logit_bias": {str(EOS): 100}}
    assert chat(**at_once).usage.completion_tokens == 1
    held = chat(**at_once, extra={"min_tokens": 5})
    assert (held.usage.completion_tokens, held.choices[0].finish_reason) == (6, "stop")
    ignoring = chat(**at_once, extra={"ignore_eos": True})
    assert (ignoring.usage.completion_tokens, ignoring.choices[0].finish_reason) == (8, "length")


@pytest.mark.slow
def test_stop_strings_patterns_and_ids_end_a_text(complete: Any) -> None:
    plain = complete(max_tokens=14, extra={"return_token_ids": True}).choices[0]
    stop = plain.text[8:11]
    ended = complete(max_tokens=14, stop=[stop]).choices[0]
    assert (ended.text, ended.finish_reason) == (plain.text[: plain.text.index(stop)], "stop")
    kept = complete(max_tokens=14, stop=stop, extra={"include_stop_str_in_output": True}).choices[0]
    assert kept.text == plain.text[: plain.text.index(stop) + len(stop)]
    pattern = complete(max_tokens=14, extra={"stop_regex": "[a-z]{4}"}).choices[0]
    assert plain.text.startswith(pattern.text)
    assert pattern.finish_reason == "stop"
    by_id = complete(max_tokens=14, extra={"stop_token_ids": [plain.token_ids[3]], "return_token_ids": True}).choices[0]
    assert by_id.token_ids == plain.token_ids[: plain.token_ids.index(plain.token_ids[3]) + 1]
    assert by_id.stop_reason == plain.token_ids[3]


def test_logprobs_have_the_sampled_token_its_bytes_and_those_asked_for(chat: Any, complete: Any) -> None:
    reply = chat(logprobs=True, top_logprobs=3, extra={"logprob_token_ids": [42, 43], "return_token_ids": True})
    content = reply.choices[0].logprobs.content
    assert len(content) == reply.usage.completion_tokens
    text = b"".join(bytes(entry.bytes) for entry in content).decode()
    assert text.startswith(reply.choices[0].message.content)
    for entry in content:
        assert 4 <= len(entry.top_logprobs) <= 5
        assert entry.logprob == pytest.approx(entry.top_logprobs[0].logprob)  # greedy
        assert sum(math.exp(top.logprob) for top in entry.top_logprobs) < 1.001
    several = complete(logprobs=2, temperature=1, seed=3).choices[0].logprobs
    assert len(several.tokens) == len(several.token_logprobs) == len(several.text_offset) == 8
    for own, top in zip(several.token_logprobs, several.top_logprobs, strict=True):
        assert 2 <= len(top) <= 3
        assert any(value == pytest.approx(own) for value in top.values())


@pytest.mark.slow
def test_sampling_is_the_same_for_a_seed_and_within_top_k(chat: Any, complete: Any) -> None:
    fields: dict[str, Any] = {"temperature": 1, "top_p": 0.9, "n": 2}
    one, two, other = (
        [choice.message.content for choice in chat(**fields, seed=seed, extra={"top_k": 20, "min_p": 0.01}).choices]
        for seed in (5, 5, 100)
    )
    assert one == two != other
    assert one[0] != one[1]
    assert complete(temperature=1, seed=1, extra={"top_k": 1}).choices[0].text == complete().choices[0].text


def test_prompts_may_be_token_ids_and_several(complete: Any, smollm2: Tokenizer) -> None:
    ids = smollm2.encode(PROMPT, add_special_tokens=True)
    text = complete().choices[0].text
    reply = complete(prompt=[ids, ids[:-1]], n=2)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in reply.choices][:2] == [text, text]
    assert reply.usage.prompt_tokens == 2 * len(ids) - 1


def test_special_tokens_show_where_asked(complete: Any, endpoint: Any) -> None:
    hidden = complete(logit_bias={str(EOS): 100})
    assert (hidden.choices[0].text, hidden.choices[0].finish_reason) == ("", "stop")
    extra = {"skip_special_tokens": False, "include_stop_str_in_output": True}
    assert complete(logit_bias={str(EOS): 100}, extra=extra).choices[0].text == "<|im_end|>"


def test_a_chat_can_continue_its_last_message(chat: Any) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "1. Apple\n2."}]
    extra = {"continue_final_message": True, "add_generation_prompt": False, "return_token_ids": True}
    continued = chat(messages=messages, extra=extra)
    opened = chat(messages=messages, extra={"return_token_ids": True})
    assert continued.prompt_token_ids == opened.prompt_token_ids[: len(continued.prompt_token_ids)]
    assert continued.choices[0].message.content


def test_priority_salt_and_ignored_fields_pass(client: openai.OpenAI, endpoint: Any) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=endpoint.model,
        messages=MESSAGES,
        max_tokens=2,
        user="u",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        extra_body={"priority": 5, "cache_salt": "s1", "request_id": "abc", "nobody_knows": 1},
        extra_headers={"x-request-id": "trace-7"},
    )
    assert raw.headers["x-request-id"] == "trace-7"
    assert raw.headers["x-ignored-fields"] == "nobody_knows"
    assert "queue;dur=" in raw.headers["server-timing"]
    assert raw.parse().id == "chatcmpl-abc"


def test_salts_keep_cached_prompts_apart(client: openai.OpenAI, endpoint: Any) -> None:
    def cached(salt: str) -> int:
        reply = client.completions.create(
            model=endpoint.model, prompt="salt and pepper " * 40, max_tokens=1, extra_body={"cache_salt": salt}
        )
        assert reply.usage is not None
        assert reply.usage.prompt_tokens_details is not None
        return reply.usage.prompt_tokens_details.cached_tokens or 0

    assert [cached("one"), cached("two"), cached("two"), cached("one")] == [0, 0, 112, 112]


def test_nothing_is_left_behind(endpoint: Any) -> None:
    endpoint.wait_idle(30)
    assert httpx.get(f"{endpoint.url}/ready").status_code == 200
