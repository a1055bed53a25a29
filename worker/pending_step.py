"""A launched step: its result is there at once on CPU, and some time later on CUDA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from worker.protocol import StepFrame, StepResult


class PendingStep(Protocol):
    """One launched step."""

    def is_done(self) -> bool:
        """Whether `result` would return without waiting."""

    def result(self) -> StepResult:
        """The step's result; waits for it."""


class StepRunner(Protocol):
    """Runs the steps of one rank, in order."""

    def launch(self, frame: StepFrame) -> PendingStep:
        """Starts the step; the next one may be launched before its result is taken.

        Raises:
            EngineError: the frame does not fit this rank's tables. Nothing has changed then.
        """


@dataclass(frozen=True, slots=True)
class CompletedStep:
    """A step that was run whole by `launch`."""

    outcome: StepResult

    def is_done(self) -> bool:
        return True

    def result(self) -> StepResult:
        return self.outcome
