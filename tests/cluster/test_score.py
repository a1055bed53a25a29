"""/v1/score over the scripted engine, which gives the labels the log probabilities -1, -2 and so on."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.helpers.scripted_engine import MODEL, Run, Stack
from tests.helpers.tiny_engine import tiny_engine


def test_every_item_has_a_score_for_every_label(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        body = {"model": MODEL, "query": "Is it so? ", "items": ["yes", "no", "so"], "label_token_ids": [7, 9]}
        reply = (await stack.http.post("/v1/score", json=body)).json()
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


def test_items_behind_one_query_go_together_where_the_engine_takes_them(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        stack.model.max_item_tokens = 3
        body = {"query": [5, 6], "items": [[7], [8, 9], [5]], "label_token_ids": [1, 2]}
        reply = (await stack.http.post("/v1/score", json=body)).json()
        assert reply["scores"] == [pytest.approx([math.exp(-1), math.exp(-2)])] * 3
        prompts = [memoryview(request.prompt).cast("i").tolist() for request in stack.coordinator.requests]
        assert prompts == [[5, 6, 7, 8, 9], [5, 6, 5]]
        assert [request.sampling.item_lens for request in stack.coordinator.requests] == [(1, 2), ()]
        assert reply["usage"]["prompt_tokens"] == 8

    run(scenario)


def test_together_they_score_as_each_alone(tmp_path: Path) -> None:
    """Over a real model; texts whose tokens join across the end of the query included."""
    bodies = [
        {"query": "Is it t", "items": ["he", "he same", " the", "no", "no", "o"], "apply_softmax": True},
        {"query": list(range(4, 30)), "items": [[7, 8, 9], [10], list(range(40, 60)), [7]]},
        {"query": " the", "items": ["it", "that"], "item_first": True},
    ]
    with tiny_engine(tmp_path) as engine:
        num_sequences = []
        scores = []
        for most in (engine.model.max_item_tokens, 0):
            engine.model.max_item_tokens = most
            replies = [engine.post("/v1/score", {**body, "label_token_ids": [5, 60, 200]}).json() for body in bodies]
            num_sequences.append([reply["usage"]["completion_tokens"] for reply in replies])
            scores.append([score for reply in replies for item in reply["scores"] for score in item])
        assert num_sequences == [[1, 1, 2], [6, 4, 2]], "items in front of a query have none in common"
        assert scores[0] == pytest.approx(scores[1], rel=1e-4)
        engine.check()
