"""The layers of Qwen3-Next and Qwen3.5, from config.json: Gated DeltaNet, with gated attention between them."""

from __future__ import annotations

from configs.delta_net import GatedDeltaNet
from configs.errors import CheckpointError
from configs.fields import MOST_PARTS, Fields, layer_types
from configs.layers import DenseMLP, FeedForward, GroupedQueryAttention, LayerSpec, Mixer, MixtureOfExperts
from configs.model_config import layers_of
from configs.rope import RopeConfig

_LINEAR, _FULL = "linear_attention", "full_attention"
_UNIT = 16  # elements of a head come in whole vectors of the kernels


def qwen3_next_layers(fields: Fields, rope: RopeConfig) -> tuple[LayerSpec, ...]:
    """All layers of a Qwen3-Next model. Raises CheckpointError if a field is missing or not supported."""
    num_layers = fields.count("num_hidden_layers", at_most=MOST_PARTS)
    dense, step = fields.integers("mlp_only_layers"), fields.count("decoder_sparse_step", 1)
    return _layers(
        fields,
        rope,
        [_mlp(fields, 5632) if i in dense or (i + 1) % step else _experts(fields, 512, 10) for i in range(num_layers)],
        is_interleaved=True,
    )


def qwen3_5_layers(fields: Fields, rope: RopeConfig) -> tuple[LayerSpec, ...]:
    """All layers of a dense Qwen3.5 model. Raises CheckpointError if a field is missing or not supported."""
    num_layers = fields.count("num_hidden_layers", at_most=MOST_PARTS)
    return _layers(fields, rope, [_mlp(fields, 12288)] * num_layers)


def qwen3_5_moe_layers(fields: Fields, rope: RopeConfig) -> tuple[LayerSpec, ...]:
    """All layers of a Qwen3.5 model with experts. Raises CheckpointError if a field is missing or not supported."""
    num_layers = fields.count("num_hidden_layers", at_most=MOST_PARTS)
    return _layers(fields, rope, [_experts(fields, 256, 8)] * num_layers)


def _layers(
    fields: Fields, rope: RopeConfig, feed_forwards: list[FeedForward], *, is_interleaved: bool = False
) -> tuple[LayerSpec, ...]:
    interval = fields.count("full_attention_interval", 4)
    usual = [_LINEAR if (i + 1) % interval else _FULL for i in range(len(feed_forwards))]
    types = layer_types(fields, (_LINEAR, _FULL), usual)
    mixers: dict[str, Mixer] = {_LINEAR: _linear(fields, is_interleaved), _FULL: _attention(fields, rope)}
    hidden_size = fields.count("hidden_size")
    return layers_of([mixers[it] for it in types], feed_forwards, hidden_size, norm_offset=1.0)


def _linear(fields: Fields, is_interleaved: bool) -> GatedDeltaNet:
    fields.check("hidden_act", "silu")
    num_keys, num_values = fields.count("linear_num_key_heads", 16), fields.count("linear_num_value_heads", 32)
    if num_values % num_keys:
        raise CheckpointError(
            f"{fields.where}: linear_num_value_heads={num_values} is not a multiple of linear_num_key_heads={num_keys}"
        )
    sizes = {key: fields.count(key, 128) for key in ("linear_key_head_dim", "linear_value_head_dim")}
    for key, size in sizes.items():
        if size % _UNIT:
            raise CheckpointError(f"{fields.where}: {key}={size} is not supported; it must be a multiple of {_UNIT}")
    return GatedDeltaNet(
        hidden_size=fields.count("hidden_size"),
        num_key_heads=num_keys,
        num_value_heads=num_values,
        key_dim=sizes["linear_key_head_dim"],
        value_dim=sizes["linear_value_head_dim"],
        width=fields.count("linear_conv_kernel_dim", 4, at_most=8),
        is_interleaved=is_interleaved,
    )


def _attention(fields: Fields, rope: RopeConfig) -> GroupedQueryAttention:
    has_bias = fields.flag("attention_bias", False)
    return GroupedQueryAttention(
        hidden_size=fields.count("hidden_size"),
        num_attention_heads=fields.count("num_attention_heads"),
        num_key_value_heads=fields.count("num_key_value_heads"),
        head_dim=fields.count("head_dim", 256),
        rope=rope,
        qkv_bias=has_bias,
        o_bias=has_bias,
        is_gated=True,
        qk_norm=True,
        norm_offset=1.0,
    )


def _mlp(fields: Fields, columns: int) -> DenseMLP:
    return DenseMLP(
        hidden_size=fields.count("hidden_size"),
        intermediate_size=fields.count("intermediate_size", columns),
        hidden_act=fields.text("hidden_act", "silu"),
    )


def _experts(fields: Fields, num_experts: int, top_k: int) -> MixtureOfExperts:
    """The experts, with this many of them and this many for a token if the file has no numbers."""
    fields.check("hidden_act", "silu")
    num_experts, top_k = fields.experts("num_experts", num_experts, top_k)
    return MixtureOfExperts(
        hidden_size=fields.count("hidden_size"),
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=fields.count("moe_intermediate_size", 512),
        norm_topk_prob=fields.flag("norm_topk_prob", True),
        shared_intermediate_size=fields.count("shared_expert_intermediate_size", 512),
    )
