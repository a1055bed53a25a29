"""Reads `quantization_config`: whether the checkpoint's weights are in FP8 or MXFP4, and which elements share a scale.

Supported formats are those of DeepSeek and Qwen 3 (`fp8` with blocks), vLLM and AutoFP8 (`fp8` with one scale per
matrix), llm-compressor (`compressed-tensors`, a scale per row, matrix or block) and gpt-oss (`mxfp4`). Settings for
activations are ignored, because activations are computed in the model's own dtype.
"""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from configs.errors import CheckpointError

INPUT_SCALE = "input_scale"
"""Suffix of the names of activation scales."""

_ADVICE = (
    "quantised weights are read in FP8 with scales of blocks, rows or matrices. Use the model's unquantised checkpoint"
)
_KV_SCHEME = {"type": "float", "num_bits": 8, "strategy": "tensor", "symmetric": True, "dynamic": False}


class WeightScales(NamedTuple):
    """The layout of the scales of an FP8 matrix: one scale per block."""

    height: int
    """Rows per block. 0 means all rows of the matrix."""
    width: int
    """Columns per block. 0 means all columns."""
    suffix: str = "_scale_inv"
    """Suffix of the name of a weight's scales. Elements are multiplied by the scales, even if the suffix says
    inverse."""

    def block(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Rows and columns per block for a matrix of this shape."""
        return self.height or shape[0], self.width or shape[1]


FP8_BLOCKS = WeightScales(128, 128)
"""The layout for weights that are quantised while they are read."""


MXFP4_BYTES = Fraction(17, 32)
"""Bytes per MXFP4 element, including its part of the block's scale."""


def read_weight_scales(said: Any, path: Path) -> WeightScales | None:
    """The scale layout in `quantization_config`. None if no weight is in FP8, even if there are factors for KV in FP8.

    Raises:
        CheckpointError: the format is not supported. The message names `path`.
    """
    quantization: dict[str, Any] = said if isinstance(said, dict) else {}
    scheme = quantization.get("kv_cache_scheme")
    if isinstance(scheme, dict):
        _check_scheme(scheme, _KV_SCHEME, f"{path}: kv_cache_scheme", "with one factor a layer")
    method = quantization.get("quant_method")
    if method == "mxfp4" and scheme is None:
        return None  # The tensors' names say which are in MXFP4 (worker/weights/mxfp4.py).
    if method == "fp8" and (scheme is None or isinstance(scheme, dict)):
        return _of_fp8(quantization, path)
    if method == "compressed-tensors" and (groups := quantization.get("config_groups")):
        return _of_groups(groups, quantization, path)
    if not isinstance(scheme, dict) or quantization.get("config_groups") or quantization.get("quant_algo"):
        raise CheckpointError(f"{path} has a quantization_config ({method}); {_ADVICE}")
    return None


def _of_fp8(quantization: dict[str, Any], path: Path) -> WeightScales:
    block = quantization.get("weight_block_size")
    if quantization.get("fmt", "e4m3") != "e4m3" or not (block is None or _is_block(block)):
        raise CheckpointError(
            f"{path}: quantization_config with weight_block_size={block} and fmt={quantization.get('fmt')} is not "
            "supported; supported are blocks of rows and columns, in e4m3"
        )
    return WeightScales(0, 0, "_scale") if block is None else WeightScales(*block)


def _of_groups(groups: Any, quantization: dict[str, Any], path: Path) -> WeightScales:
    """Reads `config_groups`. All groups must have one layout, in the format "float-quantized" or "naive-quantized"."""
    kinds = set()
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict) or quantization.get("format") not in ("float-quantized", "naive-quantized"):
            raise CheckpointError(f"{path} has a quantization_config ({quantization.get('format')}); {_ADVICE}")
        strategy, block = weights.get("strategy"), weights.get("block_structure") or []
        _check_scheme(weights, _KV_SCHEME | {"strategy": strategy}, f"{path}: weights", "of a row, matrix or block")
        known = {"channel": (1, 0), "tensor": (0, 0)} | ({"block": (block[0], block[1])} if _is_block(block) else {})
        if strategy not in known:
            raise CheckpointError(f"{path}: weights with strategy={strategy} are not supported; {_ADVICE}")
        height, width = known[strategy]
        kinds.add(WeightScales(height, width, "_scale"))
    if len(kinds) != 1:
        raise CheckpointError(f"{path}: config_groups with scales of {len(kinds)} kinds are not supported; {_ADVICE}")
    return kinds.pop()


def _check_scheme(scheme: dict[str, Any], taken: dict[str, Any], what: str, of: str) -> None:
    other = {key: scheme.get(key, value) for key, value in taken.items() if scheme.get(key, value) != value}
    if other:
        raise CheckpointError(
            f"{what} with {other} is not supported; supported are {taken}, which is FP8 e4m3 {of}. Use the model's "
            "unquantised checkpoint"
        )


def _is_block(block: Any) -> bool:
    return isinstance(block, list) and len(block) == 2 and all(type(it) is int and it > 0 for it in block)
