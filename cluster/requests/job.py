"""One request of any route in the engine's terms: prompts and parameters go in, deltas of text come out.

A `Job` is checked data about what to generate. A `Run` is a job in the engine. Neither knows how an answer is written.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

import msgspec

from cluster.http.context import RequestContext, current_request
from cluster.messages.engine import FinishReason, SamplingParams, Terms
from cluster.observability.record import RequestRecord
from cluster.requests.engine_client import EngineClient, wait_ready
from cluster.requests.generation import Delta, Output
from cluster.text.answer_parser import AnswerFormat
from cluster.text.stops import TextOptions
from cluster.text.tokenizer import Tokenizer
from configs.errors import DeadlineError, EngineError, LockstepError, RequestError

# Units of work on a large request, or on many answers, before the event loop serves other requests: 1 to 4 ms.
_IDS_AT_ONCE = 1 << 17
_OUTPUTS_AT_ONCE = 32


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int = 0


class Usage(msgspec.Struct):
    """Token counts over all choices of a request. A prompt counts once for any number of choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails = msgspec.field(default_factory=CompletionTokensDetails)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """Options of a request besides its prompts and sampling parameters."""

    num_choices: int = 1
    """Number of answers to each prompt."""
    num_logprobs: int = -1
    """-1: none. k: log probabilities of each token and of the k likeliest. Also for the next field."""
    num_prompt_logprobs: int = -1
    priority: int = 0
    """Order among the client's requests; lower goes first. `Terms` has the details."""
    cache_salt: str | None = None
    """Only prompts with equal salts share cached pages. If None, the client's own salt is used."""
    name: str | None = None
    """The answer's id without its prefix. If None, a random id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One checked request."""

    id: str
    """The answer's id, such as `chatcmpl-...`."""
    prompts: list[list[int]]
    """Token ids of each prompt, at least one."""
    sampling: list[list[SamplingParams]]
    """Parameters of each choice of each prompt."""
    terms: Terms
    """The terms of all sequences. The deadline applies to the run as a whole."""
    text: TextOptions = field(default_factory=TextOptions)
    form: AnswerFormat | None = None
    """How chat answers are parsed into reasoning, content and calls. None if they are not parsed."""

    @property
    def num_choices(self) -> int:
        """Number of sequences per prompt."""
        return len(self.sampling[0])

    @property
    def num_outputs(self) -> int:
        """Number of sequences: prompts times choices, ordered by prompt."""
        return len(self.prompts) * self.num_choices

    def prompt_of(self, index: int) -> list[int]:
        """The prompt of the output with this index."""
        return self.prompts[index // self.num_choices]


class Run:
    """A job that the engine computes, from the first read of `deltas()` on."""

    def __init__(self, job: Job, engine: EngineClient, tokenizer: Tokenizer) -> None:
        self.job = job
        self._engine = engine
        self._tokenizer = tokenizer
        self._outputs: list[Output] = []
        self._aborted = False
        self._late = False
        self._first_token: float | None = None
        self._error: LockstepError | None = None

    async def deltas(self) -> AsyncGenerator[list[Delta], None]:
        """Yields what each engine step produced until every sequence has ended. `Delta.index` counts over all
        sequences. With many sequences, a step comes in pieces, between which the event loop serves other requests.

        The first read submits the job, once. Leaving the generator early aborts the sequences that still run, so close
        it (`contextlib.aclosing`) where it is used.

        Raises:
            DeadlineError, OverloadedError, EngineError: one sequence failed, and all others are aborted.
        """
        await self._submit()
        if self._aborted:
            self.abort()
        context, telemetry = current_request(), self._engine.telemetry
        # There is one timer per request, because one per wait would cost a tenth of a token's time.
        timer = asyncio.get_running_loop().call_later(self.job.terms.deadline_s, self._be_late)
        pending = self._outputs
        streams = [output.stream for output in pending]
        try:
            while pending:
                await wait_ready(streams)
                if self._late:
                    limit = self.job.terms.deadline_s
                    raise DeadlineError(
                        f"The request did not finish within server.request_timeout_s={limit:g}; request fewer tokens."
                    )
                ready = [output for output in pending if output.stream.ready]
                for first in range(0, len(ready), _OUTPUTS_AT_ONCE):
                    deltas = [output.advance() for output in ready[first : first + _OUTPUTS_AT_ONCE]]
                    if self._first_token is None:
                        self._first_token = time.monotonic()
                        if context is not None:
                            telemetry.first_token(self._first_token - context.arrived_s)
                    yield deltas
                    if len(ready) > _OUTPUTS_AT_ONCE:
                        await asyncio.sleep(0)
                if any(output.finish_reason is not None for output in ready):
                    pending = [output for output in pending if output.finish_reason is None]
                    streams = [output.stream for output in pending]
                if any(output.stream.ready for output in ready):
                    await asyncio.sleep(0)  # yields to other streams, because these readers are far behind
        except (EngineError, RequestError) as error:
            self._error = error
            raise
        finally:
            timer.cancel()
            for output in self._outputs:
                output.stream.abort()
            if context is not None:  # without a context, this run is a warm-up and not a request
                telemetry.finished(self._record(context))
                context.meter.count_tokens(sum(output.num_tokens for output in self._outputs))

    def _be_late(self) -> None:
        self._late = True
        for output in self._outputs:
            output.stream.wake()

    def abort(self) -> None:
        """Ends the run early: sequences that still run end with `FinishReason.ABORT`."""
        self._aborted = True
        for output in self._outputs:
            output.stream.abort()

    def output(self, index: int) -> Output:
        """The submitted sequence with this index, for its counts."""
        return self._outputs[index]

    def usage(self) -> Usage:
        """Token counts so far, over all sequences. A prompt counts once for any number of choices."""
        prompt = sum(len(prompt) for prompt in self.job.prompts)
        completion = sum(output.num_tokens for output in self._outputs)
        # A prompt's later choices reuse the first one's pages, so only the first one's cached tokens count.
        firsts = self._outputs[:: self.job.num_choices]
        cached = sum(it.num_cached_tokens for output in firsts if (it := output.stream.prefilled) is not None)
        thought = sum(output.num_reasoning_tokens for output in self._outputs)
        cached_details, details = PromptTokensDetails(cached), CompletionTokensDetails(thought)
        return Usage(prompt, completion, prompt + completion, cached_details, details)

    def server_timing(self) -> str:
        """The value of a Server-Timing header, in milliseconds: the slowest sequence's time in the queue, the slowest
        prefill and, once all sequences have ended, the time since the first token."""
        done = [it for output in self._outputs if (it := output.stream.prefilled) is not None]
        times = {
            "queue": max((prefilled.queue_s for prefilled in done), default=0.0),
            "prefill": max((prefilled.prefill_s for prefilled in done), default=0.0),
        }
        if self._first_token is not None and all(output.finish_reason is not None for output in self._outputs):
            times["decode"] = time.monotonic() - self._first_token
        return ", ".join(f"{name};dur={1e3 * seconds:.1f}" for name, seconds in times.items())

    async def _submit(self) -> None:
        assert not self._outputs, "a run is read once"
        job = self.job
        streams = self._engine.submit(await _int32(job.prompts), job.sampling, job.terms)
        try:
            for index, stream in enumerate(streams):
                prompt = job.prompt_of(index)
                self._outputs.append(Output(index, stream, self._tokenizer, prompt, job.text, job.form))
                if len(self._outputs) % _OUTPUTS_AT_ONCE == 0:
                    await asyncio.sleep(0)
        except BaseException:
            for stream in streams:
                stream.abort()
            raise

    def _record(self, context: RequestContext) -> RequestRecord:
        usage = self.usage()
        unfinished = FinishReason.ABORT if self._error is None else FinishReason.ERROR
        return RequestRecord(
            id=self.job.id,
            context=context,
            first_token_s=self._first_token,
            ended_s=time.monotonic(),
            num_prompt_tokens=usage.prompt_tokens,
            num_cached_tokens=usage.prompt_tokens_details.cached_tokens,
            num_generated=[output.num_tokens for output in self._outputs],
            finish_reasons=[output.finish_reason or unfinished for output in self._outputs],
            sampling=self.job.sampling[0][0],
            chat=self.job.form is not None,
            prefilled=self._outputs[0].stream.prefilled,
            error=None if self._error is None else type(self._error).__name__,
        )


async def _int32(prompts: Sequence[Sequence[int]]) -> list[bytes]:
    """The token ids of each prompt as int32 bytes."""
    encoded, num_ids = [], 0
    for ids in prompts:
        num_ids += len(ids)
        if num_ids >= _IDS_AT_ONCE:
            num_ids = 0
            await asyncio.sleep(0)
        encoded.append(array("i", ids).tobytes())
    return encoded
