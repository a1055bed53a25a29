"""The layers of Granite 4, from config.json: Mamba2 or attention, each with an MLP and perhaps experts beside it."""

from __future__ import annotations

from configs.errors import CheckpointError
from configs.fields import MOST_PARTS, Fields
from configs.layers import DenseMLP, FeedForward, GroupedQueryAttention, LayerSpec, Mixer, MixtureOfExperts
from configs.mamba import read_mamba
from configs.model_config import layers_of
from configs.rope import RopeConfig

_MAMBA, _ATTENTION = ("mamba", "linear_attention"), ("attention", "full_attention")  # transformers 4's and 5's names
_PROJECTIONS = ("input_linear", "input_linear", "output_linear")


def granite_layers(fields: Fields, rope: RopeConfig) -> tuple[LayerSpec, ...]:
    """All layers of the model. Raises CheckpointError if a field is missing or not supported."""
    num_layers = fields.count("num_hidden_layers", at_most=MOST_PARTS)
    types = fields.values.get("layer_types") or fields.values.get("layers_block_type") or [_MAMBA[0]] * num_layers
    if not isinstance(types, list) or len(types) != num_layers or not set(types) <= {*_MAMBA, *_ATTENTION}:
        raise CheckpointError(f"{fields.where}: layer_types must name mamba or attention for {num_layers} layers")
    fields.check("hidden_act", "silu")
    mixers: dict[str, Mixer] = dict.fromkeys(_ATTENTION, _attention(fields, rope))
    if set(types) & {*_MAMBA}:
        columns = fields.count("mamba_expand", 2) * fields.count("hidden_size")
        mixers |= dict.fromkeys(_MAMBA, read_mamba(fields, columns, fields.number("rms_norm_eps", 1e-6)))
    return layers_of([mixers[it] for it in types], [_feed_forward(fields)] * num_layers, fields.count("hidden_size"))


def _attention(fields: Fields, rope: RopeConfig) -> GroupedQueryAttention:
    num_q, has_bias = fields.count("num_attention_heads", 32), fields.flag("attention_bias", False)
    turns = fields.values.get("position_embedding_type") == "rope"
    return GroupedQueryAttention(
        hidden_size=fields.count("hidden_size"),
        num_attention_heads=num_q,
        num_key_value_heads=fields.count("num_key_value_heads", num_q),
        head_dim=fields.count("head_dim", fields.count("hidden_size") // num_q),
        rope=rope if turns else RopeConfig(theta=rope.theta, partial=0.0),
        qkv_bias=has_bias,
        o_bias=has_bias,
        scale=fields.number("attention_multiplier", 1.0),
    )


def _feed_forward(fields: Fields) -> FeedForward:
    """The MLP that all tokens use, and experts beside it unless the file says that there are none."""
    columns = fields.count("shared_intermediate_size", 1024)
    shared = DenseMLP(
        hidden_size=fields.count("hidden_size"),
        intermediate_size=columns,
        name="shared_mlp",
        projections=_PROJECTIONS,
    )
    if fields.integer("num_local_experts", 8) == 0:
        return shared
    num_experts, top_k = fields.experts("num_local_experts", 8, 2)
    return MixtureOfExperts(
        hidden_size=fields.count("hidden_size"),
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=fields.count("intermediate_size", 11008),
        norm_topk_prob=True,
        shared_intermediate_size=columns,
        shared_name="shared_mlp",
        shared_projections=_PROJECTIONS,
        has_shared_gate=False,
        name="block_sparse_moe",
        projections=_PROJECTIONS,
        router_name="router.layer",
        stacked="outputs first",
    )
