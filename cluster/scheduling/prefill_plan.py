"""The prefill chunks of one step, as they are planned."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from cluster.scheduling.prefix_cache import Node
from cluster.scheduling.request import Request
from worker.protocol import Int32Array

PageKey = tuple[Node, bytes]
"""An end of the cached prefixes, and the tokens of the page after it."""


class PromptRun(NamedTuple):
    """Prompt tokens whose log probability a step finds."""

    row: int
    first: int
    """Position of the first of them; the step has the one before as an input."""
    num: int
    k: int
    """How many of the likeliest tokens are wanted too."""


@dataclass(slots=True, eq=False)
class PrefillPlan:
    """The prefill chunks of one step. Pages are taken already: a plan with rows must be launched."""

    budget: int
    """Tokens left."""
    now: float
    rows: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    lens: list[int] = field(default_factory=list)
    deltas: list[Int32Array] = field(default_factory=list)
    """Page deltas, each [n, 3]."""
    admitted: list[Request] = field(default_factory=list)
    num_adjustment_bytes: int = 0
    """Bytes that the rows of `admitted` start with, besides parameters."""
    num_prefix_deltas: int = 0
    """Page deltas of pages that came from the prefix cache."""
    prompt_runs: list[PromptRun] = field(default_factory=list)
    num_prompt_logprobs: int = 0
    """Prompt tokens of `prompt_runs`."""
    num_items: int = 0
    """Items of the rows whose prefill ends."""
    computing: dict[PageKey, int] = field(default_factory=dict)
    """Index into `rows` of the chunk that begins at this end of the cached prefixes with this page."""
