"""The route /generate in SGLang's own form: texts or token ids in; text, ids and log probabilities out.

RL trainers and evaluation harnesses use this route. A request has no messages and no model name, one prompt or a batch,
and for each parameter one value or one per prompt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import ConfigDict, Field

from cluster.http.context import RequestContext
from cluster.http.response import HttpResponse
from cluster.native.native_answer import NativeWriter
from cluster.requests import checks
from cluster.requests.answer import answer
from cluster.requests.fields import STYLING, UNSUPPORTED, FieldPolicy, ignored_header, lowered_header, neutral
from cluster.requests.job import Job, JobOptions
from cluster.requests.json_body import below
from cluster.requests.sampling_fields import SamplingFields
from cluster.requests.served_model import ServedModel
from cluster.requests.shapes import MAX_SEQUENCES, MAX_TOKENS, IdLists, Shape, Texts, exactly_one
from configs.errors import RequestError
from worker.protocol import MAX_ROW_REQUESTED

_DEFAULT_NEW_TOKENS = 128
_T = TypeVar("_T")
_ForEach = Annotated[list[_T], Field(max_length=MAX_SEQUENCES)]
"""A list with one value for each prompt."""

_Count = Annotated[int, Field(ge=0, le=MAX_TOKENS)]
_Start = Annotated[int, Field(ge=-1, le=MAX_TOKENS)]
_Asked = Annotated[list[int], Field(fail_fast=True)]
_Rid = Annotated[str, Field(pattern=r"^[A-Za-z0-9._:-]{1,128}$")]


class NativeSampling(SamplingFields):
    """The `sampling_params`: every sampling field of the other routes, and some under SGLang's names."""

    max_new_tokens: _Count | None = None
    """Maximum number of tokens of the answer. Null means 128. 0 is for requests that only need the prompt."""
    min_new_tokens: _Count | None = None
    sampling_seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    n: int | None = Field(None, ge=1)


class NativeRequest(Shape):
    """POST /generate: `text` or `input_ids`."""

    model_config = ConfigDict(json_schema_extra=exactly_one(text=["string", "array"], input_ids="array"))

    text: Texts | None = None
    input_ids: IdLists | None = None
    sampling_params: NativeSampling | Annotated[list[NativeSampling], Field(fail_fast=True)] | None = None
    rid: _Rid | _ForEach[_Rid] | None = None
    """Becomes `meta_info.id` of the answer. If null, a random id."""
    return_logprob: bool | _ForEach[bool] | None = None
    logprob_start_len: _Start | _ForEach[_Start] | None = None
    """Position in the prompt from which log probabilities of its tokens are returned too. -1 for none."""
    top_logprobs_num: _Count | _ForEach[_Count] | None = None
    token_ids_logprob: _Asked | _ForEach[_Asked] | None = None
    """Token ids that get a log probability at every position of the answer."""
    return_text_in_logprobs: bool | None = None
    stream: bool | None = None
    priority: int | None = Field(None, ge=-(2**53) + 1, le=2**53 - 1)
    """Lower goes first among the client's requests. Across clients it counts within the range granted to the key."""


_SAMPLING = FieldPolicy(
    {**UNSUPPORTED, "structural_tag": neutral()},
    frozenset({"spaces_between_special_tokens", "stream_interval"}),
    STYLING,
)
_FIELDS = FieldPolicy(
    {
        "audio_data": neutral(),
        "bootstrap_host": neutral(),
        "custom_logit_processor": neutral(),
        "image_data": neutral(),
        "input_embeds": neutral(),
        "lora_path": neutral(),
        "return_hidden_states": neutral(False),
        "session_params": neutral(),
        "video_data": neutral(),
    },
    frozenset({"background", "log_metrics", "modalities", "model", "return_bytes", "user"}),
)


class _Checked(NamedTuple):
    """A request with checked fields, and its values for each prompt."""

    request: NativeRequest
    is_batch: bool
    ignored: list[str]
    prompts: list[list[int]]
    sampling: list[NativeSampling]
    options: list[JobOptions]
    starts: list[int]
    """The argument `starts` of `NativeWriter`."""


async def generate(model: ServedModel, body: bytes, context: RequestContext) -> HttpResponse:
    """POST /generate. Raises RequestError for a bad request."""
    checked = await model.threads.prepared(body, partial(_checked, model))
    request, count = checked.request, len(checked.prompts)
    job = await _job(model, checked, context)
    own_names = [f"{job.id}-{i}" for i in range(count)] if count > 1 else [job.id]
    names = own_names if request.rid is None else _spread(request.rid, count, "", "rid")
    writer = NativeWriter(
        model.run(job),
        model.tokenizer,
        checked.starts,
        names,
        as_list=checked.is_batch or job.num_choices > 1,
        with_text=bool(request.return_text_in_logprobs),
    )
    limits = [choices[0].max_tokens for choices in job.sampling]
    lowered = lowered_header([fields.max_new_tokens for fields in checked.sampling], limits)
    return answer(writer, streamed=bool(request.stream), headers=ignored_header(checked.ignored) | lowered)


