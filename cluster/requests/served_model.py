"""The model that one replica serves, for all routes: its name, its tokenizer and the connection to its engine.

This module has the checks before a request becomes a `Job`: the model's name, the length of the prompt, and parameters.
"""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel

from cluster.http.context import RequestContext, current_request
from cluster.messages.engine import SamplingParams, Terms, WeightsChanged
from cluster.messages.state import EngineState
from cluster.requests.engine_client import EngineClient
from cluster.requests.engine_info import EngineInfo
from cluster.requests.fair_threads import FairThreads
from cluster.requests.fields import FieldPolicy
from cluster.requests.job import Job, JobOptions, Run
from cluster.requests.json_body import validated
from cluster.requests.other_replicas import OtherReplicas
from cluster.requests.sampling import Vocabulary, sampling_params, text_options
from cluster.requests.sampling_fields import SamplingFields
from cluster.structured.checker import GrammarChecker
from cluster.structured.checker_messages import Setup
from cluster.structured.grammar_limits import MAX_REQUEST_GRAMMAR_BYTES
from cluster.text.answer_parser import AnswerFormat
from cluster.text.conversation import Conversation, Turn
from cluster.text.formats import ModelFormats
from cluster.text.prompt_encoder import PromptEncoder, Use
from cluster.text.tokenizer import Tokenizer
from configs.errors import ContextLengthError, EngineError, RequestError
from configs.schema import GenerationDefaults, ServerConfig

_Request = TypeVar("_Request", bound=BaseModel)
_FIRST = -(1 << 62)  # level of the probe, which runs before requests of all clients
_SHOWN_CHARS = 40  # number of characters of a token that a message shows


class Operations(Protocol):
    """Changes of all replicas of the app. `RunningEngine` implements these methods and documents their errors."""

    async def sleep(self, *, wakes: bool = False) -> float:
        """Frees the memory of the devices. If `wakes`, takes it back instead."""

    async def resize_app(self, size: int) -> float:
        """Changes the number of ranks. Returns the seconds for which requests waited."""

    async def update_weights(self, model: str | None = None, **how: Any) -> WeightsChanged | None:
        """Changes to the weights of checkpoint `model`."""

    async def flush_cache(self) -> None:
        """Drops the cached prefixes that no running request uses."""


