"""The event loop is held by no request for long, whatever is asked: all streams of a replica are answered on it.

What is measured is the processor time of each callback of the loop, and of each call that holds the GIL in another
thread, so that other processes do not count.
"""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
from collections.abc import Iterator
from functools import cache
from types import FrameType
from typing import Any

import numpy as np
import pytest
from starlette.types import Message

from cluster.serve.ingress import create_app
from configs.schema import ServerConfig
from tests.helpers.scripted_engine import MODEL, Run, ScriptedCoordinator, Stack

MOST_S = 0.05
"""Longest that one callback may take; SSE streams of 20 tokens a second do not show it."""
MOST_CALL_S = 0.06
"""Longest that one call of another thread may hold the GIL, by its processor time; others may be using the machine."""
RELEASE_THE_GIL = {"encode_batch_fast", "decode_batch"}
"""Calls in which the loop goes on; tests/cluster/test_tokenizer.py sees to it."""
_WORK_S = 0.02
"""Processor time that `slowness` measures on the machine for which the two are."""
LONG = 4096  # tokens: 4096 x 20 log probabilities took 0.2 s when they were made at once


@cache
def slowness() -> float:
    """How many times as slow as that machine this one is; 1 where it is faster."""

    def work_s() -> float:
        began = time.thread_time()
        sum(i * i for i in range(300_000))
        return time.thread_time() - began

    return max(1.0, min(work_s() for _ in range(5)) / _WORK_S)


class Slices:
    """The longest callback of the loop, by processor time of its thread, but for those of the scripted engine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.longest_s = 0.0
        self.longest_call_s = 0.0
        """The longest call of another thread into C that came to no Python code, where they are watched."""
        run = asyncio.Handle._run

        def timed(handle: asyncio.Handle) -> None:
            task = getattr(handle._callback, "__self__", None)  # type: ignore[attr-defined]  # asyncio shows it nowhere else
            coroutine = task.get_coro() if isinstance(task, asyncio.Task) else None
            if getattr(coroutine, "__qualname__", "").startswith(f"{ScriptedCoordinator.__name__}."):
                run(handle)
                return
            began = time.thread_time()
            run(handle)
            self.longest_s = max(self.longest_s, time.thread_time() - began)

        monkeypatch.setattr(asyncio.Handle, "_run", timed)

    def watch_threads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Times calls into C of the threads that begin from now on, whose Python code takes several times as long."""
        thread = threading.local()

        def profile(frame: FrameType, event: str, arg: Any) -> None:
            began = getattr(thread, "began", None)
            if event == "c_return" and began is not None and arg.__name__ not in RELEASE_THE_GIL:
                self.longest_call_s = max(self.longest_call_s, time.thread_time() - began)
            thread.began = time.thread_time() if event == "c_call" else None

        monkeypatch.setattr(threading, "_profile_hook", profile)  # what threading.setprofile sets, undone after it


