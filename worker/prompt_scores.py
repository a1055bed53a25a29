"""Log probabilities of prompt tokens: which hidden states a step needs for them, and how they get into its result.

A step's targets are the tokens after some of its inputs (`StepFrame.scores`). Their hidden states run through the last
layer and the LM head beside those of the rows that are sampled, the latter a chunk of rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from worker.protocol import RowFlag, StepFrame, StepResult
from worker.sampler import likeliest

CHUNK_ROWS = 128
"""Targets whose logits are there at a time."""


class WantedTokens(NamedTuple):
    """Inputs of a step whose hidden states are wanted. [n] int64 each, on the host."""

    tokens: npt.NDArray[np.int64]
    """Places in the batch, ascending."""
    sampled: npt.NDArray[np.int64]
    """[num_sampled]: index into `tokens` of each sampled row's last input, in row order."""
    scored: npt.NDArray[np.int64]
    """[num_targets]: index into `tokens` of the input before each target."""

    @classmethod
    def of(cls, frame: StepFrame) -> WantedTokens:
        """Of a checked frame."""
        ends = np.cumsum(frame.lens, dtype=np.int64)
        sampled = ends[(frame.flags & RowFlag.SAMPLE) != 0] - 1
        at = np.flatnonzero(np.isin(frame.rows, frame.scores["row"]))  # records are in the order of rows
        counts = frame.scores["num"].astype(np.int64)
        first_inputs = (ends - frame.lens)[at] + frame.scores["start"] - frame.starts[at]
        scored = np.repeat(first_inputs - (np.cumsum(counts) - counts), counts) + np.arange(len(frame.targets))
        tokens = np.union1d(sampled, scored)
        return cls(tokens, np.searchsorted(tokens, sampled), np.searchsorted(tokens, scored))


class TargetScores(NamedTuple):
    """Log probabilities of a step's targets."""

    logprobs: torch.Tensor
    """[num_targets] fp32."""
    top_ids: torch.Tensor
    """[num_targets, k] int64: likeliest tokens, descending, equal ones by id."""
    top_logprobs: torch.Tensor
    """[num_targets, k] fp32."""

    def to_host(self) -> TargetScores:
        """Queues the copies; on CPU the tensors themselves."""
        return TargetScores(*(part.to("cpu", non_blocking=True) for part in self))

    def put_into(self, result: StepResult) -> None:
        """Of tensors on the host that are there."""
        result.target_logprobs = self.logprobs.numpy()
        result.target_top_ids = self.top_ids.numpy().astype(np.int32)
        result.target_top_logprobs = self.top_logprobs.numpy()


def score_in_chunks(
    hidden: torch.Tensor,
    targets: torch.Tensor,
    num_rows: int,
    score: Callable[[torch.Tensor, torch.Tensor], TargetScores],
) -> TargetScores:
    """Scores of all `targets` [num_targets], at least one, by `score` of at most `num_rows` at a time.

    Args:
        hidden: [num_targets, hidden_size]: the state before each.
    """
    chunks = [
        score(hidden[start : start + num_rows], targets[start : start + num_rows])
        for start in range(0, len(targets), num_rows)
    ]
    return TargetScores(*map(torch.cat, zip(*chunks, strict=True)))


def target_scores(logits: torch.Tensor, targets: torch.Tensor, k: int) -> TargetScores:
    """Scores of `targets` [num_rows] int64 by whole rows of logits [num_rows, vocab_size] fp32."""
    logprobs = torch.log_softmax(logits, dim=-1)
    top_ids = likeliest(logprobs, k)
    own = logprobs.gather(1, targets.unsqueeze(1)).squeeze(1)
    return TargetScores(own, top_ids, logprobs.gather(1, top_ids))
