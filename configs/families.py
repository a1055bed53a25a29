"""What configurations of Hugging Face checkpoints mean, family by family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from configs.deepseek import deepseek_v2_layers
from configs.errors import CheckpointError
from configs.fields import MOST_PARTS, Fields, checked_rope, read_json
from configs.layers import DenseMLP, FeedForward, GroupedQueryAttention, LayerSpec, MixtureOfExperts
from configs.model_config import ModelConfig, RopeConfig, layers_of


@dataclass(frozen=True, kw_only=True)
class _ExpertsFamily:
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
    mixes_dense_layers: bool = False
    """Layers of `mlp_only_layers`, and those that `decoder_sparse_step` passes over, are dense."""


@dataclass(frozen=True, kw_only=True)
class _Family:
    """What a family's config.json leaves unsaid, and what its code decides whatever the file says."""

    num_key_value_heads: int | None = None
    """None: as many as query heads."""
    head_dim: int | None = None
    """None: hidden_size / num_attention_heads."""
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    qkv_bias: bool | None = False
    """None: `qkv_bias` says, and else there is one."""
    heeds_attention_bias: bool = False
    """`attention_bias` gives one to q, k, v and o."""
    heeds_mlp_bias: bool = False
    qk_norm: bool = False
    windows: Literal["none", "every layer", "every layer if used", "as said", "by type"] = "none"
    """Layers that `sliding_window` holds for, the last three under `use_sliding_window` only. "as said": those of
    `layer_types` or else from `max_window_layers` on; "by type": those of `layer_types`."""
    default_window: int | None = 4096
    """Where the file names none."""
    experts: _ExpertsFamily | None = None
    layers: Callable[[Fields, RopeConfig], tuple[LayerSpec, ...]] | None = None
    """What the layers are, where they are not those of grouped-query attention that the rest of this tells of."""


_FAMILIES = {
    "llama": _Family(max_position_embeddings=2048, heeds_attention_bias=True, heeds_mlp_bias=True),
    "qwen2": _Family(num_key_value_heads=32, max_position_embeddings=32768, qkv_bias=True, windows="as said"),
    "qwen3": _Family(
        num_key_value_heads=32,
        head_dim=128,
        max_position_embeddings=32768,
        heeds_attention_bias=True,
        qk_norm=True,
        windows="as said",
    ),
    "mistral": _Family(num_key_value_heads=8, max_position_embeddings=131072, windows="every layer"),
    "qwen3_moe": _Family(
        num_key_value_heads=4,
        max_position_embeddings=32768,
        heeds_attention_bias=True,
        qk_norm=True,
        windows="every layer if used",
        experts=_ExpertsFamily(
            num_experts_keys=("num_experts", "num_local_experts"),
            columns_key="moe_intermediate_size",
            mixes_dense_layers=True,
        ),
    ),
    "mixtral": _Family(
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=1e6,
        windows="every layer",
        default_window=None,
        experts=_ExpertsFamily(
            num_experts_keys=("num_local_experts", "num_experts"),
            columns_key="intermediate_size",
            norm_topk_prob=True,
            round_weights=False,
            name="block_sparse_moe",
            projections=("w1", "w3", "w2"),
        ),
    ),
    "qwen2_moe": _Family(
        num_key_value_heads=16,
        max_position_embeddings=32768,
        qkv_bias=None,
        windows="by type",
        experts=_ExpertsFamily(
            num_experts_keys=("num_experts", "num_local_experts"),
            columns_key="moe_intermediate_size",
            shared_columns_key="shared_expert_intermediate_size",
            mixes_dense_layers=True,
        ),
    ),
    "deepseek_v2": _Family(max_position_embeddings=2048, layers=deepseek_v2_layers),
}


