"""The machines that ranks run on: their processors and GPUs."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from configs.attention import installed_packages
from configs.cards import Card
from configs.resolve import HostFacts
from worker.device.card import node_card
from worker.device.cgroup import available_cores

_TIMEOUT_S = 120.0  # a node may have to start a process first

logger = logging.getLogger(__name__)


def _card_here() -> Card:
    return node_card()


def known_card(nodes: Iterable[Mapping[str, Any]]) -> Card | None:
    """The facts that hold for all GPUs of the live nodes in `ray.nodes()`, as each node's driver gives them. None, with
    a warning, if a node cannot say."""
    here = ray.get_runtime_context().get_node_id()
    of_nodes = [node["NodeID"] for node in nodes if node["Alive"] and node["Resources"].get("GPU")]
    ask = ray.remote(num_cpus=0, max_retries=0)(_card_here)
    asked = {
        node: ask.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote()
        for node in of_nodes
        if node != here
    }
    try:
        cards = [ray.get(asked[node], timeout=_TIMEOUT_S) if node in asked else node_card() for node in of_nodes]
    except (RuntimeError, ray.exceptions.RayError) as error:
        reason = str(error).strip().rsplit("\n", 1)[-1]
        logger.warning("a node does not know its GPUs, so nothing is decided by them: %s", reason)
        return None
    return Card.least(cards) if cards else None


def environment_options(wanted: Mapping[str, str], have: Mapping[str, str]) -> dict[str, Any]:
    """Actor options with which the actor's process gets the environment variables `wanted`. Empty if Ray's processes
    have them already (`have`), because then Ray can use an idle process instead of starting a new one."""
    return {} if wanted.items() <= have.items() else {"runtime_env": {"env_vars": dict(wanted)}}


def host_facts(*, gpus: bool) -> HostFacts:
    """Facts for `configs.resolve`: about this node, and with `gpus` about the cluster's GPUs."""
    card = known_card(ray.nodes()) if gpus and ray.is_initialized() else None
    return HostFacts(node_cores(), int(gpus), card, installed_packages())


def node_cores() -> int:
    """Number of CPU cores that this process may use, given its affinity and its container's quota."""
    cores, quota = len(os.sched_getaffinity(0)), available_cores()
    return cores if quota is None else max(1, min(cores, int(quota)))
