"""The chunks of prompts that a step prefills: rows in prefill, their prefixes, pages and log probabilities.

A prompt of which another row computes the same part in the same step waits for that row: a step later the prefix cache
has it. A prompt whose log probabilities are wanted reads no cache, and takes no more tokens of a step than may
have them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from cluster.scheduling.frame_builder import FrameBuilder
from cluster.scheduling.limits import MAX_PREFIX_DELTAS, SchedulerLimits
from cluster.scheduling.prefix_cache import Node
from cluster.scheduling.request import Request
from cluster.scheduling.row_pages import Prefix, RowPages
from cluster.scheduling.row_table import RowTable
from worker.protocol import ITEM_DTYPE, MAX_ITEMS, PROMPT_LOGPROBS_DTYPE, Int32Array, RowFlag

# Plain integers: operations of enumerations take a microsecond each.
_CHUNK = int(RowFlag.HAS_TOKENS)
_LAST_CHUNK = int(RowFlag.HAS_TOKENS | RowFlag.SAMPLE)

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
    """Of the rows whose prefill ends."""
    computing: dict[PageKey, int] = field(default_factory=dict)
    """Index into `rows` of the chunk that begins at this end of the cached prefixes with this page."""


class PrefillChunks:
    """Rows in prefill, from `begin` to the end of their prompts. Writes `RowTable.num_computed` of them."""

    def __init__(self, limits: SchedulerLimits, rows: RowTable, pages: RowPages) -> None:
        self._limits = limits
        self._rows = rows
        self._pages = pages
        self._prefilling: list[int] = []  # in order of admission
        self.total_prefix_hit_tokens = 0
        """Tokens that rows took from the prefix cache."""

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows in prefill, in order of admission."""
        return tuple(self._prefilling)

    @property
    def num_missing_pages(self) -> list[int]:
        """Pages that each of these rows still lacks."""
        return [self.num_pages_missing(row) for row in self._prefilling]

    def begin(self, row: int, key: PageKey | None, plan: PrefillPlan) -> None:
        """Adds the first chunk of a row that was just admitted, which begins with the page of `key`; there are enough
        pages for it."""
        self._prefilling.append(row)
        has_chunk = self._add_chunk(row, key, plan)
        assert has_chunk, "a request was admitted without pages for its first chunk"

    def forget(self, row: int) -> None:
        """The row's request ended or was preempted, in prefill or not."""
        if row in self._prefilling:
            self._prefilling.remove(row)

    def go_on(self, row: int, plan: PrefillPlan) -> None:
        """Adds the next chunk of a row in prefill, if there are pages for it and no other row computes the same."""
        if not self.has_room(self._rows.request(row), plan):
            return
        # Others may have computed what comes next since the last chunk.
        prefix = self.find_prefix(row, plan)
        key = self.next_page_key(row, prefix)
        if self.is_computed_by_another(row, prefix, key, plan):
            return
        if self._pages.has_room([self.num_pages_missing(row)]):
            # Only then it is sure that the chunk gets its pages, and that the deltas of the prefix are sent.
            self.adopt_prefix(row, prefix, plan)
        elif len(prefix.pages):
            key = self.next_page_key(row, self._pages.no_prefix(row))
        self._add_chunk(row, key, plan)

    def has_room(self, request: Request, plan: PrefillPlan) -> bool:
        """Whether the step finds another log probability, if the request needs one to go on, and takes its items."""
        if request.item_lens:
            return request.num_item_tokens <= plan.budget and plan.num_items + len(request.item_lens) <= MAX_ITEMS
        return not request.wants_prompt_logprobs or plan.num_prompt_logprobs < self._limits.max_prompt_logprobs

    def find_prefix(self, row: int, plan: PrefillPlan) -> Prefix:
        """Cached pages that go on where the row's own end. The last token is left: its logits are wanted."""
        if plan.num_prefix_deltas >= MAX_PREFIX_DELTAS:
            return self._pages.no_prefix(row)
        table = self._rows
        start, end = int(table.num_computed[row]), int(table.num_prefill[row])
        request = table.request(row)
        if request.wants_prompt_logprobs:
            end = max(start + 1, request.next_prompt_logprob)  # The rest has to be computed.
        return self._pages.find_prefix(row, table.tokens[row, start : min(end - 1, int(table.num_cacheable[row]))])

    def adopt_prefix(self, row: int, prefix: Prefix, plan: PrefillPlan) -> None:
        """Gives the row the pages that `find_prefix` has just found."""
        table = self._rows
        deltas = self._pages.adopt_prefix(row, prefix)
        if len(deltas):
            num_tokens = len(deltas) * self._limits.page_size
            table.num_computed[row] += num_tokens
            table.request(row).num_cached_tokens += num_tokens
            self.total_prefix_hit_tokens += num_tokens
            plan.deltas.append(deltas)
            plan.num_prefix_deltas += len(deltas)

    def next_page_key(self, row: int, prefix: Prefix) -> PageKey | None:
        """What a chunk after `prefix` begins with, by which others can tell that they begin alike; None if none can."""
        table, page_size = self._rows, self._limits.page_size
        start = int(table.num_computed[row]) + len(prefix.pages) * page_size
        end = min(int(table.num_prefill[row]), int(table.num_cacheable[row]))
        tokens = table.tokens[row, start : min(start + page_size, end)]
        return self._pages.next_page_key(row, prefix, tokens)

    def is_computed_by_another(self, row: int, prefix: Prefix, key: PageKey | None, plan: PrefillPlan) -> bool:
        """A chunk of the plan computes whole pages that hold at least half of what the row would compute now."""
        if key is None or (index := plan.computing.get(key)) is None or self._rows.request(row).wants_prompt_logprobs:
            return False
        table, page_size = self._rows, self._limits.page_size
        start = int(table.num_computed[row]) + len(prefix.pages) * page_size
        length = self._chunk_length(row, start, plan)
        cacheable = int(table.num_cacheable[[row, plan.rows[index]]].min())
        shared = min(length, plan.lens[index], int(table.num_prefill[row]) - 1 - start, cacheable - start)
        differ = table.tokens[row, start : start + shared] != table.tokens[plan.rows[index], start : start + shared]
        num_same = int(differ.argmax()) if differ.any() else shared
        num_shareable = num_same // page_size * page_size
        return num_shareable > 0 and 2 * num_shareable >= length

    def num_pages_missing(self, row: int) -> int:
        """Pages a row in prefill lacks for its tokens and the first one after them."""
        request = self._rows.request(row)
        num_positions = min(len(request.tokens) + 1, request.max_total_tokens - 1)
        return self._limits.num_pages_for(num_positions) - self._pages.num_row_pages(row)

    def commit(self, plan: PrefillPlan, frame: FrameBuilder) -> list[int]:
        """Adds the plan to the frame, makes its whole pages known, and returns the rows whose prefill ends."""
        table = self._rows
        ending: list[int] = []
        tokens: list[Int32Array] = []
        flags: list[int] = []
        for row, start, length in zip(plan.rows, plan.starts, plan.lens, strict=True):
            end = start + length
            tokens.append(table.tokens[row, start:end])
            table.num_computed[row] = end
            if end == table.num_prefill[row]:
                ending.append(row)
                flags.append(_LAST_CHUNK)
            else:
                flags.append(_CHUNK)
            # Pages that are cached already would be kept twice while such a prompt is computed, which reads no cache.
            if not table.request(row).wants_prompt_logprobs:
                self._pages.publish(row, table.tokens[row], min(end, int(table.num_cacheable[row])))
        if ending:
            self._prefilling = [row for row in self._prefilling if row not in ending]
        frame.add(
            rows=np.array(plan.rows, np.int32),
            starts=np.array(plan.starts, np.int32),
            lens=np.array(plan.lens, np.int32),
            flags=np.array(flags, np.int32),
            token_ids=np.concatenate(tokens),
        )
        if plan.num_items:
            items = [(row, length) for row in ending for length in table.request(row).item_lens]
            frame.add(items=np.array(items, ITEM_DTYPE))
        if plan.prompt_runs:
            runs = [(row, first - 1, num, k) for row, first, num, k in plan.prompt_runs]
            targets = [table.tokens[row, first : first + num] for row, first, num, _ in plan.prompt_runs]
            frame.add(prompt_runs=np.array(runs, PROMPT_LOGPROBS_DTYPE), prompt_targets=np.concatenate(targets))
        return ending

    def check_integrity(self) -> None:
        """Raises AssertionError unless these are the rows in prefill."""
        table = self._rows
        prefilling = np.flatnonzero(table.live & (table.num_computed < table.num_prefill))
        assert sorted(self._prefilling) == prefilling.tolist(), "the list of prefills is wrong"

    def _add_chunk(self, row: int, key: PageKey | None, plan: PrefillPlan) -> bool:
        """Takes pages for the row's next chunk and adds it to the plan; False if there are too few."""
        start = int(self._rows.num_computed[row])
        length = self._chunk_length(row, start, plan)
        deltas = self._pages.grow(row, start + length)
        if deltas is None:
            return False
        if key is not None:
            plan.computing.setdefault(key, len(plan.rows))
        if len(deltas):
            plan.deltas.append(deltas)
        plan.rows.append(row)
        plan.starts.append(start)
        plan.lens.append(length)
        plan.budget -= length
        request = self._rows.request(row)
        if request.wants_prompt_logprobs:
            self._add_prompt_run(request, start, length, plan)
        if start + length == self._rows.num_prefill[row]:
            plan.num_items += len(request.item_lens)
        return True

    def _add_prompt_run(self, request: Request, start: int, length: int, plan: PrefillPlan) -> None:
        first = max(start + 1, request.next_prompt_logprob)
        num = min(start + length + 1, request.num_prompt_tokens) - first
        if num > 0:
            plan.prompt_runs.append(PromptRun(request.row, first, num, request.sampling.prompt_logprobs))
            plan.num_prompt_logprobs += num

    def _chunk_length(self, row: int, start: int, plan: PrefillPlan) -> int:
        page_size, end = self._limits.page_size, int(self._rows.num_prefill[row])
        length = min(end - start, self._limits.prefill_chunk_size, plan.budget)
        request = self._rows.request(row)
        if request.item_lens and end - start > min(length, self._limits.max_item_tokens):
            length = min(length, int(self._rows.num_cacheable[row]) - start)  # items come all in one step
        if request.wants_prompt_logprobs:
            stop = (
                max(start, request.next_prompt_logprob - 1)
                + self._limits.max_prompt_logprobs
                - plan.num_prompt_logprobs
            )
            if stop < request.num_prompt_tokens - 1:
                length = min(length, stop - start)
        last_boundary = (start + length) // page_size * page_size
        if start + length < end and last_boundary > start:
            return last_boundary - start  # Whole pages can be shared, partial ones cannot.
        return length