def config_of_directory(path: Path) -> ModelConfig:
    config_path = path / "config.json"
    if not config_path.is_file():
        raise CheckpointError(f"{path} has no config.json; set `model` to a directory with one, or to a .gguf file")
    fields = Fields(read_json(config_path), str(config_path))
    model_type = fields.text("model_type")
    if model_type not in _FAMILIES:
        raise CheckpointError(
            f"{config_path}: model_type={model_type} is not supported; supported are {', '.join(_FAMILIES)}"
        )
    if fields.values.get("quantization_config"):
        raise CheckpointError(
            f"{config_path} has a quantization_config; quantised weights are read from .gguf files only. Use the "
            "model's unquantised checkpoint or a GGUF of it"
        )
    family = _FAMILIES[model_type]
    max_positions = fields.count("max_position_embeddings", family.max_position_embeddings)
    rope = _rope(fields, max_positions, family.rope_theta)
    return ModelConfig(
        model_type=model_type,
        hidden_size=fields.count("hidden_size"),
        vocab_size=fields.count("vocab_size"),
        max_position_embeddings=max_positions,
        rms_norm_eps=fields.number("rms_norm_eps", family.rms_norm_eps),
        rope=rope,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        layers=_layers(fields, family) if family.layers is None else family.layers(fields, rope),
        dtype=_dtype(fields),
        bos_token_id=next(iter(fields.ids("bos_token_id")), None),
        eos_token_ids=_eos_token_ids(fields, path),
    )


