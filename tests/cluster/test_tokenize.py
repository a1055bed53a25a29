"""/tokenize and /detokenize: the ids a request would run on, by the scripted engine's stack."""

from __future__ import annotations

from cluster.text.tokenizer import Tokenizer
from tests.helpers.scripted_engine import MODEL, Run, Stack

MESSAGES = [{"role": "user", "content": "hi"}]


def test_a_prompt_comes_back_as_the_ids_a_completion_runs_on(run: Run, smollm2: Tokenizer) -> None:
    async def scenario(stack: Stack) -> None:
        text = "Hello there 😀, 漢字."
        reply = (await stack.http.post("/tokenize", json={"model": MODEL, "prompt": text})).json()
        ids = smollm2.encode(text, add_special_tokens=True)
        assert reply == {"count": len(ids), "max_model_len": 128, "tokens": ids, "token_strs": None}
        back = await stack.http.post("/detokenize", json={"model": MODEL, "tokens": ids})
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
