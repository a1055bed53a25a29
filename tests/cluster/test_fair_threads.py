"""Sizes are judged before work, and clients take turns for it: texts that cannot fit are not encoded, and what waits of
one client does not stand before another's."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import normalizers
from transformers import PreTrainedTokenizerFast

from cluster.http.context import Role
from cluster.http.keys import KeyRing
from cluster.requests import fair_threads
from cluster.requests.fair_threads import FairThreads
from cluster.serve.ingress import create_app
from cluster.text.formats import ModelFormats
from cluster.text.prompt_encoder import PromptEncoder
from cluster.text.tokenizer import Tokenizer
from configs.errors import ContextLengthError, OverloadedError
from configs.schema import ServerConfig
from tests.cluster.test_auth import Keys
from tests.helpers.scripted_engine import MODEL, Run, Stack, error_of

LONG = "The quick brown fox jumps over the lazy dog. " * 90_000
"""A text of 4 MB."""


def encoder_of(tokenizer: Tokenizer, max_model_len: int) -> PromptEncoder:
    return PromptEncoder(tokenizer, ModelFormats.of(tokenizer.template, ServerConfig()), max_model_len)


def collapsing(smollm2: Tokenizer) -> Tokenizer:
    """A tokenizer that makes one space of many, so that no length of a text tells how many tokens it has."""
    rust = RustTokenizer.from_str(smollm2.to_json())
    rust.normalizer = normalizers.Replace("  ", "")
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=rust))


# --- Sizes ------------------------------------------------------------------------------------------------------------


def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded_on_every_route(
    run: Run, smollm2: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[int] = []
    encode = Tokenizer.encode

    def counting(self: Tokenizer, text: str, **options: Any) -> list[int]:
        encoded.append(len(text))
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", counting)
    chat = {"messages": [{"role": "user", "content": LONG}]}

    async def scenario(stack: Stack) -> None:
        encoded.clear()
        for path, fields in (
            ("/v1/completions", {"prompt": [LONG, "b"]}),
            ("/v1/chat/completions", chat),
            ("/v1/messages", {**chat, "max_tokens": 1}),
            ("/v1/messages/count_tokens", chat),
            ("/v1/responses", {"input": LONG}),
            ("/v1/responses/input_tokens", {"input": LONG}),
            ("/generate", {"text": [LONG]}),
            ("/v1/score", {"query": LONG, "items": ["a"] * 1000, "label_token_ids": [5]}),
            ("/tokenize", {"prompt": LONG}),
            ("/tokenize", chat),
        ):
            model = {} if path == "/generate" else {"model": MODEL}
            reply = await stack.http.post(path, json={**model, **fields})
            assert reply.status_code == 400, (path, reply.text)
            assert "maximum context length is 1024 tokens" in reply.text or "tokens > 1024 maximum" in reply.text
        assert encoded == []
        assert stack.coordinator.requests == []

    run(scenario, max_model_len=1024)


def test_four_long_texts_cost_neither_time_nor_memory(run: Run) -> None:
    async def scenario(stack: Stack) -> None:
        process = psutil.Process()
        before, cpu = process.memory_info().rss, sum(process.cpu_times()[:2])
        body = {"model": MODEL, "prompt": [LONG, LONG]}
        replies = await asyncio.gather(*(stack.http.post("/v1/completions", json=body) for _ in range(2)))
        for reply in replies:
            error_of(reply, 400, "context_length_exceeded")
        assert sum(process.cpu_times()[:2]) - cpu < 3
        assert process.memory_info().rss - before < 100 << 20

    run(scenario, max_model_len=8192, server=ServerConfig(max_body_bytes=16 << 20))


@pytest.mark.parametrize("shrinks", [False, True])
def test_a_long_text_is_refused_by_its_first_part_where_its_length_says_nothing(
    smollm2: Tokenizer, shrinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = collapsing(smollm2) if shrinks else smollm2
    assert tokenizer.longest_token == (0 if shrinks else 81)
    encoded: list[int] = []
    encode = Tokenizer.encode

    def counting(self: Tokenizer, text: str, **options: Any) -> list[int]:
        encoded.append(len(text))
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", counting)
    prompts = encoder_of(tokenizer, 1024)
    with pytest.raises(ContextLengthError, match="at least"):
        prompts.encode(LONG[:80_000])
    assert sum(encoded) < 20_000
    encoded.clear()
    # Where whitespace is dropped, a text of any length may fit.
    spaces = "word " + "  " * 40_000 + "word"
    if shrinks:
        assert prompts.encode(spaces) == tokenizer.encode("word word", add_special_tokens=True)


def test_no_text_that_fits_is_refused(smollm2: Tokenizer) -> None:
    limit = 64
    prompts = encoder_of(smollm2, limit)
    for unit in ("a", "漢", "😀", "#", " ", "\n", "hello ", "\n" + " " * 80, "x1 "):
        for count in (1, 10, limit // 2, limit, 3 * limit, 40 * limit, 90 * limit, 200 * limit):
            text = unit * count
            ids = smollm2.encode(text, add_special_tokens=True)
            if len(ids) <= limit:
                assert prompts.encode(text) == ids
            else:
                with contextlib.suppress(ContextLengthError):
                    assert prompts.encode(text) == ids  # refused later, with the right length


def test_a_truncated_text_ends_in_the_tokens_of_the_whole(smollm2: Tokenizer) -> None:
    prompts = encoder_of(smollm2, 64)
    for text in (LONG[:400_000], "漢字😀 and more\n" * 20_000, "x" * 100_000):
        assert prompts.encode(text, use="end")[-64:] == smollm2.encode(text, add_special_tokens=True)[-64:]


# --- Turns ------------------------------------------------------------------------------------------------------------


class Held:
    """Work that takes until it is let go."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.began: list[str] = []

    def work(self, name: str) -> Callable[[], str]:
        def run() -> str:
            self.began.append(name)
            self.go.wait(30)
            return name

        run.__name__ = name
        return run


