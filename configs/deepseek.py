"""The layers of DeepSeek-V2, V3 and V3.2 and of GLM-5, from config.json: latent attention, which is sparse (DSA) in
V3.2 and GLM-5, and experts after the first dense layers."""

from __future__ import annotations

from dataclasses import replace

from configs.errors import CheckpointError
from configs.fields import MOST_PARTS, Fields, layer_types
from configs.latent_attention import Indexer, LatentAttention
from configs.layers import DenseMLP, FeedForward, LayerSpec, MixtureOfExperts
from configs.model_config import layers_of
from configs.rope import RopeConfig, yarn_mscale

_GREEDY, _GROUP_LIMITED, _NOAUX_TC = "greedy", "group_limited_greedy", "noaux_tc"
_DENSE, _SPARSE = "dense", "sparse"
_FULL, _SHARED = "full", "shared"
_SPARSE_DEFAULTS = {"index_topk": 2048, "index_head_dim": 128}


def deepseek_v2_layers(fields: Fields, rope: RopeConfig) -> tuple[LayerSpec, ...]:
    """All layers of a DeepSeek-V2 model. Raises CheckpointError if a field is missing or not supported."""
    return _layers(fields, rope, _feed_forwards(fields, _v2_experts(fields)))


def deepseek_v3_layers(fields: Fields, rope: RopeConfig) -> tuple[LayerSpec, ...]:
    """All layers of a DeepSeek-V3 or R1 model. Raises CheckpointError if a field is missing or not supported."""
    rope = replace(rope, interleaved=fields.flag("rope_interleave", True))
    return _layers(fields, rope, deepseek_v3_feed_forwards(fields))


def deepseek_v32_layers(fields: Fields, rope: RopeConfig) -> tuple[LayerSpec, ...]:
    """All layers of a DeepSeek-V3.2 model. Raises CheckpointError if a field is missing or not supported."""
    return _sparse_layers(fields, rope, interleaved_index=False)


def glm_dsa_layers(fields: Fields, rope: RopeConfig) -> tuple[LayerSpec, ...]:
    """All layers of a GLM-5 model. Raises CheckpointError if a field is missing or not supported."""
    fields = Fields({"n_group": 1, "topk_group": 1, **fields.values}, fields.where)
    return _sparse_layers(fields, rope, interleaved_index=True)


def _sparse_layers(fields: Fields, rope: RopeConfig, *, interleaved_index: bool) -> tuple[LayerSpec, ...]:
    fields = Fields({**_SPARSE_DEFAULTS, **fields.values}, fields.where)
    fields.check("attention_bias", False)
    fields.check("rope_interleave", True)
    fields.check("indexer_rope_interleave", interleaved_index)
    feed_forwards = deepseek_v3_feed_forwards(fields)
    by_count = [_SPARSE if isinstance(it, MixtureOfExperts) else _DENSE for it in feed_forwards]
    if layer_types(fields, (_DENSE, _SPARSE), by_count, "mlp_layer_types") != by_count:
        raise CheckpointError(
            f"{fields.where}: mlp_layer_types must be dense for the first first_k_dense_replace layers and sparse for "
            "the others; other orders are not supported"
        )
    latents = latent_attention(fields, replace(rope, interleaved=True))
    if latents.q_lora_rank is None:
        raise CheckpointError(
            f"{fields.where}: q_lora_rank=null is not supported with an indexer, which reads that latent"
        )
    indexer = Indexer(
        num_heads=fields.count("index_n_heads"),
        head_dim=fields.count("index_head_dim"),
        interleaved=interleaved_index,
        hidden_size=latents.hidden_size,
        q_lora_rank=latents.q_lora_rank,
    )
    if indexer.head_dim < latents.qk_rope_head_dim:
        raise CheckpointError(
            f"{fields.where}: index_head_dim={indexer.head_dim} is less than "
            f"qk_rope_head_dim={latents.qk_rope_head_dim}"
        )
    full = replace(latents, top_k=fields.count("index_topk"), indexer=indexer)
    mixers = {_FULL: full, _SHARED: replace(full, indexer=None)}
    types = layer_types(fields, (_FULL, _SHARED), _index_types(fields, len(feed_forwards)), "indexer_types")
    if len(types) != len(feed_forwards) or types[0] != _FULL or not {*types} <= {*mixers}:
        raise CheckpointError(
            f"{fields.where}: the first of {len(feed_forwards)} layers must have an indexer, and each other one must "
            f"have one or share it; the file says {', '.join(types)}"
        )
    return layers_of([mixers[it] for it in types], feed_forwards, latents.hidden_size)


def _index_types(fields: Fields, num_layers: int) -> list[str]:
    """Whether each layer has an indexer of its own or shares that of a layer before it, in a file without
    `indexer_types`."""
    if pattern := fields.text("index_topk_pattern", ""):
        return [{"F": _FULL, "S": _SHARED}.get(it, it) for it in pattern]
    step, offset = fields.count("index_topk_freq", 1), fields.integer("index_skip_topk_offset", 2)
    return [_SHARED if max(i - offset + 1, 0) % step else _FULL for i in range(num_layers)]


def deepseek_v3_feed_forwards(fields: Fields) -> list[FeedForward]:
    """The feed-forward of each layer: a few dense MLPs, then experts chosen by sigmoids with a bias (noaux_tc)."""
    return _feed_forwards(fields, deepseek_v3_experts(fields))


