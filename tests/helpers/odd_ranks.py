"""A coordinator whose ranks are of a class of the test's own: which fails, hangs or is slow where the test wants it."""

from __future__ import annotations

from typing import Any

import pytest

import cluster.serve.running_engine
from cluster.engine.coordinator_actor import CoordinatorActor, EngineFacts
from cluster.ranks.rank_actor import RankActor


def use_ranks(monkeypatch: pytest.MonkeyPatch, ranks: type[RankActor], **patches: object) -> None:
    """Has engines that start from here on consist of such ranks.

    Args:
        patches: what else is there in the coordinator's process, by its name in cluster.engine.resizing.
    """

    class OddCoordinator(CoordinatorActor):
        def start(self, placement_group: Any) -> EngineFacts:
            # In the process that it runs in alone.
            pytest.MonkeyPatch().setattr("cluster.ranks.rank.RankActor", ranks)
            for name, value in patches.items():
                pytest.MonkeyPatch().setattr(f"cluster.engine.resizing.{name}", value)
            return super().start(placement_group)

    monkeypatch.setattr(cluster.serve.running_engine, "CoordinatorActor", OddCoordinator)
