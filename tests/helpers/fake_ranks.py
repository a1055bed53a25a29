"""Ranks that a coordinator drives without any process, in the place of a `RankGroup`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from configs.errors import LockstepError
from parallel.step_cost import StepCost


class Pool(NamedTuple):
    """Sizes of the pool that ranks have."""

    num_pages: int
    num_window_pages: int | None = None
    num_states: int | None = None


class FakeRanks:
    """Both ends of their channel; whoever inherits sends and receives."""

    def __init__(self, cost: StepCost) -> None:
        self.frames: Any = self
        self.results: Any = self
        self.cost = cost
        self.size = 1
        self.pool = Pool(64)
        self.reason_never: str | None = None
        self.devices: list[str] = []
        self.pids: dict[int, int] = {}
        self.ages: list[float] = []
        self.stuck_s: list[float] = []
        """How long steps ran whose ranks were asked what they do."""
        self.replace: Callable[[int, Any], FakeRanks] | None = None
        """Does what `replace_ranks` is asked for."""

    def heartbeat_ages(self) -> list[float]:
        return self.ages

    def log_stacks(self, step_age_s: float) -> None:
        self.stuck_s.append(step_age_s)

    def keeps_kv(self, failure: LockstepError) -> bool:
        return False

    def takes_kv(self, old: FakeRanks) -> bool:
        return False

    def replace_ranks(self, generation: int, how: LockstepError | FakeRanks, kept_pages: Any = None) -> FakeRanks:
        assert self.replace is not None, "nobody replaces these"
        return self.replace(generation, how)

    def fail(self, reason: str) -> None:
        pass

    def close(self) -> None:
        pass
