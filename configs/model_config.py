"""What the model is: read from a checkpoint's own `config.json` or GGUF metadata, never from a class name table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: base and, for long-context models, how its frequencies are scaled."""

    theta: float
    """Base of the geometric series of frequencies."""
    scaling_type: str = "default"
    """default, linear, llama3, yarn or dynamic; anything else is refused when the model is read."""
    scaling: tuple[tuple[str, Any], ...] = ()
    """The checkpoint's own parameters for `scaling_type`, sorted by name."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One decoder-only transformer. All counts are those of the whole model, never of a rank."""

    model_type: str
    """llama, qwen2, qwen3 or mistral: the family that names the tensors."""
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    hidden_act: str = "silu"
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm on each query and key head before the rotary embedding (Qwen3)."""
    layer_windows: tuple[int | None, ...] = ()
    """Sliding window of each layer in tokens (a query sees itself and `window - 1` before it); None is full."""
    attention_softcap: float | None = None
    final_logit_softcap: float | None = None
    attention_scale: float | None = None
    """None: head_dim ** -0.5."""
    dtype: str = "float32"
    """The checkpoint's own: float32, bfloat16 or float16."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    """Union of what config, generation_config and tokenizer metadata name."""
