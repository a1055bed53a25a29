"""Families of Hugging Face checkpoints: what a config.json leaves unsaid, and what only transformers' code says.

A table; configs/config_json.py reads files by it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from configs.deepseek import deepseek_v2_layers, deepseek_v3_feed_forwards, deepseek_v3_layers
from configs.fields import Fields
from configs.layers import PLAIN_NORMS, FeedForward, LayerSpec, NormNames
from configs.llama4 import llama4_layers
from configs.rope import RopeConfig


@dataclass(frozen=True, kw_only=True)
class ExpertsFamily:
    """How a family's config.json tells of its experts, and what its code decides about them."""

    num_experts_keys: tuple[str, ...]
    """The first that is there counts."""
    columns_key: str
    """Names the columns of one expert."""
    shared_columns_key: str | None = None
    norm_topk_prob: bool | None = None
    """None: the file says, and else it is false."""
    round_weights: bool = True
    name: str = "mlp"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    are_biased: bool = False
    """A BiasedMixture; of the above, the first two count alone."""
    mixes_dense_layers: bool = False
    """Layers of `mlp_only_layers`, and those that `decoder_sparse_step` passes over, are dense."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """Facts that a family's config.json leaves unsaid, or that its code decides whatever the file says."""

    num_key_value_heads: int | None = None
    """None: as many as query heads."""
    head_dim: int | None = None
    """None: hidden_size / num_attention_heads."""
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_parameters: Mapping[str, Any] = field(default_factory=dict)
    """The default for a file that has none."""
    local_rope_theta: float | None = None
    """The base of layers with windows, unless `rope_local_base_freq` names another; their frequencies are not scaled.
    None: all layers turn alike."""
    partial_rotary: float | None = None
    """The share of a head that turns where the file does not say; None: all of it, or the file is refused."""
    interleaved_rope: bool = False
    """See RopeConfig."""
    qkv_bias: bool | None = False
    """None: `qkv_bias` says, and else there is one."""
    attention_bias: bool | None = None
    """Whether q, k, v and o have one where the file does not say; None: they have none, whatever it says."""
    heeds_o_bias: bool = True
    """Whether o has one where q, k and v have."""
    heeds_mlp_bias: bool = False
    fused_qkv: bool = False
    mlp_projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """See DenseMLP."""
    qk_norm: bool | None = False
    """None: `use_qk_norm` says, and else there is none."""
    has_sinks: bool = False
    """See GroupedQueryAttention."""
    windows: Literal["none", "every layer", "every layer if used", "as said", "by type", "by turns"] = "none"
    """Layers that `sliding_window` holds for, of "every layer if used", "as said" and "by type" under
    `use_sliding_window` only. "as said": those of `layer_types` or else from `max_window_layers` on; "by type": those
    of `layer_types`; "by turns": those of `layer_types` or else all but each `sliding_window_pattern`th."""
    window_pattern: int = 1
    """The default for a file that names none."""
    default_window: int | None = 4096
    """The default for a file that names none."""
    experts: ExpertsFamily | None = None
    feed_forwards: Callable[[Fields], list[FeedForward]] | None = None
    """Makes those of a family that neither `experts` nor a dense MLP describes."""
    layers: Callable[[Fields, RopeConfig], tuple[LayerSpec, ...]] | None = None
    """Makes the layers of a family without grouped-query attention, which the other fields describe."""
    hidden_act_key: str = "hidden_act"
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    query_pre_attn_scalar: float | None = None
    """Scores are divided by the root of the file's, or else of this; None: of head_dim."""
    softcaps: Mapping[str, float | None] = field(default_factory=dict)
    """Keys that count, and softcaps where the file does not name them; a null there turns one off."""
    norm_names: NormNames = PLAIN_NORMS
    """See LayerSpec."""
    norm_offset: float = 0.0
    """The `TensorSpec.offset` of all norms."""
    tensor_prefix: str = ""
    """See ModelConfig. With one, the model is the text part of a larger one, which its `text_config` describes."""
    scales_embedding: bool = False
    """Embeddings are multiplied with the root of hidden_size."""


