"""The layers of Kimi-Linear, from config.json: Kimi Delta Attention, with latent attention between them, and the
experts of DeepSeek-V3."""

from __future__ import annotations

from dataclasses import replace

from configs.deepseek import deepseek_v3_experts, dense_mlp, latent_attention
from configs.errors import CheckpointError
from configs.fields import MOST_PARTS, Fields, layer_types
from configs.kimi_delta import KimiDeltaAttention
from configs.layers import FeedForward, LayerSpec, Mixer
from configs.model_config import layers_of
from configs.rope import RopeConfig

_LINEAR, _FULL = "linear_attention", "full_attention"
_DENSE, _SPARSE = "dense", "sparse"
_DEFAULTS = {
    "q_lora_rank": None,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 1024,
    "routed_scaling_factor": 2.446,
    "n_group": 1,
    "topk_group": 1,
}
_UNIT = 16  # elements of a head come in whole vectors of the kernels


def kimi_linear_layers(fields: Fields, _rope: RopeConfig) -> tuple[LayerSpec, ...]:
    """All layers of the model. Raises CheckpointError if a field is missing or not supported."""
    num_layers = fields.count("num_hidden_layers", at_most=MOST_PARTS)
    fields = Fields({**_DEFAULTS, **fields.values}, fields.where)
    linear = fields.part("linear_attn_config")
    fields.check("mla_use_nope", True)
    fields.check("mla_use_output_gate", False)
    linear.check("use_full_rank_gate", False)
    linear.check("gate_lower_bound", None)
    num_dense, step = fields.integer("first_k_dense_replace", 1), fields.count("moe_layer_freq", 1)
    usual = [_DENSE if i < num_dense or i % step else _SPARSE for i in range(num_layers)]
    experts = replace(
        deepseek_v3_experts(fields),
        name="block_sparse_moe",
        projections=("w1", "w3", "w2"),
        shared_name="block_sparse_moe.shared_experts",
    )
    feed_forwards: dict[str, FeedForward] = {_DENSE: dense_mlp(fields), _SPARSE: experts}
    full = latent_attention(fields, RopeConfig(theta=10000.0, partial=0.0))
    mixers: dict[str, Mixer] = {_LINEAR: _delta_attention(fields, linear), _FULL: full}
    return layers_of(
        [mixers[it] for it in layer_types(fields, (_LINEAR, _FULL), _usual_types(linear, num_layers))],
        [feed_forwards[it] for it in layer_types(fields, (_DENSE, _SPARSE), usual, "mlp_layer_types")],
        fields.count("hidden_size"),
    )


def _usual_types(linear: Fields, num_layers: int) -> list[str]:
    """The types of layers in a file without `layer_types`. Published files have two lists, which count layers from
    1."""
    if "full_attn_layers" not in linear.values:
        return [_FULL if i and i % 4 == 0 else _LINEAR for i in range(num_layers)]
    full, others = linear.integers("full_attn_layers"), linear.integers("kda_layers")
    if sorted((*full, *others)) != list(range(1, num_layers + 1)):
        raise CheckpointError(
            f"{linear.where}: full_attn_layers and kda_layers must name each of the layers 1 to {num_layers} once"
        )
    return [_FULL if i + 1 in full else _LINEAR for i in range(num_layers)]


def _delta_attention(fields: Fields, linear: Fields) -> KimiDeltaAttention:
    size = linear.count("head_dim", fields.count("linear_head_dim", 128))
    if size % _UNIT:
        raise CheckpointError(
            f"{fields.where}: heads of {size} elements are not supported; choose a multiple of {_UNIT}"
        )
    width = fields.count("linear_conv_kernel_dim", 4)
    return KimiDeltaAttention(
        hidden_size=fields.count("hidden_size"),
        num_heads=linear.count("num_heads", fields.count("linear_num_heads", 32)),
        key_dim=size,
        width=linear.count("short_conv_kernel_size", width, at_most=8),
    )
