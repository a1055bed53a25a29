"""Decides how many drafts a step verifies, and in which rows: the number with the highest geometric mean of the rows'
speeds.

For one row, or for similar rows, that number gives the most tokens per second. For different rows, it prevents that a
few rows gain while all other rows wait for longer steps.

A row with n-gram drafts must know its last token, so it waits for the step in flight. Rows with drafts of a draft head
need not wait, and their steps overlap. Acceptance rates (`NgramHistory`, `DraftHistory`) and measured step times
(`StepTimes`) tell whether drafts are worth their time and the wait. If they are not, the next step is launched at once,
as without speculation. A row without predictions never waits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cluster.scheduling.decodes import Decodes
from cluster.scheduling.draft_history import FIRST_RATES, DraftHistory
from cluster.scheduling.frame_builder import FrameBuilder
from cluster.scheduling.guided_rows import GuidedRows
from cluster.scheduling.limits import SchedulerLimits
from cluster.scheduling.ngrams import NgramHistory
from cluster.scheduling.row_table import RowTable
from cluster.scheduling.step_results import Launched
from worker.protocol import FrameKind, Int32Array, RowFlag, StepResult

_FORGET = 0.98
# Assumed time of one token, as a share of an empty step, until steps of several sizes were measured. It is small,
# because a step with drafts shows their cost, but steps that are never tried show nothing.
_TOKEN_SHARE = 0.01
# Weight of that assumption, in squared tokens of difference.
_PRIOR_WEIGHT = 4.0
# A longer step counts as this multiple of its expected time, because something disturbed it.
_MOST_TIMES = 3.0
_EXTRA_WEIGHT = 0.1
# The measured extra time of steps with drafts decays in steps without drafts, so that drafts are tried again.
_EXTRA_FORGET = 0.999
# Drafts must make rows this much faster (3 %), because they cost the scheduler time and estimates are inexact.
_LEAST_GAIN = 0.03
# Maximum number of last tokens that n-grams compare, unless `prompt_lookup_min` is larger.
_MOST_COMPARED = 4
# If no drafts are worth verifying, the ranks still make drafts in one of this many steps. A draft takes some percent of
# a step.
_ASK_EVERY = 32
# The ranks skip the draft head after `_MOST_VAIN` steps without verified drafts: for `_FIRST_REST` steps at first, for
# up to `_LONGEST_REST` later. The head takes 3 % of a step, and one step with drafts makes up for `_WORTH` steps
# without.
_MOST_VAIN = 2 * _ASK_EVERY
_WORTH = 8
_FIRST_REST = 512
_LONGEST_REST = 8192
# Prompt tokens that one step adds to a row's n-gram index, which takes 0.5 ms.
_MAX_AT_ONCE = 1024


class StepTimes:
    """Estimates the seconds of a decode step: a line over its number of tokens, fitted to recent steps. Steps with
    drafts take an extra time, which includes the wait for the step before."""

    def __init__(self) -> None:
        self._weight = self._tokens = self._seconds = self._squares = self._products = 0.0
        self._extra = 0.0
        self._num_drafted = 0  # number of steps with drafts
        # last slope, because steps of equal size say nothing about it
        self._slope: float | None = None

    def took(self, num_tokens: int, seconds: float, *, has_drafts: bool) -> None:
        """Records the duration of a step that has ended, and its number of tokens."""
        if self._weight:
            expected = float(self.of(num_tokens, has_drafts=has_drafts))
            seconds = min(seconds, _MOST_TIMES * expected)
            if has_drafts:
                # The first steps count more; otherwise the line would attribute their waiting time to their tokens.
                self._num_drafted += 1
                weight = max(_EXTRA_WEIGHT, 1 / (1 + self._num_drafted))
                self._extra = max(0.0, self._extra + weight * (seconds - expected))
                seconds -= self._extra
            else:
                self._extra *= _EXTRA_FORGET
        self._weight = _FORGET * self._weight + 1
        self._tokens = _FORGET * self._tokens + num_tokens
        self._seconds = _FORGET * self._seconds + seconds
        self._squares = _FORGET * self._squares + num_tokens * num_tokens
        self._products = _FORGET * self._products + num_tokens * seconds
        self._slope = self._fitted()

    def of(self, num_tokens: npt.ArrayLike, *, has_drafts: bool) -> npt.NDArray[np.float64]:
        """Estimated seconds of a step with `num_tokens` tokens. Before any measurement, an empty step counts as 1."""
        sizes = np.asarray(num_tokens, np.float64)
        if not self._seconds:
            return 1 + _TOKEN_SHARE * sizes
        size, mean = self._tokens / self._weight, self._seconds / self._weight
        line = np.maximum(mean + (self._slope or 0.0) * (sizes - size), mean * 0.1)
        return line + (self._extra if has_drafts else 0.0)

    def _fitted(self) -> float:
        """Estimated seconds per additional token."""
        size, mean = self._tokens / self._weight, self._seconds / self._weight
        variance = self._squares - self._weight * size * size
        covariance = self._products - self._weight * size * mean
        prior = mean * _TOKEN_SHARE / (1 + _TOKEN_SHARE * size) if self._slope is None else self._slope
        return max(0.0, (covariance + _PRIOR_WEIGHT * prior) / (variance + _PRIOR_WEIGHT))


@dataclass(slots=True)
class DraftCounts:
    """Number of drafts that steps have verified, in total."""

    num_drafted: int = 0
    num_accepted: int = 0
    """Number of those drafts that were right."""


class Drafter:
    """The drafts of running requests. Writes `RowTable.predicted` and stores a history with each request."""

    def __init__(self, limits: SchedulerLimits, rows: RowTable, guided: GuidedRows, counts: DraftCounts) -> None:
        self._limits = limits
        self._rows = rows
        self._guided = guided
        self._counts = counts
        self._retired_s = 0.0  # time when the last step retired
        self._most = limits.speculation.max_sampled(limits.max_num_seqs) - limits.max_num_seqs
        self.times = StepTimes()
        self._asks = limits.speculation.is_by_ranks
        self._num_chosen = limits.speculation.num_drafts  # largest number of drafts of a row in the last choice
        self._num_unasked = 0  # steps since the ranks last made drafts
        # Steps without drafts since the head was last skipped, less `_WORTH` for each step with drafts.
        self._num_vain = 0
        self._rest = _FIRST_REST  # number of steps for which the head is skipped now, or the next time
        self._resting_rows = 0  # number of rows when the head began to be skipped

    def learn(self, launched: Launched, result: StepResult, rows: Int32Array, now: float) -> None:
        """Records how long a retired step took and which of its drafts were right.

        Args:
            rows: live rows of the step's tokens, one entry per token.
            now: time when the step retired.
        """
        table, began = self._rows, launched.launched_s
        num_kept = np.bincount(rows, minlength=len(table.live))
        at = np.flatnonzero(launched.num_samples > 1)
        if began is not None:
            began = self._retired_s if len(at) else max(began, self._retired_s)
            self.times.took(launched.num_inputs, now - began, has_drafts=bool(len(at)))
        self._retired_s = now
        self.take(np.flatnonzero(num_kept).astype(np.int32))
        if len(result.drafts):
            is_going = num_kept[launched.sampled] > 0
            self.bring(launched.sampled[is_going], result.drafts[is_going])
        at = at[table.live[launched.sampled[at]]]
        of = launched.sampled[at]
        # An accepted draft behind a stop was dropped with its token, so it does not count.
        self._counts.num_drafted += int((launched.num_samples[at] - 1).sum())
        self._counts.num_accepted += int(np.minimum(result.num_tokens[at] - 1, num_kept[of]).sum())

    def take(self, rows: Int32Array) -> None:
        """Compares the drafts of the live, distinct `rows` with their new tokens."""
        table, speculation = self._rows, self._limits.speculation
        self._num_unasked += 1
        for row, num_known in zip(rows.tolist(), table.num_known[rows].tolist(), strict=True):
            request = table.request(row)
            if (history := request.history) is None:
                least = speculation.prompt_lookup_min
                history = DraftHistory(num_known) if self._asks else NgramHistory(least, max(least, _MOST_COMPARED))
                request.history = history
            end = min(num_known, len(history) + _MAX_AT_ONCE)
            history.take(table.tokens[row, len(history) : end], is_whole=end == num_known)
            table.predicted[row] = history.chances is not None

    def bring(self, rows: Int32Array, drafts: Int32Array) -> None:
        """Stores the ranks' `drafts` for the live `rows`: [len(rows), num_drafts] token ids, -1 for no draft."""
        table, self._num_unasked = self._rows, 0
        for row, of_row, count in zip(rows.tolist(), drafts.tolist(), (drafts >= 0).sum(axis=1).tolist(), strict=True):
            history = table.request(row).history
            if count and isinstance(history, DraftHistory):
                history.bring(of_row[:count])
                table.predicted[row] = True

    def _num_wanted(self) -> int:
        """Number of drafts that the ranks should make for each row in the next step: one more than the last choice
        verified, to see whether that would be worth it. If it verified none, all drafts, every `_ASK_EVERY` steps."""
        most = self._limits.speculation.num_drafts
        if not self._asks or self.rests or (not self._num_chosen and self._num_unasked < _ASK_EVERY):
            return 0
        return min(self._num_chosen + 1, most) if self._num_chosen else most

    @property
    def rests(self) -> bool:
        """Whether decode steps skip the ranks' draft head, because its drafts were too rarely worth verifying.

        Steps with prompts always run the head, so rows that begin later lack nothing. Rows that decode while it is
        skipped may get worse drafts.
        """
        return self._asks and self._num_vain >= _MOST_VAIN

    def launch(self, decodes: Decodes) -> FrameKind:
        """Counts a step of decodes that is about to be launched, and returns its kind."""
        if decodes.has_drafts:
            self._num_vain = max(0, self._num_vain - _WORTH)
            if not self._num_vain:
                self._rest = _FIRST_REST
            return FrameKind.STEP
        kind = FrameKind.STEP_WITHOUT_DRAFT_HEAD if self.rests else FrameKind.STEP
        num_rows = len(decodes.rows)
        self._num_vain += 1
        if self._num_vain <= _MOST_VAIN:
            self._resting_rows = num_rows
        elif 2 * num_rows <= self._resting_rows:  # with fewer rows, drafts may be worth it again
            self._num_vain, self._rest = 0, _FIRST_REST
        elif self._num_vain >= _MOST_VAIN + self._rest:
            self._num_vain, self._rest = 0, min(2 * self._rest, _LONGEST_REST)
        return kind

    def choose(self, rows: Int32Array, budget: int) -> Decodes | None:
        """Chooses the drafts that the ready `rows` verify, for a step of at most `budget` tokens. None: it is worth
        waiting for the step in flight first."""
        num_samples = self._num_samples(rows, budget)
        return None if num_samples is None else Decodes(rows, num_samples, self._num_wanted())

    def _num_samples(self, rows: Int32Array, budget: int) -> Int32Array | None:
        """[len(rows)]: number of inputs of each row. None: it is worth waiting for the step in flight first."""
        table = self._rows
        num_samples = np.ones(len(rows), np.int32)
        at = np.flatnonzero(table.predicted[rows] | self.has_drafts_on_device(rows))
        if not len(at):
            return num_samples
        most = min(self._limits.speculation.num_drafts, int((table.max_total - table.num_computed)[rows[at]].max()) - 2)
        chances = self._chances(rows[at], max(most, 0))
        # Each draft increases the expected tokens of its row, and the time of all rows.
        more = np.log1p(np.cumsum(chances, axis=1))
        more[:, 1:] -= more[:, :-1].copy()
        order = np.argsort(-more, axis=None, kind="stable")[: max(0, min(self._most, budget - len(rows)))]
        sizes = len(rows) + np.arange(1, len(order) + 1)
        slower = np.log(self.times.of(sizes, has_drafts=True) / self.times.of(len(rows), has_drafts=False))
        gains = np.cumsum(more.ravel()[order]) / len(rows) - slower
        if not len(gains) or gains.max() < _LEAST_GAIN:
            self._num_chosen = 0
            return num_samples
        is_chosen = np.zeros(chances.size, np.int32)
        is_chosen[order[: int(gains.argmax()) + 1]] = 1
        num_samples[at] += (is_chosen.reshape(chances.shape) * (chances > 0)).sum(axis=1, dtype=np.int32)
        self._num_chosen = int(num_samples.max()) - 1
        waits = (num_samples > 1) & (table.in_flight[rows] > 0) & ~self.has_drafts_on_device(rows)
        return None if waits.any() else num_samples

    def has_drafts_on_device(self, rows: Int32Array) -> npt.NDArray[np.bool_]:
        """[len(rows)]: whether the ranks make drafts for the row in a step in flight, which the coordinator does not
        know yet."""
        table = self._rows
        is_ahead: npt.NDArray[np.bool_] = (
            table.drafts_on_device[rows] & (table.in_flight[rows] > 0) & (table.num_drafts[rows] > 0)
        )
        return is_ahead

    def add_tokens(self, decodes: Decodes, builder: FrameBuilder) -> Int32Array:
        """Adds the inputs of rows with drafts that the coordinator knows: for each row its last token, then its drafts.

        Returns:
            [num_rows]: flags of all decoding rows, with HAS_TOKENS for the rows with added inputs.
        """
        known = (decodes.num_samples > 1) & ~self.has_drafts_on_device(decodes.rows)
        if known.any():
            builder.add(token_ids=self._tokens(decodes.rows[known], decodes.num_samples[known]))
        return known * np.int32(RowFlag.HAS_TOKENS)

    def add(self, decodes: Decodes, sampled: Int32Array, capacity: Int32Array, builder: FrameBuilder) -> None:
        """Adds how many inputs of each sampled row are sampled, and how many drafts the ranks make for it, to the
        frame.

        Args:
            sampled: the rows of `decodes`, followed by the rows whose prompts end.
            capacity: [num_sampled]: number of tokens that fit in each row's pages.
        """
        table, rows, num_samples = self._rows, decodes.rows, decodes.num_samples
        table.num_drafts[sampled] = 0
        if decodes.num_wanted and len(sampled):
            # The ranks make no more drafts than may be verified, and no more than fit in the row's pages.
            ends = table.num_computed[sampled] + table.num_unverified[sampled]
            room = np.minimum(table.max_total[sampled] - ends - 2, capacity - ends + 1)
            wanted = np.clip(room, 0, decodes.num_wanted)
            builder.add(num_wanted=wanted)
            table.num_drafts[sampled] = wanted
        if decodes.has_drafts:
            builder.add(num_samples=np.concatenate((num_samples, np.ones(len(sampled) - len(rows), np.int32))))
            # Either the ranks know where such a row continues, or the row waits for its result.
            table.ready[rows[(num_samples > 1) & ~table.drafts_on_device[rows]]] = False

    def _tokens(self, rows: Int32Array, num_samples: Int32Array) -> Int32Array:
        table, ids = self._rows, list[int]()
        lasts = table.tokens[rows, table.num_known[rows] - 1].tolist()
        for row, last, count in zip(rows.tolist(), lasts, num_samples.tolist(), strict=True):
            history = table.request(row).history
            assert history is not None, "a row that predicts has a history"
            ids += last, *history.drafts(count - 1)
        return np.array(ids, np.int32)

    def _chances(self, rows: Int32Array, most: int) -> npt.NDArray[np.float64]:
        """[len(rows), most]: probability that a draft and all drafts before it are right; 0 beyond a row's drafts.

        With n-gram drafts, the step in flight already samples the first predicted token, so these are the probabilities
        of the drafts after it.
        """
        table = self._rows
        histories = [table.request(row).history for row in rows.tolist()]
        ahead = self.has_drafts_on_device(rows)
        chances = [
            it.new_chances if is_ahead and isinstance(it, DraftHistory) else it.chances if it is not None else None
            for it, is_ahead in zip(histories, ahead.tolist(), strict=True)
        ]
        first, then = np.array([it or FIRST_RATES for it in chances], np.float64).T
        places = np.arange(most)
        is_behind = (table.in_flight[rows, None] > 0) & (not self._asks)
        room = table.max_total[rows] - table.num_computed[rows] - table.num_unverified[rows] - 2
        num_drafts = np.array([0 if it is None else it.num_drafts for it in histories])
        room = np.minimum(room, np.where(ahead, table.num_drafts[rows], num_drafts))
        if table.num_guided:
            guided = table.guided[rows]
            room[guided] = np.minimum(room[guided], self._guided.num_foreseen(rows[guided]))
        return first[:, None] * then[:, None] ** (places + is_behind) * (places < room[:, None])