_GEMMA2 = Family(
    num_key_value_heads=4,
    head_dim=256,
    max_position_embeddings=8192,
    attention_bias=False,
    windows="by turns",
    window_pattern=2,
    hidden_act_key="hidden_activation",
    hidden_act="gelu_pytorch_tanh",
    tie_word_embeddings=True,
    query_pre_attn_scalar=256,
    softcaps={"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    norm_names=NormNames(
        after_mixer="post_attention_layernorm",
        before_feed_forward="pre_feedforward_layernorm",
        after_feed_forward="post_feedforward_layernorm",
    ),
    norm_offset=1.0,
    scales_embedding=True,
)

_LLAMA4 = Family(
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    interleaved_rope=True,
    layers=llama4_layers,
)
_FUSED_MLP = ("gate_up_proj", "gate_up_proj", "down_proj")
_GLM = Family(
    num_key_value_heads=2,
    head_dim=128,
    max_position_embeddings=131072,
    rms_norm_eps=1.5625e-7,
    partial_rotary=0.5,
    interleaved_rope=True,
    attention_bias=True,
    heeds_o_bias=False,
    mlp_projections=_FUSED_MLP,
)

FAMILIES = {
    "llama": Family(max_position_embeddings=2048, attention_bias=False, heeds_mlp_bias=True),
    "qwen2": Family(num_key_value_heads=32, max_position_embeddings=32768, qkv_bias=True, windows="as said"),
    "qwen3": Family(
        num_key_value_heads=32,
        head_dim=128,
        max_position_embeddings=32768,
        attention_bias=False,
        qk_norm=True,
        windows="as said",
    ),
    "mistral": Family(num_key_value_heads=8, max_position_embeddings=131072, windows="every layer"),
    "qwen3_moe": Family(
        num_key_value_heads=4,
        max_position_embeddings=32768,
        attention_bias=False,
        qk_norm=True,
        windows="every layer if used",
        experts=ExpertsFamily(
            num_experts_keys=("num_experts", "num_local_experts"),
            columns_key="moe_intermediate_size",
            mixes_dense_layers=True,
        ),
    ),
    "mixtral": Family(
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=1e6,
        windows="every layer",
        default_window=None,
        experts=ExpertsFamily(
            num_experts_keys=("num_local_experts", "num_experts"),
            columns_key="intermediate_size",
            norm_topk_prob=True,
            round_weights=False,
            name="block_sparse_moe",
            projections=("w1", "w3", "w2"),
        ),
    ),
    "qwen2_moe": Family(
        num_key_value_heads=16,
        max_position_embeddings=32768,
        qkv_bias=None,
        windows="by type",
        experts=ExpertsFamily(
            num_experts_keys=("num_experts", "num_local_experts"),
            columns_key="moe_intermediate_size",
            shared_columns_key="shared_expert_intermediate_size",
            mixes_dense_layers=True,
        ),
    ),
    "gemma2": _GEMMA2,
    "gemma3_text": replace(
        _GEMMA2,
        max_position_embeddings=131072,
        rope_theta=1e6,
        local_rope_theta=10000.0,
        qk_norm=True,
        window_pattern=6,
        softcaps={"final_logit_softcapping": None},
    ),
    "phi3": Family(
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        partial_rotary=1.0,
        fused_qkv=True,
        mlp_projections=_FUSED_MLP,
        windows="every layer",
        default_window=None,
    ),
    "glm": _GLM,
    "glm4": replace(
        _GLM,
        norm_names=NormNames(after_mixer="post_self_attn_layernorm", after_feed_forward="post_mlp_layernorm"),
    ),
    "gpt_oss": Family(
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=150000.0,
        rope_parameters={
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        attention_bias=True,
        has_sinks=True,
        windows="by turns",
        window_pattern=2,
        default_window=128,
        experts=ExpertsFamily(
            num_experts_keys=("num_local_experts", "num_experts"), columns_key="intermediate_size", are_biased=True
        ),
    ),
    "deepseek_v2": Family(max_position_embeddings=2048, interleaved_rope=True, layers=deepseek_v2_layers),
    "deepseek_v3": Family(max_position_embeddings=4096, layers=deepseek_v3_layers),
    "llama4_text": _LLAMA4,
    "llama4": replace(_LLAMA4, tensor_prefix="language_model."),
    "glm4_moe": Family(
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        partial_rotary=0.5,
        attention_bias=False,
        heeds_o_bias=False,
        qk_norm=None,
        feed_forwards=deepseek_v3_feed_forwards,
    ),
}