def as_client(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Sets the client of whatever is run next."""

    class Context:
        share_owner = ""

    monkeypatch.setattr(fair_threads, "current_request", lambda: Context)

    def choose(name: str) -> None:
        Context.share_owner = name

    return choose


async def settled(held: Held | None = None, num_begun: int = 0) -> None:
    """Returns when so much of what is held has begun, and no more comes."""
    async with asyncio.timeout(20):
        while held is not None and len(held.began) < num_begun:  # noqa: ASYNC110 -- it begins in threads
            await asyncio.sleep(0.002)
    for _ in range(20):
        await asyncio.sleep(0.002)


def test_what_waits_of_one_client_does_not_stand_before_anothers(monkeypatch: pytest.MonkeyPatch) -> None:
    choose, held = as_client(monkeypatch), Held()

    async def scenario() -> None:
        threads = FairThreads(128)
        choose("alice")
        first = [asyncio.ensure_future(threads.run(1, held.work(f"alice{i}"))) for i in range(20)]
        await settled(held, 3)
        assert sorted(held.began) == ["alice0", "alice1", "alice2"]  # one thread is left for others
        choose("bob")
        assert await asyncio.wait_for(threads.run(1, lambda: "quick"), 10) == "quick"
        others = [asyncio.ensure_future(threads.run(1, held.work(f"bob{i}"))) for i in range(3)]
        await settled(held, 4)
        assert held.began[3:] == ["bob0"]
        turns, submit = list[str](), threads._threads.submit

        def noting(tidied: Any, num_bytes: int, work: Callable[[], str]) -> Any:
            turns.append(work.__name__)
            return submit(tidied, num_bytes, work)

        monkeypatch.setattr(threads._threads, "submit", noting)
        held.go.set()
        assert await asyncio.gather(*first, *others) == [f"alice{i}" for i in range(20)] + [f"bob{i}" for i in range(3)]
        # Those that waited take turns, in whatever order their threads get a processor.
        assert {"bob1", "bob2"} <= set(turns[:5])
        assert (threads._waiting, threads._running, threads._num_bytes) == ({}, {}, 0)
        threads.close()

    asyncio.run(scenario())


def test_work_under_way_is_bounded_in_bytes_and_large_work_is_not_put_off_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    choose, held = as_client(monkeypatch), Held()
    size = fair_threads._MAX_BYTES

    async def scenario() -> None:
        threads = FairThreads(128)
        runs = []
        for name, num_bytes in (("a", size // 2), ("b", size), ("c", 1), ("d", 2 * size)):
            choose(name)
            runs.append(asyncio.ensure_future(threads.run(num_bytes, held.work(name))))
            await asyncio.sleep(0)
        await settled(held, 1)
        assert held.began == ["a"]
        held.go.set()
        assert await asyncio.gather(*runs) == ["a", "b", "c", "d"]
        assert held.began[:2] == ["a", "b"]
        threads.close()

    asyncio.run(scenario())


def test_a_client_that_leaves_gives_its_turn_back_and_its_thread_when_that_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    choose, held = as_client(monkeypatch), Held()

    async def scenario() -> None:
        threads = FairThreads(128)
        choose("alice")
        runs = [asyncio.ensure_future(threads.run(5, held.work(str(i)))) for i in range(6)]
        await settled(held, 3)
        for leaving in (runs[0], runs[3], runs[4]):
            leaving.cancel()
        await settled()
        assert (sorted(held.began), threads._num_bytes) == (["0", "1", "2"], 15)
        held.go.set()
        assert [await runs[i] for i in (1, 2, 5)] == ["1", "2", "5"]
        await settled()
        assert held.began[3:] == ["5"]
        assert (threads._waiting, threads._running, threads._num_bytes) == ({}, {}, 0)
        threads.close()

    asyncio.run(scenario())


def test_a_client_of_which_too_much_waits_is_told_to_come_back_and_others_are_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    choose, held = as_client(monkeypatch), Held()
    monkeypatch.setattr(fair_threads, "_MAX_WAITING", 4)

    async def scenario() -> None:
        threads = FairThreads(128)
        choose("alice")
        runs = [asyncio.ensure_future(threads.run(1, held.work(str(i)))) for i in range(7)]
        await settled()
        with pytest.raises(OverloadedError):
            await threads.run(1, held.work("more"))
        choose("bob")
        assert await threads.run(1, lambda: "quick") == "quick"
        held.go.set()
        await asyncio.gather(*runs)
        threads.close()

    asyncio.run(scenario())


def test_all_that_a_chat_holds_counts_as_bytes_under_way(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "x" * 10_000}}

    async def scenario(stack: Stack) -> None:
        counted: list[int] = []
        threads, in_turn = stack.model.threads, stack.model.threads.run

        async def counting(num_bytes: int, work: Callable[[], Any]) -> Any:
            counted.append(num_bytes)
            return await in_turn(num_bytes, work)

        monkeypatch.setattr(threads, "run", counting)
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "tools": [tool], "max_tokens": 1}
        reply = await stack.http.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200, reply.text
        assert len(counted) == 2  # checked, and encoded
        assert min(counted) > 10_000

    run(scenario, max_model_len=8192)


@pytest.mark.timing
def test_slow_templates_of_one_key_do_not_hold_up_anothers_chat(run: Run, tmp_path: Path) -> None:
    """8,000 messages take a renderer about a second."""

    async def scenario(stack: Stack) -> None:
        keys = Keys(tmp_path, ("alice", Role.USER, ""), ("bob", Role.USER, ""))
        app = create_app(stack.model, keys=KeyRing(keys.path))
        many = [{"role": ("user", "assistant")[i % 2], "content": "x"} for i in range(8001)]
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", timeout=300) as http:

            async def chat(id_: str, messages: list[dict[str, str]]) -> int:
                body = {"model": MODEL, "messages": messages, "max_tokens": 1}
                return (await http.post("/v1/chat/completions", json=body, headers=keys.bearer(id_))).status_code

            flood = [asyncio.create_task(chat("alice", many)) for _ in range(12)]
            await asyncio.sleep(1)
            began = time.monotonic()
            assert await chat("bob", [{"role": "user", "content": "hi"}]) == 200
            took = time.monotonic() - began
            assert not all(task.done() for task in flood)
            assert took < 5, took  # where the flood goes first, it is all over by then
            for task in flood:
                task.cancel()
            await asyncio.gather(*flood, return_exceptions=True)

    run(scenario, max_model_len=8192, timeout_s=120)
