"""Messages between the Engine replica and its coordinator: msgspec structs over one unix socket.

Engine to coordinator: `Submit`, `Abort`, `FlushCache`. Coordinator to Engine: one `StepOutput` a step for all requests.
Array fields are raw little-endian bytes: one message a step must not cost a Python object per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

import msgspec

from cluster.messages.state import EngineState


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    """An end-of-sequence or stop token."""
    LENGTH = "length"
    """`max_tokens` or the context is used up."""
    ABORT = "abort"
    """Cancelled by the caller."""
    ERROR = "error"
    """The engine failed; `Finished.error` says how."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How one request's tokens are chosen. Checked at the ingress; the scheduler trusts it."""

    max_tokens: int
    """At least 1, and prompt + max_tokens <= max_model_len."""
    temperature: float = 1.0
    """0: greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0: off."""
    min_p: float = 0.0
    seed: int = 0
    """Always set: noise is a function of (seed, position, token id) alone."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_logprobs: int = -1
    """-1: none; k: the sampled token's and the k likeliest."""
    logprob_token_ids: tuple[int, ...] = ()
    """Ids whose log probabilities come too, after the likeliest, in this order; with logprobs."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit for each time the answer has it."""
    presence_penalty: float = 0.0
    """Taken from the logit of each token the answer has."""
    repetition_penalty: float = 1.0
    """Positive logits of tokens of prompt and answer are divided by it, negative ones multiplied; 1: off."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit); distinct ids."""
    allowed_token_ids: tuple[int, ...] = ()
    """Only these may be sampled; empty: any."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of token ids that must not occur in the answer."""
    min_tokens: int = 0
    """Until the answer has as many tokens, neither end of sequence nor `stop_token_ids` is sampled."""
    prompt_logprobs: int = -1
    """-1: none; k: each prompt token's log probability and the k likeliest in its place. Reads no prefix cache."""
    item_lens: tuple[int, ...] = ()
    """The last tokens of the prompt are as many items, which see what is before them all and themselves. The log
    probabilities of `logprob_token_ids` after each of them come with the one token that is sampled after the last."""
    grammar: str | None = None
    """The grammar that the answer must match, as llguidance's JSON of a checked grammar (`cluster.structured`)."""


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """When the sequences of one HTTP request have their turn, how long they may take, and whose pages they share."""

    level: int = 0
    """Order among the requests of all clients, within what an operator granted. Lower goes first."""
    priority: int = 0
    """Order among the requests of one client at one level. Lower goes first."""
    client: str = ""
    """The client that sent it. Clients of one level take turns, and share rows and pages."""
    cache_salt: bytes = b""
    """Prompts of different salts share no page."""
    deadline_s: float = 0.0
    """Seconds from its arrival after which it ends with the code `deadline_exceeded`, wherever it is; 0: never."""


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate."""

    id: int
    """Unique in the Engine replica, from 1, below 2**63."""
    prompt: bytes
    """int32 token ids, at least one."""
    sampling: SamplingParams
    terms: Terms = Terms()


class Choice(msgspec.Struct, frozen=True, array_like=True):
    """One sequence of a `Submit`: which prompt it continues, and the parameters it has of its own."""

    prompt: int
    """Index in `Submit.prompts`."""
    sampling: int
    """Index in `Submit.sampling`."""
    max_tokens: int
    seed: int
    prompt_logprobs: int


class Submit(msgspec.Struct, tag="submit", frozen=True, kw_only=True):
    """The sequences of one HTTP request: the engine lets all of them wait, or none. What they share is here once."""

    first_id: int
    """Ids count up from it, in the order of `choices`."""
    prompts: list[bytes]
    """int32 token ids, at least one each."""
    sampling: list[SamplingParams]
    """Parameters that are not in `Choice`."""
    choices: list[Choice]
    terms: Terms = Terms()

    def requests(self) -> list[GenerateRequest]:
        """The submitted requests, one for each sequence; those of one prompt have the same bytes."""
        return [
            GenerateRequest(
                id=request_id,
                prompt=self.prompts[choice.prompt],
                sampling=msgspec.structs.replace(
                    self.sampling[choice.sampling],
                    max_tokens=choice.max_tokens,
                    seed=choice.seed,
                    prompt_logprobs=choice.prompt_logprobs,
                ),
                terms=self.terms,
            )
            for request_id, choice in enumerate(self.choices, self.first_id)
        ]


def shared_sampling(params: Sequence[Sequence[SamplingParams]]) -> tuple[list[SamplingParams], list[Choice]]:
    """`Submit.sampling` and `Submit.choices` of the parameters of each prompt's choices."""
    shared: list[SamplingParams] = []
    choices: list[Choice] = []
    for prompt, of_prompt in enumerate(params):
        for own in of_prompt:
            common = msgspec.structs.replace(own, max_tokens=1, seed=0, prompt_logprobs=-1)
            # Requests of one submission seldom differ in more, and then from one prompt to the next.
            if not shared or common != shared[-1]:
                shared.append(common)
            choices.append(Choice(prompt, len(shared) - 1, own.max_tokens, own.seed, own.prompt_logprobs))
    return shared, choices


