"""What the model is: read from a checkpoint's own `config.json` or GGUF metadata, never from a class name table.

Owns what configurations mean, family by family. Weights are the worker's.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from configs.errors import CheckpointError, ConfigError
from configs.gguf_header import GGUFHeader
from configs.layers import (
    Axis,
    Cut,
    DenseMLP,
    FeedForward,
    GroupedQueryAttention,
    HeadGroups,
    LayerSpec,
    Linear,
    MixtureOfExperts,
    Role,
    TensorSpec,
    tensors_of,
)


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: base and, for long-context models, how its frequencies are scaled."""

    theta: float
    """Base of the geometric series of frequencies."""
    scaling_type: str = "default"
    """default, linear, llama3, yarn or dynamic; anything else is refused when the model is read."""
    scaling: tuple[tuple[str, Any], ...] = ()
    """The checkpoint's own parameters for `scaling_type`, sorted by name."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One decoder-only transformer. All counts are those of the whole model, never of a rank."""

    model_type: str
    """As config.json names the family, e.g. llama or qwen3_moe."""
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    layers: tuple[LayerSpec, ...]
    final_logit_softcap: float | None = None
    dtype: str = "float32"
    """The checkpoint's own: float32, bfloat16 or float16."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    """Union of what config, generation_config and tokenizer metadata name."""

    @property
    def num_hidden_layers(self) -> int:
        """Layers, of any kind."""
        return len(self.layers)

    @property
    def num_attention_heads(self) -> int:
        """Query heads of the layer that has the fewest: as many ranks as the model can be dealt to."""
        return min(axis.num_heads for layer in self.layers for axis in layer.axes if isinstance(axis, HeadGroups))

    @property
    def rotary_dim(self) -> int:
        """Elements of a head that the rotary embedding turns, in the layers that have it."""
        return max(layer.mixer.rotary_dim for layer in self.layers)

    @property
    def embedding(self) -> Linear:
        """Rows of token ids. The LM head too where the two are tied."""
        return self._vocabulary("model.embed_tokens", "token_embd")

    @property
    def lm_head(self) -> Linear | None:
        """None where it is the embedding."""
        return None if self.tie_word_embeddings else self._vocabulary("lm_head", "output")

    @property
    def norm(self) -> TensorSpec:
        """The weight of the norm before the LM head."""
        return TensorSpec("model.norm.weight", "output_norm.weight", (self.hidden_size,), Role.NORM)

    @property
    def outer_tensors(self) -> tuple[TensorSpec, ...]:
        """Tensors that are in no layer."""
        heads = () if self.lm_head is None else (self.lm_head,)
        return (*tensors_of(self.embedding, *heads), self.norm)

    def tensors(self) -> Iterator[TensorSpec]:
        """Every tensor of a checkpoint, under its full name."""
        yield from self.outer_tensors
        for i, layer in enumerate(self.layers):
            for tensor in layer.tensors:
                yield replace(tensor, name=layer_prefix(i) + tensor.name, gguf_name=f"blk.{i}.{tensor.gguf_name}")

    @property
    def max_context(self) -> int:
        """Longest sequence the rotary embedding is made for: YaRN reaches beyond `max_position_embeddings`."""
        scaling = dict(self.rope.scaling)
        if self.rope.scaling_type != "yarn" or "factor" not in scaling:
            return self.max_position_embeddings
        original = scaling.get("original_max_position_embeddings") or self.max_position_embeddings
        return max(self.max_position_embeddings, int(original * scaling["factor"]))

    def _vocabulary(self, name: str, gguf_name: str) -> Linear:
        cut = Cut(Axis.VOCABULARY, 0)
        return Linear(name, gguf_name, self.vocab_size, self.hidden_size, cut, role=Role.EMBEDDING)


def layer_prefix(layer: int) -> str:
    """What the names of a layer's tensors begin with."""
    return f"model.layers.{layer}."


def check_tensor_parallel_size(model: ModelConfig, tp_size: int) -> None:
    """Raises ConfigError when the model's heads cannot be dealt to `tp_size` ranks."""
    num_q = model.num_attention_heads
    if tp_size < 1:
        raise ConfigError(f"tensor_parallel_size={tp_size} is less than 1; choose 1 to {num_q}")
    if tp_size > num_q:
        raise ConfigError(
            f"tensor_parallel_size={tp_size} exceeds num_attention_heads={num_q}, and every rank needs a query head of "
            f"its own; choose 1 to {num_q}"
        )


