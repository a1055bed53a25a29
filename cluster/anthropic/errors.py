"""Errors in the shape that Anthropic's clients read."""

from __future__ import annotations

from cluster.anthropic.objects import AnthropicError, AnthropicErrorDetail
from configs.errors import RequestError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_error(error: RequestError, request_id: str | None = None) -> AnthropicError:
    """`error` as /v1/messages tells of it."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return AnthropicError(AnthropicErrorDetail(kind, str(error)), request_id)
