"""Reads the model's config from a directory with a `config.json`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from configs.config_json import config_of_directory
from configs.errors import CheckpointError
from configs.layers import HeadGroups
from configs.model_config import ModelConfig


def read_model_config(path: Path, max_model_len: int | None = None) -> ModelConfig:
    """Reads the config of the model at `path`.

    Args:
        path: a directory with config.json, such as `configs.checkpoint.resolve_model_path` returns.
            generation_config.json and tokenizer_config.json are read too if they exist.
        max_model_len: the setting. A longrope model uses its frequencies for long sequences for all requests, unless
            this value is within the original context.

    Raises:
        CheckpointError: a file is missing or corrupt, or the model is not supported.
    """
    model = config_of_directory(path, max_model_len)
    _check(model, path)
    # Ids without an embedding are never sampled, and grammars never allow them.
    return replace(model, eos_token_ids=tuple(id_ for id_ in model.eos_token_ids if 0 <= id_ < model.vocab_size))


def _check(model: ModelConfig, path: Path) -> None:
    for axis in {axis for layer in model.layers for axis in layer.axes if isinstance(axis, HeadGroups)}:
        if axis.num_heads % axis.num_groups:
            raise CheckpointError(
                f"{path}: num_attention_heads={axis.num_heads} is not a multiple of "
                f"num_key_value_heads={axis.num_groups}; such a model cannot be served"
            )
    for rope, rotary_dim in {(layer.mixer.rope, layer.mixer.rotary_dim) for layer in model.layers}:
        if rotary_dim % 2:
            raise CheckpointError(f"{path}: head_dim={rotary_dim} is odd; the rotary embedding needs pairs")
        scaling, want = dict(rope.scaling), rotary_dim // 2
        for key in ("short_factor", "long_factor") if rope.scaling_type == "longrope" else ():
            factors = scaling.get(key, () if key == "short_factor" else scaling.get("short_factor"))
            if not isinstance(factors, tuple) or len(factors) != want or not all(_is_positive(it) for it in factors):
                raise CheckpointError(f"{path}: rope scaling longrope: {key} must be {want} positive numbers")
        if not rope.theta > 0:
            raise CheckpointError(
                f"{path}: rope theta={rope.theta} is not positive; the checkpoint is corrupt, so download it again"
            )


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and value > 0
