"""Reads a step's result: its tokens, the ends of rows, and the log probabilities that requests want."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cluster.messages.engine import Miss, Prefilled, PromptLogprobs, TokenLogprobs
from cluster.scheduling.prefill_plan import PromptRun
from cluster.scheduling.row_table import RowTable
from configs.errors import EngineError
from worker.protocol import Int32Array, StepResult


@dataclass(slots=True, eq=False)
class Launched:
    """What `retire` needs to know about a step, stored at its launch."""

    step: int
    rows: Int32Array
    """All rows that the frame names."""
    starts: Int32Array
    """[num_rows]: lower bound of the number of tokens that each row had computed before. A row with unverified drafts
    may have computed more."""
    sampled: Int32Array
    """[num_sampled_rows]: rows for which the step samples tokens."""
    num_samples: Int32Array
    """[num_sampled_rows]: maximum number of tokens sampled for each row. Empty if it is 1 for all rows."""
    prefilled: list[int]
    """Rows whose prompts end in this step."""
    prompt_runs: list[PromptRun]
    item_rows: Int32Array
    """[num_items]: row of each scored item."""
    launched_s: float | None = None
    """Time of the launch. None if the step has prompts or nothing drafts, because then its time is not measured."""

    @property
    def num_inputs(self) -> int:
        """Number of input tokens. Only for a step without prompts."""
        return int(self.num_samples.sum()) if len(self.num_samples) else len(self.sampled)

    def check(self, result: StepResult, generation: int) -> None:
        """Raises EngineError if `result` belongs to another step or has a wrong number of tokens."""
        num_prompt_logprobs, counts = sum(run.num for run in self.prompt_runs), result.num_tokens
        num_tokens = int(counts.sum()) if len(counts) else len(self.sampled)
        got = (
            result.generation,
            result.step,
            len(result.tokens),
            len(result.prompt_logprobs),
            len(result.item_logprobs),
            len(result.drafts) or len(self.sampled),
        )
        expected = (generation, self.step, num_tokens, num_prompt_logprobs, len(self.item_rows), len(self.sampled))
        if got != expected:
            raise EngineError(f"result has (generation, step, tokens, targets, items, rows) {got}, expected {expected}")
        if len(counts) and (
            len(counts) != len(self.sampled)
            or counts.min() < 1
            or (counts > (self.num_samples if len(self.num_samples) else 1)).any()
        ):
            raise EngineError(f"result of step {self.step} has rows with {counts.tolist()} tokens, none or too many")


class StepTokens(NamedTuple):
    """A result's tokens. A token counts if its row is live and no earlier token of the step ended the row."""

    rows: Int32Array
    """[num_tokens], like all arrays here. The tokens of a row are consecutive."""
    positions: Int32Array
    tokens: Int32Array
    stopped: npt.NDArray[np.bool_]
    """Whether the token ends its row: EOS or a stop id."""
    is_last: npt.NDArray[np.bool_]
    """Whether the request reaches its maximum length with the token."""

    def where(self, valid: npt.NDArray[np.bool_]) -> StepTokens:
        """The tokens for which `valid` is True."""
        rows, positions, tokens, stopped, is_last = self
        return StepTokens(rows[valid], positions[valid], tokens[valid], stopped[valid], is_last[valid])

    @classmethod
    def of(
        cls, table: RowTable, launched: Launched, result: StepResult, eos_token_ids: tuple[int, ...]
    ) -> tuple[StepTokens, npt.NDArray[np.bool_]]:
        """All tokens of a result, and for each token whether it counts."""
        rows, tokens, counts = launched.sampled, result.tokens, result.num_tokens
        positions = table.num_known[rows]
        if len(counts):
            firsts = np.cumsum(counts, dtype=np.int32) - counts
            rows = np.repeat(rows, counts)
            positions = np.repeat(positions - firsts, counts) + np.arange(len(tokens), dtype=np.int32)
        stopped, is_last = find_stopped(table, rows, tokens, eos_token_ids), positions + 1 >= table.max_total[rows]
        valid = table.live[rows]
        if len(counts):
            ends = stopped | is_last | (tokens < 0)
            num_ended: npt.NDArray[np.int64] = np.cumsum(ends) - ends  # number of ends before each token
            valid &= num_ended == np.repeat(num_ended[firsts], counts)
        return cls(rows, positions, tokens, stopped, is_last), valid

    def broken(
        self, table: RowTable, launched: Launched, result: StepResult, valid: npt.NDArray[np.bool_]
    ) -> list[int]:
        """The live rows with a NaN: with a negative id for a token that counts, or NaN as log probability."""
        found: list[npt.NDArray[np.integer]] = []
        if len(self.tokens) and self.tokens.min() < 0:
            found.append(self.rows[valid & (self.tokens < 0)])
        if len(result.logprob_rows):
            found.append(self.rows[result.logprob_rows[np.isnan(result.logprobs)]])
        if launched.prompt_runs:
            rows, counts = np.array([(run.row, run.num) for run in launched.prompt_runs]).T
            found.append(np.repeat(rows, counts)[np.isnan(result.prompt_logprobs)])
        if len(launched.item_rows):
            found.append(launched.item_rows[np.isnan(result.item_logprobs).any(axis=1)])
        return [row for row in np.unique(np.concatenate(found)).tolist() if table.live[row]] if found else []

    def write(self, table: RowTable, launched: Launched) -> None:
        """Writes the tokens, which all count, to the table. For rows with verified drafts, also corrects `num_computed`
        and `num_unverified` and makes the rows ready."""
        rows, positions = self.rows, self.positions
        num_kept = np.bincount(rows, minlength=len(table.live)) if len(launched.num_samples) else None
        table.tokens[rows, positions] = self.tokens
        if len(launched.num_samples):
            # With repeated indices, numpy need not write the last value, so each row's last index is chosen first.
            is_end = np.ones(len(rows), np.bool_)
            np.not_equal(rows[1:], rows[:-1], out=is_end[:-1])
            rows, positions = rows[is_end], positions[is_end]
        table.num_known[rows] = positions + 1
        if num_kept is not None:
            at = np.flatnonzero((launched.num_samples > 1) & table.live[launched.sampled])
            rows = launched.sampled[at]
            table.num_computed[rows] += num_kept[rows] - 1
            table.num_unverified[rows] -= launched.num_samples[at] - 1
            table.ready[rows] = ~table.guided[rows] & ~table.may_end(rows)


