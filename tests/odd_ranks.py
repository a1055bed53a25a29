"""A coordinator whose ranks are of a class of the test's own: which fails, hangs or is slow where the test wants it."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.engine.coordinator_actor import CoordinatorActor, EngineFacts
from cluster.ranks.rank_actor import RankActor


class OddCoordinator(CoordinatorActor):
    """Starts ranks of the class `ranks`, in the process that it runs in alone."""

    ranks: type[RankActor]

    def start(self, placement_group: Any) -> EngineFacts:
        pytest.MonkeyPatch().setattr("cluster.ranks.rank.RankActor", self.ranks)
        return super().start(placement_group)