def deepseek_v3_experts(fields: Fields) -> MixtureOfExperts:
    """Experts chosen by sigmoids with a bias. Raises CheckpointError if a field is missing or not supported."""
    fields.check("scoring_func", "sigmoid")
    fields.check("topk_method", _NOAUX_TC)
    experts = _experts(fields, _NOAUX_TC)
    if experts.num_experts // experts.num_groups < 2:
        raise CheckpointError(
            f"{fields.where}: n_group={experts.num_groups} leaves a group fewer than two of "
            f"n_routed_experts={experts.num_experts}, by which groups are chosen"
        )
    normalises = fields.flag("norm_topk_prob", True)
    return replace(experts, sigmoid=True, has_choice_bias=True, norm_topk_prob=normalises)


def _layers(fields: Fields, rope: RopeConfig, feed_forwards: list[FeedForward]) -> tuple[LayerSpec, ...]:
    return layers_of([latent_attention(fields, rope)] * len(feed_forwards), feed_forwards, fields.count("hidden_size"))


def _feed_forwards(fields: Fields, experts: MixtureOfExperts) -> list[FeedForward]:
    dense = dense_mlp(fields)
    # The families with sigmoids have different defaults, so the file must have these fields.
    num_dense = fields.integer("first_k_dense_replace", None if experts.sigmoid else 0)
    step = fields.count("moe_layer_freq", 1)
    num_layers = fields.count("num_hidden_layers", at_most=MOST_PARTS)
    return [experts if i >= num_dense and i % step == 0 else dense for i in range(num_layers)]


def dense_mlp(fields: Fields) -> DenseMLP:
    """The MLP of layers without experts."""
    return DenseMLP(
        hidden_size=fields.count("hidden_size"),
        intermediate_size=fields.count("intermediate_size"),
        hidden_act=fields.text("hidden_act", "silu"),
    )


def latent_attention(fields: Fields, rope: RopeConfig) -> LatentAttention:
    """The mixer of DeepSeek's layers."""
    nope_dim, rope_dim = fields.count("qk_nope_head_dim", 128), fields.count("qk_rope_head_dim", 64)
    # An explicit null means that queries have no latent.
    has_q_latent = fields.values.get("q_lora_rank", 0) is not None
    scaling = dict(rope.scaling)
    # The factor applies twice, to queries and to keys.
    mscale = yarn_mscale(scaling.get("factor", 1.0), scaling.get("mscale_all_dim") or 0.0)
    return LatentAttention(
        hidden_size=fields.count("hidden_size"),
        num_attention_heads=fields.count("num_attention_heads"),
        q_lora_rank=fields.count("q_lora_rank", 1536) if has_q_latent else None,
        kv_lora_rank=fields.count("kv_lora_rank", 512),
        qk_nope_head_dim=nope_dim,
        qk_rope_head_dim=rope_dim,
        v_head_dim=fields.count("v_head_dim", 128),
        rope=rope,
        scale=(nope_dim + rope_dim) ** -0.5 * mscale**2,
    )


def _v2_experts(fields: Fields) -> MixtureOfExperts:
    # DeepSeek's code and transformers treat norm_topk_prob differently. No published model sets it.
    fields.check("scoring_func", "softmax")
    fields.check("norm_topk_prob", False)
    method = fields.text("topk_method", _GREEDY)
    if method not in (_GREEDY, _GROUP_LIMITED):
        raise CheckpointError(
            f"{fields.where}: topk_method={method} is not supported; supported are {_GREEDY}, {_GROUP_LIMITED}"
        )
    return _experts(fields, method)


def _experts(fields: Fields, method: str) -> MixtureOfExperts:
    num_experts, top_k = fields.count("n_routed_experts", at_most=MOST_PARTS), fields.count("num_experts_per_tok")
    fields.check("hidden_act", "silu")
    num_groups, top_groups = (1, 1) if method == _GREEDY else expert_groups(fields, num_experts)
    if top_k > top_groups * (num_experts // num_groups):
        raise CheckpointError(
            f"{fields.where}: num_experts_per_tok={top_k} exceeds the experts of {top_groups} of {num_groups} groups "
            f"of n_routed_experts={num_experts}"
        )
    width = fields.count("moe_intermediate_size")
    return MixtureOfExperts(
        hidden_size=fields.count("hidden_size"),
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=width,
        norm_topk_prob=False,
        round_weights=False,
        weight_scale=fields.number("routed_scaling_factor", None if method == _NOAUX_TC else 1.0),
        num_groups=num_groups,
        top_groups=top_groups,
        shared_intermediate_size=fields.count("n_shared_experts") * width,
        shared_name="mlp.shared_experts",
        has_shared_gate=False,
    )


def expert_groups(fields: Fields, num_experts: int, default: int | None = None) -> tuple[int, int]:
    """The number of expert groups, and the number of groups that a token may choose from. Each is `default` if the file
    has none."""
    num_groups, top_groups = fields.count("n_group", default), fields.count("topk_group", default)
    if num_experts % num_groups or top_groups > num_groups:
        raise CheckpointError(
            f"{fields.where}: n_group={num_groups} does not divide n_routed_experts={num_experts}, or is less than "
            f"topk_group={top_groups}"
        )
    return num_groups, top_groups
