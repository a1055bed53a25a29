"""Plans the next chunk of a prompt: its cached prefix, its length, and its pages.

If another row computes the same part of a prompt in the same step, the prompt waits one step, because the prefix cache
has that part afterwards. A prompt with log probabilities does not read the cache. Its chunk is no longer than the
number of log probabilities that the step may still compute.
"""

from __future__ import annotations

from collections import Counter

from cluster.messages.engine import Miss
from cluster.scheduling.limits import MAX_PREFIX_DELTAS, SchedulerLimits
from cluster.scheduling.pages import Prefix, RowPages
from cluster.scheduling.prefill_plan import PageKey, PrefillPlan, PromptRun
from cluster.scheduling.request import Request
from cluster.scheduling.row_table import RowTable
from worker.protocol import MAX_ITEMS


class Chunks:
    """Plans the chunks of rows in prefill, and takes their pages."""

    def __init__(self, limits: SchedulerLimits, rows: RowTable, pages: RowPages) -> None:
        self._limits = limits
        self._rows = rows
        self._pages = pages
        self.total_prefix_hit_tokens = 0
        """Number of tokens that rows took from the prefix cache."""
        self.total_missed: Counter[Miss] = Counter()
        """Sum of `Request.missed` over all admissions."""

    def go_on(self, row: int, plan: PrefillPlan) -> None:
        """Adds the next chunk of a row in prefill, if pages are available and no other row computes the same tokens."""
        if not self.has_room(self._rows.request(row), plan):
            return
        # Other rows may have put the next part into the cache since the last chunk.
        prefix = self.find_prefix(row, plan)
        key = self.next_page_key(row, prefix)
        if self.is_computed_by_another(row, prefix, key, plan):
            return
        if self._pages.has_room([self.num_pages_missing(row)]):
            # Pages are adopted only now, when it is certain that the chunk gets its pages.
            self.adopt_prefix(row, prefix, plan)
        elif len(prefix.pages):
            key = self.next_page_key(row, self._pages.no_prefix(row))
        self.add(row, key, plan)

    def has_room(self, request: Request, plan: PrefillPlan) -> bool:
        """Whether the step can compute the request's scored items, or one more of its prompt log probabilities."""
        if request.num_item_tokens:
            return (
                request.num_item_tokens <= plan.budget and plan.num_items + len(request.sampling.item_lens) <= MAX_ITEMS
            )
        return not request.wants_prompt_logprobs or plan.num_prompt_logprobs < self._limits.max_prompt_logprobs

    def find_prefix(self, row: int, plan: PrefillPlan) -> Prefix:
        """Finds cached pages that continue the row's own. The last token is left out, because its logits are needed."""
        if plan.num_prefix_deltas >= MAX_PREFIX_DELTAS:
            return self._pages.no_prefix(row)
        table = self._rows
        start, end = int(table.num_computed[row]), int(table.num_prefill[row])
        request = table.request(row)
        if request.wants_prompt_logprobs:
            end = max(start + 1, request.next_prompt_logprob)  # all later tokens must be computed
        return self._pages.find_prefix(row, table.tokens[row, start : min(end - 1, int(table.num_cacheable[row]))])

    def adopt_prefix(self, row: int, prefix: Prefix, plan: PrefillPlan) -> None:
        """Gives the row the pages of the `prefix` that `find_prefix` has just returned, and counts them as computed."""
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
        """The key of the first page of a chunk after `prefix`, equal for equal pages. None if it cannot be shared."""
        table, page_size = self._rows, self._limits.page_size
        start = int(table.num_computed[row]) + len(prefix.pages) * page_size
        end = min(int(table.num_prefill[row]), int(table.num_cacheable[row]))
        tokens = table.tokens[row, start : min(start + page_size, end)]
        return self._pages.next_page_key(row, prefix, tokens)

    def is_computed_by_another(self, row: int, prefix: Prefix, key: PageKey | None, plan: PrefillPlan) -> bool:
        """Whether the row should wait for another row of the plan. It does if that row's chunk computes whole pages
        with at least half of the row's next tokens, which the row then finds in the prefix cache."""
        if key is None or (index := plan.computing.get(key)) is None or self._rows.request(row).wants_prompt_logprobs:
            return False
        table = self._rows
        start = int(table.num_computed[row]) + len(prefix.pages) * self._limits.page_size
        length = self._chunk_length(row, start, plan)
        cacheable = int(table.num_cacheable[[row, plan.rows[index]]].min())
        shared = min(length, plan.lens[index], int(table.num_prefill[row]) - 1 - start, cacheable - start)
        differ = table.tokens[row, start : start + shared] != table.tokens[plan.rows[index], start : start + shared]
        num_same = int(differ.argmax()) if differ.any() else shared
        num_shareable = self._pages.num_shareable(start, plan.lens[index], num_same)
        return num_shareable > 0 and 2 * num_shareable >= length

    def num_pages_missing(self, row: int) -> int:
        """Number of pages that a row in prefill lacks for its tokens and the first token after them."""
        request = self._rows.request(row)
        num_positions = min(len(request.tokens) + 1, request.max_total_tokens - 1)
        return self._limits.num_pages_for(num_positions) - self._pages.num_row_pages(row)

    def add(self, row: int, key: PageKey | None, plan: PrefillPlan) -> bool:
        """Takes pages for the row's next chunk and adds the chunk to the plan. Returns False if pages are lacking."""
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
            plan.num_items += len(request.sampling.item_lens)
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
        if request.num_item_tokens and end - start > min(length, self._limits.max_item_tokens):
            # all items must be in one step
            length = min(length, int(self._rows.num_cacheable[row]) - start)
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
            length = last_boundary - start  # whole pages can be shared, partial ones cannot
        return self._pages.state_end(row, start, start + length, end) - start
