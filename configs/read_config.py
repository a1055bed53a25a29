"""Reads the config of the model in a directory, by the checkpoint's own `config.json`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from configs.config_json import config_of_directory
from configs.errors import CheckpointError
from configs.layers import HeadGroups
from configs.model_config import ModelConfig


def read_model_config(path: Path, max_model_len: int | None = None) -> ModelConfig:
    """Reads what the model at `path` is.

    Args:
        path: a directory with config.json (generation_config.json and tokenizer_config.json are read too when there).
            `configs.checkpoint.resolve_model_path` gives such a path for any `model` setting.
        max_model_len: the setting. A model with other frequencies for sequences that are longer than it was first
            trained for (longrope) takes those for all, unless this is no longer.

    Raises:
        CheckpointError: a file is missing, corrupt or truncated, or the model is of a kind that cannot be served.
    """
    model = config_of_directory(path, max_model_len)
    _check(model, path)
    # An id without an embedding is never sampled, and grammars take none.
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
            raise CheckpointError(f"{path}: rope theta={rope.theta} is not positive; the checkpoint is corrupt")


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and value > 0
