"""The HTTP surface over a scripted coordinator: order of chunks, errors, disconnects, and the openai package."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import httpx
import pytest
from starlette.types import Message

from cluster.messages.engine import SamplingParams, Terms
from cluster.requests.job import Job
from cluster.serve.ingress import create_app
from cluster.text.tokenizer import Tokenizer
from configs.schema import ServerConfig
from tests.helpers.scripted_engine import MODEL, REPLY, Run, Stack, error_of, events, served

# --- Answers ----------------------------------------------------------------------------------------------------------


def test_a_chat_answer_has_text_usage_and_reason(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        body = (await stack.chat()).json()
        num_tokens = len(stack.coordinator.reply)
        assert body["object"] == "chat.completion"
        assert body["id"].startswith("chatcmpl-")
        assert body["choices"][0]["message"] == {"role": "assistant", "content": REPLY, "refusal": None}
        assert body["choices"][0]["finish_reason"] == "stop"
        assert body["choices"][0]["stop_reason"] is None
        assert body["usage"] == {
            "prompt_tokens": 31,
            "completion_tokens": num_tokens,
            "total_tokens": 31 + num_tokens,
            "prompt_tokens_details": {"cached_tokens": 16},
            "completion_tokens_details": {"reasoning_tokens": 0},
        }
        assert stack.engine.num_open == 0

    run(scenario)


def test_a_chat_stream_has_its_chunks_in_order_and_the_same_text(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        response = await stack.chat(stream=True, stream_options={"include_usage": True})
        *chunks, usage, done = events(response)
        assert done == "[DONE]"
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        middle, last = chunks[1:-1], chunks[-1]
        assert all(set(chunk["choices"][0]["delta"]) == {"content"} for chunk in middle)
        assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in middle) == REPLY
        assert (last["choices"][0]["delta"], last["choices"][0]["finish_reason"]) == ({}, "stop")
        assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks[:-1])
        assert all(chunk["usage"] is None for chunk in chunks)
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == len(stack.coordinator.reply)
        assert len({chunk["id"] for chunk in [*chunks, usage]}) == 1

    run(scenario)


def test_without_include_usage_no_chunk_mentions_usage(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        assert all("usage" not in chunk for chunk in events(await stack.chat(stream=True)) if chunk != "[DONE]")

    run(scenario)


def test_a_completion_streams_the_text_it_answers_whole(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        whole = (await stack.complete(max_tokens=100)).json()
        assert whole["object"] == "text_completion"
        assert whole["choices"][0]["text"] == REPLY
        *chunks, done = events(await stack.complete(max_tokens=100, stream=True))
        assert done == "[DONE]"
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == REPLY
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"

    run(scenario)


def test_the_length_limits_default_as_openai_says(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        await stack.chat()
        await stack.chat(max_tokens=7, max_completion_tokens=3)
        completion = (await stack.complete()).json()
        assert completion["usage"]["prompt_tokens"] == 1
        limits = [request.sampling.max_tokens for request in stack.coordinator.requests]
        assert limits == [128 - 31, 3, 16]
        assert (await stack.chat(max_tokens=3)).json()["choices"][0]["finish_reason"] == "length"

    run(scenario)


def test_choices_have_their_own_seeds_and_indices(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        body = (await stack.chat(n=3, seed=2**63 - 2)).json()
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
        assert {choice["message"]["content"] for choice in body["choices"]} == {REPLY}
        assert [request.sampling.seed for request in stack.coordinator.requests] == [2**63 - 2, 2**63 - 1, -(2**63)]
        assert body["usage"]["prompt_tokens"] == 31
        assert body["usage"]["completion_tokens"] == 3 * len(stack.coordinator.reply)
        chunks = events(await stack.chat(n=2, stream=True))[:-1]
        for index in (0, 1):
            own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
            assert "".join(choice["delta"].get("content", "") for choice in own) == REPLY
            assert own[0]["delta"]["role"] == "assistant"
            assert own[-1]["finish_reason"] == "stop"

    run(scenario)


def test_sampling_parameters_reach_the_engine(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        await stack.chat(temperature=0, top_p=0.5, top_k=-1, min_p=0.25, stop_token_ids=[9], ignore_eos=True, seed=4)
        sampling = stack.coordinator.requests[0].sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.0, 0.5, 0, 0.25)
        assert (sampling.stop_token_ids, sampling.ignore_eos, sampling.seed) == ((9,), True, 4)

    run(scenario)


def test_several_prompts_are_answered_in_order(run: Run, smollm2: Tokenizer) -> None:
    async def scenario(stack: Stack) -> None:
        body = (await stack.complete(prompt=[[5, 6, 7], [8]], n=2, max_tokens=2)).json()
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
        prompts = [list(struct.unpack(f"<{len(r.prompt) // 4}i", r.prompt)) for r in stack.coordinator.requests]
        assert prompts == [[5, 6, 7], [5, 6, 7], [8], [8]]
        assert body["usage"]["prompt_tokens"] == 4

    run(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_across_tokens_cuts_the_text_and_frees_the_request(run: Run, stream: bool) -> None:
    async def scenario(stack: Stack) -> None:
        response = await stack.chat(stop=["字 an", "never"], stream=stream)
        if stream:
            chunks = events(response)[:-1]
            text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
            choice = chunks[-1]["choices"][0]
        else:
            choice = response.json()["choices"][0]
            text = choice["message"]["content"]
            assert response.json()["usage"]["completion_tokens"] < len(stack.coordinator.reply)
        assert text == "Hello there 😀, 漢"
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "字 an")
        await stack.until(lambda: stack.coordinator.aborted == [1])
        assert stack.engine.num_open == 0

    run(scenario, step_s=0.01)


def test_an_answer_cut_inside_a_character_ends_the_same_streamed_or_not(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        whole = (await stack.chat(max_tokens=3)).json()["choices"][0]["message"]["content"]
        chunks = events(await stack.chat(max_tokens=3, stream=True))[:-1]
        assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == whole
        assert whole.endswith("�")

    run(scenario)


def test_chat_logprobs_carry_raw_bytes_and_always_the_sampled_token(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        body = (await stack.chat(logprobs=True, top_logprobs=1)).json()
        content = body["choices"][0]["logprobs"]["content"]
        assert len(content) == body["usage"]["completion_tokens"]
        assert bytes(byte for entry in content[:-1] for byte in entry["bytes"]).decode() == REPLY
        assert content[0]["top_logprobs"] == [{"token": "Hello", "logprob": -0.5, "bytes": list(b"Hello")}]
        assert [top["token"] for top in content[1]["top_logprobs"]] == ["Hello", content[1]["token"]]
        assert content[1]["logprob"] == content[1]["top_logprobs"][1]["logprob"] == -1.5
        none = (await stack.chat(logprobs=True)).json()["choices"][0]["logprobs"]["content"]
        assert all(entry["top_logprobs"] == [] for entry in none)
        streamed = [
            entry
            for chunk in events(await stack.chat(logprobs=True, top_logprobs=1, stream=True))[:-1]
            for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
        ]
        assert streamed == content
        assert stack.coordinator.requests[0].sampling.num_logprobs == 1

    run(scenario)


def test_completion_logprobs_are_aligned_with_the_text(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        choice = (await stack.complete(max_tokens=100, logprobs=2)).json()["choices"][0]
        logprobs = choice["logprobs"]
        assert len({len(values) for values in logprobs.values()}) == 1
        for token, offset in zip(logprobs["tokens"][:2], logprobs["text_offset"][:2], strict=True):
            assert choice["text"][offset:].startswith(token)
        assert logprobs["text_offset"][-1] == len(choice["text"])
        assert logprobs["top_logprobs"][0]["Hello"] == -0.5
        assert -9999.0 in logprobs["top_logprobs"][0].values()  # -inf has no JSON

    run(scenario)


def test_the_sequences_of_one_request_are_submitted_at_once(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        body = (await stack.complete(prompt=["one", "two", "three"], n=2)).json()
        assert len(body["choices"]) == 6
        [requests] = stack.coordinator.submissions
        assert [request.prompt for request in requests[::2]] == [request.prompt for request in requests[1::2]]

    run(scenario)


def test_a_large_request_lets_the_event_loop_go_on_while_it_is_submitted(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        turns = 0

        async def count_turns() -> None:
            nonlocal turns
            while not stack.coordinator.submissions:
                turns += 1
                await asyncio.sleep(0)

        num_prompts, num_tokens = 256, 8192
        job = Job(
            id="large",
            prompts=[[1] * num_tokens] * num_prompts,
            sampling=[[SamplingParams(max_tokens=1)]] * num_prompts,
            terms=Terms(deadline_s=60),
        )
        counting = asyncio.create_task(count_turns())
        async with aclosing(stack.model.run(job).deltas()) as steps:
            await anext(steps)
        await counting
        # Two million ids, of which at most 131,072 are made ready in one turn, and 256 outputs, 64 a turn.
        assert turns >= 16 + 4

    run(scenario)


# --- Errors -----------------------------------------------------------------------------------------------------------


def test_what_no_route_takes_gets_the_same_shape_of_error(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        error_of(await stack.http.get("/nothing"), 404, "not_found")
        error_of(await stack.http.get("/v1/chat/completions/"), 404, "not_found")
        response = await stack.http.get("/v1/chat/completions")
        error_of(response, 405, "method_not_allowed")
        assert response.headers["allow"] == "POST"
        plain = {"content-type": "text/plain"}
        error_of(await stack.http.post("/v1/completions", content=b"{}", headers=plain), 415, "unsupported_media_type")
        zipped = {"content-encoding": "gzip"}
        error_of(await stack.http.post("/v1/completions", content=b"{}", headers=zipped), 415, "unsupported_media_type")
        assert stack.coordinator.requests == []

    run(scenario)


def test_a_prompt_that_does_not_fit_is_refused_with_both_lengths(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        error = error_of(await stack.complete(prompt=[5] * 200), 400, "context_length_exceeded")
        assert "maximum context length is 128 tokens" in error["message"]
        assert "200 in the prompt" in error["message"]
        error = error_of(await stack.complete(prompt=[5] * 128, max_tokens=29), 400, "context_length_exceeded")
        assert "29 for the completion" in error["message"]
        assert (await stack.complete(prompt=[5] * 100, max_tokens=28)).status_code == 200
        assert (await stack.complete(prompt=[5] * 127)).json()["usage"]["completion_tokens"] == 1

    run(scenario)


def test_a_body_over_the_limit_is_refused_with_or_without_its_length(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        read = 0

        async def endless() -> AsyncIterator[bytes]:
            nonlocal read
            for _ in range(100):
                read += 1
                yield b"x" * 1024

        error_of(await stack.http.post("/v1/completions", content=b"x" * 10_000), 413, "request_too_large")
        error_of(await stack.http.post("/v1/completions", content=endless()), 413, "request_too_large")
        assert read < 10

    run(scenario, server=ServerConfig(max_body_bytes=4096))


@pytest.mark.parametrize("stream", [False, True])
def test_an_overloaded_engine_is_503_with_retry_after_streamed_or_not(run: Run, stream: bool) -> None:
    async def scenario(stack: Stack) -> None:
        response = await stack.chat(stream=stream)
        error_of(response, 503, "engine_overloaded")
        assert response.headers["retry-after"] == "1"
        assert stack.engine.num_open == 0

    run(scenario, overloaded=True)


def test_an_engine_error_is_500_before_the_stream_and_a_chunk_within_it(run: Run) -> None:
    async def first(stack: Stack) -> None:
        error = error_of(await stack.chat(stream=True), 500, "engine_error")
        assert "rank" not in error["message"]
        error_of(await stack.chat(n=2), 500, "engine_error")

    async def later(stack: Stack) -> None:
        *chunks, last = events(await stack.chat(stream=True))
        assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "Hello there"
        assert last["error"]["code"] == "engine_error"
        assert stack.engine.num_open == 0

    run(first, fail_after=0)
    run(later, fail_after=2, step_s=0.01)


def test_a_client_is_told_what_the_engine_lets_it_know_of_its_failure(run: Run) -> None:
    told = "Rank 1 of 2 died: its process was killed."

    async def scenario(stack: Stack) -> None:
        *_, last = events(await stack.chat(stream=True))
        for error in (error_of(await stack.chat(), 500, "engine_error"), last["error"]):
            assert error["message"] == told

    run(scenario, fail_after=2, step_s=0.01, public_message=told)


def test_an_answer_that_is_not_a_number_is_500_and_not_to_be_tried_again(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        *_, last = events(await stack.chat(stream=True))
        response = await stack.chat()
        assert error_of(response, 500, "not_a_number") == last["error"]
        assert response.headers["x-should-retry"] == "false"

    run(scenario, fail_after=2, step_s=0.01, error_code="not_a_number")


def test_a_request_past_its_deadline_is_504_and_aborted(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        error = error_of(await stack.chat(), 504, "deadline_exceeded")
        assert "server.request_timeout_s=0.5" in error["message"]
        await stack.until(lambda: stack.coordinator.aborted == [1])

    run(scenario, server=ServerConfig(request_timeout_s=0.5), hang_after=1)


def test_a_lost_engine_is_503_and_not_ready(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        await stack.model.warm_up()
        await stack.engine.close()
        response = await stack.chat()
        error_of(response, 503, "engine_overloaded")
        assert "retry-after" in response.headers
        error_of(await stack.http.get("/ready"), 503, "engine_overloaded")
        error_of(await stack.http.get("/health"), 503, "engine_overloaded")

    run(scenario)


def test_an_unforeseen_error_shows_the_client_a_reference_only(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(stack: Stack) -> None:
        def broken(*args: object) -> None:
            raise RuntimeError("/secret/path")

        monkeypatch.setattr(stack.engine, "submit", broken)
        assert "secret" not in error_of(await stack.chat(), 500, "internal_error")["message"]

    run(scenario)


# --- Other routes -----------------------------------------------------------------------------------------------------


def test_models_can_be_listed_and_retrieved_even_with_a_slash(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        listed = (await stack.http.get("/v1/models")).json()
        assert listed["object"] == "list"
        assert (await stack.http.get(f"/v1/models/{MODEL}")).json() == listed["data"][0]
        assert (listed["data"][0]["id"], listed["data"][0]["max_model_len"]) == (MODEL, 128)
        assert (listed["first_id"], listed["last_id"], listed["has_more"]) == (MODEL, MODEL, False)
        error_of(await stack.http.get("/v1/models/other"), 404, "model_not_found")

    run(scenario)


def test_ready_only_after_a_token_was_generated(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        assert (await stack.http.get("/health")).status_code == 200
        assert (await stack.http.get("/version")).json() == {"version": "1.2"}
        response = await stack.http.get("/ready")
        assert response.status_code == 503
        assert "retry-after" in response.headers
        await stack.model.warm_up(timeout_s=5)
        assert (await stack.http.get("/ready")).status_code == 200

    run(scenario)


def test_text_can_be_had_without_http(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        pieces = [piece async for piece in stack.model.stream_text("hi", chat=True, max_tokens=90, temperature=0.0)]
        assert "".join(pieces) == REPLY
        assert stack.coordinator.requests[0].sampling.temperature == 0.0

    run(scenario)


# --- Disconnects ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"n": 3}, {"n": 3, "stream": True}])
@pytest.mark.parametrize("hang_after", [0, 2], ids=["queued", "running"])
def test_a_client_that_goes_away_aborts_its_requests(run: Run, fields: dict[str, Any], hang_after: int) -> None:
    async def scenario(stack: Stack) -> None:
        body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}).encode()
        gone = asyncio.Event()
        sent: list[Message] = []
        arriving = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive() -> Message:
            for message in arriving:
                return message
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/chat/completions",
            "raw_path": b"/v1/chat/completions",
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json")],
        }
        app: Callable[..., Awaitable[None]] = create_app(stack.model)
        serving = asyncio.create_task(app(scope, receive, send))
        ids = list(range(1, fields.get("n", 1) + 1))
        await stack.until(lambda: len(stack.coordinator.requests) == len(ids))
        has_begun = bool(fields.get("stream")) and hang_after > 0
        await stack.until(lambda: bool(sent) or not has_begun)
        await asyncio.sleep(0.02)
        assert bool(sent) == has_begun
        gone.set()
        await serving
        await stack.until(lambda: sorted(stack.coordinator.aborted) == ids)
        assert stack.engine.num_open == 0

    run(scenario, hang_after=hang_after)


def test_cancelling_the_asgi_call_aborts_too(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        waiting = asyncio.create_task(stack.chat())
        await stack.until(lambda: len(stack.coordinator.requests) == 1)
        waiting.cancel()
        await asyncio.wait((waiting,))
        await stack.until(lambda: stack.coordinator.aborted == [1])

    run(scenario, hang_after=0)


# --- A real server and the real client --------------------------------------------------------------------------------


def test_the_openai_package_works_unmodified(run: Run) -> None:
    openai = pytest.importorskip("openai")

    async def scenario(stack: Stack) -> None:
        async with (
            served(stack.model) as url,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        ):
            assert (await client.models.retrieve(MODEL)).id == MODEL
            messages = [{"role": "user", "content": "hi"}]
            whole = await client.chat.completions.create(model=MODEL, messages=messages, logprobs=True)
            assert whole.choices[0].message.content == REPLY
            assert whole.usage.prompt_tokens_details.cached_tokens == 16
            assert whole.choices[0].logprobs.content[0].token == "Hello"
            stream = await client.chat.completions.create(
                model=MODEL, messages=messages, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
            assert text == REPLY
            assert chunks[-1].usage.completion_tokens == len(stack.coordinator.reply)
            completion = await client.completions.create(model=MODEL, prompt="hi", max_tokens=90)
            assert completion.choices[0].text == REPLY
            with pytest.raises(openai.NotFoundError) as caught:
                await client.chat.completions.create(model="other", messages=messages)
            assert caught.value.code == "model_not_found"
            with pytest.raises(openai.BadRequestError, match="temperature"):
                await client.chat.completions.create(model=MODEL, messages=messages, temperature=3)

    run(scenario)


def test_a_closed_connection_aborts_on_a_real_server(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        async with served(stack.model) as url, httpx.AsyncClient(base_url=url, trust_env=False) as client:
            body = {"model": MODEL, "prompt": "hi", "max_tokens": 50, "stream": True}
            async with client.stream("POST", "/v1/completions", json=body) as response:
                assert response.status_code == 200
                async for _ in response.aiter_lines():
                    break
            await stack.until(lambda: stack.coordinator.aborted == [1])
            unary = asyncio.create_task(client.post("/v1/completions", json={**body, "stream": False}))
            await stack.until(lambda: len(stack.coordinator.requests) == 2)
            unary.cancel()
            await asyncio.wait((unary,))
            await stack.until(lambda: stack.coordinator.aborted == [1, 2])
            assert stack.engine.num_open == 0

    run(scenario, hang_after=3)
