"""Exact numerics: the parts of a model that cannot be exact, with the reasons, and the version of the contract."""

from __future__ import annotations

from typing import Any, Literal

from configs.biased_mixture import BiasedMixture
from configs.errors import ConfigError
from configs.latent_attention import LatentAttention
from configs.layers import HeadGroups
from configs.model_config import ModelConfig

CONTRACT = 1
"""The version of the section "One answer" in docs/concepts.md. Raise it with each change that gives an exact answer
other bits. It is part of `system_fingerprint`, so equal fingerprints still promise equal bits."""
_INEXACT_ON_GPUS: dict[type[Any], str] = {BiasedMixture: "experts with biases are summed exactly on CPUs only, so far"}
_INEXACT: dict[type[Any], str] = {
    LatentAttention: "latent attention computes in two forms, by which is cheaper for a step, and they round otherwise",
}


def check_exact(model: ModelConfig, device: Literal["cpu", "cuda"], tp_size: int) -> None:
    """Raises ConfigError with the reason if `numerics: exact` is impossible for `model`, for `device`, or for this
    number of ranks."""
    for part in (part for layer in model.all_layers for part in (layer.mixer, layer.feed_forward)):
        why = _INEXACT.get(type(part)) or (_INEXACT_ON_GPUS.get(type(part)) if device == "cuda" else None)
        if why is not None:
            raise ConfigError(why)
    for axis in (axis for layer in model.all_layers for axis in layer.mixer.axes if isinstance(axis, HeadGroups)):
        num_leaves = axis.num_heads // axis.leaf_heads
        if tp_size > num_leaves:
            raise ConfigError(
                f"exact sums over this model's heads have {num_leaves} parts, and tensor_parallel_size={tp_size} ranks "
                f"would have to share one; choose at most {num_leaves}"
            )
