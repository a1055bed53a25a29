"""Model families of Hugging Face checkpoints: the facts that only transformers' code states, and not config.json.

This module is a table. configs/config_json.py reads checkpoints by it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from configs.deepseek import (
    deepseek_v2_layers,
    deepseek_v3_feed_forwards,
    deepseek_v3_layers,
    deepseek_v32_layers,
    glm_dsa_layers,
)
from configs.falcon_h1 import falcon_h1_layers
from configs.fields import Fields
from configs.granite import granite_layers
from configs.kimi_linear import kimi_linear_layers
from configs.layers import PLAIN_NORMS, FeedForward, LayerSpec, NormNames
from configs.lfm2 import lfm2_layers, lfm2_moe_layers
from configs.llama4 import llama4_layers
from configs.nemotron import nemotron_layers
from configs.qwen_hybrid import qwen3_5_layers, qwen3_5_moe_layers, qwen3_next_layers
from configs.rope import RopeConfig


@dataclass(frozen=True, kw_only=True)
class ExpertsFamily:
    """How config.json describes a family's experts, and what the family's code fixes."""

    num_experts_keys: tuple[str, ...]
    """Keys for the number of experts. The first one that the file has counts."""
    columns_key: str
    """Key for the columns of one expert."""
    shared_columns_key: str | None = None
    norm_topk_prob: bool | None = None
    """Whether a token's weights are divided by their sum. If None, the file's value counts, or false if it has none."""
    round_weights: bool = True
    name: str = "mlp"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    are_biased: bool = False
    """Whether layers have a BiasedMixture. Then only `num_experts_keys` and `columns_key` count."""
    mixes_dense_layers: bool = False
    """Whether layers in `mlp_only_layers`, and layers that `decoder_sparse_step` skips, have a dense MLP."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """Facts of a family that config.json omits, or that the family's code fixes even if the file says otherwise."""

    num_key_value_heads: int | None = None
    """Number of KV heads if the file has none. If this is None too, the number of query heads."""
    head_dim: int | None = None
    """Size of a head if the file has none. If this is None too, hidden_size / num_attention_heads."""
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rms_norm_eps_key: str = "rms_norm_eps"
    rope_theta: float = 10000.0
    rope_parameters: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of the rotary embedding if the file has none."""
    local_rope_theta: float | None = None
    """The rotary base of layers with a sliding window, unless the file has `rope_local_base_freq`. The frequencies of
    these layers are not scaled. If None, all layers use the same base."""
    partial_rotary: float | None = None
    """The rotated share of a head if the file has none. If None, heads are rotated whole, and a smaller share is
    refused."""
    interleaved_rope: bool = False
    """Whether the checkpoint rotates pairs of neighbours, see RopeConfig."""
    qkv_bias: bool | None = False
    """Whether q, k and v have a bias. If None, the file's `qkv_bias` counts, and true if the file has none."""
    attention_bias: bool | None = None
    """Whether q, k, v and o have a bias if the file has no `attention_bias`. If None, they never have one."""
    reads_o_bias: bool = True
    """Whether o has a bias whenever q, k and v have one."""
    reads_mlp_bias: bool = False
    fused_qkv: bool = False
    mlp_projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Names of gate, up and down, see DenseMLP."""
    qk_norm: bool | None = False
    """Whether query and key heads have norms. If None, the file's `use_qk_norm` counts, and false if the file has
    none."""
    has_sinks: bool = False
    """Whether attention has sinks, see GroupedQueryAttention."""
    reads_no_rope_layers: bool = False
    """Whether layers that `no_rope_layers` marks with 0, or every `no_rope_layer_interval`th layer if the file has no
    such list, have no rotary embedding."""
    windows: Literal["none", "every layer", "every layer if used", "as said", "by type", "by turns", "without rope"] = (
        "none"
    )
    """The layers to which `sliding_window` applies. "as said": layers named in `layer_types`, or layers from
    `max_window_layers` on if the file has no types. "by type": layers named in `layer_types`. "by turns": layers named
    in `layer_types`, or all but every `sliding_window_pattern`th layer. "without rope": layers named in `layer_types`,
    or layers without a rotary embedding. For "every layer if used", "as said", "by type" and "without rope", only if
    the file sets `use_sliding_window`."""
    window_pattern: int = 1
    """The `sliding_window_pattern` if the file has none."""
    default_window: int | None = 4096
    """The `sliding_window` if the file has none. If this is None too, no layer has a window."""
    experts: ExpertsFamily | None = None
    feed_forwards: Callable[[Fields], list[FeedForward]] | None = None
    """Builds the feed-forwards, if the family has neither a dense MLP nor `experts`."""
    layers: Callable[[Fields, RopeConfig], tuple[LayerSpec, ...]] | None = None
    """Builds the layers, if the family has no grouped-query attention. Other fields of mixers and feed-forwards do not
    count."""
    hidden_act_key: str = "hidden_act"
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    query_pre_attn_scalar: float | None = None
    """Scores are divided by the square root of the file's value or, if it has none, of this one. If None, of
    head_dim."""
    softcaps: Mapping[str, float | None] = field(default_factory=dict)
    """The softcap keys that the family reads, with their defaults. A null in the file turns a softcap off."""
    norm_names: NormNames = PLAIN_NORMS
    """Names of a layer's norms, see LayerSpec."""
    embedding_name: str = "embed_tokens"
    final_norm_name: str = "norm"
    norm_offset: float = 0.0
    """`TensorSpec.offset` of all norm weights."""
    tensor_prefix: str = ""
    """Prefix of the text model's tensor names."""
    body: str = "model"
    """Prefix of all tensor names but the LM head's."""
    is_part: bool = False
    """Whether the checkpoint is of a larger model. Then its `text_config` counts."""
    unread: tuple[str, ...] = ()
    """Prefixes of tensors that are not read, see ModelConfig."""
    num_mtp_layers: int = 0
    """Number of MTP layers if the file has none of the keys for it."""
    other_names: Mapping[str, str] = field(default_factory=dict)
    """Keys of the file that have other names in this module, with these names."""
    scales_embedding: bool = False
    """Whether embeddings are multiplied by the square root of hidden_size."""
    reads_multipliers: bool = False
    """Whether `embedding_multiplier`, `residual_multiplier`, `logits_scaling` and `lm_head_multiplier` of the file
    count."""


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

