"""The layers of LFM2, from config.json: short convolutions, with grouped-query attention between them, and in LFM2-MoE
experts after the first layers."""

from __future__ import annotations

from collections.abc import Sequence

from configs.fields import MOST_PARTS, Fields, layer_types
from configs.layers import (
    DenseMLP,
    FeedForward,
    GroupedQueryAttention,
    LayerSpec,
    Mixer,
    MixtureOfExperts,
    NormNames,
)
from configs.model_config import layers_of
from configs.recurrent import ShortConvolution
from configs.rope import RopeConfig

_CONVOLUTION, _ATTENTION = "conv", "full_attention"
_MLP, _PROJECTIONS = "feed_forward", ("w1", "w3", "w2")


def lfm2_layers(fields: Fields, rope: RopeConfig) -> tuple[LayerSpec, ...]:
    """All layers of a dense model. Raises CheckpointError if a field is missing or not supported."""
    num_layers = fields.count("num_hidden_layers", at_most=MOST_PARTS)
    return _layers(fields, rope, [_mlp(fields, _columns(fields))] * num_layers)


def lfm2_moe_layers(fields: Fields, rope: RopeConfig) -> tuple[LayerSpec, ...]:
    """All layers of a model with experts. Raises CheckpointError if a field is missing or not supported."""
    num_layers = fields.count("num_hidden_layers", at_most=MOST_PARTS)
    num_dense = min(fields.integer("num_dense_layers", 2), num_layers)
    mlp, experts = _mlp(fields, fields.count("intermediate_size", 7168)), _experts(fields)
    return _layers(fields, rope, [mlp] * num_dense + [experts] * (num_layers - num_dense))


def _layers(fields: Fields, rope: RopeConfig, feed_forwards: Sequence[FeedForward]) -> tuple[LayerSpec, ...]:
    num_layers, hidden_size = len(feed_forwards), fields.count("hidden_size")
    full = fields.integers("full_attn_idxs") if "full_attn_idxs" in fields.values else range(num_layers)
    usual = [_ATTENTION if i in full else _CONVOLUTION for i in range(num_layers)]
    types = layer_types(fields, (_CONVOLUTION, _ATTENTION), usual)
    num_q = fields.count("num_attention_heads", 32)
    mixers: dict[str, Mixer] = {
        _CONVOLUTION: ShortConvolution(
            hidden_size=hidden_size, width=fields.count("conv_L_cache", 3), bias=fields.flag("conv_bias", False)
        ),
        _ATTENTION: GroupedQueryAttention(
            hidden_size=hidden_size,
            num_attention_heads=num_q,
            num_key_value_heads=fields.count("num_key_value_heads", 8),
            head_dim=fields.count("head_dim", hidden_size // num_q),
            rope=rope,
            o_name="out_proj",
            qk_norm=True,
            head_norm_name="layernorm",
        ),
    }
    norm_names = NormNames(before_mixer="operator_norm", before_feed_forward="ffn_norm")
    return layers_of([mixers[it] for it in types], feed_forwards, hidden_size, norm_names=norm_names)


def _mlp(fields: Fields, columns: int) -> DenseMLP:
    size = fields.count("hidden_size")
    return DenseMLP(hidden_size=size, intermediate_size=columns, name=_MLP, projections=_PROJECTIONS)


def _experts(fields: Fields) -> MixtureOfExperts:
    num_experts, top_k = fields.experts("num_experts", 32, 4)
    return MixtureOfExperts(
        hidden_size=fields.count("hidden_size"),
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=fields.count("moe_intermediate_size", 1792),
        norm_topk_prob=fields.flag("norm_topk_prob", True),
        weight_scale=fields.number("routed_scaling_factor", 1.0),
        sigmoid=True,
        has_choice_bias=fields.flag("use_expert_bias", True),
        choice_bias_name="expert_bias",
        sum_epsilon=1e-6,
        name=_MLP,
        projections=_PROJECTIONS,
    )


def _columns(fields: Fields) -> int:
    """Columns of a dense model's MLPs: two thirds of what the file has, times a factor, rounded up to a multiple."""
    columns = fields.count("block_ff_dim", fields.count("intermediate_size", 12288))
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return columns
    columns = 2 * columns // 3
    if fields.values.get("block_ffn_dim_multiplier", 1.0) is not None:
        unit = fields.count("block_multiple_of", 256)
        columns = -(-int(fields.number("block_ffn_dim_multiplier", 1.0) * columns) // unit) * unit
    return columns
