"""A dense Llama-like model from the numbers of a config.json, for tests that only need its shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from configs.layers import DenseMLP, GroupedQueryAttention
from configs.model_config import ModelConfig, layers_of

_MLP = {"intermediate_size": "intermediate_size", "hidden_act": "hidden_act", "mlp_bias": "bias"}
_ATTENTION = ("num_attention_heads", "num_key_value_heads", "head_dim", "qkv_bias", "o_bias", "qk_norm")


def dense_model(
    *, hidden_size: int, num_hidden_layers: int, layer_windows: Sequence[int | None] = (), **values: Any
) -> ModelConfig:
    """The model whose layers are all alike but for `layer_windows`; other `values` are ModelConfig's."""
    attention = {name: values.pop(name) for name in _ATTENTION if name in values}
    mlp = {ours: values.pop(name) for name, ours in _MLP.items() if name in values}
    attention["rope"] = values.pop("rope")
    windows = layer_windows or [None] * num_hidden_layers
    layers = layers_of(
        [GroupedQueryAttention(hidden_size=hidden_size, window=window, **attention) for window in windows],
        [DenseMLP(hidden_size=hidden_size, **mlp)] * num_hidden_layers,
        hidden_size,
    )
    return ModelConfig(hidden_size=hidden_size, layers=layers, **values)
