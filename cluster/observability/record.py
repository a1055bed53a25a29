"""Facts about a replica and each of its ended requests, for metrics, spans and log lines."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.http.context import RequestContext
from cluster.messages.engine import FinishReason, Prefilled, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Labels that every metric of a replica has."""

    model_name: str = ""
    application: str = ""
    deployment: str = ""
    replica: str = ""


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """One request of any route that has ended. Times are on `time.monotonic()`."""

    id: str
    """The answer's id."""
    context: RequestContext
    first_token_s: float | None
    """Time of the first token. None if the request got no token."""
    ended_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated: list[int]
    """Number of tokens generated for each sequence."""
    finish_reasons: list[FinishReason]
    """Why each sequence ended."""
    sampling: SamplingParams
    """Parameters of the first sequence."""
    chat: bool = False
    """Whether the prompt was made by the chat template."""
    prefilled: Prefilled | None = None
    """The scheduler's times for the first sequence's prefill. None if the request got no token."""
    error: str | None = None
    """Name of the exception that ended the request. None without an error."""

    @property
    def num_generated_tokens(self) -> int:
        """Number of tokens generated for all sequences."""
        return sum(self.num_generated)

    @property
    def ttft_s(self) -> float | None:
        """Seconds from arrival to the first token. None if the request got no token."""
        return None if self.first_token_s is None else self.first_token_s - self.context.arrived_s

    @property
    def e2e_s(self) -> float:
        """Seconds from arrival to end."""
        return self.ended_s - self.context.arrived_s

    @property
    def phases(self) -> dict[str, tuple[float, float]]:
        """(begin, end) of the consecutive phases queue, prefill and decode. Empty if the request got no token."""
        if self.prefilled is None or self.first_token_s is None:
            return {}
        admitted_s = self.first_token_s - self.prefilled.prefill_s
        return {
            "queue": (admitted_s - self.prefilled.queue_s, admitted_s),
            "prefill": (admitted_s, self.first_token_s),
            "decode": (self.first_token_s, self.ended_s),
        }

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first, in the longest sequence. None for an answer of at most one token."""
        longest = max(self.num_generated, default=0)
        if self.first_token_s is None or longest < 2:
            return None
        return (self.ended_s - self.first_token_s) / (longest - 1)
