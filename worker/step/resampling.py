"""Sampling of rows with filters, adjustments, log probabilities, or drafts to verify."""

from __future__ import annotations

import numpy as np

from worker.sampling.drafts import StepDrafts
from worker.sampling.sampler import Sampler
from worker.step.step import Step, StepOutput
from worker.step.step_inputs import StepInputs


class Resampling:
    """Samples rows with filters or adjustments again, computes log probabilities, and verifies drafts. This is queued
    after the step's own kernels and before the next step reads the tokens."""

    def __init__(self, sampler: Sampler, inputs: StepInputs) -> None:
        self._sampler = sampler
        self._inputs = inputs

    def is_needed(self, step: Step) -> bool:
        """Whether the step has rows to sample again, requests log probabilities, or verifies drafts."""
        return bool(len(step.sampled)) and (bool(len(step.resampled.indices)) or step.verifies_drafts)

    def add(self, step: Step, output: StepOutput) -> None:
        """Samples tokens again where necessary, computes log probabilities, and finds which drafts are accepted."""
        rows, positions = self._inputs.sampled_rows(step.shape)
        resampled, drafts = step.resampled, None
        if step.verifies_drafts:
            drafts = StepDrafts.of(step.samples_per_row, self._inputs.inputs_after_samples(step.shape))
        if len(resampled.indices):
            output.logprobs = self._sampler.resample(output.logits, rows, positions, output.tokens, resampled, drafts)
        rows = rows.long()
        if drafts is not None:
            output.accepted = drafts.accepted(output.tokens)
            resampled, _ = resampled.by_index_in_row(drafts)
            # Tokens that are not their row's last go to row 0 (padding)
            # Only a row's last token is stored for the row. All others go to row 0, which is padding.
            rows = rows * drafts.lasts(output.tokens, output.accepted)
        output.logprob_tokens = resampled.indices[resampled.num_logprobs >= 0].astype(np.int32)
        self._inputs.take(rows, output.tokens, positions)
