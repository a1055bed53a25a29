"""Messages between the Engine replica and its coordinator: msgspec structs over one unix socket.

The Engine sends `Submit`, `Abort` and `FlushCache`. The coordinator sends one `StepOutput` per step for all requests.
Array fields are raw little-endian bytes, so that a step does not cost a Python object per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

import msgspec

from cluster.messages.state import EngineState


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    """The answer ended with an end-of-sequence or stop token, or its guide found it complete."""
    LENGTH = "length"
    """The answer used up `max_tokens` or the context."""
    ABORT = "abort"
    """The caller cancelled the request."""
    ERROR = "error"
    """The request was refused or failed; see `Finished.error`."""


class Miss(StrEnum):
    """Why tokens of a prompt were computed that the prefix cache has or had."""

    NO_STATE = "no_state"
    """No state of the recurrent layers is stored after them."""
    NO_WINDOW = "no_window"
    """Their pages of the window pool were given to others."""
    EVICTED = "evicted"
    """They have left the prefix cache: others needed the room, or all was dropped."""
    OTHER_SALT = "other_salt"
    """They are cached under another `cache_salt`, or with earlier weights. Clients do not see this number, or they
    could find out what others have sent."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How one request's tokens are chosen. The replica checks the values, and the scheduler trusts them."""

    max_tokens: int
    """At least 1. Prompt and `max_tokens` together have at most `max_model_len` tokens."""
    temperature: float = 1.0
    """0 means greedy: the likeliest token is sampled."""
    top_p: float = 1.0
    top_k: int = 0
    """0 means that all tokens may be sampled."""
    min_p: float = 0.0
    seed: int = 0
    """Always set. The noise of a sample depends only on seed, position and token id."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_logprobs: int = -1
    """-1: none. k: the log probability of the sampled token and of the k likeliest tokens."""
    logprob_token_ids: tuple[int, ...] = ()
    """Token ids with log probabilities besides the `num_logprobs` likeliest ones. Empty if `num_logprobs` is
    -1 (none)."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time it occurs in the answer."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token that occurs in the answer."""
    repetition_penalty: float = 1.0
    """Divides positive logits of tokens in the prompt or answer, and multiplies negative ones. 1 means off."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, value added to its logit), with distinct ids."""
    allowed_token_ids: tuple[int, ...] = ()
    """Only these ids may be sampled. Empty: any id."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of token ids that must not occur in the answer."""
    min_tokens: int = 0
    """Until the answer has this many tokens, neither end of sequence nor `stop_token_ids` is sampled."""
    prompt_logprobs: int = -1
    """-1: none. k: the log probability of each prompt token and of the k likeliest tokens at its position. The prompt
    then does not read the prefix cache."""
    item_lens: tuple[int, ...] = ()
    """Lengths of the scored items at the end of the prompt. An item sees itself and everything before all items. The
    log probabilities of `logprob_token_ids` after each item come with the token that is sampled at the end."""
    grammar: str | None = None
    """The grammar that the answer must match, as llguidance's JSON of a checked grammar. None: any text."""


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """The priority, deadline, client and salt of the sequences of one HTTP request."""

    level: int = 0
    """Order among the requests of all clients, as far as an operator allowed. Lower goes first."""
    priority: int = 0
    """Order among the requests of one client at one level. Lower goes first."""
    client: str = ""
    """The client that sent the request. Clients of one level take turns, and share rows and pages."""
    cache_salt: bytes = b""
    """Prompts with different salts share no pages."""
    deadline_s: float = 0.0
    """Seconds from arrival after which the request ends with the code `deadline_exceeded`. 0 means never."""


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate."""

    id: int
    """Unique in the Engine replica, from 1, below 2**63."""
    prompt: bytes
    """int32 ids of the prompt's tokens, at least one."""
    sampling: SamplingParams
    terms: Terms = Terms()


class Choice(msgspec.Struct, frozen=True, array_like=True):
    """One sequence of a `Submit`: its prompt, and the parameters in which it differs."""

    prompt: int
    """Index in `Submit.prompts`."""
    sampling: int
    """Index in `Submit.sampling`."""
    max_tokens: int
    seed: int
    prompt_logprobs: int