def find_stopped(
    table: RowTable, rows: Int32Array, tokens: Int32Array, eos_token_ids: tuple[int, ...]
) -> npt.NDArray[np.bool_]:
    """For each of `tokens`, whether it is an EOS or stop id that ends its row."""
    stopped = np.zeros(len(rows), np.bool_)
    for eos in eos_token_ids:
        stopped |= tokens == eos
    stopped &= table.ends_on_eos[rows]
    requested = table.has_stop_ids[rows]
    if requested.any():
        for index in np.flatnonzero(requested):
            if int(tokens[index]) in table.request(int(rows[index])).stop_token_ids:
                stopped[index] = True
    return stopped


def take_prefilled(table: RowTable, rows: list[int], now: float) -> list[Prefilled]:
    """Returns a `Prefilled` for each of `rows` with a request that got its first token at time `now`. Marks these
    requests, so that each is returned once."""
    prefilled: list[Prefilled] = []
    for row in rows:
        if table.live[row] and not (request := table.request(row)).has_emitted:
            request.has_emitted = True
            admitted = request.admission_s
            assert admitted is not None, "a first token before an admission"
            queue_s, prefill_s = admitted - request.arrival_s, now - admitted
            missed: dict[Miss, int] = {why: num for why, num in request.missed.items() if why is not Miss.OTHER_SALT}
            prefilled.append(Prefilled(request.id, request.num_cached_tokens, queue_s, prefill_s, missed))
    return prefilled


def token_logprobs(
    table: RowTable, rows: Int32Array, valid: npt.NDArray[np.bool_], item_rows: Int32Array, result: StepResult
) -> list[TokenLogprobs]:
    """Log probabilities of the tokens that count, for the requests that want them. For a scoring request, they are
    those of `logprob_token_ids` after each item."""
    logprobs: list[TokenLogprobs] = []
    for place, (index, logprob) in enumerate(zip(result.logprob_rows.tolist(), result.logprobs.tolist(), strict=True)):
        if not valid[index]:
            continue
        request = table.request(int(rows[index]))
        # The arrays are as wide as the widest request of the step.
        k, requested = request.sampling.num_logprobs, request.sampling.logprob_token_ids
        ids = array("i", requested).tobytes()
        if request.num_item_tokens:
            after = result.item_logprobs[item_rows == request.row, : len(requested)]
            logprobs.append(TokenLogprobs(request.id, logprob, ids * len(after), after.tobytes()))
        elif k >= 0:
            top_ids = result.top_ids[place, :k].tobytes() + ids
            of_requested = result.requested_logprobs[place, : len(requested)].tobytes()
            top_logprobs = result.top_logprobs[place, :k].tobytes() + of_requested
            logprobs.append(TokenLogprobs(request.id, logprob, top_ids, top_logprobs))
    return logprobs


def prompt_logprobs(table: RowTable, runs: list[PromptRun], result: StepResult) -> list[PromptLogprobs]:
    """Prompt log probabilities for the live rows of `runs`. Each request's next run begins after them."""
    taken: list[PromptLogprobs] = []
    offset = 0
    for row, first, num, k in runs:
        run = slice(offset, offset + num)
        offset += num
        if table.live[row]:
            request = table.request(row)
            request.next_prompt_logprob = first + num
            taken.append(
                PromptLogprobs(
                    request.id,
                    first,
                    result.prompt_logprobs[run].tobytes(),
                    # The result is as wide as the widest request of the step.
                    result.prompt_top_ids[run, :k].tobytes(),
                    result.prompt_top_logprobs[run, :k].tobytes(),
                )
            )
    return taken
