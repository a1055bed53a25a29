"""/generate over the scripted engine, whose tokens have the log probability -1.5."""

from __future__ import annotations

import itertools
import json
from typing import Any

from tests.helpers.scripted_engine import EOS, REPLY, Run, Stack


async def generate(stack: Stack, **fields: Any) -> Any:
    reply = await stack.http.post("/generate", json=fields)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_a_text_comes_back_with_ids_and_meta_info(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        answer = await generate(stack, text="hi", rid="mine")
        meta = answer["meta_info"]
        assert answer["text"] == REPLY
        assert answer["output_ids"] == stack.coordinator.reply
        assert meta.pop("e2e_latency") > 0
        assert meta == {
            "id": "mine",
            "finish_reason": {"type": "stop", "matched": EOS},
            "prompt_tokens": 1,
            "completion_tokens": len(stack.coordinator.reply),
            "cached_tokens": 16,
        }

    run(scenario)


def test_sglangs_names_of_parameters_reach_the_engine(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        parameters = {"max_new_tokens": 3, "min_new_tokens": 2, "sampling_seed": 7, "temperature": 0.5, "top_k": -1}
        answer = await generate(stack, input_ids=[5, 6], sampling_params=parameters)
        assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 3}
        [request] = stack.coordinator.requests
        sampling = request.sampling
        assert (sampling.max_tokens, sampling.min_tokens, sampling.seed) == (3, 2, 7)
        assert (sampling.temperature, sampling.top_k) == (0.5, 0)
        assert memoryview(request.prompt).cast("i").tolist() == [5, 6]

    run(scenario)


def test_a_batch_takes_one_value_or_one_for_each_prompt(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        answers = await generate(
            stack,
            input_ids=[[5], [6]],
            sampling_params=[{"max_new_tokens": 1}, {"max_new_tokens": 2, "temperature": 0}],
            return_logprob=[False, True],
            rid=["a", "b"],
        )
        assert [answer["meta_info"]["id"] for answer in answers] == ["a", "b"]
        assert [len(answer["output_ids"]) for answer in answers] == [1, 2]
        assert "output_token_logprobs" not in answers[0]["meta_info"]
        ids = stack.coordinator.reply
        assert answers[1]["meta_info"]["output_token_logprobs"] == [[-1.5, ids[0], None], [-1.5, ids[1], None]]

    run(scenario)


def test_n_makes_a_list_of_one_prompts_answers(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        answers = await generate(stack, text="hi", sampling_params={"n": 3, "max_new_tokens": 1})
        assert len(answers) == 3
        assert len({request.sampling.seed for request in stack.coordinator.requests}) == 3

    run(scenario)


def test_logprobs_name_the_likeliest_and_the_tokens_asked_for(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        answer = await generate(
            stack,
            text="hi",
            sampling_params={"max_new_tokens": 1},
            return_logprob=True,
            top_logprobs_num=2,
            token_ids_logprob=[9, 4],
            return_text_in_logprobs=True,
        )
        meta = answer["meta_info"]
        assert meta["input_token_logprobs"] == []
        assert meta["output_token_logprobs"] == [[-1.5, stack.coordinator.reply[0], "Hello"]]
        assert meta["output_top_logprobs"] == [
            [[-0.5, 19556, "Hello"], [-9999.0, 5, stack.model.tokenizer.token_text(5)]]
        ]
        assert [entry[:2] for entry in meta["output_token_ids_logprobs"][0]] == [[-1.0, 9], [-2.0, 4]]

    run(scenario)


def test_a_stream_grows_to_the_whole_answer(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        reply = await stack.http.post("/generate", json={"text": "hi", "stream": True, "return_logprob": True})
        *chunks, last = [block.removeprefix("data: ") for block in reply.text.split("\n\n")[:-1]]
        assert last == "[DONE]"
        answers = [json.loads(chunk) for chunk in chunks]
        for earlier, later in itertools.pairwise(answers):
            assert later["text"].startswith(earlier["text"])
            assert earlier["meta_info"]["finish_reason"] is None
        whole = await generate(stack, text="hi", return_logprob=True)
        for answer in (answers[-1], whole):
            del answer["meta_info"]["id"], answer["meta_info"]["e2e_latency"]
        assert answers[-1] == whole
        batch = await stack.http.post("/generate", json={"text": ["a", "b"], "stream": True})
        shown = [json.loads(block.removeprefix("data: ")) for block in batch.text.split("\n\n")[:-2]]
        assert {answer["index"] for answer in shown} == {0, 1}

    run(scenario)