class Abort(msgspec.Struct, tag="abort", frozen=True):
    """Requests to end now; unknown ids are ignored."""

    ids: list[int]


class FlushCache(msgspec.Struct, tag="flush", frozen=True):
    """Forget the prefixes that no running request uses."""


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """The end of one request; sent once for each request that was submitted."""

    id: int
    reason: FinishReason
    stop_token_id: int | None = None
    """The token that ended it, when reason is STOP; it is also the last of the request's tokens. None: its guide says
    that the answer is complete."""
    error: str | None = None
    error_code: str | None = None
    """`engine_overloaded` (503), `deadline_exceeded` (504), `engine_error` (500), `not_a_number` (500) or
    `grammar_error` (400)."""
    public_message: str | None = None
    """Words for the caller, with `engine_error`, as in EngineError; `error` is for the log."""
    retry_after_s: float | None = None
    """Seconds in which the queue may be expected to drain, with `engine_overloaded`."""
    num_preemptions: int = 0
    """How often it gave its pages up to others, or lost them with a rank, and was computed again."""


class TokenLogprobs(msgspec.Struct, frozen=True, gc=False):
    """Log probabilities of one emitted token. An answer keeps one for each of its tokens, so each is few objects. As
    lists those of 128 answers took the garbage collector 0.2 s to walk over, and as tuples 0.1 s to free."""

    id: int
    """Request id."""
    logprob: float
    """The token's, by the model's own distribution: before penalties, biases, masks, temperature and filters."""
    top_ids: bytes
    """int32: the `num_logprobs` likeliest, descending; then `logprob_token_ids`, in the request's order. With
    `item_lens` these alone, once for each item."""
    top_logprobs: bytes
    """float32, one for each of `top_ids`."""

    @property
    def top(self) -> list[tuple[int, float]]:
        """Id and log probability of each of `top_ids`."""
        ids, logprobs = memoryview(self.top_ids).cast("i"), memoryview(self.top_logprobs).cast("f")
        return list(zip(ids.tolist(), logprobs.tolist(), strict=True))


class PromptLogprobs(msgspec.Struct, frozen=True):
    """Log probabilities of a run of prompt tokens, each given those before it."""

    id: int
    """Request id."""
    start: int
    """Position of the first one in the prompt, at least 1: the first token of all has none before it."""
    logprobs: bytes
    """float32[num_tokens], before temperature and filters."""
    top_ids: bytes
    """int32[num_tokens, k]: likeliest tokens in the same place, descending, equal ones by id; k as asked for."""
    top_logprobs: bytes
    """float32[num_tokens, k]"""


class Prefilled(msgspec.Struct, frozen=True, array_like=True):
    """A request whose first token is there. Times are of the coordinator's one monotonic clock."""

    id: int
    num_cached_tokens: int
    """Prompt tokens taken from the prefix cache."""
    queue_s: float = 0.0
    """Seconds from its arrival to its first admission."""
    prefill_s: float = 0.0
    """Seconds from there to its first token, preemptions included."""


