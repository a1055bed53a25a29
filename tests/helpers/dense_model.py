"""Dense Llama-like models from the numbers of a config.json, for tests that only need their shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from configs.layers import DenseMLP, GroupedQueryAttention
from configs.model_config import ModelConfig, layers_of
from configs.rope import RopeConfig

_SMALL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 256,
    "vocab_size": 320,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope": RopeConfig(theta=1e4),
    "tie_word_embeddings": True,
}
_MLP = {"intermediate_size": "intermediate_size", "hidden_act": "hidden_act", "mlp_bias": "bias"}
_ATTENTION = ("num_attention_heads", "num_key_value_heads", "head_dim", "qkv_bias", "o_bias", "qk_norm")


def dense_model(*, layer_windows: Sequence[int | None] = (), **changes: Any) -> ModelConfig:
    """A model whose layers are all alike but for `layer_windows`; `changes` are what it has unlike a small one."""
    values = {**_SMALL, **changes}
    hidden_size, num_hidden_layers = values.pop("hidden_size"), values.pop("num_hidden_layers")
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