class Submit(msgspec.Struct, tag="submit", frozen=True, kw_only=True):
    """The sequences of one HTTP request, which the engine accepts or refuses together. Values that several sequences
    have are sent once."""

    first_id: int
    """Id of the request for the first choice. The later choices get the ids after it."""
    prompts: list[bytes]
    """int32 token ids of each prompt, at least one."""
    sampling: list[SamplingParams]
    """Parameters of the choices, apart from the fields that `Choice` has."""
    choices: list[Choice]
    terms: Terms = Terms()

    def requests(self) -> list[GenerateRequest]:
        """Creates one request per choice. Requests of one prompt share its bytes."""
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
    """Makes `Submit.sampling` and `Submit.choices` from the parameters of each choice of each prompt."""
    shared: list[SamplingParams] = []
    choices: list[Choice] = []
    for prompt, of_prompt in enumerate(params):
        for own in of_prompt:
            common = msgspec.structs.replace(own, max_tokens=1, seed=0, prompt_logprobs=-1)
            # Choices of one submission rarely differ in other fields. If they do, the choices of different prompts do.
            if not shared or common != shared[-1]:
                shared.append(common)
            choices.append(Choice(prompt, len(shared) - 1, own.max_tokens, own.seed, own.prompt_logprobs))
    return shared, choices


class Abort(msgspec.Struct, tag="abort", frozen=True):
    """Ends the requests `ids`. Unknown ids are ignored."""

    ids: list[int]


class FlushCache(msgspec.Struct, tag="flush", frozen=True):
    """Drops the cached prefixes that no running request uses."""


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """The end of one request, sent exactly once for each submitted request."""

    id: int
    reason: FinishReason
    stop_token_id: int | None = None
    """The token that ended the request, if the reason is STOP. It is also the request's last token. None if its guide
    found that the answer is complete."""
    error: str | None = None
    error_code: str | None = None
    """`engine_overloaded` (503), `deadline_exceeded` (504), `engine_error` (500), `not_a_number` (500) or
    `grammar_error` (400)."""
    public_message: str | None = None
    """The message for the caller if the code is `engine_error`, as in EngineError. `error` is then only for the log."""
    retry_after_s: float | None = None
    """Seconds after which the queue should be empty, if the code is `engine_overloaded`."""
    num_preemptions: int = 0
    """How often the request was preempted, or lost its KV with a rank, and was computed again."""


class TokenLogprobs(msgspec.Struct, frozen=True, gc=False):
    """Log probabilities of one token. They are raw bytes, because an answer has one such object per token. As lists,
    the objects of 128 answers cost the garbage collector 0.2 s, and as tuples 0.1 s to free."""

    id: int
    """Request id."""
    logprob: float
    """The token's log probability in the model's own distribution: before penalties, biases, masks, temperature and
    filters."""
    top_ids: bytes
    """int32: the `num_logprobs` likeliest tokens, likeliest first; then `logprob_token_ids`, in the request's order.
    With `item_lens`, only `logprob_token_ids`, once per item."""
    top_logprobs: bytes
    """float32: log probability of each of `top_ids`."""

    @property
    def top(self) -> list[tuple[int, float]]:
        """Id and log probability of each of `top_ids`."""
        ids, logprobs = memoryview(self.top_ids).cast("i"), memoryview(self.top_logprobs).cast("f")
        return list(zip(ids.tolist(), logprobs.tolist(), strict=True))


class PromptLogprobs(msgspec.Struct, frozen=True):
    """Log probabilities of consecutive prompt tokens, each given the tokens before it."""

    id: int
    """Request id."""
    start: int
    """Position of the first token in the prompt. At least 1, because the first prompt token has no token before it."""
    logprobs: bytes
    """float32[num_tokens]: log probability of each token, before temperature and filters."""
    top_ids: bytes
    """int32[num_tokens, k]: ids of the likeliest tokens at each position, likeliest first, equal ones by id."""
    top_logprobs: bytes
    """float32[num_tokens, k]: log probabilities of `top_ids`."""


