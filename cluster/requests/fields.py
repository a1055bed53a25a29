"""The known fields of a request, and what happens to the others: the same on every route, whoever's API it is.

A field of another server that would change the answer is refused, not dropped in silence: the answer would be one to
another question. A field that nobody knows is ignored with a header that says so, or refused in strict mode.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from configs.errors import RequestError

_NO_NAME = re.compile(r"[^A-Za-z0-9_.-]")
_MAX_SHOWN = 32
_MAX_SHOWN_CHARS = 64
_MAX_NAME_CHARS = 200


def neutral(*values: object) -> Callable[[object], bool]:
    """Whether a value asks for nothing: null, or one of `values`."""

    # 0 == False in Python: types are compared too, but 0 and 0.0 are one JSON number.
    def is_neutral(value: object) -> bool:
        return value is None or any(
            value == known and isinstance(value, bool) == isinstance(known, bool) for known in values
        )

    return is_neutral


@dataclass(frozen=True, slots=True)
class FieldPolicy:
    """Fields that one API's requests may hold besides the fields of their model."""

    unsupported: Mapping[str, Callable[[object], bool]]
    """Fields that this server does not have, each with the values that ask for nothing."""
    without_effect: frozenset[str]
    """Fields that are accepted and change no answer."""
    styling: Mapping[str, Callable[[object], bool]] = field(default_factory=dict)
    """Fields that only ask for a style, or for speed, as in `unsupported`; they count as fields that nobody knows."""
    options: Mapping[str, type[BaseModel]] = field(default_factory=dict)
    """Fields that are objects, whose own fields are looked at too."""

    def check(self, kind: type[BaseModel], raw: Mapping[str, Any], *, strict: bool) -> list[str]:
        """The fields of `raw` that are ignored; `strict`: none may be (`server.strict_fields`). Raises RequestError
        where a field is not supported, or unknown where none may be."""
        own = field_names(kind)
        for name in self.unsupported.keys() & raw.keys():
            if name not in own and not self.unsupported[name](raw[name]):
                raise RequestError(f"{name} is not supported by this server.", code="unsupported_parameter", param=name)
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
"""Fields other servers know and this one does not, each with the values that ask for nothing."""

STYLING: Mapping[str, Callable[[object], bool]] = {"prediction": neutral(), "verbosity": neutral("medium")}
"""Fields that ask for a style or for speed, each with the values that ask for nothing: ignored, and named as such."""

OWN_FIELDS = FieldPolicy({}, frozenset({"user"}))
"""For routes whose model has all that their API knows."""


def ignored_header(names: Sequence[str]) -> dict[str, str]:
    """The header that tells which fields were ignored; none when none was."""
    if not names:
        return {}
    # Names come from the caller: nothing of them may be taken for more than a name.
    shown = [_NO_NAME.sub("_", name[:_MAX_SHOWN_CHARS]) for name in names[:_MAX_SHOWN]]
    return {"x-ignored-fields": ",".join(shown)}


def field_names(kind: type[BaseModel]) -> set[str]:
    """Names of the fields of `kind` as they come in."""
    return {field.alias or name for name, field in kind.model_fields.items()}
