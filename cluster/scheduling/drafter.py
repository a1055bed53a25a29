"""Decides how many drafts a step verifies, of which rows: as many as make rows go fastest, in the geometric mean.

Of one row, and of rows alike, that is the most tokens a second; of others it is not what a few rows gain and all the
others pay for with longer steps.

A row with drafts from here has to know its last token, so it waits for the step in flight. Ranks that draft know
theirs, and their steps overlap. Whether drafts are worth the wait, and each its time, follows from how often the rows'
predictions were right (`NgramHistory`, `DraftHistory`) and from what steps took (`StepTimes`). Where they are not,
which they never are where nothing is predicted, steps overlap as without drafts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cluster.messages.engine import Drafted
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
# Until steps of several sizes were seen, each token of one is taken to add this share of what an empty one takes. It is
# little: a step with drafts shows what they cost, and steps that are never tried show nothing.
_TOKEN_SHARE = 0.01
# The weight of that: tokens of difference, squared.
_PRIOR_WEIGHT = 4.0
# A step that took longer than so many times what is expected was held up.
_MOST_TIMES = 3.0
_EXTRA_WEIGHT = 0.1
# The extra time of steps with drafts is forgotten while there are none, so that they are tried again.
_EXTRA_FORGET = 0.999
# Drafts have to make rows so much faster: it takes the scheduler some time, and estimates are not exact.
_LEAST_GAIN = 0.03
# Last tokens that are compared, unless more have to be alike.
_MOST_COMPARED = 4
# Steps, of which one makes drafts where none are worth verifying: a draft takes some percent of a step.
_ASK_EVERY = 32
# Steps without drafts after which the ranks' head rests, and for how many at first and at most. A step with drafts is
# worth the head's time in so many without: 3 % of each.
_MOST_VAIN = 2 * _ASK_EVERY
_WORTH = 8
_FIRST_REST = 512
_LONGEST_REST = 8192
# Tokens of a prompt that are looked at in one step: 0.5 ms.
_MAX_AT_ONCE = 1024


class StepTimes:
    """The seconds that a step of decodes takes: a line over its tokens, fitted to those that were seen and forgetting
    them, and what it takes more with drafts, the wait for the step before included."""

    def __init__(self) -> None:
        self._weight = self._tokens = self._seconds = self._squares = self._products = 0.0
        self._extra = 0.0
        self._num_drafted = 0  # steps with drafts
        self._slope: float | None = None  # the last one: steps that are all of one size say nothing of it

    def took(self, num_tokens: int, seconds: float, *, has_drafts: bool) -> None:
        """A step has ended."""
        if self._weight:
            expected = float(self.of(num_tokens, has_drafts=has_drafts))
            seconds = min(seconds, _MOST_TIMES * expected)
            if has_drafts:
                # The first ones count for more, or the line would take their wait to be that of their tokens.
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
        """Seconds of steps with so many tokens; in units of an empty step before any was seen."""
        sizes = np.asarray(num_tokens, np.float64)
        if not self._seconds:
            return 1 + _TOKEN_SHARE * sizes
        size, mean = self._tokens / self._weight, self._seconds / self._weight
        line = np.maximum(mean + (self._slope or 0.0) * (sizes - size), mean * 0.1)
        return line + (self._extra if has_drafts else 0.0)

    def _fitted(self) -> float:
        """Seconds of one more token."""
        size, mean = self._tokens / self._weight, self._seconds / self._weight
        variance = self._squares - self._weight * size * size
        covariance = self._products - self._weight * size * mean
        prior = mean * _TOKEN_SHARE / (1 + _TOKEN_SHARE * size) if self._slope is None else self._slope
        return max(0.0, (covariance + _PRIOR_WEIGHT * prior) / (variance + _PRIOR_WEIGHT))


@dataclass(slots=True)
class DraftCounts:
    """Drafts that steps verified, since the start."""

    num_drafted: int = 0
    num_accepted: int = 0
    """Drafts among them that were right."""


class Drafter:
    """The drafts of running requests. Writes `RowTable.predicted`, and keeps a history with each request."""

    def __init__(self, limits: SchedulerLimits, rows: RowTable, guided: GuidedRows, counts: DraftCounts) -> None:
        self._limits = limits
        self._rows = rows
        self._guided = guided
        self._counts = counts
        self._retired_s = 0.0  # when the last step retired
        self._most = limits.speculation.max_sampled(limits.max_num_seqs) - limits.max_num_seqs
        self.times = StepTimes()
        self._asks = limits.speculation.is_by_ranks
        self._num_chosen = limits.speculation.num_drafts  # most of a row, when they were chosen last
        self._num_unasked = 0  # steps since the ranks were asked for drafts
        self._num_vain = 0  # steps without drafts that none with them made up for, since the end of the last rest
        self._rest = _FIRST_REST  # steps of the next rest, or of this one
        self._resting_rows = 0  # rows of the step before this rest

    def learn(self, launched: Launched, result: StepResult, rows: Int32Array, now: float) -> list[Drafted]:
        """Takes in how long a step took and what became of its drafts.

        Args:
            rows: live rows that got tokens from it, one entry for each token.
            now: when it retired.

        Returns:
            The drafts of live rows, and how many were right.
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
        if not len(at):
            return []
        at = at[table.live[launched.sampled[at]]]
        of = launched.sampled[at]
        # A stop may have left out some that were right.
        columns = table.ids[of], launched.num_samples[at] - 1, np.minimum(result.num_tokens[at] - 1, num_kept[of])
        self._counts.num_drafted += int(columns[1].sum())
        self._counts.num_accepted += int(columns[2].sum())
        return [Drafted(*numbers) for numbers in zip(*(column.tolist() for column in columns), strict=True)]

    def take(self, rows: Int32Array) -> None:
        """The live `rows`, distinct, have got tokens."""
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
        """The ranks made `drafts` [len(rows), most] of what follows the tokens that live `rows` have; -1 is none."""
        table, self._num_unasked = self._rows, 0
        for row, of_row, count in zip(rows.tolist(), drafts.tolist(), (drafts >= 0).sum(axis=1).tolist(), strict=True):
            history = table.request(row).history
            if count and isinstance(history, DraftHistory):
                history.bring(of_row[:count])
                table.predicted[row] = True

    def _num_wanted(self) -> int:
        """How many drafts the ranks should make of each row in the next step: those that the last choice took and one
        more, so that it is seen whether they are worth it, or now and then all."""
        most = self._limits.speculation.num_drafts
        if not self._asks or self.rests or (not self._num_chosen and self._num_unasked < _ASK_EVERY):
            return 0
        return min(self._num_chosen + 1, most) if self._num_chosen else most

    @property
    def rests(self) -> bool:
        """Whether steps of decodes do without the ranks' head: it would take its time of them, and drafts have long
        been worth verifying too seldom. Prompts go through it at any time, so that rows which begin after a rest lack
        nothing; those that went on meanwhile may have worse drafts."""
        return self._asks and self._num_vain >= _MOST_VAIN

    def launch(self, decodes: Decodes) -> FrameKind:
        """Counts a step of decodes alone, which is about to be launched; returns its kind."""
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
        elif 2 * num_rows <= self._resting_rows:  # drafts may be worth it for fewer
            self._num_vain, self._rest = 0, _FIRST_REST
        elif self._num_vain >= _MOST_VAIN + self._rest:
            self._num_vain, self._rest = 0, min(2 * self._rest, _LONGEST_REST)
        return kind

    def choose(self, rows: Int32Array, budget: int) -> Decodes | None:
        """The ready `rows`, with the drafts that they verify in a step of at most `budget` tokens. None: drafts are
        worth waiting for the step in flight."""
        num_samples = self._num_samples(rows, budget)
        return None if num_samples is None else Decodes(rows, num_samples, self._num_wanted())

    def _num_samples(self, rows: Int32Array, budget: int) -> Int32Array | None:
        """[len(rows)]: inputs of each row; None as in `choose`."""
        table = self._rows
        num_samples = np.ones(len(rows), np.int32)
        at = np.flatnonzero(table.predicted[rows] | self.has_drafts_on_device(rows))
        if not len(at):
            return num_samples
        most = min(self._limits.speculation.num_drafts, int((table.max_total - table.num_computed)[rows[at]].max()) - 2)
        chances = self._chances(rows[at], max(most, 0))
        # Each draft multiplies the tokens of its row, and the time of all.
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
        """[len(rows)] whether the ranks have drafts behind the step in flight, which nobody here knows yet."""
        table = self._rows
        is_ahead: npt.NDArray[np.bool_] = (
            table.drafts_on_device[rows] & (table.in_flight[rows] > 0) & (table.num_drafts[rows] > 0)
        )
        return is_ahead

    def add_tokens(self, decodes: Decodes, builder: FrameBuilder) -> Int32Array:
        """Adds the inputs of rows whose drafts are known here, one row after the other: the last token of each row, and
        its drafts. Returns flags [num_rows], HAS_TOKENS of these rows."""
        known = (decodes.num_samples > 1) & ~self.has_drafts_on_device(decodes.rows)
        if known.any():
            builder.add(token_ids=self._tokens(decodes.rows[known], decodes.num_samples[known]))
        return known * np.int32(RowFlag.HAS_TOKENS)

    def add(self, decodes: Decodes, sampled: Int32Array, capacity: Int32Array, builder: FrameBuilder) -> None:
        """Adds how many inputs of the rows `sampled` are sampled, and how many drafts the ranks are to make of each.

        Args:
            sampled: the rows of `decodes`, and then those whose prompts end.
            capacity: [num_sampled]: tokens that each has pages for.
        """
        table, rows, num_samples = self._rows, decodes.rows, decodes.num_samples
        table.num_drafts[sampled] = 0
        if decodes.num_wanted and len(sampled):
            # No more than may be verified, nor than there are pages for.
            ends = table.num_computed[sampled] + table.num_unverified[sampled]
            room = np.minimum(table.max_total[sampled] - ends - 2, capacity - ends + 1)
            wanted = np.clip(room, 0, decodes.num_wanted)
            builder.add(num_wanted=wanted)
            table.num_drafts[sampled] = wanted
        if decodes.has_drafts:
            builder.add(num_samples=np.concatenate((num_samples, np.ones(len(sampled) - len(rows), np.int32))))
            # The ranks know where such a row goes on, or its result will say so.
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
        """[len(rows), most] how likely each draft is right, with all before it; 0 past a row's length. With
        n-gram drafts a step in flight already samples the first predicted token: the chances are then of the drafts
        after that token."""
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