class Prefilled(msgspec.Struct, frozen=True, array_like=True):
    """A request that got its first token. Times are on the coordinator's monotonic clock."""

    id: int
    num_cached_tokens: int
    """Number of prompt tokens taken from the prefix cache."""
    queue_s: float = 0.0
    """Seconds from arrival to first admission."""
    prefill_s: float = 0.0
    """Seconds from first admission to first token, preemptions included."""
    missed: dict[Miss, int] = {}
    """Number of prompt tokens that were computed for each reason, apart from `Miss.OTHER_SALT`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerStats:
    """Current gauges, and counters since the start (`total_*`)."""

    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    num_free_pages: int
    num_cached_pages: int
    """Pages in the prefix cache, whether a running request uses them or not."""
    num_evictable_pages: int
    """The part of `num_cached_pages` that no running request uses."""
    num_owned_pages: int
    """Pages that are private to one running request."""
    total_prefix_hit_tokens: int
    total_prompt_tokens: int
    """Tokens of admitted requests, whether computed or from the prefix cache."""
    total_preemptions: int
    total_missed: dict[Miss, int] = field(default_factory=dict)
    """Prompt tokens that were computed for each reason."""
    total_dropped_states: int = 0
    """States that the prefix cache dropped for others."""
    total_answer_tokens: int = 0
    """Tokens of answers, without dropped ones."""
    total_drafted: int = 0
    """Drafts that steps have verified."""
    total_accepted: int = 0
    """Drafts that became tokens of an answer."""
    total_refused: int = 0
    """Requests refused because the queue was full."""
    total_expired: int = 0
    """Requests that ended by their deadline."""
    longest_wait_s: float = 0.0
    """Seconds for which the oldest waiting request has waited. 0 if none waits."""
    admitted_tokens_per_s: float = 0.0
    """Tokens of waiting requests admitted per second, over the last ten to twenty seconds."""

    @property
    def prefix_hit_ratio(self) -> float:
        """Share of all tokens of admitted requests since the start that came from the prefix cache."""
        return self.total_prefix_hit_tokens / max(self.total_prompt_tokens, 1)


Running = Literal["continue", "finish", "recompute"]
"""What running requests do when the weights change. continue: go on with their KV. finish: end with the old weights,
while new requests wait. recompute: keep their tokens, and compute their KV again with the new weights."""


class Weights(msgspec.Struct, frozen=True):
    """Weights that replaced the ones of the start."""

    version: str
    fingerprint: str
    """The `system_fingerprint` of answers with these weights."""


class WeightsChanged(msgspec.Struct, frozen=True):
    """The result of a change of weights."""

    version: str
    pause_s: float
    """Seconds for which no step ran."""
    load_s: float
    """Seconds that reading the weights took, while steps ran."""
    staged_in: Literal["device", "host"]
    """Memory in which the weights were staged: the device's or the host's."""


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's figures. They are sent ten times a second while it works, and once a second while it is idle."""

    time_s: float
    """Time of the report, on CLOCK_MONOTONIC, which all processes of the host share."""
    scheduler: SchedulerStats
    num_steps: int
    """Number of steps launched so far."""
    step_age_s: float
    """Seconds for which the oldest step in flight has run. 0 if no step is in flight."""
    heartbeat_age_s: list[float]
    """Seconds since each rank last took or awaited a frame. Empty if the ranks are on several nodes."""
    devices: list[str] = []
    """The device of each rank, such as `cuda:0`. Its length is the current `tensor_parallel_size`."""
    num_rebuilds: int = 0
    """How often failed ranks were replaced."""
    state: EngineState = EngineState.RUNNING
    """The state that the coordinator reports."""
    is_preparing: bool = False
    """Whether the ranks may have CUDA graphs left to capture."""
    weights: Weights | None = None
    """The weights in use. None: the weights of the start."""
    steps: bytes
    """Records of the steps that retired since the last report (`cluster.messages.steps.STEP_DTYPE`)."""


class StepOutput(msgspec.Struct, tag="output", frozen=True, kw_only=True):
    """The results of one step, for all requests, or a report between steps."""

    ids: bytes = b""
    """int64: request id of each of `tokens`."""
    tokens: bytes = b""
    """int32: ids of the sampled tokens."""
    logprobs: list[TokenLogprobs] = []
    """Log probabilities in the order of `tokens`, for requests that want them."""
    prompt_logprobs: list[PromptLogprobs] = []
    """Log probabilities of prompts, each position once, in order, and the last ones at the latest with the first
    token."""
    prefilled: list[Prefilled] = []
    """Requests that got their first token in this output."""
    finished: list[Finished] = []
    stats: EngineStats | None = None
    """The engine's figures, in some outputs only."""


EngineToCoordinator = Submit | Abort | FlushCache
