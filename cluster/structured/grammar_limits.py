"""Limits of what a grammar may cost. Every number is a bound on what one request can take from the others.

llguidance counts its own work ("fuel") and gives up with an error; measured, that bounds a mask to some 30 ms but not
a compile: `multipleOf: 999983` takes half a minute, an intersection of three regexes six minutes and 2 GB. So the first
compile also has a limit of CPU time and memory that ends the process it runs in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_GRAMMAR_BYTES = 256 << 10
"""Size of a schema, regex, grammar or list of choices, as UTF-8 JSON or text."""
MAX_SCHEMA_DEPTH = 60
"""Schemas within schemas. llguidance reads JSON of at most 128 levels, two for each of ours."""
MAX_ENUM_VALUES = 5000
"""Values of all `enum`s of a schema together, and choices."""

MAX_REQUEST_GRAMMAR_BYTES = 8 << 20
"""Size of one request's grammar, times its sequences: each of them carries it to the coordinator."""

CHECK_CPU_S = 0.04
"""CPU time to compile a grammar and compute its first mask: nearly all need a quarter of it. A refusal has to come
within 100 ms in all."""
CHECK_MEMORY_BYTES = 2 << 30
"""Address space that a check may take."""
MASK_CPU_S = 0.1
"""CPU time that an answer's masks may have taken in advance of its tokens."""
TOKEN_CPU_S = 0.002
"""CPU time of a mask on average: what an answer gets for each of its tokens."""
GUIDE_MEMORY_BYTES = 1 << 30
"""Memory that the coordinator may have taken since it has a tokenizer; with more, no answer with a grammar is begun. A
grammar takes 0.1 MB, one of thousands of names 3 MB, and the states of its lexer 5 MB at most."""

PARSER_LIMITS: Mapping[str, Any] = {
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 10_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
"""Keyword arguments of `llguidance.LLParserLimits`, on both sides. 500 optional properties of one object still fit."""
