"""A step computed once from its frame, and the output that it leaves on the device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from attention.step_shape import StepShape
from worker.protocol import FrameKind, Int32Array, StepFrame
from worker.sampling.logprobs import LogprobTensors
from worker.sampling.sampler import NONE_RESAMPLED, ResampledRows

Int64Array = npt.NDArray[np.int64]


@dataclass(slots=True, eq=False)
class Step:
    """One step of a rank. All arrays are on the host."""

    frame: StepFrame
    samples_per_row: Int32Array
    """[num_rows]: number of sampled inputs of each of the frame's rows."""
    sampled: Int64Array
    """[num_sampled]: index in the frame of each sampled input's row."""
    num_after: Int64Array | int
    """[num_sampled]: number of inputs that follow each sampled input in its row. The int 0 if it is 0 for all."""
    shape: StepShape
    """The step's own shape, without padding."""
    resampled: ResampledRows = NONE_RESAMPLED
    """Sampled inputs that need more than the plain token. The sampler finds them once it has the frame's parameters."""

    @classmethod
    def of(cls, frame: StepFrame) -> Step:
        """The step of a frame, which may be unchecked."""
        per_row = frame.samples_per_row
        sampled: Int64Array = np.flatnonzero(per_row)
        num_after: Int64Array | int = 0
        if len(frame.num_samples):
            sampled = np.repeat(np.arange(len(per_row)), per_row)
            num_after = np.repeat(np.cumsum(per_row, dtype=np.int64), per_row) - 1 - np.arange(len(sampled))
        shape = StepShape(
            num_tokens=int(frame.lens.sum()),
            num_rows=len(frame.rows),
            num_sampled=len(sampled),
            max_seq_len=int((frame.starts + frame.lens).max(initial=0)),
        )
        return cls(frame, per_row, sampled, num_after, shape)

    @property
    def is_scored(self) -> bool:
        """Whether log probabilities of prompt tokens or after scored items are requested."""
        return bool(len(self.frame.prompt_targets) or len(self.frame.items))

    @property
    def verifies_drafts(self) -> bool:
        """Whether a row may get several tokens."""
        return bool(len(self.frame.num_samples))

    @property
    def makes_drafts(self) -> bool:
        """Whether the draft head reads the step's tokens."""
        return self.frame.kind is not FrameKind.STEP_WITHOUT_DRAFT_HEAD

    @property
    def sampled_rows(self) -> Int32Array:
        """[num_sampled]: row in the request table of each sampled input."""
        rows: Int32Array = self.frame.rows[self.sampled]
        return rows

    @property
    def sampled_positions(self) -> npt.NDArray[np.integer]:
        """[num_sampled]: position, in its sequence, of the token sampled after each sampled input."""
        positions: npt.NDArray[np.integer] = (self.frame.starts + self.frame.lens)[self.sampled] - self.num_after
        return positions

    @property
    def sampled_tokens(self) -> Int64Array:
        """[num_sampled]: index of each sampled input among the step's tokens."""
        tokens: Int64Array = np.cumsum(self.frame.lens, dtype=np.int64)[self.sampled] - 1 - self.num_after
        return tokens


@dataclass(slots=True, eq=False)
class StepOutput:
    """The output of a step so far. Tensors are on the device."""

    tokens: torch.Tensor
    """[num_sampled] int64: the sampled tokens; -1 for a row with a NaN in its logits."""
    logits: torch.Tensor
    """[num_sampled, this rank's columns] fp32: logits of this rank's part of the vocabulary."""
    captured: StepShape | None
    """Shape of the CUDA graph that the step replayed. None if the step ran eagerly."""
    head_inputs: torch.Tensor | None
    """The draft head's input for the step's tokens. None without a draft head."""
    logprob_tokens: Int32Array = field(default_factory=lambda: np.empty(0, np.int32))
    """Indices of the sampled tokens with requested log probabilities, on the host."""
    logprobs: LogprobTensors | None = None
    """Log probabilities of `logprob_tokens`. None if none were requested."""
    prompt_logprobs: LogprobTensors | None = None
    """Log probabilities of the frame's prompt targets and then of its items. None if the frame has neither."""
    accepted: torch.Tensor | None = None
    """[num_sampled] bool: tokens that count, because the drafts before them are accepted. If None, all tokens count."""
    drafts: torch.Tensor | None = None
    """[num_sampled_rows, n] int64: the tokens that the draft head expects after each row. n is the largest number that
    a row requested. None if no row requested any."""


class Extra(Protocol):
    """Work that only some steps need, after their plain tokens are sampled."""

    def is_needed(self, step: Step) -> bool:
        """Whether `add` must be called for the step."""

    def add(self, step: Step, output: StepOutput) -> None:
        """Queues the work after the step's own, and writes its results to `output`."""
