"""The route /v1/score, in SGLang's form for generative models: probabilities of some tokens after each of many texts.

Texts with a common beginning become scored items after it, in one prompt up to the engine's limit. The beginning is
then computed once, and the items in one step. If the engine accepts no items, or an item is too long, every text is a
separate prompt, and prompts of one query share its pages.
"""

from __future__ import annotations

import itertools
import math
import uuid
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, NamedTuple

import msgspec
from pydantic import ConfigDict, Field

from cluster.http.context import RequestContext
from cluster.http.response import HttpResponse
from cluster.messages.engine import SamplingParams
from cluster.requests.answer import AnswerWriter, answer
from cluster.requests.checks import check_token_ids
from cluster.requests.fields import OWN_FIELDS, ignored_header
from cluster.requests.generation import Delta
from cluster.requests.job import Job, Run, Usage
from cluster.requests.json_parts import json_parts, long_list
from cluster.requests.served_model import ServedModel
from cluster.requests.shapes import MAX_SEQUENCES, Shape
from configs.errors import RequestError
from worker.protocol import MAX_ITEMS, MAX_ROW_REQUESTED

_Ids = Annotated[list[int], Field(fail_fast=True)]
_CROSS_ENCODER_FIELDS = ("text_1", "text_2", "queries", "documents", "data_1", "data_2")


class ScoreRequest(Shape):
    """POST /v1/score: the query followed by one of the items is one text."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                {"properties": {"query": {"type": "string"}, "items": {"items": {"type": "string"}}}},
                {"properties": {"query": {"type": "array"}, "items": {"type": "array", "items": {"type": "array"}}}},
            ]
        },
    )

    model: str | None = None
    query: str | _Ids
    items: str | Annotated[list[str], Field(fail_fast=True)] | Annotated[list[_Ids], Field(fail_fast=True)]
    """Texts if `query` is a text, lists of token ids if it is a list of token ids."""
    label_token_ids: list[int] = Field(min_length=1, max_length=MAX_ROW_REQUESTED)
    """Ids of the tokens to score after each text."""
    apply_softmax: bool | None = None
    """Whether the scores of an item are divided by their sum. If not, they are probabilities among all tokens."""
    item_first: bool | None = None
    """Whether an item comes before the query in its text."""


class Scores(msgspec.Struct):
    """A list of scores for each item, with one score per label."""

    id: str
    model: str
    scores: list[list[float]]
    usage: Usage
    """If texts share a prompt, their common tokens count once."""
    object: str = "scoring"


async def score(model: ServedModel, body: bytes, context: RequestContext) -> HttpResponse:
    """POST /v1/score. Raises RequestError for a bad request."""
    labels, softmax, groups, ignored = await model.threads.prepared(body, partial(_checked, model))
    # Sampling is greedy, because the sampled token is dropped.
    sampling = SamplingParams(
        max_tokens=1, temperature=0.0, ignore_eos=True, num_logprobs=0, logprob_token_ids=tuple(labels)
    )
    job = Job(
        id=f"score-{uuid.uuid4().hex}",
        prompts=[group.prompt for group in groups],
        sampling=[[msgspec.structs.replace(sampling, item_lens=group.item_lens)] for group in groups],
        terms=model.terms(context),
    )
    writer = _ScoreWriter(model.run(job), model.model_name, softmax=softmax)
    return answer(writer, streamed=False, headers=ignored_header(ignored))


def _checked(model: ServedModel, raw: Mapping[str, Any]) -> tuple[list[int], bool, list[Group], list[str]]:
    """Returns the labels, whether their scores are divided by their sum, the prompts, and the ignored fields."""
    for name in _CROSS_ENCODER_FIELDS:
        if raw.get(name) is not None:
            raise RequestError(
                f"{name} is for cross-encoders; this model scores with query, items and label_token_ids.",
                code="unsupported_parameter",
                param=name,
            )
    request, ignored = model.checked(ScoreRequest, raw, OWN_FIELDS)
    labels = request.label_token_ids
    check_token_ids(labels, "label_token_ids", model.vocab_size)
    prompts = []
    # Texts are encoded one at a time: each contains the whole query, so together they may be very long.
    for i, prompt in enumerate(_prompts(model, request)):
        model.checked_max_tokens(prompt, 1, param=f"items[{i}]")
        prompts.append(prompt)
    groups = grouped(prompts, model.max_item_tokens, model.max_model_len)
    return labels, bool(request.apply_softmax), groups, ignored


def _prompts(model: ServedModel, request: ScoreRequest) -> Iterator[list[int]]:
    query = request.query
    items: Sequence[str | list[int]] = [request.items] if isinstance(request.items, str) else request.items
    if not 0 < len(items) <= MAX_SEQUENCES:
        raise RequestError(f"items must hold 1 to {MAX_SEQUENCES} items.", param="items")
    if isinstance(query, str):
        for i, item in enumerate(items):
            if not isinstance(item, str):
                message = "items must be a string or strings, as query is."
                raise RequestError(message, code="invalid_type", param="items")
            yield model.prompts.encode(item + query if request.item_first else query + item, f"items[{i}]")
        return
    check_token_ids(query, "query", model.vocab_size)
    for i, item in enumerate(items):
        if isinstance(item, str):
            message = f"items[{i}] must be a list of token ids, as query is one."
            raise RequestError(message, code="invalid_type", param=f"items[{i}]")
        check_token_ids(item, f"items[{i}]", model.vocab_size)
        yield [*item, *query] if request.item_first else [*query, *item]


class Group(NamedTuple):
    """Texts that the engine computes as one prompt."""

    prompt: list[int]
    item_lens: tuple[int, ...] = ()
    """Lengths of the scored items at the prompt's end. Empty if the prompt is a single text."""


