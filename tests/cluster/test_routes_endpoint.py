"""The routes beside OpenAI's chats and completions, against the served model: /v1/responses and /v1/messages by the
packages that speak them, and the others by what they must agree with."""

from __future__ import annotations

import json
import math
from typing import Any, Literal

import anthropic
import httpx
import openai
import pytest
from pydantic import BaseModel

from tests.conftest import Endpoint

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

FRANCE: Any = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"temperature": 0}
"""The anthropic package has no such argument."""
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}


class City(BaseModel):
    name: Literal["Paris", "London", "Rome"]
    continent: Literal["Europe", "Asia"]


@pytest.fixture
def claude(endpoint: Endpoint) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=endpoint.url, api_key="none", max_retries=0, timeout=120)


@pytest.fixture
def http(endpoint: Endpoint) -> httpx.Client:
    return httpx.Client(base_url=endpoint.url, timeout=120)


# --- /v1/responses ----------------------------------------------------------------------------------------------------


def test_a_response_says_what_a_chat_says_streamed_and_whole(client: openai.OpenAI, endpoint: Endpoint) -> None:
    chat = (
        client.chat.completions.create(model=endpoint.model, messages=FRANCE, temperature=0, max_tokens=24)
        .choices[0]
        .message.content
    )
    whole = client.responses.create(model=endpoint.model, input=FRANCE, temperature=0, max_output_tokens=24)
    assert whole.output_text == chat
    assert "Paris" in whole.output_text
    with client.responses.stream(model=endpoint.model, input=FRANCE, temperature=0, max_output_tokens=24) as stream:
        told = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert told == final.output_text == chat
    assert final.usage is not None
    assert whole.usage is not None
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert client.responses.retrieve(final.id).output_text == chat


def test_a_conversation_goes_on_from_the_last_response(client: openai.OpenAI, endpoint: Endpoint) -> None:
    first = client.responses.create(model=endpoint.model, input=FRANCE, temperature=0, max_output_tokens=24)
    second = client.responses.create(
        model=endpoint.model,
        input="Name one museum there.",
        previous_response_id=first.id,
        temperature=0,
        max_output_tokens=24,
    )
    chat = client.chat.completions.create(
        model=endpoint.model,
        messages=[
            *FRANCE,
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "Name one museum there."},
        ],
        temperature=0,
        max_tokens=24,
    )
    assert second.output_text == chat.choices[0].message.content


@pytest.mark.slow
def test_a_response_is_parsed_into_a_model_and_calls_a_function(client: openai.OpenAI, endpoint: Endpoint) -> None:
    parsed = client.responses.parse(
        model=endpoint.model, input=FRANCE, text_format=City, temperature=0, max_output_tokens=64
    )
    assert isinstance(parsed.output_parsed, City)
    tool: Any = {"type": "function", "name": "weather", "parameters": WEATHER, "strict": True}
    asked: Any = {"model": endpoint.model, "input": "Weather in Rome?", "tools": [tool], "tool_choice": "required"}
    asked |= {"parallel_tool_calls": False}
    with client.responses.stream(**asked, temperature=0, max_output_tokens=64) as stream:
        fragments = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        final = stream.get_final_response()
    [call] = [item for item in final.output if item.type == "function_call"]
    assert "".join(fragments) == call.arguments
    assert json.loads(call.arguments).keys() == {"city", "unit"}


# --- /v1/messages -----------------------------------------------------------------------------------------------------


def test_a_message_says_what_a_chat_says_streamed_and_whole(
    claude: anthropic.Anthropic, client: openai.OpenAI, endpoint: Endpoint
) -> None:
    chat = client.chat.completions.create(model=endpoint.model, messages=FRANCE, temperature=0, max_tokens=24)
    asked: dict[str, Any] = {"model": endpoint.model, "messages": FRANCE, "max_tokens": 24, "extra_body": GREEDY}
    whole = claude.messages.create(**asked)
    [block] = whole.content
    assert block.type == "text"
    assert block.text == chat.choices[0].message.content
    with claude.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == block.text
        final = stream.get_final_message()
    assert final.stop_reason == whole.stop_reason
    assert chat.usage is not None
    counted = claude.messages.count_tokens(model=endpoint.model, messages=FRANCE)
    assert counted.input_tokens == chat.usage.prompt_tokens
    assert whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0) == chat.usage.prompt_tokens


@pytest.mark.slow
def test_a_message_uses_a_tool_and_goes_on_from_its_own_beginning(
    claude: anthropic.Anthropic, endpoint: Endpoint
) -> None:
    tool: Any = {"name": "weather", "input_schema": WEATHER}
    asked: dict[str, Any] = {
        "model": endpoint.model,
        "messages": [{"role": "user", "content": "Weather in Rome?"}],
        "tools": [tool],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "max_tokens": 64,
        "extra_body": GREEDY,
    }
    whole = claude.messages.create(**asked)
    assert whole.stop_reason == "tool_use"
    [use] = [block for block in whole.content if block.type == "tool_use"]
    assert use.name == "weather"
    assert use.input.keys() == {"city", "unit"}
    with claude.messages.stream(**asked) as stream:
        final = stream.get_final_message()
    assert [block.input for block in final.content if block.type == "tool_use"] == [use.input]
    begun: Any = [*FRANCE, {"role": "assistant", "content": "The capital of France is"}]
    continued = claude.messages.create(model=endpoint.model, messages=begun, max_tokens=4, extra_body=GREEDY)
    assert continued.content[0].type == "text"
    assert continued.content[0].text.startswith(" Paris")


