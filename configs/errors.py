"""Every error a user or a caller can meet, as one tree.

    LockstepError
    ├── ConfigError               a setting is wrong: names the key, its value, the rule and the fix
    │   ├── CheckpointError       model files are missing, truncated, of an unsafe kind, or do not fit together
    │   └── PlacementError        no node of the cluster can hold one tensor-parallel group
    ├── RequestError              the caller's request is wrong; carries an HTTP status, a code and a param path
    │   ├── ContextLengthError    prompt (and asked output) exceed the model's context
    │   ├── GuideError            the answer cannot go on as the request's grammar or constraint demands
    │   └── OverloadedError       a queue limit is reached; try again later
    └── EngineError               the engine failed; requests in it end with this
        ├── OutOfMemoryError      a rank's device or node has no memory for what it does
        ├── NotANumberError       the model's answer to one request is not a number; ends that request alone
        ├── RankDiedError         a rank's process ended or raised
        │   └── RankLostError     its process ended
        └── DeadlineError         a wait passed its deadline; names the setting that bounds it

All of them survive pickling: they cross process borders as Ray results.
"""

from __future__ import annotations

from typing import Any


class LockstepError(Exception):
    """Base of every error Lockstep raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions with keyword-only state do not survive the default protocol: rebuild from args, then state.
        return (_rebuild, (type(self), self.args, self.__dict__))


def _rebuild(cls: type[LockstepError], args: tuple[Any, ...], state: dict[str, Any]) -> LockstepError:
    # The built-in base whose memory layout `cls` has must make it; DeadlineError is an OSError by way of TimeoutError.
    base = OSError if issubclass(cls, OSError) else Exception
    error = base.__new__(cls)
    error.args = args
    error.__dict__.update(state)
    return error


class ConfigError(LockstepError, ValueError):
    """A setting is wrong. The message names key, value, rule and fix."""


class CheckpointError(ConfigError):
    """Model files are missing, truncated, of an unsafe kind, or do not fit the configuration."""


class PlacementError(ConfigError):
    """No node of the cluster can hold one tensor-parallel group."""


class RequestError(LockstepError, ValueError):
    """A request is wrong.

    Args:
        message: for the caller; never carries paths, addresses or tracebacks.
        code: OpenAI-style string code, e.g. `invalid_value`.
        param: path of the offending field, e.g. `messages[0].content`.
        status: HTTP status.
        retry_after_s: when the same request may succeed; a hint for the Retry-After header.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str = "invalid_value",
        param: str | None = None,
        status: int = 400,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.param = param
        self.status = status
        self.retry_after_s = retry_after_s


class ContextLengthError(RequestError):
    """Prompt, or prompt plus asked output, exceed the context."""

    def __init__(
        self,
        *,
        max_model_len: int,
        num_prompt_tokens: int,
        max_tokens: int = 0,
        param: str = "messages",
        at_least: bool = False,
    ):
        """`at_least`: the prompt was not encoded whole, so it has that many tokens or more."""
        asked = f"{'at least ' * at_least}{num_prompt_tokens + max_tokens} tokens"
        detail = f"{num_prompt_tokens} in the prompt" + (f", {max_tokens} for the completion" if max_tokens else "")
        # Proxy libraries map on the words "This model's maximum context length is".
        super().__init__(
            f"This model's maximum context length is {max_model_len} tokens. However, you requested {asked} "
            f"({detail}). Please reduce the length of the prompt or the completion.",
            code="context_length_exceeded",
            param=param,
        )


class GuideError(RequestError):
    """The answer cannot go on as the request's grammar or constraint demands; ends that request alone."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="grammar_error")


class OverloadedError(RequestError):
    """A queue limit is reached, or the server stops.

    `closes_connection`: whether the answer ends its connection, which is what the server has too many of.
    """

    def __init__(self, message: str, *, retry_after_s: float = 1.0, closes_connection: bool = False) -> None:
        super().__init__(message, code="engine_overloaded", status=503, retry_after_s=retry_after_s)
        self.closes_connection = closes_connection


class EngineError(LockstepError, RuntimeError):
    """The engine failed; every request in it ends with this error.

    Args:
        message: for the log; it may have paths and addresses.
        public_message: for the caller, without them. None: the caller learns no more than that the engine failed.
    """

    def __init__(self, message: str, *, public_message: str | None = None) -> None:
        super().__init__(message)
        self.public_message = public_message


class NotANumberError(EngineError):
    """The logits of one request hold a NaN; ends that request alone."""


class OutOfMemoryError(EngineError):
    """A rank's device or node has no memory for what it does; the message names the rank and what helps."""


class RankDiedError(EngineError):
    """A rank's process ended or raised; the message carries the rank and its own error text. `rank`: None: nobody knows
    which."""

    def __init__(self, message: str, *, public_message: str | None = None, rank: int | None = None) -> None:
        super().__init__(message, public_message=public_message)
        self.rank = rank


class RankLostError(RankDiedError):
    """A rank's process ended, or was ended because it had stopped."""


class DeadlineError(EngineError, TimeoutError):
    """A wait passed its deadline. The message names the setting that bounds it and its value."""


class StepHungError(DeadlineError):
    """A step takes far longer than it can: a rank does not get on, and the others wait for it."""