def _checked(model: ServedModel, raw: Mapping[str, Any]) -> _Checked:
    request, ignored = model.checked(NativeRequest, raw, _FIELDS)
    prompts = _prompts(model, request)
    count = len(prompts)
    sampling = _sampling(model, request, raw, count)
    wanted = _spread(request.return_logprob, count, False, "return_logprob")
    starts = _spread(request.logprob_start_len, count, -1, "logprob_start_len")
    tops = _spread(request.top_logprobs_num, count, 0, "top_logprobs_num")
    tokens = _spread_ids(request.token_ids_logprob, count)
    starts = [start if has else -1 for start, has in zip(starts, wanted, strict=True)]
    options = [
        JobOptions(
            num_choices=sampling[0].n or 1,
            num_logprobs=top if has else -1,
            num_prompt_logprobs=top if start >= 0 else -1,
            priority=request.priority or 0,
        )
        for top, has, start in zip(tops, wanted, starts, strict=True)
    ]
    sampling = [
        given.model_copy(
            update={
                "seed": given.seed if given.sampling_seed is None else given.sampling_seed,
                "min_tokens": given.min_tokens if given.min_new_tokens is None else given.min_new_tokens,
                "logprob_token_ids": ids if has else None,
            }
        )
        for given, ids, has in zip(sampling, tokens, wanted, strict=True)
    ]
    _check(model, options, starts, sampling)
    is_batch = not (isinstance(request.text, str) or (request.input_ids and isinstance(request.input_ids[0], int)))
    return _Checked(request, is_batch, ignored, prompts, sampling, options, starts)


def _prompts(model: ServedModel, request: NativeRequest) -> list[list[int]]:
    if (request.text is None) == (request.input_ids is None):
        raise RequestError("Give either text or input_ids.", code="missing_required_parameter", param="text")
    given = checks.prompts(request.text or request.input_ids, "input_ids", model.vocab_size)
    return [model.prompts.encode(entry, "text") if isinstance(entry, str) else entry for entry in given]


def _sampling(model: ServedModel, request: NativeRequest, raw: Mapping[str, Any], count: int) -> list[NativeSampling]:
    given = request.sampling_params or NativeSampling()
    path = "sampling_params"
    sampling = given if isinstance(given, list) else [given] * count
    if len(sampling) != count:
        raise RequestError(f"{path} must be one object, or one for each of {count} prompts.", param=path)
    fields = raw.get(path) or {}
    own_paths = [f"{path}[{i}]" for i in range(count)] if isinstance(fields, list) else [path]
    for own_path, entry in zip(own_paths, fields if isinstance(fields, list) else [fields], strict=True):
        try:
            _SAMPLING.check(NativeSampling, entry, strict=model.server.strict_fields)
        except RequestError as error:
            raise below(own_path, error) from error
    return sampling


def _check(
    model: ServedModel, options: Sequence[JobOptions], starts: Sequence[int], sampling: Sequence[NativeSampling]
) -> None:
    num_choices = options[0].num_choices
    if any((fields.n or 1) != num_choices for fields in sampling):
        raise RequestError("n must be the same for all prompts.", param="sampling_params")
    checks.num_sequences(num_choices, len(sampling), "sampling_params.n", model.server)
    for wanted, start, fields in zip(options, starts, sampling, strict=True):
        checks.num_logprobs(wanted.num_logprobs, "top_logprobs_num", model.server)
        token_ids = fields.logprob_token_ids or []
        if len(token_ids) > MAX_ROW_REQUESTED:
            message = f"token_ids_logprob has more than {MAX_ROW_REQUESTED} tokens for a prompt."
            raise RequestError(message, param="token_ids_logprob")
        checks.check_token_ids(token_ids, "token_ids_logprob", model.vocab_size)
        if token_ids and start >= 0:
            raise RequestError(
                "token_ids_logprob is for the answer's tokens; it needs logprob_start_len=-1.",
                code="unsupported_parameter",
                param="token_ids_logprob",
            )


async def _job(model: ServedModel, checked: _Checked, context: RequestContext) -> Job:
    """Makes one job of a job for each prompt. The prompts' parameters may differ, except in how texts end."""
    request, prompts = checked.request, checked.prompts
    single = len(prompts) == 1
    jobs = []
    for i, (prompt, fields, options) in enumerate(zip(prompts, checked.sampling, checked.options, strict=True)):
        # Each job may list all tokens of the vocabulary, so the event loop serves other requests between them
        await asyncio.sleep(0)
        param = "text" if request.input_ids is None else "input_ids"
        limit = model.checked_max_tokens(
            prompt, fields.max_new_tokens, default=_DEFAULT_NEW_TOKENS, param=param if single else f"{param}[{i}]"
        )
        try:
            grammar = await model.grammar(fields)
            job = model.job("", fields, [prompt], [limit], context, options, grammar=grammar)
        except RequestError as error:
            raise below("sampling_params" if single else f"sampling_params[{i}]", error) from error
        jobs.append(job)
    if any(job.text != jobs[0].text for job in jobs):
        raise RequestError(
            "stop, stop_regex, no_stop_trim, skip_special_tokens and max_new_tokens=0 must be the same for all "
            "prompts.",
            param="sampling_params",
        )
    return replace(jobs[0], prompts=prompts, sampling=[job.sampling[0] for job in jobs])


def _spread(value: _T | list[_T] | None, count: int, default: _T, param: str) -> list[_T]:
    """The values for each prompt: those of a list, or one value repeated."""
    if isinstance(value, list):
        if len(value) != count:
            raise RequestError(f"{param} must be one value, or one for each of {count} prompts.", param=param)
        return value
    return [default if value is None else value] * count


def _spread_ids(value: list[int] | list[list[int]] | None, count: int) -> list[list[int]]:
    """The requested token ids of each prompt."""
    ids: list[Any] = list(value or ())
    if ids and isinstance(ids[0], list):
        return _spread(ids, count, [], "token_ids_logprob")
    return [ids] * count
