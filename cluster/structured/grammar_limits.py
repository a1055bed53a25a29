"""Limits on the cost of a grammar. Each limits how far one request can delay other requests.

llguidance counts its own work ("fuel") and gives up with an error. By measurement, that limits a mask to about 30 ms,
but not a compile: `multipleOf: 999983` takes half a minute, and an intersection of three regexes takes six minutes and
2 GB. So the first compile also has limits of CPU time and memory, which end its process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_GRAMMAR_BYTES = 256 << 10
"""Maximum bytes of a schema, regex, grammar or list of choices, as UTF-8 JSON or text."""
MAX_SCHEMA_DEPTH = 60
"""Maximum nesting depth of schemas. llguidance reads JSON of at most 128 levels, and a schema takes two."""
MAX_ENUM_VALUES = 5000
"""Maximum number of values of all `enum`s of a schema together, or of choices."""

MAX_REQUEST_GRAMMAR_BYTES = 8 << 20
"""Maximum bytes of a request's grammar times its sequences, because each sequence carries the grammar."""

CHECK_CPU_S = 0.04
"""CPU seconds to compile a grammar and compute its first mask. Nearly all grammars need a quarter of this. A refusal
should come within 100 ms."""
CHECK_MEMORY_BYTES = 2 << 30
"""Bytes of address space that a check may add to its process."""
MASK_CPU_S = 0.1
"""CPU seconds for masks that an answer has at its start, and may save at most."""
TOKEN_CPU_S = 0.002
"""CPU seconds that an answer gets for each of its tokens."""
GUIDE_MEMORY_BYTES = 1 << 30
"""Bytes that the coordinator may allocate after it got a tokenizer. Above this, an answer with a grammar that begins is
ended. A grammar takes 0.1 MB, one with thousands of names 3 MB, and its lexer's states at most 5 MB."""

PARSER_LIMITS: Mapping[str, Any] = {
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 10_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
"""Keyword arguments of `llguidance.LLParserLimits` in both processes. An object with 500 optional properties still
fits."""
