"""A rank's frames from a scheduler in its own process, for benchmarks without Ray and HTTP."""

from __future__ import annotations

from cluster.scheduling.limits import SchedulerLimits
from cluster.scheduling.scheduler import Scheduler
from worker.protocol import FrameKind, StepFrame


class ScheduledFrames:
    """A FrameSource over a scheduler of its own, until nothing is left to do."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._scheduler = Scheduler(limits)

    def recv(self, timeout_s: float) -> bytes:
        """The next frame; after the last one, the end."""
        return self.poll() or StepFrame(1, self._scheduler.last_step + 1, kind=FrameKind.CLOSE).encode()

    def poll(self) -> bytes | None:
        """The next frame, if one may be launched."""
        frame = self._scheduler.next_step()
        return None if frame is None else frame.encode()
