"""What one replica serves, as every route sees it: one model, its tokenizer and the connection to its engine.

Owns what a request must pass before it is a `Job`: the model's name, encoding, room in the context, and parameters.
"""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from cluster.engine_client import EngineClient
from cluster.http.context import RequestContext
from cluster.messages import SamplingParams
from cluster.native.engine_info import EngineInfo
from cluster.openai.chat import render_prompt
from cluster.openai.checks import stop_strings
from cluster.openai.job import Job, Run
from cluster.openai.protocol import SamplingFields
from cluster.openai.sampling import SamplingDefaults, choices_of, sampling_params
from cluster.openai.tokenizer import Tokenizer
from cluster.openai.wire import Head, ModelCard
from configs.errors import ContextLengthError, EngineError, RequestError
from configs.schema import ServerConfig

_FIRST = -(1 << 62)  # a priority that no request has
_INLINE_CHARS = 2048  # encoding takes under 1 ms; a thread costs a tenth of that and more jitter


def _random_seed() -> int:
    return secrets.randbits(63)


class ServedModel:
    """One model that requests can be put to."""

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
        rank_devices: Sequence[str] = (),
        version: str = "unknown",
        system_fingerprint: str | None = None,
        info: EngineInfo | None = None,
        next_seed: Callable[[], int] = _random_seed,
    ) -> None:
        """Args:
        vocab_size: ids the model has an embedding for. None: those of the tokenizer.
        rank_devices: by rank, e.g. `cuda:0`.
        info: what clients may know of the engine.
        next_seed: int64 for a request that brings none.
        """
        self.engine = engine
        self.tokenizer = tokenizer
        self.model_name = model_name
        self.max_model_len = max_model_len
        self.server = server
        self.rank_devices = list(rank_devices)
        self.version = version
        self.system_fingerprint = system_fingerprint
        self.info = info
        self.vocab_size = tokenizer.vocab_size if vocab_size is None else vocab_size
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
        await self.generate_one(timeout_s)
        self._warm = True

    async def generate_one(self, timeout_s: float | None = None) -> None:
        """Generates one token, ahead of what waits: the proof that the engine works.

        Args:
            timeout_s: None: `server.request_timeout_s`.

        Raises:
            EngineError: the engine failed or did not answer in time.
        """
        tokenizer = self.tokenizer
        prompt = [next((id_ for id_ in (tokenizer.bos_token_id, tokenizer.eos_token_id) if id_ is not None), 0)]
        sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        job = Job(id="probe", prompts=[prompt], sampling=[[sampling]], stops=[], priority=_FIRST)
        async with aclosing(self.run(job, timeout_s=timeout_s).deltas()) as steps:
            num_tokens = sum([len(delta.token_ids) async for deltas in steps for delta in deltas])
        if num_tokens != 1:
            raise EngineError(f"one token was asked for, and {num_tokens} came")

    def cards(self) -> list[ModelCard]:
        """The one model, as /v1/models lists it."""
        return [ModelCard(self.model_name, self._started, self.max_model_len)]

    def card(self, name: str) -> ModelCard:
        """Raises RequestError (404) for any other name."""
        self.check_name(name)
        return self.cards()[0]

    def check_name(self, name: str) -> None:
        """Raises RequestError (404) for a model that is not this one."""
        if name != self.model_name:
            raise RequestError(
                f"The model {name[:200]!r} does not exist; this server has {self.model_name!r}.",
                code="model_not_found",
                param="model",
                status=404,
            )

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; does not hold up the event loop."""
        if len(text) <= _INLINE_CHARS:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens=add_special_tokens)

    async def encode_chat(self, messages: list[dict[str, Any]]) -> list[int]:
        """Token ids of the chat template's text for `messages`, which `chat.parse_messages` has checked.

        Raises:
            RequestError: there is no template, or it refuses these messages.
        """

        def encode() -> list[int]:
            # The template writes the special tokens; adding them again would double the first one.
            return self.tokenizer.encode(render_prompt(self.tokenizer, messages), add_special_tokens=False)

        if sum(len(message["content"]) for message in messages) <= _INLINE_CHARS:
            return encode()
        return await asyncio.to_thread(encode)

    def room(self, prompt: Sequence[int]) -> int:
        """Tokens that fit after `prompt`; 1 when none does, so that asking for them names the prompt's length."""
        return max(self.max_model_len - len(prompt), 1)

    def checked_max_tokens(self, prompt: Sequence[int], asked: int | None, *, default: int, param: str) -> int:
        """How many tokens may follow `prompt`.

        Args:
            param: the field `prompt` came from.

        Raises:
            RequestError: the prompt has no tokens.
            ContextLengthError: prompt and asked tokens do not fit.
        """
        if not prompt:
            raise RequestError(f"{param} has no tokens.", code="empty_string", param=param)
        max_tokens = default if asked is None else asked
        if len(prompt) + max_tokens > self.max_model_len:
            raise ContextLengthError(
                max_model_len=self.max_model_len, num_prompt_tokens=len(prompt), max_tokens=max_tokens, param=param
            )
        return max_tokens

    def job(
        self,
        prefix: str,
        fields: SamplingFields,
        prompts: list[list[int]],
        max_tokens: Sequence[int],
        context: RequestContext,
        *,
        num_choices: int = 1,
        num_logprobs: int = -1,
    ) -> Job:
        """A request ready to run.

        Args:
            prefix: of the answer's id, e.g. `chatcmpl-`.
            prompts: token ids, at least one each, all in the vocabulary.
            max_tokens: for each prompt, from `checked_max_tokens`.
            num_logprobs: -1 none, k the sampled token's and the k likeliest.

        Raises:
            RequestError: a field's value is not possible with this model.
        """
        seed = self._next_seed()
        sampling = [
            sampling_params(
                fields,
                self._defaults,
                max_tokens=limit,
                seed=seed,
                num_logprobs=num_logprobs,
                vocab_size=self.vocab_size,
            )
            for limit in max_tokens
        ]
        return Job(
            id=f"{prefix}{uuid.uuid4().hex}",
            prompts=prompts,
            sampling=[choices_of(params, num_choices) for params in sampling],
            stops=stop_strings(fields.stop, self.server),
            client=context.client,
            cache_salt=context.cache_salt(),
        )

    def run(self, job: Job, *, timeout_s: float | None = None) -> Run:
        """`job` in this model's engine; it starts with the first delta that is read.

        Args:
            timeout_s: None: `server.request_timeout_s`.
        """
        timeout_s = self.server.request_timeout_s if timeout_s is None else timeout_s
        return Run(job, self.engine, self.tokenizer, timeout_s=timeout_s)

    def head(self, job: Job) -> Head:
        """What the answer to `job` begins with."""
        return Head(job.id, int(time.time()), self.model_name, self.system_fingerprint)

    async def stream_text(
        self, prompt: str, *, chat: bool, max_tokens: int | None = None, temperature: float | None = None
    ) -> AsyncGenerator[str, None]:
        """The continuation of `prompt` (or the reply to it, with `chat`) as text, without any HTTP or JSON.

        Raises:
            RequestError: the prompt is empty or does not fit.
            EngineError: the engine failed.
        """
        messages = [{"role": "user", "content": prompt}]
        ids = await (self.encode_chat(messages) if chat else self.encode(prompt))
        limit = self.checked_max_tokens(ids, max_tokens, default=self.room(ids), param="prompt")
        fields = SamplingFields(temperature=temperature)
        job = self.job("text-", fields, [ids], [limit], RequestContext(request_id=uuid.uuid4().hex))
        async with aclosing(self.run(job).deltas()) as steps:
            async for deltas in steps:
                for delta in deltas:
                    if delta.text:
                        yield delta.text
