"""The known fields of a request, and what happens to unknown and unsupported fields, on every route.

A field of another server that would change the answer is refused, not dropped silently. An unknown field is ignored and
listed in a header, or refused in strict mode.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from configs.errors import RequestError

_NO_NAME = re.compile(r"[^A-Za-z0-9_.-]")
_MAX_SHOWN = 32
_MAX_SHOWN_CHARS = 64
_MAX_NAME_CHARS = 200


def neutral(*values: object) -> Callable[[object], bool]:
    """Returns a function that tells whether a value has no effect: null, or one of `values`."""

    # 0 == False in Python, so types are compared too. But 0 and 0.0 are one JSON number.
    def is_neutral(value: object) -> bool:
        return value is None or any(
            value == known and isinstance(value, bool) == isinstance(known, bool) for known in values
        )

    return is_neutral


@dataclass(frozen=True, slots=True)
class FieldPolicy:
    """Fields that one API's requests may have besides the fields of their pydantic model."""

    unsupported: Mapping[str, Callable[[object], bool]]
    """Fields that this server does not support, each with a function that tells whether a value has no effect."""
    without_effect: frozenset[str]
    """Fields that are accepted and change no answer."""
    styling: Mapping[str, Callable[[object], bool]] = field(default_factory=dict)
    """Fields that only affect style or speed, each with a function that tells whether a value has no effect. If it has
    one, the field is ignored and listed, like an unknown field."""
    options: Mapping[str, type[BaseModel]] = field(default_factory=dict)
    """Fields with objects as values, and the model of each. The fields of these objects are checked too."""
    instead: Mapping[str, str] = field(default_factory=dict)
    """Unsupported fields, and what to do instead, for those that it does not help to leave out."""

    def check(self, kind: type[BaseModel], raw: Mapping[str, Any], *, strict: bool) -> list[str]:
        """Names of the fields of `raw` that are ignored. With `strict` (`server.strict_fields`), they are refused.

        Raises:
            RequestError: a field is not supported, or unknown with `strict`.
        """
        own = field_names(kind)
        for name in self.unsupported.keys() & raw.keys():
            if name not in own and not self.unsupported[name](raw[name]):
                message = f"{name} is not supported by this server; {self.instead.get(name, 'leave it out')}."
                raise RequestError(message, code="unsupported_parameter", param=name)
        asks_nothing = {name for name, is_neutral in self.styling.items() if name in raw and is_neutral(raw[name])}
        passed = own | self.unsupported.keys() | self.without_effect | asks_nothing
        options = {f"{name}.{it}" for name, kind in self.options.items() for it in field_names(kind)}
        ignored = [name for name in raw if name not in passed]
        for name in self.options:
            if isinstance(given := raw.get(name), dict):
                ignored += [path for option in given if (path := f"{name}.{option}") not in options]
        if strict and ignored:
            near = difflib.get_close_matches(ignored[0], own | options, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            shown = ignored[0][:_MAX_NAME_CHARS]
            raise RequestError(f"There is no field {shown!r}.{hint}", code="unknown_parameter", param=shown)
        return ignored


UNSUPPORTED: Mapping[str, Callable[[object], bool]] = {
    "audio": neutral(),
    "best_of": neutral(1),
    "chat_template": neutral(),
    "custom_logit_processor": neutral(),
    "custom_params": neutral(),
    "echo": neutral(False),
    "function_call": neutral("none", "auto"),
    "functions": neutral([]),
    "guided_choice": neutral(),
    "guided_decoding_backend": neutral(),
    "guided_grammar": neutral(),
    "guided_json": neutral(),
    "guided_regex": neutral(),
    "guided_whitespace_pattern": neutral(),
    "kv_transfer_params": neutral(),
    "length_penalty": neutral(1),
    "logits_processors": neutral([]),
    "lora_path": neutral(),
    "lora_request": neutral(),
    "mm_processor_kwargs": neutral({}),
    "modalities": neutral(["text"]),
    "moderation": neutral(),
    "prompt_embeds": neutral(),
    "return_hidden_states": neutral(False),
    "session_params": neutral(),
    "suffix": neutral(""),
    "use_beam_search": neutral(False),
    "web_search_options": neutral(),
}
"""Fields that other servers support and this one does not, each with its values that have no effect."""

STYLING: Mapping[str, Callable[[object], bool]] = {"prediction": neutral(), "verbosity": neutral("medium")}
"""Fields for style or speed, each with its values that have no effect. Other values are ignored and listed."""

OWN_FIELDS = FieldPolicy({}, frozenset({"user"}))
"""For routes with a pydantic model that has all fields of their API."""


def ignored_header(names: Sequence[str]) -> dict[str, str]:
    """The header that lists ignored fields. Empty if no field is ignored."""
    if not names:
        return {}
    # Names come from the caller, so they are escaped.
    shown = [_NO_NAME.sub("_", name[:_MAX_SHOWN_CHARS]) for name in names[:_MAX_SHOWN]]
    return {"x-ignored-fields": ",".join(shown)}


def lowered_header(asked: Iterable[int | None], limits: Iterable[int]) -> dict[str, str]:
    """The header that says to what the answers' maximum number of tokens was lowered: the least of `limits` that is
    below the number `asked` for the same prompt. Empty if none is. None asks for no number."""
    lowered = [limit for wanted, limit in zip(asked, limits, strict=True) if wanted is not None and limit < wanted]
    return {"x-max-tokens": str(min(lowered))} if lowered else {}


def field_names(kind: type[BaseModel]) -> set[str]:
    """Names of the fields of `kind` as they appear in JSON."""
    return {field.alias or name for name, field in kind.model_fields.items()}
