"""A launched step: its result is there at once on CPU, and some time later on CUDA."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from parallel.group import TensorParallelGroup
from worker.logprobs import LogprobTensors
from worker.protocol import Int32Array, StepFrame, StepResult


class PendingStep:
    """The results of a step, on their way to the host. Made behind the step's launches, on their stream.

    Args:
        tokens: [num_sampled] int64, device; None when no row was sampled.
        logprob_rows: indices of the sampled rows that asked for logprobs.
        logprobs: theirs; None when there are none.
        prompt_logprobs: of the frame's prompt targets and then of its items; None when it has neither.
    """

    def __init__(
        self,
        group: TensorParallelGroup,
        frame: StepFrame,
        tokens: torch.Tensor | None,
        logprob_rows: Int32Array,
        logprobs: LogprobTensors | None,
        prompt_logprobs: LogprobTensors | None,
    ) -> None:
        self._group = group
        self._generation, self._step = frame.generation, frame.step
        self._num_targets = len(frame.prompt_targets)
        # A non-blocking copy to the host lands in pinned memory, which the event says is filled.
        self._tokens = None if tokens is None else tokens.to("cpu", non_blocking=True)
        self._logprob_rows = logprob_rows
        self._logprobs = None if logprobs is None else logprobs.to_host()
        self._prompt_logprobs = None if prompt_logprobs is None else prompt_logprobs.to_host()
        self._done: Any = None  # torch does not annotate its event; None: all of it is there
        if group.device.type == "cuda":
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record()

    def is_done(self) -> bool:
        """Whether `result` would return without waiting."""
        return self._done is None or bool(self._done.query())

    def result(self) -> StepResult:
        """The step's result; waits for it.

        Raises:
            EngineError: a collective of the step failed, or the group was aborted meanwhile.
        """
        if self._done is not None:
            self._done.synchronize()
            # A sum whose wait was ended goes on with what there is: those tokens must not get out.
            self._group.check_alive()
        tokens = np.empty(0, np.int32) if self._tokens is None else self._tokens.numpy().astype(np.int32)
        result = StepResult(self._generation, self._step, tokens=tokens)
        if self._logprobs is not None:
            result.logprob_rows = self._logprob_rows
            result.logprobs = self._logprobs.logprobs.numpy()
            result.top_ids = self._logprobs.top_ids.numpy().astype(np.int32)
            result.top_logprobs = self._logprobs.top_logprobs.numpy()
            result.asked_logprobs = self._logprobs.asked_logprobs.numpy()
        if self._prompt_logprobs is not None:
            num_targets = self._num_targets
            result.prompt_logprobs = self._prompt_logprobs.logprobs.numpy()[:num_targets]
            result.prompt_top_ids = self._prompt_logprobs.top_ids.numpy()[:num_targets].astype(np.int32)
            result.prompt_top_logprobs = self._prompt_logprobs.top_logprobs.numpy()[:num_targets]
            result.item_logprobs = self._prompt_logprobs.asked_logprobs.numpy()[num_targets:]
        return result
