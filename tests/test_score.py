"""/v1/score over the scripted engine, which gives the labels the log probabilities -1, -2 and so on."""

from __future__ import annotations

import math

import pytest

from tests.scripted_engine import MODEL, Run, Stack


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
