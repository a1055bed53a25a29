"""The routes /v1/chat/completions and /v1/completions, from body to answer. No HTTP here: bytes in, bytes out."""

from __future__ import annotations

from cluster.http.answer import Answer
from cluster.http.context import RequestContext
from cluster.openai import checks, protocol
from cluster.openai.answer import answer
from cluster.openai.chat import parse_messages
from cluster.openai.chat_writer import ChatWriter
from cluster.openai.completion_writer import CompletionWriter
from cluster.openai.job import Job
from cluster.openai.protocol import ChatRequest, CompletionRequest
from cluster.openai.served_model import ServedModel
from configs.errors import RequestError


class OpenAIServing:
    """Answers OpenAI requests for one model."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    async def chat(self, body: bytes, context: RequestContext) -> Answer:
        """POST /v1/chat/completions. Raises RequestError for a bad request."""
        model = self._model
        request = protocol.parse_request(ChatRequest, body, model.server)
        job = await chat_job(model, "chatcmpl-", request, context)
        writer = ChatWriter(model.head(job), model.tokenizer, request.num_logprobs, include_usage=request.include_usage)
        return answer(model.run(job), writer, streamed=bool(request.stream))

    async def completions(self, body: bytes, context: RequestContext) -> Answer:
        """POST /v1/completions. Raises RequestError for a bad request."""
        model = self._model
        request = protocol.parse_request(CompletionRequest, body, model.server)
        model.check_name(request.model)
        given = checks.prompts(request.prompt, model.vocab_size)
        if len(given) * request.num_choices > checks.MAX_SEQUENCES:
            raise RequestError(f"{len(given)} prompts times n={request.n} exceed {checks.MAX_SEQUENCES}.", param="n")
        prompts = [await model.encode(prompt) if isinstance(prompt, str) else prompt for prompt in given]
        max_tokens = []
        for i, prompt in enumerate(prompts):
            default = min(protocol.COMPLETION_DEFAULT_MAX_TOKENS, model.room(prompt))
            param = f"prompt[{i}]" if len(prompts) > 1 else "prompt"
            max_tokens.append(model.checked_max_tokens(prompt, request.asked_max_tokens, default=default, param=param))
        job = model.job(
            "cmpl-",
            request,
            prompts,
            max_tokens,
            context,
            num_choices=request.num_choices,
            num_logprobs=request.num_logprobs,
        )
        writer = CompletionWriter(
            model.head(job), model.tokenizer, request.num_logprobs, include_usage=request.include_usage
        )
        return answer(model.run(job), writer, streamed=bool(request.stream))


async def chat_job(model: ServedModel, prefix: str, request: ChatRequest, context: RequestContext) -> Job:
    """What a chat asks of the engine, for every route that speaks in messages.

    Args:
        prefix: of the answer's id, e.g. `chatcmpl-`.

    Raises:
        RequestError: with the path of the field at fault.
    """
    model.check_name(request.model)
    prompt = await chat_prompt(model, request)
    max_tokens = model.checked_max_tokens(
        prompt, request.asked_max_tokens, default=model.room(prompt), param="messages"
    )
    return model.job(
        prefix,
        request,
        [prompt],
        [max_tokens],
        context,
        num_choices=request.num_choices,
        num_logprobs=request.num_logprobs,
    )


async def chat_prompt(model: ServedModel, request: ChatRequest) -> list[int]:
    """Token ids of a chat, as the model reads it.

    Raises:
        RequestError: with the path of the field at fault.
    """
    return await model.encode_chat(parse_messages(request.messages))
