"""Changes the weights of a running engine to other weights of the same shape. The ranks stage them beside the old ones,
and switch between two steps.

A failure before the switch costs nothing: the ranks drop the staged weights. If a rank fails during the switch, the
group's weights are unknown, so all ranks are replaced by ranks with the new weights.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import ray

from cluster.engine.changes import WeightChange
from cluster.engine.coordinator import Coordinator
from cluster.engine.engine_spec import EngineSpec
from cluster.engine.fingerprint import system_fingerprint
from cluster.engine.preflight import read_model
from cluster.messages.engine import Running, Weights, WeightsChanged
from cluster.ranks.rank import RankStarter
from configs.checkpoint import model_name, resolve_model_path
from configs.errors import ConfigError

logger = logging.getLogger(__name__)

_SHOWN_CHARS = 200  # number of characters that a message shows of a difference between two models
_SHOWN_DIFFERENCES = 4


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
    """Changes to the weights of checkpoint `model`, or of all `tensors`. Only one change, and no resize, may run at a
    time.

    Args:
        spec: the spec of the engine's start.
        platforms: `worker.device.platform.platform_of` of each rank.
        model: a local directory, or a Hugging Face id, of the same model.
        tensors: parts of a checkpoint in memory: name -> tensor, or `reduce_tensor` (torch.multiprocessing) of a GPU
            tensor of the same node. The tensor's process must keep it until the last call returns.
        last: False if more tensors follow in another call. Nothing changes then, and the result is None.
        version: name of the weights. If None, the last part of the model's name, and the revision.

    Raises:
        ConfigError: the change is impossible. The old weights stay in use.
        EngineError: it failed. The old weights stay in use, unless ranks failed while taking the new ones.
    """
    ranks, began = coordinator.ranks, time.monotonic()
    generation = coordinator.inspect(lambda scheduler: scheduler.generation)
    if (model is None) != bool(tensors) or (model is None and version is None):
        raise ConfigError("give a model, or tensors and a version")
    starter = ranks.give(tensors) if model is None else starter_with(ranks.starter, model, revision)
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
        pause_s = coordinator.change(change).result()
    finally:
        ranks.drop_staged()
    changed = WeightsChanged(version, pause_s, loaded - began, "host" if on_host else "device")
    logger.warning(
        "changed to weights %s: no step ran for %.4f s; reading them to the memory of the %s took %.2f s",
        version,
        pause_s,
        changed.staged_in,
        changed.load_s,
    )
    return changed


def starter_with(now: RankStarter, model: str, revision: str | None) -> RankStarter:
    """A starter of the same ranks with the weights of another checkpoint of the same model.

    Raises:
        ConfigError: the checkpoint does not exist, or has another model.
    """
    config = now.config.model_copy(update={"model": model, "revision": revision})
    path = resolve_model_path(model, revision, weights=config.has_local_weights)
    # The new weights may have other dtypes. The draft head stays, even if it is an MTP layer.
    kept: dict[str, Any] = {"dtype": now.model.dtype, "draft_head": now.model.draft_head}
    found = dataclasses.replace(read_model(config, path), **kept)
    scales, has_mxfp4 = now.model.weight_scales, now.model.has_mxfp4
    comparable = dataclasses.replace(found, weight_scales=scales, has_mxfp4=has_mxfp4)
    if differ := list(itertools.islice(_differences(comparable, now.model), _SHOWN_DIFFERENCES)):
        raise ConfigError(
            f"model={model} differs from the served model; start another app for it. Differences: {'; '.join(differ)}"
        )
    changes: dict[str, Any] = {"config": config, "model": found, "model_path": path}
    return dataclasses.replace(now, **changes, is_in_memory=False, weights=secrets.token_hex())


def _differences(found: Any, expected: Any, path: str = "") -> Iterator[str]:
    """The parts of `found` that differ from `expected`, as dotted paths that begin with `path`."""
    if dataclasses.is_dataclass(found) and type(found) is type(expected):
        for it in dataclasses.fields(found):
            yield from _differences(getattr(found, it.name), getattr(expected, it.name), f"{path}.{it.name}".strip("."))
    elif isinstance(found, tuple) and isinstance(expected, tuple) and len(found) == len(expected):
        for i, (part, other) in enumerate(zip(found, expected, strict=True)):
            yield from _differences(part, other, f"{path}.{i}")
    elif found != expected:
        yield f"{path} is {found!r}, not {expected!r}"[:_SHOWN_CHARS]
