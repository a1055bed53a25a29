"""What a step's result brings: which rows stop, and the log probabilities in it, each for the request that asked."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cluster.messages import Prefilled, PromptLogprobs, TokenLogprobs
from cluster.scheduling.chunks import PromptScore
from cluster.scheduling.row_table import RowTable
from configs.errors import EngineError
from worker.protocol import Int32Array, StepResult


@dataclass(slots=True, eq=False)
class Launched:
    """What `retire` may know of a step: as it was at launch."""

    step: int
    rows: Int32Array
    """Every row the frame names."""
    sampled: Int32Array
    """[num_sampled] rows that get a token."""
    positions: Int32Array
    """[num_sampled] place of that token in its sequence."""
    is_last: npt.NDArray[np.bool_]
    """[num_sampled] the token uses up the request's length."""
    prefilled: list[int]
    """Rows among `sampled` whose prefill ends here."""
    scores: list[PromptScore]

    def check(self, result: StepResult, generation: int) -> None:
        """Raises EngineError unless `result` is this step's."""
        num_targets = sum(score.num for score in self.scores)
        got = (result.generation, result.step, len(result.tokens), len(result.target_logprobs))
        expected = (generation, self.step, len(self.sampled), num_targets)
        if got != expected:
            raise EngineError(f"result has (generation, step, tokens, targets) {got}, expected {expected}")


def find_stopped(
    table: RowTable, rows: Int32Array, tokens: Int32Array, eos_token_ids: tuple[int, ...]
) -> npt.NDArray[np.bool_]:
    """Which of `tokens` end their row."""
    stopped = np.zeros(len(rows), np.bool_)
    for eos in eos_token_ids:
        stopped |= tokens == eos
    stopped &= table.ends_on_eos[rows]
    asked = table.has_stop_ids[rows]
    if asked.any():
        for index in np.flatnonzero(asked):
            if int(tokens[index]) in table.request(int(rows[index])).stop_token_ids:
                stopped[index] = True
    return stopped


def take_prefilled(table: RowTable, rows: list[int], now: float) -> list[Prefilled]:
    """Those of `rows` that got the first token of their answer, `now`."""
    prefilled: list[Prefilled] = []
    for row in rows:
        request = table.request(row)
        if table.live[row] and not request.has_emitted:
            request.has_emitted = True
            admitted = request.admission_s
            assert admitted is not None, "a first token before an admission"
            queue_s, prefill_s = admitted - request.arrival_s, now - admitted
            prefilled.append(Prefilled(request.id, request.num_cached_tokens, queue_s, prefill_s))
    return prefilled


def token_logprobs(
    table: RowTable, sampled: Int32Array, live: npt.NDArray[np.bool_], result: StepResult
) -> list[TokenLogprobs]:
    """Of the live ones of the `sampled` rows that asked."""
    logprobs: list[TokenLogprobs] = []
    for index, logprob, top_ids, top_logprobs, asked in zip(
        result.logprob_rows.tolist(),
        result.logprobs.tolist(),
        result.top_ids.tolist(),
        result.top_logprobs.tolist(),
        result.asked_logprobs.tolist(),
        strict=True,
    ):
        request = table.request(int(sampled[index]))
        # The arrays are as wide as the widest request of the step.
        k, ids = request.sampling.num_logprobs, request.sampling.logprob_token_ids
        if live[index] and k >= 0:
            likeliest, their_logprobs = [*top_ids[:k], *ids], [*top_logprobs[:k], *asked[: len(ids)]]
            logprobs.append(TokenLogprobs(request.id, logprob, likeliest, their_logprobs))
    return logprobs


def prompt_logprobs(table: RowTable, scores: list[PromptScore], result: StepResult) -> list[PromptLogprobs]:
    """Of the rows of `scores` that are live; the next ones they want come after these."""
    taken: list[PromptLogprobs] = []
    offset = 0
    for row, first, num, k in scores:
        run = slice(offset, offset + num)
        offset += num
        if table.live[row]:
            request = table.request(row)
            request.next_target = first + num
            taken.append(
                PromptLogprobs(
                    request.id,
                    first,
                    result.target_logprobs[run].tobytes(),
                    # As wide as the widest request of the step.
                    result.target_top_ids[run, :k].tobytes(),
                    result.target_top_logprobs[run, :k].tobytes(),
                )
            )
    return taken
