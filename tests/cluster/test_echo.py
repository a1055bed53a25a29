"""Log probabilities through HTTP equal those of transformers in fp32: of prompts, chunked and not, and of answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import openai
import pytest
import torch

from tests.conftest import Logits

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

TOLERANCE = 2e-3


@pytest.fixture(scope="module")
def reference(smollm2_logits: Logits) -> Logits:
    """Log probabilities of the token after each position, [num_tokens, vocab_size] float32."""
    return lambda ids: smollm2_logits(ids).log_softmax(-1)


@pytest.mark.slow
def test_echoed_logprobs_equal_transformers_as_evaluation_harnesses_ask(
    client: openai.OpenAI, endpoint: Any, reference: Logits
) -> None:
    rng = np.random.default_rng(3)
    # One is longer than a prefill chunk of the CPU's 512 tokens; two begin alike, so that a cached prefix would show.
    long = rng.integers(100, 49152, 560).tolist()
    prompts = [rng.integers(100, 49152, length).tolist() for length in (2, 17, 60)] + [long, long[:530]]
    reply = client.completions.create(
        model=endpoint.model,
        prompt=prompts,
        max_tokens=1,
        temperature=0,
        seed=1234,
        echo=True,
        logprobs=1,
        extra_body={"return_tokens_as_token_ids": True},
    )
    scored = reference(long)  # causal: also what every prompt that it begins with has
    for prompt, choice in zip(prompts, reply.choices, strict=True):
        logprobs = choice.logprobs
        assert logprobs is not None
        assert logprobs.tokens is not None
        assert logprobs.token_logprobs is not None
        assert logprobs.top_logprobs is not None
        expected = scored[: len(prompt)] if prompt == long[: len(prompt)] else reference(prompt)
        ids = [int(token.removeprefix("token_id:")) for token in logprobs.tokens]
        assert ids[:-1] == prompt
        assert ids[-1] == int(expected[-1].argmax())
        assert logprobs.token_logprobs[0] is None
        own = expected[torch.arange(len(prompt)), torch.tensor(ids[1:])]
        np.testing.assert_allclose(logprobs.token_logprobs[1:], own.numpy(), atol=TOLERANCE, rtol=0)
        for top, row in zip(logprobs.top_logprobs[1:], expected, strict=True):
            assert max(top.values()) == pytest.approx(float(row.max()), abs=TOLERANCE)
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == sum(map(len, prompts))


@pytest.mark.slow
def test_an_answers_logprobs_equal_transformers_whatever_shapes_the_choice(
    client: openai.OpenAI, endpoint: Any, reference: Logits
) -> None:
    prompt = [504, 1234, 42, 77]
    choice = client.completions.create(
        model=endpoint.model,
        prompt=prompt,
        max_tokens=6,
        temperature=0.8,
        seed=5,
        logprobs=2,
        frequency_penalty=1,
        logit_bias={"300": 20},
        extra_body={"return_token_ids": True, "logprob_token_ids": [11], "return_tokens_as_token_ids": True},
    ).choices[0]
    ids: list[int] = choice.token_ids  # type: ignore[attr-defined]  # a field of vLLM's
    expected = reference([*prompt, *ids])[len(prompt) - 1 : -1]
    assert choice.logprobs is not None
    assert choice.logprobs.top_logprobs is not None
    own = expected[torch.arange(len(ids)), torch.tensor(ids)]
    np.testing.assert_allclose(choice.logprobs.token_logprobs, own.numpy(), atol=TOLERANCE, rtol=0)
    for top, row in zip(choice.logprobs.top_logprobs, expected, strict=True):
        assert top["token_id:11"] == pytest.approx(float(row[11]), abs=TOLERANCE)
        likeliest = row.topk(2)
        for id_, value in zip(likeliest.indices.tolist(), likeliest.values.tolist(), strict=True):
            assert top[f"token_id:{id_}"] == pytest.approx(value, abs=TOLERANCE)


@pytest.mark.slow
def test_a_chats_prompt_logprobs_equal_transformers(client: openai.OpenAI, endpoint: Any, reference: Logits) -> None:
    reply: Any = client.chat.completions.create(
        model=endpoint.model,
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=1,
        extra_body={"prompt_logprobs": 1, "return_token_ids": True},
    )
    ids: list[int] = reply.prompt_token_ids
    expected = reference(ids)
    assert reply.prompt_logprobs[0] is None
    for position, entry in enumerate(reply.prompt_logprobs[1:]):
        own = entry[str(ids[position + 1])]
        assert own["logprob"] == pytest.approx(float(expected[position, ids[position + 1]]), abs=TOLERANCE)
        assert any(scored["rank"] == 1 for scored in entry.values())
