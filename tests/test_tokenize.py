"""/tokenize and /detokenize: the ids a request would run on, by the scripted engine's stack."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.openai.tokenizer import Tokenizer
from tests.scripted_engine import MODEL, Run, Stack, error_of

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_a_prompt_comes_back_as_the_ids_a_completion_runs_on(run: Run, smollm2: Tokenizer, prefix: str) -> None:
    async def scenario(stack: Stack) -> None:
        text = "Hello there 😀, 漢字."
        reply = (await stack.http.post(f"{prefix}/tokenize", json={"model": MODEL, "prompt": text})).json()
        ids = smollm2.encode(text, add_special_tokens=True)
        assert reply == {"count": len(ids), "max_model_len": 128, "tokens": ids, "token_strs": None}
        back = await stack.http.post(f"{prefix}/detokenize", json={"model": MODEL, "tokens": ids})
        assert back.json() == {"prompt": text}

    run(scenario)


def test_a_chat_counts_as_many_tokens_as_its_answer_says(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        tokens = (await stack.http.post("/tokenize", json={"messages": MESSAGES})).json()
        answer = (await stack.chat(messages=MESSAGES, max_tokens=1)).json()
        assert tokens["count"] == answer["usage"]["prompt_tokens"]

    run(scenario)


def test_token_strings_have_a_place_for_every_token(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        body = {"prompt": "Hello there", "return_token_strs": True}
        reply = (await stack.http.post("/tokenize", json=body)).json()
        assert reply["token_strs"] == ["Hello", " there"]

    run(scenario)


def test_special_tokens_survive_the_way_there_and_back(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        tokens = (await stack.http.post("/tokenize", json={"messages": MESSAGES})).json()["tokens"]
        text = (await stack.http.post("/detokenize", json={"tokens": tokens})).json()["prompt"]
        assert text.startswith("<|im_start|>")
        again = (await stack.http.post("/tokenize", json={"prompt": text, "add_special_tokens": False})).json()
        assert again["tokens"] == tokens

    run(scenario)


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "param"),
    [
        ("/tokenize", {}, 400, "missing_required_parameter", "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, 400, "missing_required_parameter", "prompt"),
        ("/tokenize", {"prompt": 7}, 400, "invalid_type", "prompt"),
        ("/tokenize", {"messages": [{"role": "user"}]}, 400, "invalid_type", "messages[0].content"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model_not_found", "model"),
        ("/detokenize", {"tokens": [5, 10**9]}, 400, "invalid_value", "tokens[1]"),
        ("/detokenize", {"tokens": [-1]}, 400, "invalid_value", "tokens[0]"),
        ("/detokenize", {"tokens": [True]}, 400, "invalid_type", "tokens[0]"),
        ("/detokenize", {}, 400, "missing_required_parameter", "tokens"),
    ],
)
def test_what_cannot_be_tokenised_is_refused_by_its_path(
    run: Run, path: str, body: dict[str, Any], status: int, code: str, param: str
) -> None:
    async def scenario(stack: Stack) -> None:
        assert error_of(await stack.http.post(path, json=body), status, code)["param"] == param

    run(scenario)
