"""Answers of /generate: one object for each sequence, whole, or as it has grown with each step.

A stream's objects are cumulative, as SGLang's are: each holds the whole text so far. Only the last one holds the
likeliest tokens: in all of them, they would be most of the stream.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from cluster.engine_client import PromptScores
from cluster.http.answer import Answer
from cluster.messages import FinishReason
from cluster.openai.echo import finite
from cluster.openai.generation import Delta
from cluster.openai.job import Run
from cluster.openai.tokenizer import Tokenizer
from cluster.openai.writer import DONE, encode

Entry = tuple[float | None, int, str | None]
"""Log probability, token id, and the token's text when it is asked for."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The log probabilities wanted of one prompt's answers."""

    logprobs: bool
    start: int
    """Position in the prompt from which on its tokens' are wanted; -1: none."""
    num_top: int
    token_ids: list[int]


def native_answer(
    run: Run,
    tokenizer: Tokenizer,
    asked: Sequence[Asked],
    *,
    ids: Sequence[str],
    as_list: bool,
    with_text: bool,
    streamed: bool,
    headers: Mapping[str, str],
) -> Answer:
    """The answer to `run`.

    Args:
        asked, ids: for each prompt.
        as_list: whole answers are a list, and streamed ones say which sequence they are of.
        with_text: log probabilities come with their tokens' text.
    """
    outputs = [
        _Output(run, index, tokenizer, asked[index // run.job.num_choices], with_text=with_text)
        for index in range(run.job.num_outputs)
    ]
    names = [ids[index // run.job.num_choices] for index in range(run.job.num_outputs)]
    chunks = _stream(run, outputs, names, as_list) if streamed else _whole(run, outputs, names, as_list)
    return Answer(chunks, streamed, dict(headers))


async def _whole(
    run: Run, outputs: Sequence[_Output], names: Sequence[str], as_list: bool
) -> AsyncGenerator[bytes, None]:
    async with aclosing(run.deltas()) as steps:
        async for deltas in steps:
            for delta in deltas:
                outputs[delta.index].add(delta)
    shown = [output.shown(name) for output, name in zip(outputs, names, strict=True)]
    yield encode(shown if as_list else shown[0])


async def _stream(
    run: Run, outputs: Sequence[_Output], names: Sequence[str], as_list: bool
) -> AsyncGenerator[bytes, None]:
    async with aclosing(run.deltas()) as steps:
        async for deltas in steps:
            chunks = []
            for delta in deltas:
                outputs[delta.index].add(delta)
                shown = outputs[delta.index].shown(names[delta.index])
                if as_list:
                    shown["index"] = delta.index
                chunks.append(b"data: " + encode(shown) + b"\n\n")
            yield b"".join(chunks)
    yield DONE


class _Output:
    """One sequence so far."""

    def __init__(self, run: Run, index: int, tokenizer: Tokenizer, asked: Asked, *, with_text: bool) -> None:
        self._run = run
        self._index = index
        self._tokenizer = tokenizer
        self._asked = asked
        self._with_text = with_text
        self._begin = time.monotonic()
        self._text = ""
        self._ids: list[int] = []
        self._finish_reason: dict[str, Any] | None = None
        self._logprobs: list[Entry] = []
        self._top: list[list[Entry]] = []
        self._of_tokens: list[list[Entry]] = []
        self._prompt: dict[str, Any] = {}

    def add(self, delta: Delta) -> None:
        """Takes what a step brought."""
        self._text += delta.text
        self._ids += delta.token_ids
        k = self._asked.num_top
        for token, row in zip(delta.token_ids, delta.logprobs, strict=False):
            self._logprobs.append(self._entry(row.logprob, token))
            pairs = list(zip(row.top_logprobs, row.top_ids, strict=True))
            self._top.append([self._entry(*pair) for pair in pairs[:k]])
            self._of_tokens.append([self._entry(*pair) for pair in pairs[k : k + len(self._asked.token_ids)]])
        if delta.prompt_logprobs is not None:
            self._prompt = self._of_prompt(delta.prompt_logprobs)
        if delta.finish_reason is not None:
            self._finish_reason = self._reason(delta)

    def shown(self, name: str) -> dict[str, Any]:
        """The sequence as clients read it."""
        output = self._run.output(self._index)
        meta: dict[str, Any] = {
            "id": name,
            "finish_reason": self._finish_reason,
            "prompt_tokens": len(self._run.job.prompt_of(self._index)),
            "completion_tokens": output.num_tokens,
            "cached_tokens": 0 if output.prefilled is None else output.prefilled.num_cached_tokens,
        }
        if self._finish_reason is not None:
            meta["e2e_latency"] = round(time.monotonic() - self._begin, 6)
        if self._asked.logprobs:
            meta |= {"input_token_logprobs": [], **self._prompt, "output_token_logprobs": self._logprobs}
            if self._asked.num_top and self._finish_reason is not None:
                meta["output_top_logprobs"] = self._top
            if self._asked.token_ids and self._finish_reason is not None:
                meta["output_token_ids_logprobs"] = self._of_tokens
        return {"text": self._text, "output_ids": self._ids, "meta_info": meta}

    def _entry(self, logprob: float | None, token: int) -> Entry:
        text = self._tokenizer.token_text(token) if self._with_text else None
        return None if logprob is None else finite(logprob), token, text

    def _of_prompt(self, scores: PromptScores) -> dict[str, Any]:
        """The prompt's tokens from `start` on; the first of all has no log probability."""
        prompt = self._run.job.prompt_of(self._index)
        logprobs: list[Entry] = []
        top: list[list[Entry] | None] = []
        for position in range(self._asked.start, len(prompt)):
            logprob = None if position == 0 else float(scores.logprobs[position - 1])
            logprobs.append(self._entry(logprob, prompt[position]))
            if position == 0:
                top.append(None)
                continue
            ids, values = scores.top_ids[position - 1].tolist(), scores.top_logprobs[position - 1].tolist()
            top.append([self._entry(value, id_) for value, id_ in zip(values, ids, strict=True)])
        shown: dict[str, Any] = {"input_token_logprobs": logprobs}
        if self._asked.num_top:
            shown["input_top_logprobs"] = top
        return shown

    def _reason(self, delta: Delta) -> dict[str, Any]:
        if delta.finish_reason is FinishReason.LENGTH:
            return {"type": "length", "length": len(self._ids)}
        if delta.finish_reason is FinishReason.STOP:
            matched = delta.stop_reason
            if matched is None and self._ids:
                matched = self._ids[-1]  # the end of sequence
            return {"type": "stop", "matched": matched}
        return {"type": "abort", "message": "The request was cancelled."}
