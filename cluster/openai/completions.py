"""The routes /v1/chat/completions and /v1/completions, from body to answer, without HTTP: bytes in, bytes out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from cluster.http.context import RequestContext
from cluster.http.response import HttpResponse
from cluster.openai.chat_turns import conversation
from cluster.openai.chat_writer import ChatWriter
from cluster.openai.completion_writer import CompletionWriter
from cluster.openai.echo import Echo
from cluster.openai.openai_request import COMPLETION_DEFAULT_MAX_TOKENS, ChatRequest, CompletionRequest, check_request
from cluster.requests import checks
from cluster.requests.answer import answer
from cluster.requests.chat_run import chat_run
from cluster.requests.fields import ignored_header, lowered_header
from cluster.requests.images import LeftOut
from cluster.requests.job import JobOptions
from cluster.requests.served_model import ServedModel
from cluster.text.conversation import Conversation
from cluster.text.prompt_encoder import Use


class _Prompt(NamedTuple):
    """One prompt of a completion request."""

    given: str | list[int]
    ids: list[int]
    max_tokens: int


async def chat_completions(model: ServedModel, body: bytes, context: RequestContext) -> HttpResponse:
    """POST /v1/chat/completions. Raises RequestError for a bad request."""
    request, turns, ignored = await model.threads.prepared(body, partial(_checked_chat, model))
    run, headers = await chat_run(
        model,
        "chatcmpl-",
        turns,
        request,
        context,
        _job_options(request),
        num_bytes=len(body),
        ignored=ignored,
        max_tokens=request.asked_max_tokens,
        truncate_prompt_tokens=request.truncate_prompt_tokens,
    )
    return answer(ChatWriter(run, request, model), streamed=bool(request.stream), headers=headers)


async def completions(model: ServedModel, body: bytes, context: RequestContext) -> HttpResponse:
    """POST /v1/completions. Raises RequestError for a bad request."""
    request, prompts, ignored = await model.threads.prepared(body, partial(_checked_completion, model))
    # An echo shows the number of likeliest tokens that `logprobs` asks for; `prompt_logprobs` may ask for more.
    echoed = request.num_logprobs if request.echo else -1
    options = replace(_job_options(request), num_prompt_logprobs=max(echoed, request.num_prompt_logprobs))
    grammar = await model.grammar(request)
    ids, limits = [prompt.ids for prompt in prompts], [prompt.max_tokens for prompt in prompts]
    job = model.job("cmpl-", request, ids, limits, context, options, grammar=grammar)
    echoes = None
    if request.echo:
        skip = job.text.skip_special_tokens
        echoes = [
            await Echo.of(
                prompt.given if request.truncate_prompt_tokens is None else prompt.ids,
                prompt.ids,
                model.tokenizer,
                skip_special_tokens=skip,
            )
            for prompt in prompts
        ]
    writer = CompletionWriter(model.run(job), request, model, echoes)
    headers = ignored_header(ignored) | lowered_header([request.max_tokens] * len(limits), limits)
    return answer(writer, streamed=bool(request.stream), headers=headers)


def _checked_chat(model: ServedModel, raw: Mapping[str, Any]) -> tuple[ChatRequest, Conversation, list[str]]:
    """Returns a request, the conversation that the model continues, and the ignored fields."""
    request, ignored = check_request(ChatRequest, raw, model.server)
    model.check_name(request.model)
    left_out = LeftOut(model.server)
    turns = conversation(request, left_out)
    return request, turns, [*ignored, *left_out.names]


def _checked_completion(
    model: ServedModel, raw: Mapping[str, Any]
) -> tuple[CompletionRequest, list[_Prompt], list[str]]:
    """Returns a request, its prompts, and the ignored fields."""
    request, ignored = check_request(CompletionRequest, raw, model.server)
    model.check_name(request.model)
    given = checks.prompts(request.prompt, "prompt", model.vocab_size)
    checks.num_sequences(request.n or 1, len(given), "n", model.server)
    add = request.add_special_tokens is not False
    limit = COMPLETION_DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    prompts = []
    for i, entry in enumerate(given):
        param = f"prompt[{i}]" if len(given) > 1 else "prompt"
        if isinstance(entry, str):
            use: Use = "run" if request.truncate_prompt_tokens is None else "end"
            ids = model.prompts.encode(entry, param, add_special_tokens=add, use=use)
        else:
            ids = entry
        ids = model.truncated(ids, request.truncate_prompt_tokens, limit)
        default = COMPLETION_DEFAULT_MAX_TOKENS
        max_tokens = model.checked_max_tokens(ids, request.max_tokens, default=default, param=param)
        prompts.append(_Prompt(entry, ids, max_tokens))
    return request, prompts, ignored


def _job_options(request: ChatRequest | CompletionRequest) -> JobOptions:
    return JobOptions(
        num_choices=request.n or 1,
        num_logprobs=request.num_logprobs,
        num_prompt_logprobs=request.num_prompt_logprobs,
        priority=request.priority or 0,
        cache_salt=request.cache_salt,
        name=request.request_id,
    )
