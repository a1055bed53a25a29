"""A launched step. Its result is available at once on CPU, and some time later on CUDA."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from parallel.collectives.group import TensorParallelGroup
from worker.protocol import Int32Array, StepResult
from worker.step.step import Step, StepOutput


class PendingStep:
    """The results of a step, while they are copied to the host. Created after the step's launches, on their stream.

    Args:
        step: the launched step.
        output: all results of the step, still on the device.
    """

    def __init__(self, group: TensorParallelGroup, step: Step, output: StepOutput) -> None:
        frame = step.frame
        self._group = group
        self._generation, self._step = frame.generation, frame.step
        self._num_targets = len(frame.prompt_targets)
        # A non-blocking copy to the host goes to pinned memory. The event marks when that memory is filled.
        self._tokens = output.tokens.to("cpu", non_blocking=True)
        self._accepted = None if output.accepted is None else output.accepted.to("cpu", non_blocking=True)
        self._drafts = None if output.drafts is None else output.drafts.to("cpu", non_blocking=True)
        self._num_samples, self._num_wanted = frame.num_samples, frame.num_wanted
        self._logprob_tokens = output.logprob_tokens
        self._logprobs = None if output.logprobs is None else output.logprobs.to_host()
        self._prompt_logprobs = None if output.prompt_logprobs is None else output.prompt_logprobs.to_host()
        self._done: Any = None  # torch does not annotate its event; None if all results are already on the host
        if group.device.type == "cuda":
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record()

    def is_done(self) -> bool:
        """Whether `result` would return without waiting."""
        return self._done is None or bool(self._done.query())

    def result(self) -> StepResult:
        """Waits for the step's result and returns it.

        Raises:
            EngineError: a collective of the step failed, or the group was aborted meanwhile.
        """
        if self._done is not None:
            self._done.synchronize()
            # An aborted all-reduce continues with incomplete data, so its tokens must not be returned.
            self._group.check_alive()
        result = StepResult(self._generation, self._step, tokens=self._tokens.numpy().astype(np.int32))
        if self._drafts is not None:
            is_wanted = np.arange(self._drafts.shape[1]) < self._num_wanted[:, None]
            result.drafts = np.where(is_wanted, self._drafts.numpy(), -1).astype(np.int32)
        if self._logprobs is not None:
            result.logprob_rows = self._logprob_tokens
            result.logprobs = self._logprobs.logprobs.numpy()
            result.top_ids = self._logprobs.top_ids.numpy().astype(np.int32)
            result.top_logprobs = self._logprobs.top_logprobs.numpy()
            result.requested_logprobs = self._logprobs.requested_logprobs.numpy()
        if self._prompt_logprobs is not None:
            num_targets = self._num_targets
            result.prompt_logprobs = self._prompt_logprobs.logprobs.numpy()[:num_targets]
            result.prompt_top_ids = self._prompt_logprobs.top_ids.numpy()[:num_targets].astype(np.int32)
            result.prompt_top_logprobs = self._prompt_logprobs.top_logprobs.numpy()[:num_targets]
            result.item_logprobs = self._prompt_logprobs.requested_logprobs.numpy()[num_targets:]
        if self._accepted is not None:
            _keep(result, self._accepted.numpy(), self._num_samples)
        return result


def _keep(result: StepResult, accepted: npt.NDArray[np.bool_], num_samples: Int32Array) -> None:
    """Removes from each row's `num_samples` tokens those that do not count, and sets the number that remains."""
    result.tokens = result.tokens[accepted]
    result.num_tokens = np.add.reduceat(accepted, np.cumsum(num_samples) - num_samples, dtype=np.int32)
    if not len(result.logprob_rows):
        return
    which = result.logprob_rows
    order = np.argsort(which)
    order = order[accepted[which[order]]]
    result.logprob_rows = (np.cumsum(accepted, dtype=np.int32) - 1)[which[order]]
    for name in ("logprobs", "top_ids", "top_logprobs", "requested_logprobs"):
        setattr(result, name, getattr(result, name)[order])
