"""The types in which ranks keep weights, which are not always those of the checkpoint."""

from __future__ import annotations

from typing import NamedTuple

from configs.model_config import ModelConfig
from configs.schema import EngineConfig


class Kept(NamedTuple):
    """The types other than `dtype` that ranks keep weights in, where these may be in them."""

    fp8: bool = False
    mxfp4: bool = False


PLAIN = Kept()


def kept_types(config: EngineConfig, model: ModelConfig) -> Kept:
    """The types that ranks keep, once `config` is resolved. CPUs read all weights in `dtype`; exact numerics on GPUs do
    so too, where weights in FP8 have the same bits but take longer, unless they are asked for."""
    is_cuda = config.device == "cuda"
    is_fast = is_cuda and not config.is_exact
    has_fp8 = is_fast and config.dtype != "float32" and model.weight_scales is not None
    has_mxfp4 = is_fast and config.dtype == "bfloat16" and model.has_mxfp4
    return Kept(has_fp8 or (is_cuda and config.quantization == "fp8"), has_mxfp4)