@pytest.fixture(scope="module")
def frozen() -> Iterator[None]:
    """What the run holds by now is frozen, which spares each test half a second of walking over it."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def slices(frozen: None, monkeypatch: pytest.MonkeyPatch) -> Slices:
    gc.collect()
    gc.freeze()  # as the Engine replica does when it has started
    return Slices(monkeypatch)


@pytest.fixture
def slices_and_calls(slices: Slices, monkeypatch: pytest.MonkeyPatch) -> Slices:
    slices.watch_threads(monkeypatch)
    return slices


async def post(app: Any, path: str, body: bytes) -> tuple[int, list[bytes]]:
    """Status and parts of the answer of an app, with a client that costs the loop nothing."""
    incoming: asyncio.Queue[Message] = asyncio.Queue()
    incoming.put_nowait({"type": "http.request", "body": body, "more_body": False})
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": [], "root_path": ""}
    await app(scope, incoming.get, send)
    return sent[0]["status"], [message["body"] for message in sent[1:]]


def answer(
    run: Run, slices: Slices, path: str, fields: dict[str, Any] | bytes, expected: int = 200, **script: Any
) -> bytes:
    """The body of the answer to a request; the loop was never held for long while it was made."""
    body = fields if isinstance(fields, bytes) else json.dumps({"model": MODEL, **fields}, ensure_ascii=False).encode()
    got: list[tuple[int, list[bytes]]] = []

    async def scenario(stack: Stack) -> None:
        app = create_app(stack.model)
        await asyncio.sleep(0)
        slices.longest_s = 0.0
        got.append(await post(app, path, body))

    run(scenario, ServerConfig(max_body_bytes=32 << 20, max_n=128), 65536, timeout_s=300, **script)
    [(status, parts)] = got
    assert status == expected, parts[0][:500]
    assert slices.longest_s < MOST_S * slowness()
    assert slices.longest_call_s < MOST_CALL_S * slowness()
    return b"".join(parts)


def prompt(length: int = LONG) -> list[int]:
    ids: list[int] = np.random.default_rng(length).integers(1000, 19000, length).tolist()
    return ids


SIZES = [LONG, pytest.param(32 << 10, marks=pytest.mark.slow)]


@pytest.mark.parametrize("length", SIZES)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_log_probabilities_of_a_long_prompt_hold_nobody_up(run: Run, slices: Slices, path: str, length: int) -> None:
    given: dict[str, Any] = {"prompt": prompt(length)}
    if path == "/v1/chat/completions":
        given = {"messages": [{"role": "user", "content": "a b " * (length // 2)}]}
    answered = json.loads(answer(run, slices, path, {**given, "prompt_logprobs": 20, "max_tokens": 1, "n": 2}))
    holder = answered if path == "/v1/chat/completions" else answered["choices"][1]
    entries = holder["prompt_logprobs"]
    assert len(entries) == answered["usage"]["prompt_tokens"] >= length
    assert entries[0] is None
    assert all(len(entry) == 20 for entry in entries[1:])


@pytest.mark.parametrize("length", SIZES)
@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_with_log_probabilities_holds_nobody_up(run: Run, slices: Slices, stream: bool, length: int) -> None:
    fields = {"prompt": prompt(length), "echo": True, "logprobs": 20, "max_tokens": 1, "stream": stream}
    body = answer(run, slices, "/v1/completions", fields)
    first = json.loads(body.split(b"\n\n")[0].removeprefix(b"data: "))["choices"][0]
    logprobs = first["logprobs"]
    assert {len(column) for column in logprobs.values()} == {length + (not stream)}
    assert logprobs["text_offset"][length - 1] < len(first["text"])


@pytest.mark.parametrize("length", SIZES)
@pytest.mark.parametrize("stream", [False, True])
def test_input_log_probabilities_of_generate_hold_nobody_up(
    run: Run, slices: Slices, stream: bool, length: int
) -> None:
    fields = {
        "input_ids": prompt(length),
        "sampling_params": {"max_new_tokens": 3},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 20,
        "return_text_in_logprobs": True,
        "stream": stream,
    }
    body = answer(run, slices, "/generate", fields)
    *_, last = [block for block in body.split(b"\n\n") if block and b"[DONE]" not in block]
    meta = json.loads(last.removeprefix(b"data: "))["meta_info"]
    assert len(meta["input_token_logprobs"]) == len(meta["input_top_logprobs"]) == length
    assert meta["input_top_logprobs"][0] is None
    assert len(meta["output_token_logprobs"]) == 3


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "hi", "logprobs": 20, "max_tokens": LONG}),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 20, "max_tokens": LONG}),
        ("/v1/responses", {"input": "hi", "top_logprobs": 20, "include": ["message.output_text.logprobs"]}),
        (
            "/generate",
            {
                "text": "hi",
                "sampling_params": {"max_new_tokens": LONG},
                "return_logprob": True,
                "top_logprobs_num": 20,
                "stream_interval": LONG,
            },
        ),
    ],
)
def test_log_probabilities_of_a_long_answer_hold_nobody_up(
    run: Run, slices: Slices, path: str, fields: dict[str, Any], stream: bool
) -> None:
    if path == "/v1/chat/completions":
        fields = {**fields, "messages": [{"role": "user", "content": "hi"}]}
    # Tokens come in lumps, as to a client that reads slowly.
    answer(run, slices, path, {**fields, "stream": stream}, reply=prompt(LONG // 4), burst=512)


def test_tokens_of_a_long_text_hold_nobody_up(run: Run, slices: Slices) -> None:
    text = "How are you today? " * 50_000
    counted = json.loads(answer(run, slices, "/tokenize", {"prompt": text, "return_token_strs": True}))
    assert counted["count"] == len(counted["tokens"]) == len(counted["token_strs"]) > 200_000
    assert "".join(counted["token_strs"]) == text


def test_many_long_prompts_hold_nobody_up(run: Run, slices: Slices) -> None:
    prompts = [prompt(1000 + i % 8) for i in range(256)]
    answered = json.loads(answer(run, slices, "/v1/completions", {"prompt": prompts, "max_tokens": 1, "echo": True}))
    assert len(answered["choices"]) == len(prompts)


ENGLISH = "The quick brown fox jumps over the lazy dog. " * 14
CHINESE = "".join(map(chr, np.random.default_rng(1).integers(0x4E00, 0x6E00, 600)))
IDS = [prompt(1000)] * 260
"""As many as a body may have."""


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": [ENGLISH] * 512, "max_tokens": 1}),
        ("/v1/completions", {"prompt": [CHINESE] * 256, "max_tokens": 1}),
        ("/v1/completions", {"prompt": IDS, "max_tokens": 1}),
        ("/generate", {"text": [ENGLISH] * 512, "sampling_params": {"max_new_tokens": 1}}),
        ("/generate", {"input_ids": IDS, "sampling_params": {"max_new_tokens": 1}}),
        ("/v1/score", {"query": "a", "items": [ENGLISH] * 512, "label_token_ids": [5]}),
        ("/v1/score", {"query": [5], "items": IDS, "label_token_ids": [5]}),
        ("/detokenize", {"tokens": IDS[0] * 260}),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{len(str(value)) >> 10}k",
)
def test_bodies_as_large_as_they_may_be_hold_nobody_up(
    run: Run, slices_and_calls: Slices, path: str, fields: dict[str, Any]
) -> None:
    answer(run, slices_and_calls, path, fields)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": [[5]] * 800_000}),
        ("/v1/chat/completions", {"messages": [{}] * 800_000}),
        ("/v1/messages", {"messages": [], "max_tokens": 1, "metadata": {f"k{i}": 1 for i in range(400_000)}}),
    ],
)
def test_bodies_of_more_lists_than_are_decoded_at_once_are_refused(
    run: Run, slices_and_calls: Slices, path: str, fields: dict[str, Any]
) -> None:
    assert b"more than 131072 lists, objects and fields" in answer(run, slices_and_calls, path, fields, 413)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": [5] * 3_000_000}),
        ("/v1/completions", {"prompt": IDS * 10}),
        ("/generate", {"input_ids": [5] * 3_000_000}),
        ("/generate", {"text": "a", "token_ids_logprob": [5] * 3_000_000}),
        ("/v1/score", {"query": [5] * 3_000_000, "items": [[5]], "label_token_ids": [5]}),
        ("/detokenize", {"tokens": [5] * 3_000_000}),
        ("/tokenize", {"messages": [1] * 3_000_000}),
        ("/v1/messages", {"messages": [], "max_tokens": 1, "stop_sequences": [""] * 1_000_000}),
        ("/v1/responses", {"input": "a", "metadata": {"a": [5] * 3_000_000}}),
    ],
)
def test_bodies_of_more_values_than_are_decoded_at_once_are_refused(
    run: Run, slices_and_calls: Slices, path: str, fields: dict[str, Any]
) -> None:
    assert b"more than 262144 values" in answer(run, slices_and_calls, path, fields, 413)
    assert slices_and_calls.longest_call_s < MOST_S * slowness()


@pytest.mark.parametrize("name", ["messages", "input"])
def test_more_messages_than_tokens_that_fit_are_refused_before_they_are_checked(
    run: Run, slices_and_calls: Slices, name: str
) -> None:
    path = "/v1/responses" if name == "input" else "/v1/chat/completions"
    told = answer(run, slices_and_calls, path, {name: [1] * 65_537}, 400)
    assert b"maximum context length is 65536 tokens" in told


@pytest.mark.parametrize("broken", ["x", "\\", "\\u1234", "😀"])
def test_a_long_body_that_is_no_json_holds_nobody_up(run: Run, slices_and_calls: Slices, broken: str) -> None:
    answer(
        run,
        slices_and_calls,
        "/v1/completions",
        b'{"prompt": "' + broken.encode() * (8_000_000 // len(broken.encode())),
        400,
    )


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/detokenize", {"tokens": ["a"] * 260_000}),
        ("/generate", {"input_ids": ["a"] * 260_000}),
        ("/generate", {"text": "a", "token_ids_logprob": ["a"] * 260_000}),
        ("/generate", {"text": "a", "return_logprob": ["a"] * 260_000}),
        ("/v1/completions", {"prompt": "a", "allowed_token_ids": ["a"] * 260_000}),
        ("/v1/messages", {"messages": [], "max_tokens": 1, "stop_sequences": [1] * 260_000}),
        ("/tokenize", {"messages": [1] * 65_000}),
    ],
)
def test_many_wrong_values_hold_nobody_up(
    run: Run, slices_and_calls: Slices, path: str, fields: dict[str, Any]
) -> None:
    answer(run, slices_and_calls, path, fields, 400)


@pytest.mark.parametrize(
    ("path", "field", "fields"),
    [
        ("/v1/chat/completions", "messages", {"max_tokens": 1}),
        ("/tokenize", "messages", {}),
        ("/v1/messages", "messages", {"max_tokens": 1}),
        ("/v1/messages/count_tokens", "messages", {}),
        ("/v1/responses", "input", {"max_output_tokens": 1}),
        ("/v1/responses/input_tokens", "input", {}),
    ],
)
def test_many_messages_hold_nobody_up(run: Run, slices: Slices, path: str, field: str, fields: dict[str, Any]) -> None:
    messages = [{"role": "assistant" if i % 2 else "user", "content": "x"} for i in range(8_001)]
    answer(run, slices, path, {field: messages, **fields})
