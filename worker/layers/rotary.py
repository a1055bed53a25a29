"""Rotary position embedding: frequencies as transformers computes them, and their application to query and key."""

from __future__ import annotations

import math
from typing import Any

import torch

from configs.errors import ConfigError
from configs.model_config import ModelConfig


class RotaryEmbedding:
    """Cosines and sines of every position up to `max_positions`, and the rotation by them.

    The halves convention: element i of a head turns with element i + head_dim / 2. On CPU `at` and `rotate` serve a
    step; on CUDA `cos_sin` is what the rotary kernel looks positions up in.
    """

    def __init__(self, model: ModelConfig, max_positions: int, *, dtype: torch.dtype, device: torch.device) -> None:
        inv_freq, attention_factor = inverse_frequencies(model)
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), inv_freq)
        cos, sin = angles.cos() * attention_factor, angles.sin() * attention_factor
        self._cos_sin: torch.Tensor | None = None
        self._table: torch.Tensor | None = None
        if device.type == "cuda":
            self._cos_sin = torch.cat((cos, sin), dim=1).to(device)
        else:
            # [max_positions, 1, 2 * head_dim]: cosines for both halves, then sines with the first half's sign turned,
            # so that a rotation is x * cos + swapped(x) * sin. fp32 until cast once to the activations' dtype.
            self._table = torch.cat((cos, cos, -sin, sin), dim=1).to(device=device, dtype=dtype).unsqueeze(1)

    @property
    def cos_sin(self) -> torch.Tensor:
        """[max_positions, head_dim] fp32, contiguous, on CUDA only: head_dim / 2 cosines, then as many sines."""
        assert self._cos_sin is not None, "the rotary kernel's table is made on CUDA only"
        return self._cos_sin

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and signed sines [num_tokens, 1, head_dim] of positions [num_tokens] int64; once a step, on CPU."""
        assert self._table is not None, "on CUDA the rotary kernel looks positions up"
        cos, sin = self._table.index_select(0, positions).chunk(2, dim=-1)
        return cos, sin


def rotate(x: torch.Tensor, cos_sin: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """x [num_tokens, heads, head_dim] turned by `RotaryEmbedding.at` of its positions."""
    cos, sin = cos_sin
    swapped = x.roll(x.shape[-1] // 2, -1)
    return torch.addcmul(x * cos, swapped, sin)


def inverse_frequencies(model: ModelConfig) -> tuple[torch.Tensor, float]:
    """[head_dim / 2] fp32 frequencies and the factor of cosine and sine.

    Raises ConfigError for a scaling type there is no rule for.
    """
    rope = model.rope
    scaling = dict(rope.scaling)
    exponents = torch.arange(0, model.rotary_dim, 2, dtype=torch.int64).float() / model.rotary_dim
    inv_freq = 1.0 / (rope.theta**exponents)
    if rope.scaling_type in ("default", "dynamic"):
        # dynamic changes the base only past max_position_embeddings, which `check_length` does not let happen.
        return inv_freq, 1.0
    if rope.scaling_type == "linear":
        return inv_freq / scaling["factor"], 1.0
    if rope.scaling_type == "llama3":
        return _llama3(inv_freq, scaling), 1.0
    if rope.scaling_type == "yarn":
        return _yarn(inv_freq, scaling, model)
    raise ConfigError(
        f"rope scaling type {rope.scaling_type} is not supported; supported are default, linear, llama3, yarn, dynamic"
    )


def check_length(model: ModelConfig, max_model_len: int) -> None:
    """Raises ConfigError when `max_model_len` needs frequencies that change with a sequence's length."""
    if model.rope.scaling_type == "dynamic" and max_model_len > model.max_position_embeddings:
        raise ConfigError(
            f"max_model_len={max_model_len} exceeds max_position_embeddings={model.max_position_embeddings} of a model "
            f"with dynamic rope scaling, whose cached keys would need other frequencies; choose at most "
            f"{model.max_position_embeddings}"
        )


def _llama3(inv_freq: torch.Tensor, scaling: dict[str, Any]) -> torch.Tensor:
    """Long wavelengths are slowed by `factor`, short ones kept, those between interpolated."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    wavelengths = 2 * math.pi / inv_freq
    smooth = (original / wavelengths - low) / (high - low)
    between = (1 - smooth) * inv_freq / factor + smooth * inv_freq
    slowed = torch.where(wavelengths > original / low, inv_freq / factor, between)
    return torch.where(wavelengths < original / high, inv_freq, slowed)


def _yarn(inv_freq: torch.Tensor, scaling: dict[str, Any], model: ModelConfig) -> tuple[torch.Tensor, float]:
    """YaRN (arXiv 2309.00071): a ramp over dimensions from kept to slowed frequencies."""
    original = scaling.get("original_max_position_embeddings") or model.max_position_embeddings
    factor = scaling.get("factor") or model.max_position_embeddings / original
    dim, base = model.rotary_dim, model.rope.theta

    def dimension_of(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension_of(scaling.get("beta_fast") or 32), dimension_of(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001
    slowed_share = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    mixed = inv_freq / factor * slowed_share + inv_freq * (1 - slowed_share)
    return mixed, _yarn_attention_factor(scaling, factor)


def _yarn_attention_factor(scaling: dict[str, Any], factor: float) -> float:
    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    given = scaling.get("attention_factor")
    if given is not None:
        return float(given)
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return mscale(scaling["mscale"]) / mscale(scaling["mscale_all_dim"])
    return mscale(1.0)
