"""Other weights of the same shape for an engine that serves: read beside the old ones, exchanged between two steps.

Whatever fails before the exchange costs nothing: the ranks forget what they read. A rank that fails in it leaves a
group that nobody knows the weights of, so that all are replaced, by ranks with the new ones.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import ray

from cluster.engine.coordinator import Coordinator, WeightChange
from cluster.engine.fingerprint import system_fingerprint
from cluster.engine.messages import Running, Weights, WeightsChanged
from configs.checkpoint import model_name
from configs.errors import ConfigError

if TYPE_CHECKING:
    from cluster.engine.coordinator_actor import EngineSpec

logger = logging.getLogger(__name__)


def change_weights(
    coordinator: Coordinator,
    spec: EngineSpec,
    platforms: Iterable[str],
    model: str | None,
    *,
    tensors: Sequence[ray.ObjectRef[dict[str, Any]]] = (),
    last: bool = True,
    revision: str | None = None,
    version: str | None = None,
    running: Running = "continue",
) -> WeightsChanged | None:
    """Has the checkpoint `model`, or that of all `tensors`, serve; one change at a time, and no resize meanwhile.

    Args:
        spec: of the engine's start.
        platforms: as `system_fingerprint` has them.
        model: a local directory, a .gguf file, or a Hugging Face id, of the same model.
        tensors: of a checkpoint in memory, by name: each as it is, or as torch.multiprocessing's `reduce_tensor` makes
            it of one on a GPU of the same node, whose process keeps it until the last call returns.
        last: False: more tensors follow in another call, and nothing serves yet, for which None is returned.
        version: None: the last part of the model's name, and the revision.

    Raises:
        ConfigError: it cannot be had. The weights there are go on.
        EngineError: it failed. They go on as well, unless ranks failed in the exchange.
    """
    ranks, began = coordinator.ranks, time.monotonic()
    generation = coordinator.inspect(lambda scheduler: scheduler.generation)
    if (model is None) != bool(tensors) or (model is None and version is None):
        raise ConfigError("give a model, or tensors and a version")
    starter = ranks.give(tensors) if model is None else ranks.with_weights(model, revision)
    if not last:
        return None
    if version is None:
        version = "@".join(it for it in (model_name(model or ""), revision) if it is not None)
    now = dataclasses.replace(spec, config=starter.config, model=starter.model, model_path=starter.model_path)
    fingerprint = system_fingerprint(now, platforms, version, in_memory=starter.is_in_memory)
    weights = Weights(version, fingerprint)
    try:
        on_host = any(ranks.stage(starter))
        loaded = time.monotonic()
        change = WeightChange(weights, running, generation, lambda: ranks.take_staged(starter))
        pause_s = coordinator.exchange(change).result()
    finally:
        ranks.drop_staged()
    changed = WeightsChanged(version, pause_s, loaded - began, "host" if on_host else "device")
    logger.info("weights %s: read in %.2f s to the memory of the %s", version, changed.load_s, changed.staged_in)
    return changed
