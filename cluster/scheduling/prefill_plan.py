"""A plan of the prefill chunks of one step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from cluster.scheduling.prefix_cache import Node
from cluster.scheduling.request import Request
from worker.protocol import Int32Array

PageKey = tuple[Node, bytes]
"""A node at the end of a cached prefix, and the tokens of the page after it."""


class PromptRun(NamedTuple):
    """A run of prompt tokens in one row. The step computes their log probabilities."""

    row: int
    first: int
    """Position of the first token. The token before it is an input of the step."""
    num: int
    k: int
    """Number of likeliest tokens that get a log probability too."""


@dataclass(slots=True, eq=False)
class PrefillPlan:
    """The prefill chunks of one step. Their pages are already taken, so a plan with rows must be launched."""

    budget: int
    """Number of tokens that may still be added."""
    now: float
    rows: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    lens: list[int] = field(default_factory=list)
    deltas: list[Int32Array] = field(default_factory=list)
    """Page deltas, each [n, 3]."""
    admitted: list[Request] = field(default_factory=list)
    num_adjustment_bytes: int = 0
    """Bytes of the masks and adjustments of the requests in `admitted`."""
    num_prefix_deltas: int = 0
    """Number of page deltas for pages from the prefix cache."""
    prompt_runs: list[PromptRun] = field(default_factory=list)
    num_prompt_logprobs: int = 0
    """Number of prompt tokens in `prompt_runs`."""
    num_items: int = 0
    """Number of scored items of the rows whose prompts end in this step."""
    computing: dict[PageKey, int] = field(default_factory=dict)
    """Index into `rows` of the first chunk that continues this cached prefix with this page."""
