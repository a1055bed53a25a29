"""/v1/score over the scripted engine, which gives the labels the log probabilities -1, -2 and so on."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.scripted_engine import MODEL, Run, Stack, error_of


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
def test_every_item_has_a_score_for_every_label(run: Run, path: str) -> None:
    async def scenario(stack: Stack) -> None:
        body = {"model": MODEL, "query": "Is it so? ", "items": ["yes", "no", "so"], "label_token_ids": [7, 9]}
        reply = (await stack.http.post(path, json=body)).json()
        assert reply["object"] == "scoring"
        assert reply["scores"] == [pytest.approx([math.exp(-1), math.exp(-2)])] * 3
        prompts = [memoryview(request.prompt).cast("i").tolist() for request in stack.coordinator.requests]
        texts = ["Is it so? yes", "Is it so? no", "Is it so? so"]
        assert [stack.model.tokenizer.decode(ids) for ids in prompts] == texts
        assert all(request.sampling.logprob_token_ids == (7, 9) for request in stack.coordinator.requests)
        assert reply["usage"]["prompt_tokens"] == sum(len(ids) for ids in prompts)

    run(scenario)


def test_softmax_makes_the_scores_of_an_item_add_up_to_one(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        body = {"query": [5, 6], "items": [[7], [8]], "label_token_ids": [1, 2, 3], "apply_softmax": True}
        scores = (await stack.http.post("/v1/score", json={**body, "item_first": True})).json()["scores"]
        weights = [math.exp(-1 - i) for i in range(3)]
        assert scores == [pytest.approx([weight / sum(weights) for weight in weights])] * 2
        prompts = [memoryview(request.prompt).cast("i").tolist() for request in stack.coordinator.requests]
        assert prompts == [[7, 5, 6], [8, 5, 6]]

    run(scenario)


GOOD: dict[str, Any] = {"query": "a", "items": ["b"], "label_token_ids": [1]}


@pytest.mark.parametrize(
    ("fields", "status", "code", "param"),
    [
        ({"label_token_ids": []}, 400, "invalid_value", "label_token_ids"),
        ({"label_token_ids": [10**8]}, 400, "invalid_value", "label_token_ids[0]"),
        ({"label_token_ids": list(range(129))}, 400, "invalid_value", "label_token_ids"),
        ({"items": []}, 400, "invalid_value", "items"),
        ({"items": [[1]]}, 400, "invalid_type", "items"),
        ({"query": [1]}, 400, "invalid_type", "items[0]"),
        ({"query": [1], "items": [[-1]]}, 400, "invalid_value", "items[0][0]"),
        ({"query": [], "items": [[]]}, 400, "empty_string", "items[0]"),
        ({"items": ["b"] * 1025}, 400, "invalid_value", "items"),
        ({"items": ["b " * 200]}, 400, "context_length_exceeded", "items[0]"),
        ({"model": "other"}, 404, "model_not_found", "model"),
        ({"text_1": "a", "text_2": "b"}, 400, "unsupported_parameter", "text_1"),
    ],
)
def test_what_cannot_be_scored_is_refused_by_its_path(
    run: Run, fields: dict[str, Any], status: int, code: str, param: str
) -> None:
    async def scenario(stack: Stack) -> None:
        assert error_of(await stack.http.post("/v1/score", json={**GOOD, **fields}), status, code)["param"] == param

    run(scenario)
