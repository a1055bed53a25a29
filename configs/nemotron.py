"""The layers of Nemotron-H and Nemotron 3, from config.json. Each is Mamba2, attention, an MLP or experts alone."""

from __future__ import annotations

import math

from configs.deepseek import expert_groups
from configs.errors import CheckpointError
from configs.fields import MOST_PARTS, Fields
from configs.layers import DenseMLP, FeedForward, GroupedQueryAttention, LayerSpec, Mixer, MixtureOfExperts, NormNames
from configs.mamba import Mamba2, checked_mamba
from configs.model_config import layers_of
from configs.recurrent import NoMixer
from configs.rope import RopeConfig

_TYPES = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}  # a pattern's letters, and transformers 4's names
_NEW_NAMES = {"linear_attention": "mamba", "full_attention": "attention"}  # transformers 5's


def nemotron_layers(fields: Fields, rope: RopeConfig) -> tuple[LayerSpec, ...]:
    """All layers of the model. Raises CheckpointError if a field is missing or not supported."""
    types = _types(fields)
    for key, only in (("mlp_hidden_act", "relu2"), ("mamba_hidden_act", "silu"), ("mlp_bias", False)):
        fields.check(key, only)
    parts: dict[str, tuple[Mixer, FeedForward | None]] = {"attention": (_attention(fields, rope), None)}
    if "mamba" in types:
        parts["mamba"] = _mamba(fields), None
    if "mlp" in types:
        parts["mlp"] = NoMixer(), _mlp(fields)
    if "moe" in types:
        parts["moe"] = NoMixer(), _experts(fields)
    return layers_of(
        [parts[it][0] for it in types],
        [parts[it][1] for it in types],
        fields.count("hidden_size"),
        norm_names=NormNames(before_mixer="norm", before_feed_forward="norm"),
    )


def _types(fields: Fields) -> list[str]:
    """The type of each layer, of those in _TYPES."""
    pattern = fields.values.get("hybrid_override_pattern")
    said = fields.values.get("layers_block_type") or fields.values.get("layer_types") or list(pattern or "ME*-")
    known = {**_TYPES, **_NEW_NAMES, **{it: it for it in _TYPES.values()}}
    if not isinstance(said, list) or len(said) > MOST_PARTS or not all(it in known for it in said):
        raise CheckpointError(f"{fields.where}: layers must be of the types {', '.join(_TYPES.values())}, not {said!r}")
    return [known[it] for it in said]


def _mamba(fields: Fields) -> Mamba2:
    mamba = Mamba2(
        hidden_size=fields.count("hidden_size"),
        num_heads=fields.count("mamba_num_heads", 128),
        num_groups=fields.count("n_groups", 8),
        head_size=fields.count("mamba_head_dim", 64),
        state_size=fields.count("ssm_state_size", 128),
        width=fields.count("conv_kernel", 4, at_most=8),
        name="mixer",
        bias=fields.flag("use_bias", False),
        conv_bias=fields.flag("use_conv_bias", True),
        norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        dt_limits=(fields.number("time_step_min", 0.001), math.inf),  # `time_step_limit` is not read by transformers
    )
    return checked_mamba(mamba, fields.where)


def _attention(fields: Fields, rope: RopeConfig) -> GroupedQueryAttention:
    num_q = fields.count("num_attention_heads", 32)
    return GroupedQueryAttention(
        hidden_size=fields.count("hidden_size"),
        num_attention_heads=num_q,
        num_key_value_heads=fields.kv_heads(num_q, 8),
        head_dim=fields.count("head_dim", 128),
        rope=RopeConfig(theta=rope.theta, partial=0.0),
        name="mixer",
    )


def _mlp(fields: Fields) -> DenseMLP:
    return DenseMLP(
        hidden_size=fields.count("hidden_size"),
        intermediate_size=fields.count("intermediate_size", 21504),
        is_gated=False,
        name="mixer",
    )


def _experts(fields: Fields) -> MixtureOfExperts:
    num_experts, top_k = fields.count("n_routed_experts", 8, MOST_PARTS), fields.count("num_experts_per_tok", 2)
    num_groups, top_groups = expert_groups(fields, num_experts, 1)
    if top_k > top_groups * (num_experts // num_groups):
        raise CheckpointError(f"{fields.where}: num_experts_per_tok={top_k} exceeds the experts that a token may take")
    latent_size = fields.values.get("moe_latent_size")
    return MixtureOfExperts(
        hidden_size=fields.count("hidden_size"),
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=fields.count("moe_intermediate_size", 7688),
        norm_topk_prob=fields.flag("norm_topk_prob", True),
        round_weights=False,
        weight_scale=fields.number("routed_scaling_factor", 1.0),
        sigmoid=True,
        has_choice_bias=True,
        num_groups=num_groups,
        top_groups=top_groups,
        shared_intermediate_size=fields.count("moe_shared_expert_intermediate_size", 7688),
        shared_name="mixer.shared_experts",
        has_shared_gate=False,
        hidden_act="relu2",
        is_gated=False,
        latent_size=None if latent_size is None else fields.count("moe_latent_size"),
        name="mixer",
    )
