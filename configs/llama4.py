"""The layers of Llama 4's text model, from config.json: chunked attention, layers without positions, experts."""

from __future__ import annotations

from configs.errors import CheckpointError
from configs.fields import MOST_PARTS, Fields, rotary_layers
from configs.layers import DenseMLP, GroupedQueryAttention, LayerSpec, MixtureOfExperts
from configs.model_config import layers_of
from configs.rope import RopeConfig

_CHUNKED, _FULL = "chunked_attention", "full_attention"


def llama4_layers(fields: Fields, rope: RopeConfig) -> tuple[LayerSpec, ...]:
    """All layers of the model. Raises CheckpointError if a field is missing or not supported."""
    num_layers = fields.count("num_hidden_layers", at_most=MOST_PARTS)
    turning, step = rotary_layers(fields, num_layers), fields.count("interleave_moe_layer_step", 1)
    types = fields.values.get("layer_types")
    types = [_CHUNKED if turns else _FULL for turns in turning] if types is None else types
    if not isinstance(types, list) or len(types) != num_layers or not set(types) <= {_CHUNKED, _FULL}:
        raise CheckpointError(
            f"{fields.where}: layer_types must name {_CHUNKED} or {_FULL} for each of {num_layers} layers"
        )
    if rope.scaling_type not in ("default", "linear", "llama3"):
        # Other types scale cosine and sine, and the norms after the rotary embedding would cancel that factor.
        raise CheckpointError(f"{fields.where}: rope scaling type {rope.scaling_type} of Llama 4 is not supported")
    said = fields.values.get("moe_layers")
    with_experts = range(step - 1, num_layers, step) if said is None else fields.integers("moe_layers")
    experts, dense = _experts(fields), _dense(fields)
    return layers_of(
        [_attention(fields, rope, turns, type_) for turns, type_ in zip(turning, types, strict=True)],
        [experts if i in with_experts else dense for i in range(num_layers)],
        fields.count("hidden_size"),
    )


def _attention(fields: Fields, rope: RopeConfig, turns: bool, type_: str) -> GroupedQueryAttention:
    num_q, has_bias = fields.count("num_attention_heads"), fields.flag("attention_bias", False)
    temperature = None
    if fields.values.get("attn_temperature_tuning", True):  # some files have a number here
        temperature = fields.number("attn_scale", 0.1), fields.count("floor_scale", 8192)
    return GroupedQueryAttention(
        hidden_size=fields.count("hidden_size"),
        num_attention_heads=num_q,
        num_key_value_heads=fields.kv_heads(num_q, 8),
        head_dim=fields.count("head_dim", 128),
        rope=rope if turns else RopeConfig(theta=rope.theta, partial=0.0, temperature=temperature),
        qkv_bias=has_bias,
        o_bias=has_bias,
        qk_norm=turns and fields.flag("use_qk_norm", True),
        norms_have_weights=False,
        chunk=fields.count("attention_chunk_size", 8192) if type_ == _CHUNKED else None,
    )


def _dense(fields: Fields) -> DenseMLP:
    return DenseMLP(
        hidden_size=fields.count("hidden_size"),
        intermediate_size=fields.count("intermediate_size_mlp", 16384),
        hidden_act=fields.text("hidden_act", "silu"),
        name="feed_forward",
    )


def _experts(fields: Fields) -> MixtureOfExperts:
    num_experts, top_k = fields.experts("num_local_experts", 16, 1)
    if (act := fields.text("hidden_act", "silu")) != "silu":
        raise CheckpointError(f"{fields.where}: hidden_act={act} of experts is not supported; only silu is")
    return MixtureOfExperts(
        hidden_size=fields.count("hidden_size"),
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=fields.count("intermediate_size"),
        norm_topk_prob=False,
        sigmoid=True,
        scales_input=True,
        shared_intermediate_size=fields.count("intermediate_size"),
        shared_name="feed_forward.shared_expert",
        has_shared_gate=False,
        name="feed_forward",
        router_name="router",
        stacked="inputs first",
    )