def grouped(prompts: Sequence[list[int]], max_item_tokens: int, max_model_len: int) -> list[Group]:
    """Groups `prompts`, in order: prompts with a common beginning become scored items after it."""
    longest, shortest = max(map(len, prompts)), min(map(len, prompts))
    # In sorted order, the first and the last prompt have the shortest common beginning.
    pairs = zip(min(prompts), max(prompts), strict=False)
    shared = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), shortest)
    shared = min(shared, shortest - 1)  # no item may be empty
    room = min(max_item_tokens, max_model_len - 1 - shared)
    if shared < 1 or longest - shared > room:
        return [Group(prompt) for prompt in prompts]
    parts: list[list[list[int]]] = []
    left = 0
    for prompt in prompts:
        item = prompt[shared:]
        if len(item) > left or len(parts[-1]) == MAX_ITEMS:
            parts.append([])
            left = room
        parts[-1].append(item)
        left -= len(item)
    query = prompts[0][:shared]
    # A single item needs no mask: it is the end of an ordinary prompt.
    lens = [tuple(map(len, items)) if len(items) > 1 else () for items in parts]
    return [Group([*query, *itertools.chain(*items)], of_items) for items, of_items in zip(parts, lens, strict=True)]


class _ScoreWriter(AnswerWriter):
    """Writes answers of /v1/score, which are never streamed."""

    def __init__(self, run: Run, model_name: str, *, softmax: bool) -> None:
        super().__init__(run)
        self._model_name = model_name
        self._softmax = softmax
        self._of_prompts: list[list[list[float]]] = [[] for _ in run.job.prompts]

    def add(self, deltas: Sequence[Delta]) -> None:
        num_labels = len(self.run.job.sampling[0][0].logprob_token_ids)
        for delta in deltas:
            for row in delta.logprobs:
                values = (logprob for _, logprob in row.top)
                items = zip(*[values] * num_labels, strict=True)
                self._of_prompts[delta.index] = [_scores(logprobs, softmax=self._softmax) for logprobs in items]

    def whole(self) -> Iterator[bytes]:
        scores = itertools.chain.from_iterable(self._of_prompts)
        return json_parts(Scores(self.run.job.id, self._model_name, long_list(scores), self.run.usage()))


def _scores(logprobs: Sequence[float], *, softmax: bool) -> list[float]:
    """Converts log probabilities to probabilities. With `softmax`, divides these by their sum."""
    top = max(logprobs) if softmax else 0.0
    if top == -math.inf:
        return [0.0] * len(logprobs)
    probabilities = [math.exp(logprob - top) for logprob in logprobs]
    total = sum(probabilities) if softmax else 1.0
    return [probability / total for probability in probabilities]