def read_model_config(path: Path) -> ModelConfig:
    """Reads what the model at `path` is.

    Args:
        path: a directory with config.json (generation_config.json and tokenizer_config.json are read too when there),
            or a .gguf file. `configs.checkpoint.resolve_model_path` gives such a path for any `model` setting.

    Raises:
        CheckpointError: a file is missing, corrupt or truncated, or the model is of a kind that cannot be served.
    """
    if path.suffix == ".gguf":
        if not path.is_file():
            raise CheckpointError(f"{path} does not exist or is no file; set `model` to a .gguf file or a directory")
        model = _from_gguf(path)
    else:
        model = _from_directory(path)
    _check(model, path)
    # An id without an embedding is never sampled, and grammars take none.
    return replace(model, eos_token_ids=tuple(id_ for id_ in model.eos_token_ids if 0 <= id_ < model.vocab_size))


def _check(model: ModelConfig, path: Path) -> None:
    for axis in {axis for layer in model.layers for axis in layer.axes if isinstance(axis, HeadGroups)}:
        if axis.num_heads % axis.num_groups:
            raise CheckpointError(
                f"{path}: num_attention_heads={axis.num_heads} is not a multiple of "
                f"num_key_value_heads={axis.num_groups}; such a model cannot be served"
            )
    if model.rotary_dim % 2:
        raise CheckpointError(f"{path}: head_dim={model.rotary_dim} is odd; the rotary embedding needs pairs")
    if not model.rope.theta > 0:
        raise CheckpointError(f"{path}: rope theta={model.rope.theta} is not positive; the checkpoint is corrupt")


