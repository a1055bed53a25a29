"""The tree of errors that users and callers see.

    LockstepError
    ├── ConfigError               a setting is wrong: names the key, its value, the rule and the fix
    │   ├── CheckpointError       model files are missing, truncated, unsafe, or do not fit together
    │   └── PlacementError        no node of the cluster can hold one group
    ├── RequestError              the request is wrong: has an HTTP status, a code and the path of the field
    │   ├── ContextLengthError    the prompt (and the requested output) exceed the model's context
    │   ├── GuideError            no next token satisfies the request's grammar or constraint
    │   └── OverloadedError       a queue limit is reached; try again later
    └── EngineError               the engine failed; all requests in it end with this error
        ├── OutOfMemoryError      a rank's device or node is out of memory
        ├── NotANumberError       the logits of one request contain a NaN; only that request ends
        ├── RankDiedError         a rank's process ended or raised
        │   └── RankLostError     a rank's process ended
        └── DeadlineError         a wait exceeded its deadline: names the setting behind it

All of them can be pickled, because they cross process borders as Ray results.
"""

from __future__ import annotations

from typing import Any


class LockstepError(Exception):
    """Base class of the errors that Lockstep raises."""

    def __reduce__(self) -> tuple[Any, ...]:
        # The default protocol drops keyword-only state, so an error is rebuilt from its args and then its state.
        return (_rebuild, (type(self), self.args, self.__dict__))


def _rebuild(cls: type[LockstepError], args: tuple[Any, ...], state: dict[str, Any]) -> LockstepError:
    # Creates the object through the built-in base class with its memory layout: DeadlineError is an OSError, through
    # TimeoutError.
    base = OSError if issubclass(cls, OSError) else Exception
    error = base.__new__(cls)
    error.args = args
    error.__dict__.update(state)
    return error


class ConfigError(LockstepError, ValueError):
    """A setting is wrong. The message names the key, its value, the rule and the fix."""


class CheckpointError(ConfigError):
    """Model files are missing, truncated or unsafe, or do not fit the configuration."""


class PlacementError(ConfigError):
    """No node of the cluster can hold one group."""


class RequestError(LockstepError, ValueError):
    """A request is wrong.

    Args:
        message: for the caller. It must not contain paths, addresses or tracebacks.
        code: OpenAI-style string code, such as `invalid_value`.
        param: path of the wrong field, such as `messages[0].content`.
        status: HTTP status.
        retry_after_s: seconds after which the same request may succeed, sent as the Retry-After header.
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
    """The prompt, or the prompt and the requested output, exceed the context."""

    def __init__(
        self,
        *,
        max_model_len: int,
        num_prompt_tokens: int,
        max_tokens: int = 0,
        param: str = "messages",
        at_least: bool = False,
    ):
        """`at_least`: the prompt was not encoded to its end, so it has this number of tokens or more."""
        self.max_model_len, self.num_prompt_tokens, self.max_tokens = max_model_len, num_prompt_tokens, max_tokens
        asked = f"{'at least ' * at_least}{num_prompt_tokens + max_tokens} tokens"
        detail = f"{num_prompt_tokens} in the prompt" + (f", {max_tokens} for the completion" if max_tokens else "")
        # Proxy libraries recognise this error by the words "This model's maximum context length is".
        super().__init__(
            f"This model's maximum context length is {max_model_len} tokens. However, you requested {asked} "
            f"({detail}). Please reduce the length of the prompt or the completion.",
            code="context_length_exceeded",
            param=param,
        )


class GuideError(RequestError):
    """No next token satisfies the request's grammar or constraint. Only this request ends."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="grammar_error")


class OverloadedError(RequestError):
    """A queue limit is reached, or the server is stopping.

    Args:
        closes_connection: whether the response closes its connection, because the server has too many connections.
    """

    def __init__(self, message: str, *, retry_after_s: float = 1.0, closes_connection: bool = False) -> None:
        super().__init__(message, code="engine_overloaded", status=503, retry_after_s=retry_after_s)
        self.closes_connection = closes_connection


class EngineError(LockstepError, RuntimeError):
    """The engine failed. Every request in it ends with this error.

    Args:
        message: for the log. It may contain paths and addresses.
        public_message: for the caller, without paths and addresses. If None, the caller only learns of a failure.
    """

    def __init__(self, message: str, *, public_message: str | None = None) -> None:
        super().__init__(message)
        self.public_message = public_message


class NotANumberError(EngineError):
    """The logits of one request contain a NaN. Only this request ends."""


class OutOfMemoryError(EngineError):
    """A rank's device or node is out of memory. The message names the rank and a remedy."""


class RankDiedError(EngineError):
    """A rank's process ended or raised. The message has the rank and its own error text.

    Args:
        rank: None if it is not known which rank failed.
    """

    def __init__(self, message: str, *, public_message: str | None = None, rank: int | None = None) -> None:
        super().__init__(message, public_message=public_message)
        self.rank = rank


class RankLostError(RankDiedError):
    """A rank's process ended, or was killed because it had stopped."""


class DeadlineError(EngineError, TimeoutError):
    """A wait exceeded its deadline. The message names the setting behind the deadline and its value."""


class StepHungError(DeadlineError):
    """A step takes far longer than expected: one rank makes no progress, and the others wait for it."""