def test_a_refused_message_is_the_packages_own_error(claude: anthropic.Anthropic, endpoint: Endpoint) -> None:
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="other", messages=FRANCE, max_tokens=1)
    long = {"role": "user", "content": "word " * 9000}
    with pytest.raises(anthropic.BadRequestError, match=r"exceed context limit: \d+ \+ 100000 > 8192"):
        claude.messages.create(model=endpoint.model, messages=[long], max_tokens=100_000)


# --- /generate, /v1/score and the others ------------------------------------------------------------------------------


def test_generate_scores_prompt_and_answer_as_completions_do(http: httpx.Client, endpoint: Endpoint) -> None:
    ids = http.post("/tokenize", json={"prompt": "The capital of France is"}).json()["tokens"]
    sampling = {"max_new_tokens": 4, "temperature": 0}
    asked = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 2}
    native = http.post("/generate", json={**asked, "logprob_start_len": 0}).json()
    body = {"model": endpoint.model, "prompt": ids, "max_tokens": 4, "temperature": 0, "logprobs": 2, "echo": True}
    choice = http.post("/v1/completions", json={**body, "return_token_ids": True}).json()["choices"][0]
    scores = choice["logprobs"]["token_logprobs"]
    meta = native["meta_info"]
    assert [entry[1] for entry in meta["input_token_logprobs"]] == ids
    assert meta["input_token_logprobs"][0][0] is None
    mine = [entry[0] for entry in meta["input_token_logprobs"][1:] + meta["output_token_logprobs"]]
    assert mine == pytest.approx(scores[1:], abs=1e-5)
    assert len(meta["input_top_logprobs"]) == len(ids)
    assert native["output_ids"] == [entry[1] for entry in meta["output_token_logprobs"]]
    prompt_only = http.post(
        "/generate", json={**asked, "sampling_params": {"max_new_tokens": 0}, "logprob_start_len": 2}
    )
    assert [entry[1] for entry in prompt_only.json()["meta_info"]["input_token_logprobs"]] == ids[2:]
    assert prompt_only.json()["meta_info"]["completion_tokens"] == 0


def test_a_streamed_batch_ends_as_the_whole_one(http: httpx.Client, endpoint: Endpoint) -> None:
    asked = {"text": ["One two three", "Red green"], "sampling_params": {"max_new_tokens": 6, "temperature": 0}}
    whole = http.post("/generate", json=asked).json()
    last: dict[int, Any] = {}
    for block in http.post("/generate", json={**asked, "stream": True}).text.split("\n\n"):
        if block.startswith("data: {"):
            shown = json.loads(block.removeprefix("data: "))
            last[shown["index"]] = shown
    assert [last[i]["output_ids"] for i in range(2)] == [answer["output_ids"] for answer in whole]
    assert [last[i]["text"] for i in range(2)] == [answer["text"] for answer in whole]


def test_scores_are_the_probabilities_of_the_next_token(http: httpx.Client, endpoint: Endpoint) -> None:
    query = "The capital of France is"
    labels = [http.post("/tokenize", json={"prompt": text}).json()["tokens"][0] for text in (" Paris", " Rome")]
    body = {"query": query, "items": ["", " the city of"], "label_token_ids": labels}
    reply = http.post("/v1/score", json={**body, "model": endpoint.model}).json()
    assert reply["usage"]["completion_tokens"] == 1, "both in one row"
    scores = reply["scores"]
    assert scores[0][0] > scores[0][1] > 0
    shares = http.post("/v1/score", json={**body, "apply_softmax": True}).json()["scores"]
    for own, share in zip(scores, shares, strict=True):
        assert share == pytest.approx([own[0] / sum(own), own[1] / sum(own)], rel=1e-4)
    reply = http.post(
        "/v1/completions",
        json={"model": endpoint.model, "prompt": query, "max_tokens": 1, "temperature": 0, "logprobs": 20},
    ).json()
    top = reply["choices"][0]["logprobs"]["top_logprobs"][0]
    assert scores[0][0] == pytest.approx(math.exp(top[" Paris"]), rel=1e-3)


def test_what_the_replica_tells_of_itself(http: httpx.Client, endpoint: Endpoint) -> None:
    info = http.get("/server_info").json()
    assert info["model"] == endpoint.model
    assert info["engine"]["tensor_parallel_size"] == 2
    assert info["engine"]["num_kv_tokens"] >= info["max_model_len"]
    assert http.get("/health_generate").json()["status"] == "ok"
    endpoint.wait_idle()
    [load] = http.get("/v1/loads").json()["loads"]
    assert load["num_running_reqs"] in (0, 1)  # as of the last report
    assert load["max_total_num_tokens"] == info["engine"]["num_kv_tokens"]
    assert http.get("/openapi.json").json()["openapi"] == "3.1.0"