class _Fields:
    """Typed access to one mapping of a checkpoint; every error names file and key."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise CheckpointError(f"{self.where}: {key}={value!r} is not an integer")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """An integer of at least 1."""
        value = self.integer(key, default)
        if value < 1:
            raise CheckpointError(f"{self.where}: {key}={value} is less than 1; the checkpoint is corrupt")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise CheckpointError(f"{self.where}: {key}={value!r} is not a number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.where}: {key}={value!r} is not true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise CheckpointError(f"{self.where}: {key}={value!r} is not a string")
        return value

    def ids(self, key: str) -> tuple[int, ...]:
        """A token id, a list of them, or nothing."""
        value = self.values.get(key)
        many = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
        if any(isinstance(id_, bool) or not isinstance(id_, int) for id_ in many):
            raise CheckpointError(f"{self.where}: {key}={value!r} is neither a token id nor a list of them")
        return tuple(many)

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(f"{self.where} has no {key}; the checkpoint is incomplete")
        return value


# ---- Hugging Face directories


def layers_of(
    attention: GroupedQueryAttention, feed_forwards: Sequence[FeedForward], windows: Sequence[int | None]
) -> tuple[LayerSpec, ...]:
    """A layer for each of `feed_forwards` and `windows`; equal ones are one object, which keeps its sums."""
    kinds = list(zip(feed_forwards, windows, strict=True))
    made = {
        (feed_forward, window): LayerSpec(attention.hidden_size, replace(attention, window=window), feed_forward)
        for feed_forward, window in dict.fromkeys(kinds)
    }
    return tuple(made[kind] for kind in kinds)


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
}


def _from_directory(path: Path) -> ModelConfig:
    config_path = path / "config.json"
    if not config_path.is_file():
        raise CheckpointError(f"{path} has no config.json; set `model` to a directory with one, or to a .gguf file")
    fields = _Fields(_read_json(config_path), str(config_path))
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
    num_q, hidden_size = fields.count("num_attention_heads"), fields.count("hidden_size")
    # An explicit null means one KV head a query head, in every family.
    default_kv = num_q if "num_key_value_heads" in fields.values else family.num_key_value_heads or num_q
    has_bias = family.heeds_attention_bias and fields.flag("attention_bias", False)
    num_layers = fields.count("num_hidden_layers")
    attention = GroupedQueryAttention(
        hidden_size=hidden_size,
        num_attention_heads=num_q,
        num_key_value_heads=fields.count("num_key_value_heads", default_kv),
        head_dim=fields.count("head_dim", family.head_dim or hidden_size // num_q),
        qkv_bias=has_bias or (fields.flag("qkv_bias", True) if family.qkv_bias is None else family.qkv_bias),
        o_bias=has_bias,
        qk_norm=family.qk_norm,
    )
    max_positions = fields.count("max_position_embeddings", family.max_position_embeddings)
    return ModelConfig(
        model_type=model_type,
        hidden_size=hidden_size,
        vocab_size=fields.count("vocab_size"),
        max_position_embeddings=max_positions,
        rms_norm_eps=fields.number("rms_norm_eps", family.rms_norm_eps),
        rope=_rope(fields, max_positions, family.rope_theta),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        layers=layers_of(attention, _feed_forwards(fields, family, num_layers), _windows(fields, family, num_layers)),
        dtype=_dtype(fields),
        bos_token_id=next(iter(fields.ids("bos_token_id")), None),
        eos_token_ids=_eos_token_ids(fields, path),
    )


def _feed_forwards(fields: _Fields, family: _Family, num_layers: int) -> list[FeedForward]:
    """Of each layer."""
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


def _mlp(fields: _Fields, family: _Family) -> DenseMLP:
    return DenseMLP(
        hidden_size=fields.count("hidden_size"),
        intermediate_size=fields.count("intermediate_size"),
        hidden_act=fields.text("hidden_act", "silu"),
        bias=family.heeds_mlp_bias and fields.flag("mlp_bias", False),
    )


def _experts(fields: _Fields, family: _ExpertsFamily) -> MixtureOfExperts | None:
    """None where the file says that there are none."""
    key = next((key for key in family.num_experts_keys if key in fields.values), family.num_experts_keys[0])
    if family.mixes_dense_layers and fields.integer(key) == 0:
        return None
    num_experts, top_k = fields.count(key), fields.count("num_experts_per_tok")
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


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:  # bad JSON or bad UTF-8
        raise CheckpointError(f"{path} is corrupt: {error}; download it again") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is corrupt: it holds a {type(content).__name__}, not an object")
    return content


def _rope(fields: _Fields, max_positions: int, default_theta: float) -> RopeConfig:
    """transformers 4 keeps `rope_theta` beside `rope_scaling`; transformers 5 has both in `rope_parameters`."""
    parameters = fields.values.get("rope_scaling") or fields.values.get("rope_parameters") or {}
    if not isinstance(parameters, dict):
        raise CheckpointError(f"{fields.where}: rope parameters {parameters!r} are no object")
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    if nested:
        if any(value != nested[0] for value in nested) or len(nested) != len(parameters):
            raise CheckpointError(f"{fields.where}: layers with different rotary embeddings are not supported")
        parameters = nested[0]
    rope = _Fields(parameters, fields.where)
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
    return _checked_rope(theta, scaling_type, scaling, fields.where)


_SCALING_KEYS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def _checked_rope(theta: float, scaling_type: str, scaling: Mapping[str, Any], where: str) -> RopeConfig:
    if scaling_type not in _SCALING_KEYS:
        raise CheckpointError(
            f"{where}: rope scaling type {scaling_type} is not supported; supported are {', '.join(_SCALING_KEYS)}"
        )
    if scaling_type == "default":
        return RopeConfig(theta=theta)
    fields = _Fields(scaling, f"{where}: rope scaling {scaling_type}")
    for key in _SCALING_KEYS[scaling_type]:
        if fields.number(key) <= 0:
            raise CheckpointError(f"{fields.where}: {key}={scaling[key]} is not positive")
    return RopeConfig(theta=theta, scaling_type=scaling_type, scaling=tuple(sorted(scaling.items())))


def _windows(fields: _Fields, family: _Family, num_layers: int) -> list[int | None]:
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


def _dtype(fields: _Fields) -> str:
    key = "dtype" if fields.values.get("dtype") is not None else "torch_dtype"
    dtype = fields.text(key, "float32").removeprefix("torch.")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise CheckpointError(
            f"{fields.where}: {key}={dtype} is not supported; supported are float32, bfloat16, float16"
        )
    return dtype


def _eos_token_ids(config: _Fields, path: Path) -> tuple[int, ...]:
    found = list(config.ids("eos_token_id"))
    generation_path = path / "generation_config.json"
    if generation_path.is_file():
        found += _Fields(_read_json(generation_path), str(generation_path)).ids("eos_token_id")
    tokenizer_path = path / "tokenizer_config.json"
    if tokenizer_path.is_file():
        tokenizer = _read_json(tokenizer_path)
        eos = tokenizer.get("eos_token")
        content = eos.get("content") if isinstance(eos, dict) else eos
        added = tokenizer.get("added_tokens_decoder") or {}
        found += [int(id_) for id_, token in added.items() if content is not None and token.get("content") == content]
    return tuple(dict.fromkeys(found))


# ---- GGUF files

_GGUF_FAMILIES = ("llama", "qwen2", "qwen3")
_GGUF_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_GGUF_DTYPES = {0: "float32", 1: "float16"}


def _from_gguf(path: Path) -> ModelConfig:
    header = GGUFHeader.read(path)
    fields = _Fields(header.metadata, str(path))
    family = fields.text("general.architecture")
    if fields.integer(f"{family}.expert_count", 0):
        raise CheckpointError(
            f"{path}: mixtures of experts are not read from GGUF files; use the model's safetensors checkpoint"
        )
    if family not in _GGUF_FAMILIES:
        raise CheckpointError(
            f"{path}: general.architecture={family} is not supported; supported are {', '.join(_GGUF_FAMILIES)}"
        )
    tensors = header.tensors
    if "token_embd.weight" not in tensors or len(tensors["token_embd.weight"].shape) != 2:
        raise CheckpointError(f"{path} has no two-dimensional tensor token_embd.weight; the checkpoint is incomplete")
    embedding = tensors["token_embd.weight"]
    hidden_size, num_q = fields.count(f"{family}.embedding_length"), fields.count(f"{family}.attention.head_count")
    head_dim = fields.count(f"{family}.attention.key_length", hidden_size // num_q)
    rotary_dim = fields.integer(f"{family}.rope.dimension_count", head_dim)
    if rotary_dim != head_dim or fields.integer(f"{family}.attention.value_length", head_dim) != head_dim:
        raise CheckpointError(f"{path}: rotary, key and value widths of a head must be the same; head_dim={head_dim}")
    num_layers = fields.count(f"{family}.block_count")
    if fields.values.get(f"{family}.attention.sliding_window"):
        raise CheckpointError(f"{path}: sliding windows of GGUF files are not supported")
    attention = GroupedQueryAttention(
        hidden_size=hidden_size,
        num_attention_heads=num_q,
        num_key_value_heads=fields.count(f"{family}.attention.head_count_kv", num_q),
        head_dim=head_dim,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        o_bias="blk.0.attn_output.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
    )
    mlp = DenseMLP(
        hidden_size=hidden_size,
        intermediate_size=fields.count(f"{family}.feed_forward_length"),
        bias="blk.0.ffn_up.bias" in tensors,
    )
    return ModelConfig(
        model_type=family,
        hidden_size=hidden_size,
        vocab_size=embedding.shape[0],
        max_position_embeddings=fields.count(f"{family}.context_length"),
        rms_norm_eps=fields.number(f"{family}.attention.layer_norm_rms_epsilon"),
        rope=_gguf_rope(path, header, fields, family, head_dim),
        tie_word_embeddings="output.weight" not in tensors,
        layers=layers_of(attention, [mlp] * num_layers, [None] * num_layers),
        # Quantised weights come from bfloat16 models more often than not, and bfloat16 never overflows.
        dtype=_GGUF_DTYPES.get(embedding.ggml_type, "bfloat16"),
        bos_token_id=next(iter(fields.ids("tokenizer.ggml.bos_token_id")), None),
        eos_token_ids=tuple(dict.fromkeys(i for key in _GGUF_EOS_KEYS for i in fields.ids(f"tokenizer.ggml.{key}"))),
    )


def _gguf_rope(path: Path, header: GGUFHeader, fields: _Fields, family: str, head_dim: int) -> RopeConfig:
    theta = fields.number(f"{family}.rope.freq_base", 10000.0)
    prefix = f"{family}.rope.scaling."
    scaling_type = fields.text(f"{prefix}type", "none").replace("none", "default")
    if "rope_freqs.weight" in header.tensors:
        scaling = _llama3_scaling(path, header.tensors["rope_freqs.weight"].offset, theta, head_dim)
        return _checked_rope(theta, "llama3", scaling, str(path))
    if scaling_type == "default":
        return RopeConfig(theta=theta)
    if fields.number(f"{prefix}attn_factor", 1.0) != 1.0 or fields.values.get(f"{prefix}yarn_log_multiplier"):
        raise CheckpointError(f"{path}: {prefix}attn_factor and yarn_log_multiplier are not supported")
    names = {
        "factor": "factor",
        "original_context_length": "original_max_position_embeddings",
        "yarn_beta_fast": "beta_fast",
        "yarn_beta_slow": "beta_slow",
    }
    scaling = {
        ours: fields.number(prefix + theirs) for theirs, ours in names.items() if prefix + theirs in fields.values
    }
    if scaling_type == "yarn":
        scaling.setdefault("original_max_position_embeddings", fields.integer(f"{family}.context_length"))
    return _checked_rope(theta, scaling_type, scaling, str(path))


def _llama3_scaling(path: Path, offset: int, theta: float, head_dim: int) -> dict[str, float]:
    """Parameters of Llama 3.1's frequency scaling, of which a GGUF keeps only the divisors it comes to.

    All published models share the constants but for the factor, which is the largest divisor; the file's divisors
    must be what these parameters give.
    """
    half = head_dim // 2
    with path.open("rb") as file:
        file.seek(offset)
        raw = file.read(4 * half)
    if len(raw) < 4 * half:
        raise CheckpointError(f"{path} is truncated: it ends inside rope_freqs.weight; download it again")
    divisors = struct.unpack(f"<{half}f", raw)
    factor, low, high, original = max(divisors), 1.0, 4.0, 8192
    for i, divisor in enumerate(divisors):
        wavelength = 2 * math.pi * theta ** (2 * i / head_dim)
        kept = min(max((original / wavelength - low) / (high - low), 0.0), 1.0)
        if not math.isclose(divisor, 1 / ((1 - kept) / factor + kept), rel_tol=1e-3):
            raise CheckpointError(
                f"{path}: rope_freqs.weight is not Llama 3.1's frequency scaling; use the safetensors checkpoint"
            )
    return {
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