class Drafted(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Drafts that a step verified for one request."""

    id: int
    num_drafts: int
    num_accepted: int
    """Drafts among them that are tokens of its answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerStats:
    """Gauges of this moment, and counters since the start (`total_*`)."""

    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    num_free_pages: int
    num_cached_pages: int
    """Pages in the prefix cache, in use or not."""
    num_evictable_pages: int
    """The part of `num_cached_pages` that no running request uses."""
    num_owned_pages: int
    """Private to one running request."""
    total_prefix_hit_tokens: int
    total_prompt_tokens: int
    """Tokens of admitted requests: the denominator of the hit rate."""
    total_preemptions: int
    total_answer_tokens: int = 0
    """Tokens that were sent to requests."""
    total_drafted: int = 0
    """Drafts that steps verified."""
    total_accepted: int = 0
    """Drafts that requests got as tokens."""
    total_refused: int = 0
    """Requests refused because the queue was full."""
    total_expired: int = 0
    """Requests that ended by their deadline."""
    longest_wait_s: float = 0.0
    """How long the request has waited that was there first; 0: none waits."""
    admitted_tokens_per_s: float = 0.0
    """Waiting tokens that were admitted each second lately, over ten to twenty seconds."""

    @property
    def prefix_hit_ratio(self) -> float:
        """Share of all prompt tokens since the start that the prefix cache held."""
        return self.total_prefix_hit_tokens / max(self.total_prompt_tokens, 1)


Running = Literal["continue", "finish", "recompute"]
"""The fate of requests that run when the weights change. continue: they go on with the keys and values that they have.
finish: they end with the weights that they began with, and others wait. recompute: they go on with keys and values of
the new weights, with the tokens that they have."""


class Weights(msgspec.Struct, frozen=True):
    """The weights that took the place of those of the start."""

    version: str
    fingerprint: str
    """The `system_fingerprint` of answers that they give."""


class WeightsChanged(msgspec.Struct, frozen=True):
    """Other weights serve."""

    version: str
    pause_s: float
    """Seconds in which no step ran."""
    load_s: float
    """Seconds in which they were read, beside the steps."""
    staged_in: Literal["device", "host"]
    """The memory that they waited in."""


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's figures, ten times a second while it works and once a second while it does not."""

    time_s: float
    """When this was taken: CLOCK_MONOTONIC of the host, which its processes share."""
    scheduler: SchedulerStats
    num_steps: int
    """Steps launched so far."""
    step_age_s: float
    """How long the oldest step in flight has run; 0: none is."""
    heartbeat_age_s: list[float]
    """How long ago each rank last took or awaited a frame. Empty: the ranks are on several nodes."""
    devices: list[str] = []
    """Each rank's device, e.g. `cuda:0`; as many as `tensor_parallel_size` is now."""
    num_rebuilds: int = 0
    """How often ranks that failed were replaced so far."""
    state: EngineState = EngineState.RUNNING
    """The coordinator's."""
    is_preparing: bool = False
    """Whether the ranks may have CUDA graphs left to capture."""
    weights: Weights | None = None
    """None: those of the start."""
    steps: bytes
    """Records of the steps that retired since the last one (`cluster.messages.steps.STEP_DTYPE`)."""


class StepOutput(msgspec.Struct, tag="output", frozen=True, kw_only=True):
    """The results of one step, for all requests."""

    ids: bytes = b""
    """int64 request ids, one for each token of `tokens`."""
    tokens: bytes = b""
    """int32 sampled tokens."""
    logprobs: list[TokenLogprobs] = []
    """Log probabilities in the order of `tokens`, only for requests that asked."""
    prompt_logprobs: list[PromptLogprobs] = []
    """For requests that asked: each position once, in order, the last with or before the first token."""
    prefilled: list[Prefilled] = []
    """Requests whose first token is in this output."""
    drafted: list[Drafted] = []
    finished: list[Finished] = []
    stats: EngineStats | None = None
    """Not in every output: see EngineStats."""


EngineToCoordinator = Submit | Abort | FlushCache
