"""What every field of a request makes of the engine's parameters and of the answer, over a scripted coordinator."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.messages.engine import SamplingParams
from cluster.requests.job import JobOptions
from cluster.requests.sampling import Vocabulary, sampling_params
from cluster.requests.sampling_fields import SamplingFields
from cluster.text.tokenizer import Tokenizer
from configs.errors import RequestError
from configs.schema import GenerationDefaults, ServerConfig
from tests.helpers.scripted_engine import MODEL, REPLY, Run, Stack, error_of, events, prompt_ids

PROMPT = "The cat sat"


def sampling(tokenizer: Tokenizer, defaults: GenerationDefaults | None = None, **fields: Any) -> SamplingParams:
    vocabulary = Vocabulary(tokenizer=tokenizer, size=tokenizer.vocab_size, eos_token_ids=frozenset({2}))
    [[params]] = sampling_params(
        SamplingFields.model_validate(fields),
        defaults or GenerationDefaults(),
        vocabulary,
        JobOptions(num_logprobs=0),
        max_tokens=[16],
        next_seed=lambda: 0,
    )
    return params


def refusal(tokenizer: Tokenizer, **fields: Any) -> str | None:
    with pytest.raises(RequestError) as caught:
        sampling(tokenizer, **fields)
    return caught.value.param


# --- How tokens are chosen --------------------------------------------------------------------------------------------


def test_penalties_ids_and_min_tokens_reach_the_engine(smollm2: Tokenizer) -> None:
    params = sampling(
        smollm2,
        frequency_penalty=-1.5,
        presence_penalty=2,
        repetition_penalty=1.25,
        allowed_token_ids=[9, 5, 9],
        logprob_token_ids=[7, 6, 7],
        min_tokens=16,
        stop_token_ids=[3],
    )
    assert (params.frequency_penalty, params.presence_penalty, params.repetition_penalty) == (-1.5, 2.0, 1.25)
    assert (params.allowed_token_ids, params.logprob_token_ids) == ((5, 9), (7, 6))
    assert (params.min_tokens, params.stop_token_ids) == (16, (3,))


def test_biases_are_numbers_by_id_within_a_hundred(smollm2: Tokenizer) -> None:
    bias = {"5": 1, "7": -1e9, "8": 10**9, "9": 0}
    assert sampling(smollm2, logit_bias=bias).logit_bias == ((5, 1.0), (7, -100.0), (8, 100.0))


def test_bad_words_are_forbidden_at_the_start_and_after_a_space(smollm2: Tokenizer) -> None:
    cat, spaced_cat = smollm2.encode("cat", add_special_tokens=False), smollm2.encode(" cat", add_special_tokens=False)
    assert len(cat) == len(spaced_cat) == 1
    params = sampling(smollm2, bad_words=["cat", "multiword phrase"], logit_bias={str(cat[0]): 5})
    assert dict(params.logit_bias) == {cat[0]: -math.inf, spaced_cat[0]: -math.inf}
    assert params.bad_words == (
        tuple(smollm2.encode("multiword phrase", add_special_tokens=False)),
        tuple(smollm2.encode(" multiword phrase", add_special_tokens=False)),
    )


def test_a_request_that_leaves_no_token_is_refused(smollm2: Tokenizer) -> None:
    cat = smollm2.encode("cat", add_special_tokens=False)
    assert refusal(smollm2, allowed_token_ids=cat, bad_words=["cat"]) == "allowed_token_ids"
    assert refusal(smollm2, allowed_token_ids=[2], min_tokens=1) == "allowed_token_ids"
    assert sampling(smollm2, allowed_token_ids=[2]).allowed_token_ids == (2,)


def test_the_models_defaults_hold_where_a_request_says_nothing(smollm2: Tokenizer) -> None:
    defaults = GenerationDefaults(temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.1)
    params = sampling(smollm2, defaults, top_k=-1, repetition_penalty=1)
    assert (params.temperature, params.top_p, params.top_k, params.repetition_penalty) == (0.6, 0.9, 0, 1.0)


@given(num_prompts=st.integers(1, 6), num_choices=st.integers(1, 6), seed=st.none() | st.integers(-(2**63), 2**63 - 1))
def test_without_a_seed_every_choice_of_every_prompt_has_one_of_its_own(
    smollm2: Tokenizer, num_prompts: int, num_choices: int, seed: int | None
) -> None:
    drawn = itertools.count(5)
    params = sampling_params(
        SamplingFields(seed=seed),
        GenerationDefaults(),
        Vocabulary(tokenizer=smollm2, size=smollm2.vocab_size),
        JobOptions(num_choices=num_choices),
        max_tokens=[16] * num_prompts,
        next_seed=lambda: next(drawn),
    )
    seeds = [[choice.seed for choice in choices] for choices in params]
    if seed is None:
        assert len(set(itertools.chain(*seeds))) == num_prompts * num_choices
    else:  # that of each prompt's first choice, and counted up
        counted = [(seed + i + 2**63) % 2**64 - 2**63 for i in range(num_choices)]
        assert seeds == [counted] * num_prompts


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"model": MODEL, "prompt": ["hi"] * 3, "n": 2}),
        ("/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "n": 6}),
        ("/generate", {"text": ["hi"] * 3, "sampling_params": {"n": 2}}),
        ("/generate", {"text": ["hi"] * 6, "sampling_params": [{}] * 6}),
    ],
)
def test_prompts_sent_together_without_a_seed_are_sampled_with_different_ones(
    run: Run, path: str, body: dict[str, Any]
) -> None:
    async def scenario(stack: Stack) -> None:
        assert (await stack.http.post(path, json=body)).status_code == 200
        assert len({request.sampling.seed for request in stack.coordinator.requests}) == 6

    run(scenario)


def test_only_the_first_choice_of_a_prompt_asks_for_its_scores(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        body = (await stack.complete(prompt=PROMPT, n=2, prompt_logprobs=1, max_tokens=2)).json()
        assert [request.sampling.prompt_logprobs for request in stack.coordinator.requests] == [1, -1]
        assert body["choices"][0]["prompt_logprobs"] == body["choices"][1]["prompt_logprobs"]

    run(scenario)


def test_priority_and_salt_reach_the_engine(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        await stack.chat(priority=-3, cache_salt="mine")
        await stack.chat(cache_salt="other")
        await stack.chat()
        first, second, third = stack.coordinator.requests
        assert (first.terms.priority, third.terms.priority) == (-3, 0)
        assert len({first.terms.cache_salt, second.terms.cache_salt, third.terms.cache_salt}) == 3

    run(scenario)


# --- Where a text ends ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "text", "reason"),
    [
        ({"stop": " 😀"}, "Hello there", " 😀"),
        ({"stop": " 😀", "include_stop_str_in_output": True}, "Hello there 😀", " 😀"),
        ({"stop": " 😀", "no_stop_trim": True}, "Hello there 😀", " 😀"),
        ({"stop_regex": "t[a-z]+e"}, "Hello the", "t[a-z]+e"),
        ({"stop_regex": ["zzz", "h.*?r"], "stop": "never"}, "Hello ther", "h.*?r"),
        ({"stop": "l", "min_tokens": 2}, REPLY, None),
        ({"stop": "e", "min_tokens": 1}, "Hello th", "e"),
        ({"stop_token_ids": [665]}, "Hello", 665),
        ({"stop_token_ids": [665], "include_stop_str_in_output": True}, "Hello there", 665),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, REPLY + "<|im_end|>", None),
        ({"skip_special_tokens": False}, REPLY, None),
    ],
)
def test_a_text_ends_where_the_request_says(
    run: Run, fields: dict[str, Any], text: str, reason: object, stream: bool
) -> None:
    async def scenario(stack: Stack) -> None:
        response = await stack.complete(max_tokens=60, stream=stream, **fields)
        choices = [chunk["choices"][0] for chunk in events(response)[:-1]] if stream else response.json()["choices"]
        assert "".join(choice["text"] for choice in choices) == text
        assert choices[-1]["finish_reason"] == "stop"
        assert choices[-1]["stop_reason"] == reason

    run(scenario)


# --- What an answer shows ---------------------------------------------------------------------------------------------


def test_token_ids_come_with_the_answer(run: Run, smollm2: Tokenizer) -> None:
    async def scenario(stack: Stack) -> None:
        ids = smollm2.encode(PROMPT, add_special_tokens=True)
        reply = stack.coordinator.reply
        choice = (await stack.complete(prompt=PROMPT, max_tokens=60, return_token_ids=True)).json()["choices"][0]
        assert (choice["prompt_token_ids"], choice["token_ids"]) == (ids, reply)
        streamed = await stack.complete(prompt=PROMPT, max_tokens=60, return_token_ids=True, stream=True)
        chunks = [chunk["choices"][0] for chunk in events(streamed)[:-1]]
        assert chunks[0]["prompt_token_ids"] == ids
        assert [id_ for chunk in chunks for id_ in chunk.get("token_ids", [])] == reply
        chat = (await stack.chat(return_token_ids=True)).json()
        assert len(chat["prompt_token_ids"]) == chat["usage"]["prompt_tokens"]
        assert chat["choices"][0]["token_ids"] == reply
        first, *others = events(await stack.chat(return_token_ids=True, stream=True))[:-1]
        assert first["prompt_token_ids"] == chat["prompt_token_ids"]
        assert [id_ for chunk in others for id_ in chunk["choices"][0].get("token_ids", [])] == reply
        assert "token_ids" not in (await stack.chat()).text

    run(scenario)


def test_logprobs_of_asked_ids_stand_beside_the_likeliest(run: Run, smollm2: Tokenizer) -> None:
    async def scenario(stack: Stack) -> None:
        fields = {"logprobs": True, "top_logprobs": 1, "logprob_token_ids": [7, 19556], "max_tokens": 1}
        top = (await stack.chat(**fields)).json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        assert [(entry["token"], entry["logprob"]) for entry in top] == [("Hello", -0.5), (smollm2.token_text(7), -1.0)]
        named = (await stack.complete(logprobs=1, max_tokens=1, return_tokens_as_token_ids=True)).json()
        logprobs = named["choices"][0]["logprobs"]
        assert (logprobs["tokens"], logprobs["top_logprobs"]) == (["token_id:19556"], [{"token_id:19556": -0.5}])

    run(scenario)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("as_ids", [False, True])
def test_an_echo_is_prompt_and_answer_in_text_and_logprobs(
    run: Run, smollm2: Tokenizer, stream: bool, as_ids: bool
) -> None:
    async def scenario(stack: Stack) -> None:
        ids = smollm2.encode(PROMPT, add_special_tokens=True)
        response = await stack.complete(
            prompt=ids if as_ids else PROMPT, echo=True, logprobs=1, max_tokens=3, stream=stream
        )
        choices = [chunk["choices"][0] for chunk in events(response)[:-1]] if stream else response.json()["choices"]
        text = "".join(choice["text"] for choice in choices)
        parts = [choice["logprobs"] for choice in choices if choice["logprobs"]]
        logprobs = {name: [entry for part in parts for entry in part[name]] for name in parts[0]}
        assert text == PROMPT + "Hello there \N{REPLACEMENT CHARACTER}"
        assert len({len(values) for values in logprobs.values()}) == 1
        assert logprobs["tokens"] == [smollm2.token_text(id_) for id_ in [*ids, *stack.coordinator.reply[:3]]]
        assert logprobs["token_logprobs"] == [None, *(-float(i) for i in range(1, len(ids))), -1.5, -1.5, -1.5]
        assert logprobs["top_logprobs"][0] is None
        assert logprobs["top_logprobs"][1] == {"Hello": -0.5, smollm2.token_text(ids[1]): -1.0}
        for token, offset in zip(logprobs["tokens"][:-1], logprobs["text_offset"][:-1], strict=True):
            assert text[offset:].startswith(token)

    run(scenario)


def test_an_echo_alone_generates_nothing(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        body = (await stack.complete(prompt=PROMPT, echo=True, logprobs=0, max_tokens=0)).json()
        choice = body["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
        assert len(choice["logprobs"]["tokens"]) == body["usage"]["prompt_tokens"] == 3
        assert body["usage"]["completion_tokens"] == 0
        assert (await stack.complete(prompt=PROMPT, echo=True)).json()["choices"][0]["text"] == PROMPT + REPLY
        assert (await stack.complete(prompt=[9] * 127, echo=True, max_tokens=0)).status_code == 200
        error_of(await stack.complete(prompt=[9] * 128, echo=True, max_tokens=0), 400, "context_length_exceeded")
        only = (await stack.complete(prompt=PROMPT, max_tokens=0, prompt_logprobs=0)).json()["choices"][0]
        assert (only["text"], len(only["prompt_logprobs"])) == ("", 3)

    run(scenario)


def test_an_echo_begins_with_the_callers_text_and_not_with_special_tokens(run: Run, smollm2: Tokenizer) -> None:
    async def scenario(stack: Stack) -> None:
        text = "<|im_start|>user\nhi"
        choice = (await stack.complete(prompt=text, echo=True, logprobs=0, max_tokens=1)).json()["choices"][0]
        assert choice["text"] == text + "Hello"
        assert choice["logprobs"]["text_offset"][:2] == [0, len("<|im_start|>")]
        ids = smollm2.encode(text, add_special_tokens=False)
        hidden = (await stack.complete(prompt=ids, echo=True, max_tokens=1)).json()["choices"][0]["text"]
        shown = await stack.complete(prompt=ids, echo=True, max_tokens=1, skip_special_tokens=False)
        assert (hidden, shown.json()["choices"][0]["text"]) == ("user\nhiHello", text + "Hello")

    run(scenario)


def test_prompt_logprobs_name_tokens_by_id_with_rank_and_text(run: Run, smollm2: Tokenizer) -> None:
    async def scenario(stack: Stack) -> None:
        ids = smollm2.encode(PROMPT, add_special_tokens=True)
        for k, rank in ((2, 2), (1, None), (0, None)):
            body = (await stack.complete(prompt=PROMPT, max_tokens=1, prompt_logprobs=k)).json()
            first, second, _ = body["choices"][0]["prompt_logprobs"]
            assert first is None
            own = {"logprob": -1.0, "rank": rank, "decoded_token": smollm2.token_text(ids[1])}
            assert second.pop(str(ids[1])) == own
            assert second == ({"19556": {"logprob": -0.5, "rank": 1, "decoded_token": "Hello"}} if k else {})
        chat = (await stack.chat(prompt_logprobs=1, max_tokens=1)).json()
        assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]

    run(scenario)


def test_continuous_usage_counts_up_in_every_chunk(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        for response in (
            await stack.chat(stream=True, stream_options=options),
            await stack.complete(stream=True, stream_options=options),
        ):
            *chunks, last, _ = events(response)
            counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
            assert counts == sorted(counts)
            assert counts[-1] == last["usage"]["completion_tokens"] == len(stack.coordinator.reply)

    run(scenario, step_s=0.001)


def test_usage_in_every_chunk_needs_usage_at_all(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        response = await stack.chat(stream=True, stream_options={"continuous_usage_stats": True})
        *chunks, _ = events(response)
        assert chunks
        assert not any("usage" in chunk for chunk in chunks)

    run(scenario)


def test_times_and_ignored_fields_are_headers(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        response = await stack.chat(wat=1, **{"a,b\r\nx: y": 2}, chat_template_kwargs={"thinking": True})
        assert response.headers["x-ignored-fields"] == "wat,a_b__x__y,chat_template_kwargs.thinking"
        assert [part.split(";")[0] for part in response.headers["server-timing"].split(", ")] == [
            "queue",
            "prefill",
            "decode",
        ]

    run(scenario)


def test_strict_fields_refuse_variables_that_the_template_does_not_read(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        error = error_of(await stack.chat(chat_template_kwargs={"thinking": True}), 400, "invalid_value")
        assert error["param"] == "chat_template_kwargs.thinking"
        assert error_of(await stack.chat(reasoning_effort="low"), 400, "invalid_value")["param"] == "reasoning_effort"
        assert (await stack.chat(user="u", documents=[])).status_code == 200

    run(scenario, server=ServerConfig(strict_fields=True))


def test_a_name_of_the_callers_is_the_end_of_the_answers_id(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        assert (await stack.chat(request_id="job-1.a")).json()["id"] == "chatcmpl-job-1.a"
        first, second = [(await stack.complete()).json()["id"] for _ in range(2)]
        assert first != second

    run(scenario)


# --- The prompt -------------------------------------------------------------------------------------------------------


def test_a_prompt_is_cut_to_its_last_tokens(run: Run, smollm2: Tokenizer) -> None:
    async def scenario(stack: Stack) -> None:
        ids = smollm2.encode(PROMPT, add_special_tokens=True)
        response = await stack.complete(prompt=PROMPT, truncate_prompt_tokens=2, echo=True, max_tokens=1)
        assert prompt_ids(stack.coordinator.requests[-1]) == ids[-2:]
        assert response.json()["choices"][0]["text"] == smollm2.decode(ids[-2:]) + "Hello"
        await stack.complete(prompt=[9] * 500, truncate_prompt_tokens=-1, max_tokens=8)
        assert len(prompt_ids(stack.coordinator.requests[-1])) == 120
        assert (await stack.chat(truncate_prompt_tokens=5)).json()["usage"]["prompt_tokens"] == 5
        error_of(await stack.complete(truncate_prompt_tokens=0), 400, "empty_string")

    run(scenario)


def test_a_final_message_is_continued_without_its_end_of_turn(run: Run, smollm2: Tokenizer) -> None:
    async def scenario(stack: Stack) -> None:
        messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, "}]
        await stack.chat(messages=messages, continue_final_message=True)
        text = smollm2.decode(prompt_ids(stack.coordinator.requests[-1]), skip_special_tokens=False)
        assert text.endswith("<|im_start|>assistant\nWell, ")
        await stack.chat(messages=messages, add_generation_prompt=False)
        text = smollm2.decode(prompt_ids(stack.coordinator.requests[-1]), skip_special_tokens=False)
        assert text.endswith("Well, <|im_end|>\n")

    run(scenario)