def _layers(fields: Fields, family: _Family) -> tuple[LayerSpec, ...]:
    """Those of grouped-query attention."""
    num_q, hidden_size = fields.count("num_attention_heads"), fields.count("hidden_size")
    # An explicit null means one KV head a query head, in every family.
    default_kv = num_q if "num_key_value_heads" in fields.values else family.num_key_value_heads or num_q
    has_bias = family.heeds_attention_bias and fields.flag("attention_bias", False)
    num_layers = fields.count("num_hidden_layers", at_most=MOST_PARTS)
    attention = GroupedQueryAttention(
        hidden_size=hidden_size,
        num_attention_heads=num_q,
        num_key_value_heads=fields.count("num_key_value_heads", default_kv),
        head_dim=fields.count("head_dim", family.head_dim or hidden_size // num_q),
        qkv_bias=has_bias or (fields.flag("qkv_bias", True) if family.qkv_bias is None else family.qkv_bias),
        o_bias=has_bias,
        qk_norm=family.qk_norm,
    )
    return layers_of(attention, _feed_forwards(fields, family, num_layers), _windows(fields, family, num_layers))


def _feed_forwards(fields: Fields, family: _Family, num_layers: int) -> list[FeedForward]:
    """Each layer's."""
    if family.experts is None:
        return [_mlp(fields, family)] * num_layers
    experts = _experts(fields, family.experts)
    if experts is None:
        return [_mlp(fields, family)] * num_layers
    dense = set[int]()
    if family.experts.mixes_dense_layers:
        step, listed = fields.count("decoder_sparse_step", 1), fields.ids("mlp_only_layers")
        dense = {layer for layer in range(num_layers) if layer in listed or (layer + 1) % step}
    return [_mlp(fields, family) if layer in dense else experts for layer in range(num_layers)]


def _mlp(fields: Fields, family: _Family) -> DenseMLP:
    return DenseMLP(
        hidden_size=fields.count("hidden_size"),
        intermediate_size=fields.count("intermediate_size"),
        hidden_act=fields.text("hidden_act", "silu"),
        bias=family.heeds_mlp_bias and fields.flag("mlp_bias", False),
    )


def _experts(fields: Fields, family: _ExpertsFamily) -> MixtureOfExperts | None:
    """None where the file says that there are none."""
    key = next((key for key in family.num_experts_keys if key in fields.values), family.num_experts_keys[0])
    if family.mixes_dense_layers and fields.integer(key) == 0:
        return None
    num_experts, top_k = fields.count(key, at_most=MOST_PARTS), fields.count("num_experts_per_tok")
    if top_k > num_experts:
        raise CheckpointError(f"{fields.where}: num_experts_per_tok={top_k} exceeds {key}={num_experts}")
    hidden_act = fields.text("hidden_act", "silu")
    if hidden_act != "silu":
        raise CheckpointError(f"{fields.where}: hidden_act={hidden_act} of experts is not supported; only silu is")
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


def _rope(fields: Fields, max_positions: int, default_theta: float) -> RopeConfig:
    """transformers 4 keeps `rope_theta` beside `rope_scaling`; transformers 5 has both in `rope_parameters`."""
    parameters = fields.values.get("rope_scaling") or fields.values.get("rope_parameters") or {}
    if not isinstance(parameters, dict):
        raise CheckpointError(f"{fields.where}: rope parameters {parameters!r} are no object")
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    if nested:
        if any(value != nested[0] for value in nested) or len(nested) != len(parameters):
            raise CheckpointError(f"{fields.where}: layers with different rotary embeddings are not supported")
        parameters = nested[0]
    rope = Fields(parameters, fields.where)
    theta = rope.number("rope_theta", fields.number("rope_theta", default_theta))
    partial = rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise CheckpointError(f"{fields.where}: partial_rotary_factor={partial} is not supported; only 1.0 is")
    scaling_type = rope.text("rope_type", rope.text("type", "default"))
    scaling = {
        key: value
        for key, value in parameters.items()
        if key not in ("rope_type", "type", "rope_theta", "partial_rotary_factor") and value is not None
    }
    if scaling_type in ("llama3", "yarn"):
        own = fields.values.get("original_max_position_embeddings")
        original = scaling.get("original_max_position_embeddings", max_positions) if own is None else own
        scaling["original_max_position_embeddings"] = original
    return checked_rope(theta, scaling_type, scaling, fields.where)


def _windows(fields: Fields, family: _Family, num_layers: int) -> list[int | None]:
    """The window of each layer."""
    full: list[int | None] = [None] * num_layers
    # An explicit null turns windows off.
    if family.windows == "none" or fields.values.get("sliding_window", family.default_window) is None:
        return full
    if family.windows != "every layer" and not fields.flag("use_sliding_window", False):
        return full
    window = fields.count("sliding_window", family.default_window)
    if family.windows in ("every layer", "every layer if used"):
        return [window] * num_layers
    layer_types = fields.values.get("layer_types")
    if layer_types is None and family.windows == "as said":
        first = fields.integer("max_window_layers", 28)
        return [window if layer >= first else None for layer in range(num_layers)]
    known = {"full_attention": None, "sliding_attention": window}
    if not isinstance(layer_types, list) or len(layer_types) != num_layers or not set(layer_types) <= set(known):
        raise CheckpointError(
            f"{fields.where}: layer_types must name {' or '.join(known)} for each of {num_layers} layers"
        )
    return [known[name] for name in layer_types]


def _dtype(fields: Fields) -> str:
    key = "dtype" if fields.values.get("dtype") is not None else "torch_dtype"
    dtype = fields.text(key, "float32").removeprefix("torch.")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise CheckpointError(
            f"{fields.where}: {key}={dtype} is not supported; supported are float32, bfloat16, float16"
        )
    return dtype


def _eos_token_ids(config: Fields, path: Path) -> tuple[int, ...]:
    found = list(config.ids("eos_token_id"))
    generation_path = path / "generation_config.json"
    if generation_path.is_file():
        found += Fields(read_json(generation_path), str(generation_path)).ids("eos_token_id")
    tokenizer_path = path / "tokenizer_config.json"
    if tokenizer_path.is_file():
        tokenizer = read_json(tokenizer_path)
        eos = tokenizer.get("eos_token")
        content = eos.get("content") if isinstance(eos, dict) else eos
        added = tokenizer.get("added_tokens_decoder") or {}
        found += [int(id_) for id_, token in added.items() if content is not None and token.get("content") == content]
    return tuple(dict.fromkeys(found))
