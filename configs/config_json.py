"""Reads the config.json of a Hugging Face checkpoint with the facts of its family from configs/families.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from configs.biased_mixture import BiasedMixture
from configs.errors import CheckpointError
from configs.families import FAMILIES, ExpertsFamily, Family
from configs.fields import MOST_PARTS, Fields, checked_rope, read_json, rotary_layers
from configs.layers import DenseMLP, FeedForward, GroupedQueryAttention, LayerSpec, MixtureOfExperts
from configs.model_config import ModelConfig, layers_of
from configs.quantization import read_weight_scales
from configs.rope import RopeConfig

_NOT_SCALING = frozenset(
    ("rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")
)
"""Rope parameters that scale no frequency. The last two concern images only."""
_TYPES = _FULL, _SLIDING = "full_attention", "sliding_attention"
"""Layer types in `layer_types` and `rope_parameters`."""


def config_of_directory(path: Path, max_model_len: int | None) -> ModelConfig:
    config_path = path / "config.json"
    if not config_path.is_file():
        raise CheckpointError(f"{path} has no config.json; set `model` to a directory with one")
    fields = Fields(read_json(config_path), str(config_path))
    model_type = fields.text("model_type")
    if model_type not in FAMILIES:
        raise CheckpointError(
            f"{config_path}: model_type={model_type} is not supported; supported are {', '.join(FAMILIES)}"
        )
    quantization = fields.values.get("quantization_config") or {}
    weight_scales = read_weight_scales(quantization, config_path) if quantization else None
    family = FAMILIES[model_type]
    own_names = {family.other_names.get(key, key): it for key, it in fields.values.items()}
    fields = Fields(own_names, fields.where)
    if family.is_part:
        text = fields.values.get("text_config")
        if not isinstance(text, dict):
            raise CheckpointError(
                f"{config_path} has no text_config; the checkpoint is incomplete, so download it again"
            )
        fields = Fields({**fields.values, **text}, f"{config_path}: text_config")
    if fields.values.get("use_bidirectional_attention"):
        raise CheckpointError(
            f"{config_path}: use_bidirectional_attention is not supported; choose a model that generates text"
        )
    hidden_size = fields.count("hidden_size")
    embedding_scale, residual_scale, logit_scale = _multipliers(fields, family)
    return ModelConfig(
        model_type=model_type,
        hidden_size=hidden_size,
        vocab_size=fields.count("vocab_size"),
        max_position_embeddings=_max_positions(fields, family),
        # The model adds its parts times a factor to the residual. Here the residual is the model's divided by this
        # factor, so the parts are added as they are. Norms of it have the same results with another eps.
        rms_norm_eps=fields.number(family.rms_norm_eps_key, family.rms_norm_eps) / residual_scale**2,
        tie_word_embeddings=fields.flag(
            "tie_embedding",  # LFM2's name
            fields.flag("tie_word_embeddings", family.tie_word_embeddings),
        ),
        layers=_layers(fields, family, max_model_len),
        embedding_scale=embedding_scale / residual_scale,
        rounds_embedding_scale=family.scales_embedding,
        logit_scale=logit_scale,
        norm_offset=family.norm_offset,
        embedding_name=family.embedding_name,
        norm_name=family.final_norm_name,
        final_logit_softcap=_softcap(fields, family, "final_logit_softcapping"),
        dtype=_dtype(fields),
        weight_scales=weight_scales,
        has_mxfp4=quantization.get("quant_method") == "mxfp4",
        tensor_prefix=family.tensor_prefix,
        body=family.body,
        unread=family.unread,
        num_mtp_layers=fields.integer(
            "num_nextn_predict_layers", fields.integer("mtp_num_hidden_layers", family.num_mtp_layers)
        ),
        bos_token_id=next(iter(fields.integers("bos_token_id")), None),
        eos_token_ids=_eos_token_ids(fields, path),
    )


def _layers(fields: Fields, family: Family, max_model_len: int | None) -> tuple[LayerSpec, ...]:
    ropes = _ropes(fields, family, max_model_len)
    if family.layers is not None:
        return family.layers(fields, ropes[_FULL])
    num_q, hidden_size = fields.count("num_attention_heads"), fields.count("hidden_size")
    has_bias = family.attention_bias is not None and fields.flag("attention_bias", family.attention_bias)
    num_layers = fields.count("num_hidden_layers", at_most=MOST_PARTS)
    turning = rotary_layers(fields, num_layers) if family.reads_no_rope_layers else (True,) * num_layers
    types = _attention_types(fields, family, turning)
    window = _window(fields, family) if _SLIDING in types else None
    kinds = list(zip(types, turning, strict=True))
    by_kind = {
        (type_, turns): GroupedQueryAttention(
            hidden_size=hidden_size,
            num_attention_heads=num_q,
            num_key_value_heads=fields.kv_heads(num_q, family.num_key_value_heads or num_q),
            head_dim=fields.count("head_dim", family.head_dim or hidden_size // num_q),
            rope=ropes[type_] if turns else RopeConfig(theta=ropes[type_].theta, partial=0.0),
            qkv_bias=has_bias or (fields.flag("qkv_bias", True) if family.qkv_bias is None else family.qkv_bias),
            o_bias=has_bias and family.reads_o_bias,
            fused_qkv=family.fused_qkv,
            qk_norm=fields.flag("use_qk_norm", False) if family.qk_norm is None else family.qk_norm,
            norm_offset=family.norm_offset,
            scale=_scale(fields, family),
            softcap=_softcap(fields, family, "attn_logit_softcapping"),
            has_sinks=family.has_sinks,
            window=window if type_ == _SLIDING else None,
        )
        for type_, turns in set(kinds)
    }
    return layers_of(
        [by_kind[kind] for kind in kinds],
        _feed_forwards(fields, family, num_layers),
        hidden_size,
        norm_names=family.norm_names,
        norm_offset=family.norm_offset,
    )


def _multipliers(fields: Fields, family: Family) -> tuple[float, float, float]:
    """Factors of the embeddings, of what layers add to the residual, and of the logits."""
    if not family.reads_multipliers:
        return fields.count("hidden_size") ** 0.5 if family.scales_embedding else 1.0, 1.0, 1.0
    logits = fields.number("lm_head_multiplier", 1.0) / _positive(fields, "logits_scaling", 1.0)
    return fields.number("embedding_multiplier", 1.0), _positive(fields, "residual_multiplier", 1.0), logits


def _max_positions(fields: Fields, family: Family) -> int:
    return fields.count("max_position_embeddings", family.max_position_embeddings)


def _scale(fields: Fields, family: Family) -> float | None:
    if family.query_pre_attn_scalar is None:
        return None
    return _positive(fields, "query_pre_attn_scalar", family.query_pre_attn_scalar) ** -0.5


def _softcap(fields: Fields, family: Family, key: str) -> float | None:
    default = family.softcaps.get(key)
    if key not in family.softcaps or fields.values.get(key, default) is None:
        return None
    return _positive(fields, key, default)


def _positive(fields: Fields, key: str, default: float | None) -> float:
    value = fields.number(key, default)
    if not value > 0:
        raise CheckpointError(
            f"{fields.where}: {key}={value} is not positive; the checkpoint is corrupt, so download it again"
        )
    return value


def _feed_forwards(fields: Fields, family: Family, num_layers: int) -> list[FeedForward]:
    """The feed-forward of each layer."""
    if family.feed_forwards is not None:
        return family.feed_forwards(fields)
    experts = None if family.experts is None else _experts(fields, family.experts)
    if family.experts is None or experts is None:
        return [_mlp(fields, family)] * num_layers
    dense = set[int]()
    if family.experts.mixes_dense_layers:
        step, listed = fields.count("decoder_sparse_step", 1), fields.integers("mlp_only_layers")
        dense = {layer for layer in range(num_layers) if layer in listed or (layer + 1) % step}
    return [_mlp(fields, family) if layer in dense else experts for layer in range(num_layers)]


def _mlp(fields: Fields, family: Family) -> DenseMLP:
    return DenseMLP(
        hidden_size=fields.count("hidden_size"),
        intermediate_size=fields.count("intermediate_size"),
        hidden_act=fields.text(family.hidden_act_key, family.hidden_act),
        bias=family.reads_mlp_bias and fields.flag("mlp_bias", False),
        projections=family.mlp_projections,
    )


def _experts(fields: Fields, family: ExpertsFamily) -> FeedForward | None:
    """The mixture of experts, or None if the file has no experts."""
    key = next((key for key in family.num_experts_keys if key in fields.values), family.num_experts_keys[0])
    if family.mixes_dense_layers and fields.integer(key) == 0:
        return None
    num_experts, top_k = fields.count(key, at_most=MOST_PARTS), fields.count("num_experts_per_tok")
    if top_k > num_experts:
        raise CheckpointError(f"{fields.where}: num_experts_per_tok={top_k} exceeds {key}={num_experts}")
    hidden_act = fields.text("hidden_act", "silu")
    if hidden_act != "silu":
        raise CheckpointError(f"{fields.where}: hidden_act={hidden_act} of experts is not supported; only silu is")
    if family.are_biased:
        return BiasedMixture(
            hidden_size=fields.count("hidden_size"),
            num_experts=num_experts,
            top_k=top_k,
            intermediate_size=fields.count(family.columns_key),
            limit=_positive(fields, "swiglu_limit", 7.0),
            alpha=fields.number("swiglu_alpha", 1.702),
        )
    normalises = family.norm_topk_prob
    return MixtureOfExperts(
        hidden_size=fields.count("hidden_size"),
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=fields.count(family.columns_key),
        norm_topk_prob=fields.flag("norm_topk_prob", False) if normalises is None else normalises,
        round_weights=family.round_weights,
        shared_intermediate_size=fields.count(family.shared_columns_key) if family.shared_columns_key else None,
        name=family.name,
        projections=family.projections,
    )


def _ropes(fields: Fields, family: Family, max_model_len: int | None) -> dict[str, RopeConfig]:
    """The rotary embedding of each layer type. transformers 4 writes `rope_theta` beside `rope_scaling`. transformers 5
    writes both in `rope_parameters`, which may have one entry per layer type."""
    said = fields.values.get("rope_scaling") or fields.values.get("rope_parameters")
    parameters = said or dict(family.rope_parameters)
    if not isinstance(parameters, dict):
        raise CheckpointError(f"{fields.where}: rope parameters {parameters!r} are no object")
    by_type = dict.fromkeys(_TYPES, parameters)
    thetas = dict.fromkeys(_TYPES, fields.number("rope_theta", family.rope_theta))
    if any(isinstance(value, dict) for value in parameters.values()):
        if not set(parameters) <= set(_TYPES) or not all(isinstance(it, dict) for it in parameters.values()):
            raise CheckpointError(f"{fields.where}: rope parameters are of other layers than {' and '.join(_TYPES)}")
        by_type = {type_: parameters.get(type_, {}) for type_ in _TYPES}
    elif family.local_rope_theta is not None:
        by_type[_SLIDING] = {}
    if family.local_rope_theta is not None:
        thetas[_SLIDING] = fields.number("rope_local_base_freq", family.local_rope_theta)
    return {type_: _rope(fields, family, by_type[type_], thetas[type_], max_model_len) for type_ in _TYPES}


def _rope(
    fields: Fields, family: Family, parameters: dict[str, Any], default_theta: float, max_model_len: int | None
) -> RopeConfig:
    rope = Fields(parameters, fields.where)
    theta = rope.number("rope_theta", default_theta)
    default_partial = 1.0 if family.partial_rotary is None else family.partial_rotary
    partial = rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", default_partial))
    if not 0 < partial <= 1 or (family.partial_rotary is None and partial != 1):
        raise CheckpointError(
            f"{fields.where}: partial_rotary_factor={partial} is not supported; this family's heads turn "
            + ("as a whole" if family.partial_rotary is None else "by a share above 0 and up to 1")
        )
    scaling_type = rope.text("rope_type", rope.text("type", "default"))
    scaling_type = "longrope" if scaling_type == "su" else scaling_type  # the first name of longrope in Phi 3's files
    scaling = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in parameters.items()
        if key not in _NOT_SCALING and value is not None
    }
    if scaling_type in ("llama3", "yarn", "longrope"):
        own, max_positions = fields.values.get("original_max_position_embeddings"), _max_positions(fields, family)
        original = scaling.get("original_max_position_embeddings", max_positions) if own is None else own
        scaling["original_max_position_embeddings"] = original
        if scaling_type == "longrope":
            trained = Fields(scaling, fields.where).count("original_max_position_embeddings")
            scaling.setdefault("factor", max_positions / trained)
            if max_model_len is not None and max_model_len <= trained:
                scaling.pop("long_factor", None)
    checked = checked_rope(theta, scaling_type, scaling, fields.where)
    return replace(checked, partial=partial, interleaved=family.interleaved_rope)


def _attention_types(fields: Fields, family: Family, turning: tuple[bool, ...]) -> list[str]:
    """The attention type of each layer, which decides whether `sliding_window` applies to it. `turning`: whether the
    layer has a rotary embedding."""
    num_layers = len(turning)
    if family.windows == "none":
        return [_FULL] * num_layers
    if family.windows not in ("every layer", "by turns") and not fields.flag("use_sliding_window", False):
        return [_FULL] * num_layers
    if family.windows in ("every layer", "every layer if used"):
        return [_SLIDING] * num_layers
    layer_types = fields.values.get("layer_types")
    if layer_types is None and family.windows == "as said":
        first = fields.integer("max_window_layers", 28)
        return [_SLIDING if layer >= first else _FULL for layer in range(num_layers)]
    if layer_types is None and family.windows == "by turns":
        pattern = fields.count("sliding_window_pattern", family.window_pattern)
        return [_SLIDING if (layer + 1) % pattern else _FULL for layer in range(num_layers)]
    if layer_types is None and family.windows == "without rope":
        return [_FULL if turns else _SLIDING for turns in turning]
    if not isinstance(layer_types, list) or len(layer_types) != num_layers or not set(layer_types) <= set(_TYPES):
        raise CheckpointError(
            f"{fields.where}: layer_types must name {' or '.join(_TYPES)} for each of {num_layers} layers"
        )
    return layer_types


def _window(fields: Fields, family: Family) -> int | None:
    """An explicit null turns windows off."""
    if fields.values.get("sliding_window", family.default_window) is None:
        return None
    return fields.count("sliding_window", family.default_window)


def _dtype(fields: Fields) -> str:
    key = "dtype" if fields.values.get("dtype") is not None else "torch_dtype"
    dtype = fields.text(key, "float32").removeprefix("torch.")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise CheckpointError(
            f"{fields.where}: {key}={dtype} is not supported; supported are float32, bfloat16, float16"
        )
    return dtype


def _eos_token_ids(config: Fields, path: Path) -> tuple[int, ...]:
    found = list(config.integers("eos_token_id"))
    generation_path = path / "generation_config.json"
    if generation_path.is_file():
        found += Fields(read_json(generation_path), str(generation_path)).integers("eos_token_id")
    tokenizer_path = path / "tokenizer_config.json"
    if tokenizer_path.is_file():
        tokenizer = read_json(tokenizer_path)
        eos = tokenizer.get("eos_token")
        content = eos.get("content") if isinstance(eos, dict) else eos
        added = tokenizer.get("added_tokens_decoder") or {}
        found += [int(id_) for id_, token in added.items() if content is not None and token.get("content") == content]
    return tuple(dict.fromkeys(found))