class ServedModel:
    """One model that serves requests."""

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: Tokenizer,
        *,
        model_name: str,
        other_names: Sequence[str] = (),
        max_model_len: int,
        server: ServerConfig,
        vocab_size: int | None = None,
        eos_token_ids: Sequence[int] = (),
        defaults: GenerationDefaults | None = None,
        version: str = "unknown",
        system_fingerprint: str | None = None,
        info: EngineInfo | None = None,
        max_item_tokens: int = 0,
        next_seed: Callable[[], int] = lambda: secrets.randbits(63),
        operations: Operations | None = None,
    ) -> None:
        """Args:
        other_names: names in requests that also stand for this model. A `*` in one stands for any characters.
        vocab_size: number of ids with an embedding. If None, the tokenizer's number of ids.
        info: what clients may know about the engine.
        max_item_tokens: maximum tokens of all scored items of a prompt. 0: the model cannot score items.
        eos_token_ids: if empty, the tokenizer's end of sequence.
        next_seed: returns an int64, for requests without a seed.
        system_fingerprint: the fingerprint of answers with the weights of the start.
        operations: changes of the app. If None, there are no ranks to change.
        """
        self.engine = engine
        self.tokenizer = tokenizer
        self.model_name = model_name
        self.other_names = other_names
        self.max_model_len = max_model_len
        self.server = server
        self.version = version
        self._system_fingerprint = system_fingerprint
        self.operations = operations
        self.others = OtherReplicas()
        self.info = info
        self.max_item_tokens = max_item_tokens
        self.vocab_size = tokenizer.vocab_size if vocab_size is None else vocab_size
        eos = eos_token_ids or self._known(tokenizer.eos_token_id)
        self.grammars = GrammarChecker(lambda: Setup(tokenizer.to_json(), self.vocab_size, list(eos)))
        self._vocabulary = Vocabulary(tokenizer=tokenizer, size=self.vocab_size, eos_token_ids=frozenset(eos_token_ids))
        self.formats = ModelFormats.of(tokenizer.template, server)
        self.prompts = PromptEncoder(
            tokenizer, self.formats, max_model_len, special_tokens_in_text=server.special_tokens_in_text
        )
        self.threads = FairThreads(max_model_len)
        self.defaults = defaults or GenerationDefaults()
        self._next_seed = next_seed
        self._probe: asyncio.Task[None] | None = None
        self.started = int(time.time())
        """Unix time of the start, in seconds."""

    @property
    def state(self) -> EngineState:
        """The engine's state."""
        return self.engine.telemetry.life.state

    @property
    def weights_version(self) -> str | None:
        """The version of the weights. None for the weights of the start."""
        weights = self.engine.board.weights
        return None if weights is None else weights.version

    @property
    def system_fingerprint(self) -> str | None:
        """The fingerprint of answers with the current weights."""
        weights = self.engine.board.weights
        return self._system_fingerprint if weights is None else weights.fingerprint

    async def warm_up(self, timeout_s: float | None = None) -> None:
        """Generates one token, after which the server is ready. Has the arguments and errors of `generate_one`."""
        await asyncio.to_thread(self.prompts.prepare)
        await self.generate_one(timeout_s)
        self.engine.telemetry.life.enter(EngineState.RUNNING)

    async def generate_one(self, timeout_s: float | None = None) -> None:
        """Generates one token, before waiting requests, which proves that the engine works.

        Raises:
            EngineError: the engine failed, or did not answer within `timeout_s`. If that is None, within
                `server.request_timeout_s`.
        """
        prompt = [*self._known(self.tokenizer.bos_token_id), *self._known(self.tokenizer.eos_token_id), 0][:1]
        sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        terms = Terms(level=_FIRST, deadline_s=self.server.request_timeout_s if timeout_s is None else timeout_s)
        job = Job(id="probe", prompts=[prompt], sampling=[[sampling]], terms=terms)
        async with aclosing(self.run(job).deltas()) as steps:
            num_tokens = sum([len(delta.token_ids) async for deltas in steps for delta in deltas])
        if num_tokens != 1:
            raise EngineError(f"one token was requested, and {num_tokens} came; please report this bug")

    async def probe(self, timeout_s: float) -> None:
        """Waits for one token, like `generate_one`. Concurrent calls wait for the same token."""
        if self._probe is None or self._probe.done():
            self._probe = asyncio.create_task(self.generate_one(timeout_s))
        await asyncio.shield(self._probe)

    async def close(self) -> None:
        """Closes the grammar checker and the threads. The engine stays open, because the caller owns it."""
        await self.grammars.close()
        self.threads.close()

    async def encode_chat(self, conversation: Conversation, num_bytes: int, use: Use = "run") -> list[int]:
        """Runs `PromptEncoder.encode_chat` in a thread, once the client has its turn.

        Args:
            num_bytes: length of the request bodies with the conversation.

        Raises:
            OverloadedError: too many of the client's requests wait.
        """
        return await self.threads.run(num_bytes, partial(self.prompts.encode_chat, conversation, use))

    def checked(
        self, kind: type[_Request], raw: Mapping[str, Any], policy: FieldPolicy, known: type[BaseModel] | None = None
    ) -> tuple[_Request, list[str]]:
        """Parses a request to this model from its JSON `raw`. Returns the request and the names of ignored fields.

        Args:
            known: model of the fields that the request may have. If None, `kind`.

        Raises:
            RequestError: a field is wrong; the error names its path. 404 for another model.
        """
        ignored = policy.check(known or kind, raw, strict=self.server.strict_fields)
        request = validated(kind, raw)
        self.check_name(getattr(request, "model", None))
        return request, ignored

    def check_name(self, name: str | None) -> None:
        """Raises RequestError (404) for the name of another model. None stands for the served model."""
        if name in (None, self.model_name):
            return
        for pattern in self.other_names:
            begin, _, end = pattern.partition("*")
            if name == pattern or ("*" in pattern and name.startswith(begin) and name[len(begin) :].endswith(end)):
                return
        raise RequestError(
            f"The model {name[:200]!r} does not exist; send {self.model_name!r} or no name.",
            code="model_not_found",
            param="model",
            status=404,
        )

    def _known(self, token_id: int | None) -> list[int]:
        """A list with `token_id`, or an empty list if the tokenizer or the model has no such token."""
        return [token_id] if token_id is not None and token_id < self.vocab_size else []

    def truncated(self, prompt: list[int], keep: int | None, max_tokens: int | None) -> list[int]:
        """The last `keep` tokens of `prompt`. None keeps all; -1 keeps as many as fit together with `max_tokens`.

        Raises:
            ContextLengthError: -1 would keep none.
        """
        if keep is None:
            return prompt
        if keep < 0 and (keep := self.max_model_len - (max_tokens or 1)) < 1:
            raise self._too_long(prompt, max_tokens, "max_tokens")
        return prompt[-keep:] if keep else []

    def checked_max_tokens(
        self, prompt: Sequence[int], asked: int | None, *, param: str, default: int | None = None
    ) -> int:
        """The number of tokens that may follow `prompt`: `asked`, lowered to what fits in the context. Every prompt is
        checked here before it is submitted.

        Args:
            param: name of the prompt's field, for errors.
            default: the number if `asked` is None. If `default` is None too, as many tokens as fit.

        Raises:
            RequestError: the prompt has no tokens, or a token without an embedding.
            ContextLengthError: the prompt leaves no room for a token.
        """
        if not prompt:
            raise RequestError(f"{param} has no tokens; send some text.", code="empty_string", param=param)
        # The engine always generates a token, even if only the prompt is of interest.
        if (room := self.max_model_len - len(prompt)) < 1:
            raise self._too_long(prompt, 1 if asked is None else asked, param)
        if (largest := max(prompt)) >= self.vocab_size:
            # A prompt's text may contain such a token, because the tokenizer has more tokens than the model.
            raise RequestError(
                f"{param} contains {self.tokenizer.token_text(largest)[:_SHOWN_CHARS]!r}, token {largest} of the "
                f"tokenizer, and this model has only tokens 0 to {self.vocab_size - 1}; leave it out.",
                param=param,
            )
        limit = default if asked is None else asked
        return room if limit is None else min(limit, room)

    def _too_long(self, prompt: Sequence[int], max_tokens: int | None, param: str) -> ContextLengthError:
        return ContextLengthError(
            max_model_len=self.max_model_len, num_prompt_tokens=len(prompt), max_tokens=max_tokens or 0, param=param
        )

    async def grammar(self, fields: SamplingFields) -> str | None:
        """The checked grammar that the answer must match. None for any text.

        Raises:
            RequestError: the grammar is wrong or too complex, or two fields have a grammar.
            OverloadedError: too many grammars wait to be checked.
        """
        spec = fields.grammar()
        return None if spec is None else await self.grammars.check(spec)

    def job(
        self,
        prefix: str,
        fields: SamplingFields,
        prompts: list[list[int]],
        max_tokens: Sequence[int],
        context: RequestContext,
        options: JobOptions,
        *,
        form: AnswerFormat | None = None,
        grammar: str | None = None,
    ) -> Job:
        """A request that is ready to run.

        Args:
            prefix: prefix of the answer's id, such as `chatcmpl-`.
            prompts: token ids that `checked_max_tokens` has accepted.
            max_tokens: result of `checked_max_tokens` for each prompt. All 0 if the client only wants the prompts.
            form: how chat answers are parsed. None if this is no chat.
            grammar: a checked grammar, or None for any text.

        Raises:
            RequestError: a field's value is impossible with this model.
        """
        prompt_only = not any(max_tokens)
        num_outputs = len(prompts) * options.num_choices
        if grammar is not None and len(grammar) * num_outputs > MAX_REQUEST_GRAMMAR_BYTES:
            raise RequestError(
                f"A grammar of {len(grammar)} bytes is too long for {num_outputs} answers; request fewer.",
                code="grammar_too_complex",
                param="n",
            )
        return Job(
            id=f"{prefix}{options.name or uuid.uuid4().hex}",
            prompts=prompts,
            sampling=sampling_params(
                fields,
                self.defaults,
                self._vocabulary,
                options,
                max_tokens=[max(limit, 1) for limit in max_tokens],  # the engine always generates a token
                next_seed=self._next_seed,
                grammar=grammar,
            ),
            text=text_options(fields, self.defaults, self.server, prompt_only=prompt_only),
            form=form,
            terms=self.terms(context, options),
        )

    def terms(self, context: RequestContext, options: JobOptions | None = None) -> Terms:
        """The terms of the request `context`. Its level among the requests of all clients is its priority, limited to
        the range that an operator granted its key. Without a grant, the level is 0."""
        options = options or JobOptions()
        least, most = context.priorities or (0, 0)
        return Terms(
            level=min(max(options.priority, least), most),
            priority=options.priority,
            client=context.share_owner,
            cache_salt=context.cache_salt(options.cache_salt),
            deadline_s=self.server.request_timeout_s,
        )

    def run(self, job: Job) -> Run:
        """A run of `job` in this model's engine. The run starts when its first delta is read.

        Raises:
            RequestError: (429) the client's quota does not allow the job now.
        """
        if (context := current_request()) is not None:
            context.meter.begin(job.num_outputs, sum(map(len, job.prompts)))
        return Run(job, self.engine, self.tokenizer)

    async def stream_text(
        self,
        prompt: str,
        *,
        chat: bool,
        max_tokens: int | None = None,
        temperature: float | None = None,
        seed: int | None = None,
    ) -> AsyncGenerator[str, None]:
        """The continuation of `prompt` (with `chat`, the reply to it) as text, without HTTP or JSON.

        Raises:
            RequestError: the prompt is empty or does not fit.
            EngineError: the engine failed.
        """
        turns = Conversation(turns=[Turn(role="user", text=prompt)])
        ids = await self.encode_chat(turns, len(prompt)) if chat else self.prompts.encode(prompt)
        limit = self.checked_max_tokens(ids, max_tokens, param="prompt")
        fields = SamplingFields(temperature=temperature, seed=seed)
        job = self.job("text-", fields, [ids], [limit], RequestContext(request_id=uuid.uuid4().hex), JobOptions())
        async with aclosing(self.run(job).deltas()) as steps:
            async for deltas in steps:
                for delta in deltas:
                    if delta.text:
                        yield delta.text
