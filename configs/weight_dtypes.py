"""The dtypes in which ranks hold weights, which may differ from the checkpoint's."""

from __future__ import annotations

from typing import NamedTuple

from configs.model_config import ModelConfig
from configs.schema import EngineConfig


class WeightDtypes(NamedTuple):
    """Whether ranks hold weights in FP8 or MXFP4, if the weights allow it. All other weights are in `dtype`."""

    fp8: bool = False
    mxfp4: bool = False


PLAIN = WeightDtypes()


def weight_dtypes(config: EngineConfig, model: ModelConfig) -> WeightDtypes:
    """The weight dtypes on the ranks, for a resolved `config`. CPUs read all weights as `dtype`. GPUs with exact
    numerics do so too, unless FP8 is requested, because FP8 then gives the same bits and takes longer."""
    is_cuda = config.device == "cuda" and config.quantization != "none"
    is_fast = is_cuda and not config.is_exact
    has_fp8 = is_fast and config.dtype != "float32" and model.weight_scales is not None
    has_mxfp4 = is_fast and config.dtype == "bfloat16" and model.has_mxfp4
    return WeightDtypes(has_fp8 or (is_cuda and config.quantization == "fp8"), has_mxfp4)
