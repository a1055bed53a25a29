"""Which parts of a model cannot be computed exactly, and why not."""

from __future__ import annotations

from typing import Any, Literal

from configs.errors import ConfigError
from configs.latent_attention import LatentAttention
from configs.model_config import ModelConfig

_INEXACT: dict[type[Any], str] = {
    LatentAttention: "latent attention computes in two forms, by which is cheaper for a step, and they round otherwise",
}


def check_exact(model: ModelConfig, device: Literal["cpu", "cuda"]) -> None:
    """Raises ConfigError with the reason where `numerics: exact` cannot hold for a part of `model` on `device`."""
    if device == "cuda":
        raise ConfigError("GPUs compute fast only, so far")
    for part in (part for layer in model.layers for part in (layer.mixer, layer.feed_forward)):
        if type(part) in _INEXACT:
            raise ConfigError(_INEXACT[type(part)])
