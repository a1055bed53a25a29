"""OpenAI requests to engine requests, and engine output to OpenAI answers. No HTTP here: bytes in, bytes out.

`OpenAIServing` is what one replica serves: one model, one tokenizer, one engine connection. An `Answer` starts
nothing until its first chunk is asked for, and aborts its requests when it is closed.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
import uuid
from array import array
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec

from cluster.engine_client import EngineClient
from cluster.messages import FinishReason, SamplingParams
from cluster.openai import protocol
from cluster.openai.chat import parse_messages, render_prompt
from cluster.openai.generation import Output, read_outputs
from cluster.openai.protocol import ChatRequest, CompletionRequest, ModelCard
from cluster.openai.responses import AnswerWriter, ChatWriter, CompletionWriter
from cluster.openai.tokenizer import Tokenizer
from configs.errors import ContextLengthError, EngineError, RequestError
from configs.schema import ServerConfig

logger = logging.getLogger(__name__)

_INLINE_CHARS = 2048  # encoding takes under 1 ms; a thread costs a tenth of that and more jitter


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """What a request gets that names no value; a model's generation_config may say otherwise."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


@dataclass(frozen=True, slots=True)
class Answer:
    """The body of a success, chunk by chunk. Raises what went wrong, before the first chunk where it can."""

    chunks: AsyncGenerator[bytes, None]
    streamed: bool
    """Server-sent events; otherwise one chunk of JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """One checked request."""

    id: str
    prompts: list[list[int]]
    sampling: list[list[SamplingParams]]
    """For each prompt, one for each of its choices."""
    stops: list[str]
    include_usage: bool


def _random_seed() -> int:
    return secrets.randbits(63)


class OpenAIServing:
    """Answers OpenAI requests for one model."""

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: Tokenizer,
        *,
        model_name: str,
        max_model_len: int,
        server: ServerConfig,
        vocab_size: int | None = None,
        defaults: SamplingDefaults | None = None,
        version: str = "unknown",
        system_fingerprint: str | None = None,
        next_seed: Callable[[], int] = _random_seed,
    ) -> None:
        """Args:
        vocab_size: ids the model has an embedding for. None: those of the tokenizer.
        next_seed: int64 for a request that brings none.
        """
        self.engine = engine
        self.tokenizer = tokenizer
        self.model_name = model_name
        self.max_model_len = max_model_len
        self.server = server
        self.version = version
        self.system_fingerprint = system_fingerprint
        self._vocab_size = tokenizer.vocab_size if vocab_size is None else vocab_size
        self._defaults = defaults or SamplingDefaults()
        self._next_seed = next_seed
        self._started = int(time.time())
        self._warm = False

    @property
    def ready(self) -> bool:
        """A token has been generated, and the engine is there."""
        return self._warm and self.engine.connected

    async def warm_up(self, timeout_s: float | None = None) -> None:
        """Generates one token; the server is ready after it.

        Args:
            timeout_s: None: `server.request_timeout_s`.

        Raises:
            EngineError: the engine failed or did not answer in time.
        """
        timeout_s = self.server.request_timeout_s if timeout_s is None else timeout_s
        tokenizer = self.tokenizer
        prompt = [next((id_ for id_ in (tokenizer.bos_token_id, tokenizer.eos_token_id) if id_ is not None), 0)]
        sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        [stream] = self.engine.submit(_int32(prompt), [sampling])
        async with aclosing(read_outputs([Output(0, stream, tokenizer, prompt, sampling)], timeout_s=timeout_s)) as it:
            num_tokens = sum([len(delta.token_ids) async for deltas in it for delta in deltas])
        if num_tokens != 1:
            raise EngineError(f"warm-up asked for one token and got {num_tokens}")
        self._warm = True

    def models(self) -> list[ModelCard]:
        """The one model."""
        return [ModelCard(self.model_name, self._started, self.max_model_len)]

    def model(self, name: str) -> ModelCard:
        """Raises RequestError (404) for any other name."""
        self._check_model(name)
        return self.models()[0]

    async def chat(self, body: bytes) -> Answer:
        """POST /v1/chat/completions. Raises RequestError for a bad request."""
        request = protocol.parse_request(ChatRequest, body, self.server)
        self._check_model(request.model)
        messages = parse_messages(request.messages)
        prompt = await self._encode_chat(messages)
        room = self.max_model_len - len(prompt)
        max_tokens = self._checked_max_tokens(prompt, request.asked_max_tokens, default=max(room, 1), param="messages")
        job = self._job("chatcmpl", request, [prompt], [max_tokens])
        writer = ChatWriter(self._head(job), self.tokenizer, request.num_logprobs, include_usage=job.include_usage)
        return self._answer(job, writer, streamed=bool(request.stream))

    async def completions(self, body: bytes) -> Answer:
        """POST /v1/completions. Raises RequestError for a bad request."""
        request = protocol.parse_request(CompletionRequest, body, self.server)
        self._check_model(request.model)
        given = protocol.prompts(request.prompt, self._vocab_size)
        if len(given) * request.num_choices > protocol.MAX_SEQUENCES:
            raise RequestError(f"{len(given)} prompts times n={request.n} exceed {protocol.MAX_SEQUENCES}.", param="n")
        prompts = [await self._encode(prompt) if isinstance(prompt, str) else prompt for prompt in given]
        max_tokens = []
        for i, prompt in enumerate(prompts):
            default = min(protocol.COMPLETION_DEFAULT_MAX_TOKENS, max(self.max_model_len - len(prompt), 1))
            param = f"prompt[{i}]" if len(prompts) > 1 else "prompt"
            max_tokens.append(self._checked_max_tokens(prompt, request.asked_max_tokens, default=default, param=param))
        job = self._job("cmpl", request, prompts, max_tokens)
        writer = CompletionWriter(
            self._head(job), self.tokenizer, request.num_logprobs, include_usage=job.include_usage
        )
        return self._answer(job, writer, streamed=bool(request.stream))

    async def stream_text(
        self, prompt: str, *, chat: bool, max_tokens: int | None = None, temperature: float | None = None
    ) -> AsyncGenerator[str, None]:
        """The continuation of `prompt` (or the reply to it, with `chat`) as text, without any HTTP or JSON.

        Raises:
            RequestError: the prompt is empty or does not fit.
            EngineError: the engine failed.
        """
        messages = [{"role": "user", "content": prompt}]
        ids = await (self._encode_chat(messages) if chat else self._encode(prompt))
        room = max(self.max_model_len - len(ids), 1)
        limit = self._checked_max_tokens(ids, max_tokens, default=room, param="prompt")
        fields = {"model": self.model_name, "prompt": prompt, "temperature": temperature}
        job = self._job("text", CompletionRequest.model_validate(fields), [ids], [limit])
        timeout_s = self.server.request_timeout_s
        async with aclosing(read_outputs(self._submit(job), timeout_s=timeout_s)) as steps:
            async for deltas in steps:
                for delta in deltas:
                    if delta.text:
                        yield delta.text

    def _check_model(self, name: str) -> None:
        if name != self.model_name:
            raise RequestError(
                f"The model {name[:200]!r} does not exist; this server has {self.model_name!r}.",
                code="model_not_found",
                param="model",
                status=404,
            )

    def _checked_max_tokens(self, prompt: list[int], asked: int | None, *, default: int, param: str) -> int:
        if not prompt:
            raise RequestError(f"{param} has no tokens.", code="empty_string", param=param)
        max_tokens = default if asked is None else asked
        if len(prompt) + max_tokens > self.max_model_len:
            raise ContextLengthError(
                max_model_len=self.max_model_len, num_prompt_tokens=len(prompt), max_tokens=max_tokens, param=param
            )
        return max_tokens

    async def _encode_chat(self, messages: list[dict[str, Any]]) -> list[int]:
        def encode() -> list[int]:
            # The template writes the special tokens; adding them again would double the first one.
            return self.tokenizer.encode(render_prompt(self.tokenizer, messages), add_special_tokens=False)

        if sum(len(message["content"]) for message in messages) <= _INLINE_CHARS:
            return encode()
        return await asyncio.to_thread(encode)

    async def _encode(self, text: str) -> list[int]:
        if len(text) <= _INLINE_CHARS:
            return self.tokenizer.encode(text, add_special_tokens=True)
        return await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens=True)

    def _job(
        self,
        prefix: str,
        request: ChatRequest | CompletionRequest,
        prompts: list[list[int]],
        max_tokens: Sequence[int],
    ) -> _Job:
        stop_ids = request.stop_token_ids or []
        protocol.check_token_ids(stop_ids, "stop_token_ids", self._vocab_size)
        seed = self._next_seed() if request.seed is None else request.seed
        defaults = self._defaults
        top_k = defaults.top_k if request.top_k is None else request.top_k

        def sampling(limit: int, choice: int) -> SamplingParams:
            return SamplingParams(
                max_tokens=limit,
                temperature=defaults.temperature if request.temperature is None else request.temperature,
                top_p=defaults.top_p if request.top_p is None else request.top_p,
                top_k=max(top_k, 0),
                min_p=defaults.min_p if request.min_p is None else request.min_p,
                seed=_wrap_int64(seed + choice),
                stop_token_ids=tuple(stop_ids),
                ignore_eos=bool(request.ignore_eos),
                num_logprobs=request.num_logprobs,
            )

        return _Job(
            id=f"{prefix}-{uuid.uuid4().hex}",
            prompts=prompts,
            sampling=[[sampling(limit, choice) for choice in range(request.num_choices)] for limit in max_tokens],
            stops=protocol.stop_strings(request.stop, self.server),
            include_usage=request.include_usage,
        )

    def _head(self, job: _Job) -> protocol.Head:
        return protocol.Head(job.id, int(time.time()), self.model_name, self.system_fingerprint)

    def _answer(self, job: _Job, writer: AnswerWriter, *, streamed: bool) -> Answer:
        return Answer(self._stream(job, writer) if streamed else self._whole(job, writer), streamed)

    async def _stream(self, job: _Job, writer: AnswerWriter) -> AsyncGenerator[bytes, None]:
        outputs = self._submit(job)
        started = time.monotonic()
        first_token: float | None = None
        try:
            async with aclosing(read_outputs(outputs, timeout_s=self.server.request_timeout_s)) as steps:
                async for deltas in steps:
                    if first_token is None:
                        first_token = time.monotonic()
                        yield writer.begin(len(outputs)) + writer.chunks(deltas)
                    elif chunk := writer.chunks(deltas):
                        yield chunk
            yield writer.end(_usage(job, outputs))
        finally:
            _log(job, outputs, started, first_token)

    async def _whole(self, job: _Job, writer: AnswerWriter) -> AsyncGenerator[bytes, None]:
        outputs = self._submit(job)
        started = time.monotonic()
        first_token: float | None = None
        try:
            async with aclosing(read_outputs(outputs, timeout_s=self.server.request_timeout_s)) as steps:
                async for deltas in steps:
                    first_token = first_token or time.monotonic()
                    writer.collect(deltas)
            yield writer.whole(len(outputs), _usage(job, outputs))
        finally:
            _log(job, outputs, started, first_token)

    def _submit(self, job: _Job) -> list[Output]:
        outputs: list[Output] = []
        try:
            for prompt, sampling in zip(job.prompts, job.sampling, strict=True):
                streams = self.engine.submit(_int32(prompt), sampling)
                for stream, params in zip(streams, sampling, strict=True):
                    outputs.append(Output(len(outputs), stream, self.tokenizer, prompt, params, job.stops))
        except BaseException:
            for output in outputs:
                output.stream.abort()
            raise
        return outputs


def _usage(job: _Job, outputs: Sequence[Output]) -> protocol.Usage:
    num_choices = len(job.sampling[0])
    num_prompt = sum(len(prompt) for prompt in job.prompts)
    num_completion = sum(output.num_tokens for output in outputs)
    # A prompt's later choices find the first one's pages; only what the first one found was free.
    num_cached = sum(output.num_cached_tokens for output in outputs[::num_choices])
    return protocol.Usage(
        num_prompt, num_completion, num_prompt + num_completion, protocol.PromptTokensDetails(num_cached)
    )


def _log(job: _Job, outputs: Sequence[Output], started: float, first_token: float | None) -> None:
    """One line per request, with the seed it ran under: enough to run it again."""
    now = time.monotonic()
    usage = _usage(job, outputs)
    reasons = ",".join(sorted({output.finish_reason or FinishReason.ABORT for output in outputs}))
    logger.info(
        "request %s choices=%d in=%d out=%d cached=%d finish=%s seed=%d ttft_ms=%.1f e2e_ms=%.1f",
        job.id,
        len(outputs),
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.prompt_tokens_details.cached_tokens,
        reasons,
        job.sampling[0][0].seed,
        1e3 * ((first_token or now) - started),
        1e3 * (now - started),
    )


def _int32(ids: Sequence[int]) -> bytes:
    return array("i", ids).tobytes()


def _wrap_int64(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63