_QWEN_HYBRID = Family(
    max_position_embeddings=32768,
    partial_rotary=0.25,
    norm_offset=1.0,
    layers=qwen3_5_layers,
    unread=("mtp.",),
    num_mtp_layers=1,
)
_QWEN3_5_MOE = replace(_QWEN_HYBRID, layers=qwen3_5_moe_layers)
_WITH_IMAGES: dict[str, Any] = {
    "body": "model.language_model",
    "unread": ("mtp.", "model.visual."),
    "is_part": True,
}

_LFM2 = Family(
    max_position_embeddings=128000,
    rms_norm_eps=1e-5,
    rms_norm_eps_key="norm_eps",
    rope_theta=1e6,
    layers=lfm2_layers,
    tie_word_embeddings=True,
    final_norm_name="embedding_norm",
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
    reads_o_bias=False,
    mlp_projections=_FUSED_MLP,
)

FAMILIES = {
    "llama": Family(max_position_embeddings=2048, attention_bias=False, reads_mlp_bias=True),
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
    "smollm3": Family(
        num_key_value_heads=4,
        max_position_embeddings=32768,
        rope_theta=2e6,
        attention_bias=False,
        reads_mlp_bias=True,
        tie_word_embeddings=True,
        reads_no_rope_layers=True,
        windows="without rope",
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
    "deepseek_v32": Family(max_position_embeddings=163840, layers=deepseek_v32_layers),
    "glm_moe_dsa": Family(max_position_embeddings=202752, rms_norm_eps=1e-5, layers=glm_dsa_layers),
    "kimi_linear": Family(
        max_position_embeddings=1048576,
        rms_norm_eps=1e-5,
        layers=kimi_linear_layers,
        other_names={
            "model_max_length": "max_position_embeddings",
            "num_experts": "n_routed_experts",
            "num_experts_per_token": "num_experts_per_tok",
            "num_shared_experts": "n_shared_experts",
            "num_expert_group": "n_group",
            "moe_renormalize": "norm_topk_prob",
            "moe_router_activation_func": "scoring_func",
        },
    ),
    "qwen3_next": replace(_QWEN_HYBRID, layers=qwen3_next_layers),
    "qwen3_5_text": _QWEN_HYBRID,
    "qwen3_5": replace(_QWEN_HYBRID, **_WITH_IMAGES),
    "qwen3_5_moe_text": _QWEN3_5_MOE,
    "qwen3_5_moe": replace(_QWEN3_5_MOE, **_WITH_IMAGES),
    "lfm2": _LFM2,
    "lfm2_moe": replace(_LFM2, layers=lfm2_moe_layers),
    "granitemoehybrid": Family(max_position_embeddings=2048, layers=granite_layers, reads_multipliers=True),
    "nemotron_h": Family(
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        rms_norm_eps_key="layer_norm_epsilon",
        layers=nemotron_layers,
        embedding_name="embeddings",
        final_norm_name="norm_f",
        body="backbone",
        unread=("mtp.",),
    ),
    "falcon_h1": Family(
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        layers=falcon_h1_layers,
        final_norm_name="final_layernorm",
        reads_multipliers=True,
    ),
    "llama4_text": _LLAMA4,
    "llama4": replace(_LLAMA4, tensor_prefix="language_model.", is_part=True),
    "glm4_moe": Family(
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        partial_rotary=0.5,
        attention_bias=False,
        reads_o_bias=False,
        qk_norm=None,
        feed_forwards=deepseek_v3_feed_forwards,
    ),
}
