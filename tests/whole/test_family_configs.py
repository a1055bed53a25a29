"""What config.json of every family says, beside the numbers that all families have: transformers is the reference."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from configs.biased_mixture import BiasedMixture
from configs.errors import CheckpointError
from configs.falcon_h1 import AttentionAndMamba
from configs.families import FAMILIES as MODEL_TYPES
from configs.latent_attention import LatentAttention
from configs.layers import DenseMLP, GroupedQueryAttention, MixtureOfExperts
from configs.mamba import Mamba2
from configs.model_config import ModelConfig
from configs.read_config import read_model_config
from configs.recurrent import NoMixer
from configs.rope import RopeConfig
from tests.conftest import ROOT
from tests.helpers.families import EXPERTS, FAMILIES, GROUPED, LATENTS
from worker.layers.rotary import inverse_frequencies
from worker.weights.checkpoint import expected_shapes

WITH_EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 96},
    "mixtral": {"num_local_experts": 8},
    "qwen2_moe": {"num_experts": 8, "moe_intermediate_size": 96, "shared_expert_intermediate_size": 160},
}
# Fields that have no defaults here, though transformers has some.
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": {},
    "qwen3_5_text": {},
    "qwen3_5_moe_text": {},
    "lfm2": {"full_attn_idxs": [2, 5]},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention"] * 3},
    "kimi_linear": {"intermediate_size": 96, "pad_token_id": 0},
}
BASES: dict[str, Mapping[str, Any]] = {
    **{
        name: {"vocab_size": 320, "hidden_size": 256, "num_hidden_layers": 9, "num_attention_heads": 8, **own}
        for name, own in HYBRIDS.items()
    },
    **{name: {**EXPERTS, **own} for name, own in WITH_EXPERTS.items()},
    "deepseek_v2": LATENTS,
    "deepseek_v3": FAMILIES["v3"].config,
    "deepseek_v32": FAMILIES["v32"].config,
    "glm_moe_dsa": FAMILIES["glm_5"].config,
    "granitemoehybrid": {**GROUPED, "mamba_n_heads": 8},
}
"""Numbers of families that do not have those of GROUPED."""


def _read(directory: Path, model_type: str, **changes: Any) -> ModelConfig:
    """The model of a config with `changes`; `...` leaves a key out."""
    config = {"model_type": model_type, **BASES.get(model_type, GROUPED), **changes}
    (directory / "config.json").write_text(json.dumps({key: it for key, it in config.items() if it is not ...}))
    return read_model_config(directory)


def _attention(model: ModelConfig, layer: int = 0) -> GroupedQueryAttention:
    mixer = model.layers[layer].mixer
    assert isinstance(mixer, GroupedQueryAttention)
    return mixer


def _mixture(model: ModelConfig, layer: int = 0) -> MixtureOfExperts:
    feed_forward = model.layers[layer].feed_forward
    assert isinstance(feed_forward, MixtureOfExperts)
    return feed_forward


def _mamba_of(model: ModelConfig) -> Mamba2:
    mixer = model.layers[0].mixer
    assert isinstance(mixer, Mamba2)
    return mixer


def test_the_guide_has_a_row_for_every_family() -> None:
    cells = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", (ROOT / "docs/guides/models.md").read_text(), re.MULTILINE)
    rows = [name for cell in cells for name in re.findall(r"\w+", cell)]
    assert sorted(rows) == sorted(["model_type", *MODEL_TYPES])  # with the table's head


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text", "gpt_oss"])
def test_what_a_config_of_plain_heads_leaves_out_is_as_transformers_has_it(tmp_path: Path, model_type: str) -> None:
    left_out = dict.fromkeys(("num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings"), ...)
    # As many heads as the family has KV heads by default, and layers for one whole turn of the windows.
    counts = {
        key: value
        for key, value in FAMILIES[model_type].config.items()
        if key.startswith("num_") and key not in GROUPED
    }
    ours = _read(tmp_path, model_type, num_attention_heads=8, num_hidden_layers=7, **counts, **left_out)
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    attention = _attention(ours)
    for name in left_out:
        assert getattr(ours if hasattr(ours, name) else attention, name) == getattr(theirs, name), name
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    mlp = ours.layers[0].feed_forward
    if isinstance(mlp, DenseMLP):
        assert mlp.hidden_act == theirs.hidden_activation
    if isinstance(mlp, BiasedMixture):
        assert (mlp.limit, mlp.alpha) == (theirs.swiglu_limit, theirs.swiglu_alpha)
    windows = [theirs.sliding_window if kind == "sliding_attention" else None for kind in theirs.layer_types]
    assert [layer.mixer.window for layer in ours.layers] == windows
    scalar = getattr(theirs, "query_pre_attn_scalar", None)
    assert attention.scale == (None if scalar is None else scalar**-0.5)
    assert attention.o_bias == theirs.attention_bias
    assert ours.final_logit_softcap == getattr(theirs, "final_logit_softcapping", None)
    assert attention.softcap == getattr(theirs, "attn_logit_softcapping", None)
    for layer, kind in zip(ours.layers, theirs.layer_types, strict=True):
        rope = theirs.rope_parameters.get(kind, theirs.rope_parameters)
        said = {"rope_theta": layer.mixer.rope.theta, "rope_type": layer.mixer.rope.scaling_type}
        assert {**dict(layer.mixer.rope.scaling), **said} == rope


@pytest.mark.parametrize("model_type", ["phi3", "glm", "glm4"])
def test_what_a_config_of_heads_that_turn_in_part_leaves_out_is_as_transformers_has_it(
    tmp_path: Path, model_type: str
) -> None:
    left_out = dict.fromkeys(("num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings"), ...)
    ours = _read(tmp_path, model_type, num_attention_heads=8, pad_token_id=0, **left_out)
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        hf = transformers.AutoModelForCausalLM.from_config(theirs)
    assert expected_shapes(ours) == {name: tuple(parameter.shape) for name, parameter in hf.named_parameters()}
    for name in ("max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert _attention(ours).rotary_dim == 2 * len(hf.model.rotary_emb.inv_freq)
    assert _attention(ours).rope.theta == theirs.rope_parameters["rope_theta"]


def test_what_a_config_of_llama_4_leaves_out_is_as_transformers_has_it(tmp_path: Path) -> None:
    left_out = ("num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings")
    ours = _read(tmp_path, "llama4_text", num_attention_heads=8, num_hidden_layers=8, pad_token_id=0,
                 interleave_moe_layer_step=2, **dict.fromkeys(left_out, ...))  # fmt: skip
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        hf = transformers.AutoModelForCausalLM.from_config(theirs)
    assert expected_shapes(ours) == {name: tuple(parameter.shape) for name, parameter in hf.named_parameters()}
    assert (ours.rms_norm_eps, ours.max_context) == (theirs.rms_norm_eps, theirs.max_position_embeddings)
    for i, layer in enumerate(hf.model.layers):
        attention, rope = _attention(ours, i), _attention(ours, i).rope
        assert rope.theta == theirs.rope_parameters["rope_theta"]
        assert attention.rotary_dim == (theirs.head_dim if layer.self_attn.use_rope else 0)
        assert attention.qk_norm == hasattr(layer.self_attn, "qk_norm")
        is_chunked = theirs.layer_types[i] == "chunked_attention"
        assert attention.chunk == (theirs.attention_chunk_size if is_chunked else None)
        assert rope.temperature == (None if layer.self_attn.use_rope else (theirs.attn_scale, theirs.floor_scale))


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"use_sliding_window": True, "sliding_window": 8},
        {"use_sliding_window": True, "sliding_window": None},
        {"no_rope_layers": [0, 1, 1, 0, 1, 1, 1, 1, 0], "use_sliding_window": True, "sliding_window": 8},
        {"no_rope_layer_interval": 3, "layer_types": ["sliding_attention", *["full_attention"] * 7]},
        {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["sliding_attention"] * 8},
    ],
)
def test_what_a_config_of_smollm_3_leaves_out_is_as_transformers_has_it(tmp_path: Path, said: dict[str, Any]) -> None:
    left_out = ("num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings")
    ours = _read(tmp_path, "smollm3", num_attention_heads=8, num_hidden_layers=8, pad_token_id=0,
                 **dict.fromkeys(left_out, ...), **said)  # fmt: skip
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        hf = transformers.AutoModelForCausalLM.from_config(theirs)
    assert expected_shapes(ours) == {name: tuple(parameter.shape) for name, parameter in hf.named_parameters()}
    assert (ours.rms_norm_eps, ours.max_context) == (theirs.rms_norm_eps, theirs.max_position_embeddings)
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    for i, layer in enumerate(hf.model.layers):
        attention = _attention(ours, i)
        assert attention.rope.theta == theirs.rope_parameters["rope_theta"]
        assert attention.rotary_dim == (layer.self_attn.head_dim if layer.self_attn.use_rope else 0)
        assert attention.window == layer.self_attn.sliding_window


@pytest.mark.parametrize("said", [{}, {"num_local_experts": 0, "position_embedding_type": "rope"}])
def test_what_a_config_of_granite_4_leaves_out_is_as_transformers_has_it(tmp_path: Path, said: dict[str, Any]) -> None:
    """With the shape of granite-4.0-h-tiny where the file needs numbers, and its names of layers' types."""
    sizes = {"vocab_size": 100352, "hidden_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 12}
    heads = {"layer_types": ["mamba"] * 5 + ["attention"], "mamba_n_heads": 48}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "granitemoehybrid", **sizes, **heads, **said}))
    ours, theirs = read_model_config(tmp_path), transformers.AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        hf = transformers.AutoModelForCausalLM.from_config(theirs)
    assert sum(it.elements for it in ours.tensors()) == sum(it.numel() for it in hf.parameters())
    assert (ours.embedding_scale, ours.logit_scale) == (theirs.embedding_multiplier, theirs.logits_scaling)
    assert (ours.rms_norm_eps, ours.max_context) == (theirs.rms_norm_eps, theirs.max_position_embeddings)
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    mamba, attention = _mamba_of(ours), _attention(ours, 5)
    assert (mamba.norm_eps, mamba.dt_limits) == (theirs.rms_norm_eps, theirs.time_step_limit)
    assert (mamba.num_groups, mamba.head_size, mamba.state_size) == (1, theirs.mamba_d_head, theirs.mamba_d_state)
    assert (attention.scale, attention.num_key_value_heads) == (theirs.attention_multiplier, 12)
    assert attention.rotary_dim == (128 if said else 0)
    if not said:
        assert _mixture(ours).top_k == theirs.num_experts_per_tok
        assert len(_mixture(ours).experts) == theirs.num_local_experts


def test_what_a_config_of_nemotron_h_leaves_out_is_as_transformers_has_it(tmp_path: Path) -> None:
    """With the pattern of layers and the sizes of Nemotron 3 Nano."""
    pattern = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
    sizes = {"vocab_size": 131072, "hidden_size": 2688, "mamba_num_heads": 64, "num_key_value_heads": 2}
    experts = {"n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856}
    for said in ({}, {"hybrid_override_pattern": pattern, "num_hidden_layers": 52, **experts}):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "nemotron_h", **sizes, **said}))
        ours, theirs = read_model_config(tmp_path), transformers.AutoConfig.from_pretrained(tmp_path)
        with torch.device("meta"):
            hf = transformers.AutoModelForCausalLM.from_config(theirs)
        assert sum(it.elements for it in ours.tensors()) == sum(it.numel() for it in hf.state_dict().values())
        assert (ours.rms_norm_eps, ours.max_context) == (theirs.layer_norm_epsilon, theirs.max_position_embeddings)
        assert ours.tie_word_embeddings == theirs.tie_word_embeddings
        kinds = [Mamba2 if it == "linear_attention" else GroupedQueryAttention if it == "full_attention" else NoMixer
                 for it in theirs.layers_block_type]  # fmt: skip
        assert [type(layer.mixer) for layer in ours.layers] == kinds
        mamba, mixture = _mamba_of(ours), _mixture(ours, 1)
        assert (mamba.num_groups, mamba.head_size, mamba.state_size) == (8, 64, theirs.ssm_state_size)
        assert (mamba.norm_eps, mamba.dt_limits[0]) == (theirs.layer_norm_epsilon, theirs.time_step_min)
        assert (mixture.top_k, mixture.weight_scale) == (theirs.num_experts_per_tok, theirs.routed_scaling_factor)
        assert (mixture.norm_topk_prob, mixture.num_groups) == (theirs.norm_topk_prob, theirs.n_group)


def test_what_a_config_of_falcon_h1_leaves_out_is_as_transformers_has_it(tmp_path: Path) -> None:
    """With the sizes of Falcon-H1-0.5B."""
    sizes = {"vocab_size": 32784, "hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2}
    mamba_sizes = {"mamba_d_ssm": 1536, "mamba_n_heads": 24, "mamba_d_state": 128}
    for said in (
        {"mamba_n_heads": 16},
        {**sizes, **mamba_sizes, "num_hidden_layers": 3},
        {**sizes, "mamba_d_ssm": None},
    ):
        needed = {"model_type": "falcon_h1", "hidden_size": 4096, "vocab_size": 128000, **said}
        (tmp_path / "config.json").write_text(json.dumps(needed))
        ours, theirs = read_model_config(tmp_path), transformers.AutoConfig.from_pretrained(tmp_path)
        with torch.device("meta"):
            hf = transformers.AutoModelForCausalLM.from_config(theirs)
        assert expected_shapes(ours) == {name: tuple(parameter.shape) for name, parameter in hf.named_parameters()}
        assert (ours.rms_norm_eps, ours.max_context) == (theirs.rms_norm_eps, theirs.max_position_embeddings)
        assert (ours.embedding_scale, ours.logit_scale) == (theirs.embedding_multiplier, theirs.lm_head_multiplier)
        mixer = ours.layers[0].mixer
        assert isinstance(mixer, AttentionAndMamba)
        assert mixer.rope.theta == theirs.rope_parameters["rope_theta"]
        assert (mixer.scale, mixer.factors) == (mixer.head_dim**-0.5, (1.0, 1.0))
        assert (mixer.mamba.factors, mixer.mamba.norm_eps) == (tuple(theirs.ssm_multipliers), None)
        assert mixer.mamba.dt_limits == theirs.time_step_limit


def test_a_multiplier_of_the_residual_changes_the_embeddings_and_the_eps_of_norms(tmp_path: Path) -> None:
    model = _read(tmp_path, "granitemoehybrid", embedding_multiplier=12, residual_multiplier=0.25, logits_scaling=8)
    assert (model.embedding_scale, model.logit_scale, model.rms_norm_eps) == (48.0, 0.125, 1.6e-4)


def test_layers_without_a_rotary_embedding_do_not_limit_the_context(tmp_path: Path) -> None:
    yarn = {"rope_scaling": {"type": "yarn", "factor": 2.0}}
    assert _read(tmp_path, "smollm3", **yarn, no_rope_layers=[1, 0, 1]).max_context == 2 * 2048
    assert _read(tmp_path, "smollm3", **yarn, no_rope_layers=[0, 0, 0]).max_context == 2048


@pytest.mark.parametrize("model_type", WITH_EXPERTS)
def test_what_a_config_of_experts_leaves_out_is_as_transformers_has_it(tmp_path: Path, model_type: str) -> None:
    left_out = dict.fromkeys(("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta"), ...)
    ours = _read(tmp_path, model_type, num_attention_heads=16, **left_out)
    given = {key: value for key, value in BASES[model_type].items() if key not in left_out}
    theirs = transformers.AutoConfig.for_model(model_type, **{**given, "num_attention_heads": 16})
    kv_heads = {axis.num_groups for layer in ours.layers for axis in layer.mixer.axes if hasattr(axis, "num_groups")}
    assert kv_heads == {theirs.num_key_value_heads}
    assert ours.layers[0].mixer.rotary_dim == 64 // 16
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.layers[0].mixer.rope.theta == theirs.rope_parameters["rope_theta"]
    assert {layer.mixer.window for layer in ours.layers} == {None}
    assert _mixture(ours).norm_topk_prob == getattr(theirs, "norm_topk_prob", True)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "qwen2_moe"])
def test_layers_without_experts_are_those_that_transformers_makes_dense(tmp_path: Path, model_type: str) -> None:
    for options in ({"mlp_only_layers": [0, 2]}, {"decoder_sparse_step": 3}, {"num_experts": 0}):
        model = _read(tmp_path, model_type, num_hidden_layers=6, **options)
        config = transformers.AutoConfig.from_pretrained(tmp_path)
        with torch.device("meta"):
            hf = transformers.AutoModelForCausalLM.from_config(config)
        dense = [not hasattr(layer.mlp, "experts") for layer in hf.model.layers]
        assert [isinstance(layer.feed_forward, DenseMLP) for layer in model.layers] == dense


def test_what_a_config_of_latents_leaves_out_is_as_transformers_has_it(tmp_path: Path) -> None:
    left_out = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rms_norm_eps",
                "first_k_dense_replace", "num_key_value_heads")  # fmt: skip
    model = _read(tmp_path, "deepseek_v2", **dict.fromkeys(left_out, ...))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    attention, experts = model.layers[-1].mixer, _mixture(model, -1)
    assert isinstance(attention, LatentAttention)
    for key in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
        assert getattr(attention, key) == getattr(theirs, key), key
    assert attention.scale == (128 + 64) ** -0.5
    assert model.rms_norm_eps == theirs.rms_norm_eps
    assert attention.rope.theta == theirs.rope_parameters["rope_theta"]
    assert (experts.weight_scale, experts.num_groups) == (theirs.routed_scaling_factor, 1)
    assert all(isinstance(layer.feed_forward, MixtureOfExperts) for layer in model.layers)
    without = _read(tmp_path, "deepseek_v2", q_lora_rank=None).layers[-1].mixer
    assert isinstance(without, LatentAttention)
    assert without.q_lora_rank is None


@pytest.mark.parametrize(
    "said",
    [
        {"indexer_types": ["full", "shared", "shared", "full", "shared", "full"]},
        {"index_topk_pattern": "FSSFSF"},
        {"index_topk_freq": 3},
        {"index_topk_freq": 2, "index_skip_topk_offset": 3},
        {},
    ],
    ids=str,
)
def test_layers_share_an_index_as_in_transformers(tmp_path: Path, said: dict[str, Any]) -> None:
    left_out = dict.fromkeys(("indexer_types", "index_topk", "index_head_dim"), ...)
    model = _read(tmp_path, "glm_moe_dsa", num_hidden_layers=6, **{**left_out, **said})
    theirs, indexers = transformers.AutoConfig.from_pretrained(tmp_path), []
    for layer in model.layers:
        assert isinstance(layer.mixer, LatentAttention)
        indexers.append(layer.mixer.indexer)
        assert layer.mixer.top_k == theirs.index_topk
    assert ["shared" if it is None else "full" for it in indexers] == theirs.indexer_types
    assert {it.head_dim for it in indexers if it is not None} == {theirs.index_head_dim}


@pytest.mark.parametrize("model_type", HYBRIDS)
def test_what_a_config_of_recurrent_layers_leaves_out_is_as_transformers_has_it(
    tmp_path: Path, model_type: str
) -> None:
    said = {"num_key_value_heads": 2} if model_type.startswith("qwen") else {}
    ours = _read(tmp_path, model_type, **said)
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        hf = transformers.AutoModelForCausalLM.from_config(theirs)
    tensors = [*hf.parameters(), *(it for name, it in hf.named_buffers() if name.endswith("bias"))]
    assert sum(tensor.elements for tensor in ours.tensors()) == sum(it.numel() for it in tensors)
    eps = theirs.norm_eps if model_type.startswith("lfm2") else theirs.rms_norm_eps
    assert (ours.rms_norm_eps, ours.max_context) == (eps, theirs.max_position_embeddings)
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    for layer, kind in zip(ours.layers, theirs.layer_types, strict=True):
        assert (kind == "full_attention") == (not layer.mixer.state)
        if isinstance(layer.mixer, GroupedQueryAttention):
            assert layer.mixer.head_dim == getattr(theirs, "head_dim", 256 // 8)
            assert layer.mixer.num_key_value_heads == theirs.num_key_value_heads
            rope = theirs.rope_parameters
            assert layer.mixer.rope.theta == rope["rope_theta"]
            assert layer.mixer.rope.partial == rope.get("partial_rotary_factor", 1.0)
        if isinstance(layer.mixer, LatentAttention):
            assert (layer.mixer.rotary_dim, layer.mixer.q_lora_rank) == (0, theirs.q_lora_rank)
            assert layer.mixer.scale == hf.model.layers[4].self_attn.scaling
        experts = layer.feed_forward
        if isinstance(experts, MixtureOfExperts):
            assert (experts.top_k, experts.norm_topk_prob) == (
                theirs.num_experts_per_tok,
                getattr(theirs, "norm_topk_prob", True),
            )
            assert experts.weight_scale == getattr(theirs, "routed_scaling_factor", 1.0)


def test_kimi_linear_tells_of_its_layers_as_published_and_as_transformers_writes(tmp_path: Path) -> None:
    linear = {"full_attn_layers": [2, 5], "kda_layers": [1, 3, 4], "num_heads": 6, "head_dim": 32}
    linear["short_conv_kernel_size"] = 3
    said = {"num_hidden_layers": 5, "first_k_dense_replace": 2, "num_experts": 6, "moe_renormalize": False}
    more = {"num_experts_per_token": 2, "num_shared_experts": 2, "num_expert_group": 3, "model_max_length": 512}
    published = _read(tmp_path, "kimi_linear", linear_attn_config=linear, q_lora_rank=24, **said, **more)
    transformers.AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    # transformers also writes what it read.
    left_out = {"linear_attn_config", "first_k_dense_replace"}
    (tmp_path / "config.json").write_text(json.dumps({key: it for key, it in written.items() if key not in left_out}))
    assert read_model_config(tmp_path).layers == published.layers
    assert [bool(layer.mixer.state) for layer in published.layers] == [True, False, True, True, False]
    assert [isinstance(layer.feed_forward, DenseMLP) for layer in published.layers] == [True] * 2 + [False] * 3
    assert published.max_context == 512
    experts = _mixture(published, -1)
    assert (experts.num_experts, experts.top_k, experts.num_groups, experts.norm_topk_prob) == (6, 2, 3, False)


def test_a_longrope_is_short_where_no_sequence_may_be_longer_than_it_was_first_trained_for(tmp_path: Path) -> None:
    config = transformers.Phi3Config(**{**FAMILIES["phi3"].config, "original_max_position_embeddings": 512})
    config.save_pretrained(tmp_path)
    theirs = transformers.models.phi3.modeling_phi3.Phi3RotaryEmbedding(config)
    for max_model_len, longest in ((512, 512), (513, 2048), (None, 2048)):
        model = read_model_config(tmp_path, max_model_len)
        assert model.max_context == longest
        ours, factor = inverse_frequencies(model.layers[0].mixer.rope, model.layers[0].mixer.rotary_dim)
        theirs(torch.empty(1), torch.arange(longest).unsqueeze(0))  # which chooses the frequencies
        torch.testing.assert_close(ours, theirs.inv_freq, rtol=1e-6, atol=0)
        assert factor == pytest.approx(theirs.attention_scaling)


def test_gemma_3_tells_of_two_rotary_embeddings_as_before_transformers_5_and_since(tmp_path: Path) -> None:
    linear = {"rope_type": "linear", "factor": 8.0}
    old = _read(
        tmp_path,
        "gemma3_text",
        rope_theta=1e5,
        rope_local_base_freq=2e4,
        rope_scaling=linear,
        sliding_window=8,
        sliding_window_pattern=3,
    )
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    local, scaled = RopeConfig(theta=2e4), RopeConfig(theta=1e5, scaling_type="linear", scaling=(("factor", 8.0),))
    assert [layer.mixer.rope for layer in old.layers] == [local, local, scaled]
    assert [layer.mixer.window for layer in old.layers] == [8, 8, None]
    theirs.save_pretrained(tmp_path)
    assert "rope_theta" not in json.loads((tmp_path / "config.json").read_text())
    assert read_model_config(tmp_path).layers == old.layers


def test_null_softcaps_are_none_and_layer_types_say_which_layers_have_windows(tmp_path: Path) -> None:
    types = ["full_attention", "full_attention", "sliding_attention"]
    caps = dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"))
    model = _read(tmp_path, "gemma2", layer_types=types, sliding_window=8, **caps)
    assert [layer.mixer.window for layer in model.layers] == [None, None, 8]
    assert (_attention(model).softcap, model.final_logit_softcap) == (None, None)


def test_windows_of_experts_families_are_those_of_transformers(tmp_path: Path) -> None:
    used = {"use_sliding_window": True, "sliding_window": 8}
    by_type = {**used, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    for model_type, options, windows in (
        ("qwen3_moe", used, [8, 8, 8]),
        ("qwen3_moe", {"sliding_window": 8}, [None] * 3),
        ("mixtral", {"sliding_window": 8}, [8, 8, 8]),
        ("mixtral", {}, [None] * 3),
        ("qwen2_moe", by_type, [8, None, 8]),
        ("qwen2_moe", {"sliding_window": 0}, [None] * 3),
    ):
        model = _read(tmp_path, model_type, **options)
        assert [layer.mixer.window for layer in model.layers] == windows, (model_type, options)
    with pytest.raises(CheckpointError, match="layer_types must name full_attention or sliding_attention"):
        _read(tmp_path, "qwen2_moe", **used)


def test_layers_of_deepseek_without_experts_are_the_first_and_those_between(tmp_path: Path) -> None:
    model = _read(tmp_path, "deepseek_v2", num_hidden_layers=8, first_k_dense_replace=3, moe_layer_freq=2)
    dense = [isinstance(layer.feed_forward, DenseMLP) for layer in model.layers]
    assert dense == [True, True, True, True, False, True, False, True]


@pytest.mark.parametrize(
    ("published", "num_parameters"),
    [
        ({"model_type": "gemma2", "hidden_size": 2304, "intermediate_size": 9216, "vocab_size": 256000}, 2_614_341_888),
        (
            {
                "model_type": "gemma3_text",
                "hidden_size": 1152,
                "intermediate_size": 6912,
                "vocab_size": 262144,
                "num_attention_heads": 4,
                "num_key_value_heads": 1,
            },
            999_885_952,
        ),
        (
            {
                "model_type": "smollm3",
                "num_hidden_layers": 36,
                "hidden_size": 2048,
                "intermediate_size": 11008,
                "vocab_size": 128256,
                "num_attention_heads": 16,
            },
            3_075_098_624,
        ),
        (
            {
                "model_type": "gpt_oss",
                "num_hidden_layers": 24,
                "hidden_size": 2880,
                "intermediate_size": 2880,
                "vocab_size": 201088,
                "num_attention_heads": 64,
                "num_local_experts": 32,
                "num_experts_per_tok": 4,
            },
            20_914_757_184,
        ),
        (
            {
                "model_type": "qwen3_next",
                "num_hidden_layers": 48,
                "hidden_size": 2048,
                "vocab_size": 151936,
                "num_attention_heads": 16,
                "num_key_value_heads": 2,
            },
            79_674_391_296,
        ),
        (
            {
                "model_type": "qwen3_5_text",
                "num_hidden_layers": 32,
                "hidden_size": 4096,
                "vocab_size": 248320,
                "num_attention_heads": 16,
                "num_key_value_heads": 4,
            },
            8_953_803_264,
        ),
        (
            {
                "model_type": "qwen3_5_moe_text",
                "num_hidden_layers": 40,
                "hidden_size": 2048,
                "vocab_size": 248320,
                "num_attention_heads": 16,
                "num_key_value_heads": 2,
            },
            34_660_610_688,
        ),
        (
            {
                "model_type": "lfm2",
                "num_hidden_layers": 16,
                "hidden_size": 2048,
                "vocab_size": 65536,
                "num_attention_heads": 32,
                "full_attn_idxs": [2, 5, 8, 10, 12, 14],
            },
            1_170_340_608,
        ),
        (
            {
                "model_type": "lfm2_moe",
                "num_hidden_layers": 24,
                "hidden_size": 2048,
                "vocab_size": 65536,
                "num_attention_heads": 32,
                "layer_types": ["full_attention" if i in (2, 6, 10, 14, 18, 21) else "conv" for i in range(24)],
            },
            8_339_929_856 + 22 * 32,  # with the experts' biases
        ),
        (
            {
                "model_type": "kimi_linear",
                "num_hidden_layers": 27,
                "hidden_size": 2304,
                "intermediate_size": 9216,
                "vocab_size": 163840,
                "num_attention_heads": 32,
                "linear_attn_config": {
                    "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
                    "kda_layers": [i for i in range(1, 27) if i % 4],
                },
            },
            49_122_681_728,
        ),
    ],
    ids=[
        *("gemma-2-2b", "gemma-3-1b", "smollm3-3b", "gpt-oss-20b"),
        *("qwen3-next-80b-a3b", "qwen3.5-9b", "qwen3.5-35b-a3b", "lfm2-1.2b", "lfm2-8b-a1b", "kimi-linear-48b-a3b"),
    ],
)
def test_published_models_have_so_many_parameters(
    tmp_path: Path, published: dict[str, Any], num_parameters: int
) -> None:
    config = {"num_hidden_layers": 26, "num_attention_heads": 8, **published}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert sum(tensor.elements for tensor in read_model_config(tmp_path).tensors()) == num_parameters


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
        ("gemma2", {"attn_logit_softcapping": 0}, "attn_logit_softcapping=0.0 is not positive"),
        ("gpt_oss", {"quantization_config": {"quant_method": "awq"}}, r"has a quantization_config \(awq\)"),
        ("gpt_oss", {"num_local_experts": 2, "num_experts_per_tok": 3}, "num_experts_per_tok=3 exceeds"),
        ("gpt_oss", {"num_local_experts": 2, "num_experts_per_tok": 2, "swiglu_limit": 0}, "swiglu_limit=0.0 is not"),
        ("gemma2", {"query_pre_attn_scalar": -1}, "query_pre_attn_scalar=-1.0 is not positive"),
        ("llama4_text", {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "type yarn of Llama 4 is not supported"),
        ("llama4_text", {"no_rope_layers": [1]}, "no_rope_layers does not name 3 layers"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers does not name 3 layers"),
        ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval=0 is less than 1"),
        ("llama4_text", {"layer_types": ["sliding_attention"] * 3}, "must name chunked_attention or full_attention"),
        ("llama4_text", {"num_experts_per_tok": 17}, "num_experts_per_tok=17 exceeds num_local_experts=16"),
        ("llama4_text", {"hidden_act": "gelu"}, "hidden_act=gelu of experts is not supported"),
        ("qwen3_moe", {"num_experts": ...}, "has no num_experts"),
        ("qwen3_moe", {"num_experts": -1}, "num_experts=-1 is less than 1"),
        ("mixtral", {"num_local_experts": 0}, "num_local_experts=0 is less than 1"),
        ("qwen3_moe", {"moe_intermediate_size": ...}, "has no moe_intermediate_size"),
        ("qwen3_moe", {"num_experts_per_tok": ...}, "has no num_experts_per_tok"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok=9 exceeds num_experts=8"),
        ("qwen3_moe", {"norm_topk_prob": "yes"}, "norm_topk_prob='yes' is not true or false"),
        ("qwen3_moe", {"mlp_only_layers": "1"}, "mlp_only_layers='1' is"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step=0 is less than 1"),
        ("mixtral", {"hidden_act": "gelu"}, "hidden_act=gelu of experts is not supported; only silu is"),
        ("qwen2_moe", {"shared_expert_intermediate_size": ...}, "has no shared_expert_intermediate_size"),
        ("deepseek_v2", {"n_routed_experts": ...}, "has no n_routed_experts"),
        ("deepseek_v2", {"n_shared_experts": None}, "has no n_shared_experts"),
        ("deepseek_v2", {"moe_intermediate_size": ...}, "has no moe_intermediate_size"),
        ("deepseek_v2", {"num_experts_per_tok": 9}, "num_experts_per_tok=9 exceeds the experts of 1 of 1 groups"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method=noaux_tc is not supported"),
        ("deepseek_v2", {"topk_method": "group_limited_greedy"}, "has no n_group"),
        (
            "deepseek_v2",
            {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 1},
            "n_group=3 does not divide",
        ),
        (
            "deepseek_v2",
            {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 5},
            "less than topk_group=5",
        ),
        (
            "deepseek_v2",
            {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 1},
            "exceeds the experts of 1 of 4",
        ),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func=sigmoid is not supported; only softmax is"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob=True is not supported; only False is"),
        ("deepseek_v2", {"hidden_act": "gelu"}, "hidden_act=gelu is not supported; only silu is"),
        ("deepseek_v2", {"moe_layer_freq": 0}, "moe_layer_freq=0 is less than 1"),
        ("deepseek_v2", {"qk_rope_head_dim": 7}, "is odd"),
        ("deepseek_v2", {"quantization_config": {"quant_method": "gptq"}}, "has a quantization_config"),
        ("granitemoehybrid", {"layer_types": ["mamba"]}, "layer_types must name mamba or attention for 3"),
        ("granitemoehybrid", {"hidden_act": "gelu"}, "hidden_act=gelu is not supported; only silu is"),
        ("granitemoehybrid", {"num_experts_per_tok": 9}, "num_experts_per_tok=9 exceeds num_local_experts=8"),
        ("granitemoehybrid", {"mamba_n_groups": 3}, "8 Mamba heads .* in 3 groups .* groups must be equal"),
        ("granitemoehybrid", {"mamba_d_state": 40}, "states of 40 are not supported; .* multiples of 16"),
        ("granitemoehybrid", {"time_step_limit": [0.0]}, r"time_step_limit=\[0.0\] is not 2 numbers"),
        ("granitemoehybrid", {"residual_multiplier": 0}, "residual_multiplier=0.0 is not positive"),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act=silu is not supported; only relu2 is"),
        ("nemotron_h", {"mlp_bias": True}, "mlp_bias=True is not supported; only False is"),
        ("nemotron_h", {"hybrid_override_pattern": "MX"}, "layers must be of the types mamba, attention, mlp, moe"),
        ("nemotron_h", {"num_experts_per_tok": 9}, "num_experts_per_tok=9 exceeds the experts that a token may take"),
        ("falcon_h1", {"projectors_bias": True}, "projectors_bias=True is not supported; only False is"),
        ("falcon_h1", {"mamba_rms_norm": True}, "mamba_norm_before_gate=True is not supported; only False is"),
        ("falcon_h1", {"ssm_multipliers": [1.0]}, r"ssm_multipliers=\[1.0\] is not 5 numbers"),
        ("falcon_h1", {"hidden_act": "gelu"}, "hidden_act=gelu is not supported; only silu is"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func=softmax is not .* only sigmoid is"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method=greedy is not .* only noaux_tc is"),
        ("deepseek_v3", {"n_group": 8, "topk_group": 3}, "n_group=8 leaves a group fewer than two"),
        ("deepseek_v3", {"routed_scaling_factor": ...}, "has no routed_scaling_factor"),
        ("deepseek_v32", {"attention_bias": True}, "attention_bias=True is not supported; only False is"),
        ("deepseek_v32", {"q_lora_rank": None}, "q_lora_rank=null is not supported with an indexer"),
        ("deepseek_v32", {"index_n_heads": ...}, "has no index_n_heads"),
        ("deepseek_v32", {"index_head_dim": 4}, "index_head_dim=4 is less than qk_rope_head_dim=8"),
        ("deepseek_v32", {"mlp_layer_types": ["sparse"] * 3}, "dense for the first first_k_dense_replace layers"),
        ("glm_moe_dsa", {"indexer_types": ["shared"] * 3}, "the first of 3 layers must have an indexer, .* shared"),
        ("glm_moe_dsa", {"indexer_types": ..., "index_topk_pattern": "FS"}, "the first of 3 layers .* full, shared"),
        ("glm_moe_dsa", {"indexer_types": ..., "index_topk_pattern": "FSs"}, "the file says full, shared, s"),
        ("glm_moe_dsa", {"indexer_rope_interleave": False}, "indexer_rope_interleave=False is not supported"),
        ("qwen3_next", {"num_key_value_heads": ...}, "has no num_key_value_heads"),
        ("qwen3_5_text", {"num_key_value_heads": 2, "layer_types": ["conv"] * 9}, "linear_attention or full_attention"),
        ("qwen3_5_text", {"linear_num_key_heads": 3}, "linear_num_value_heads=32 is not a multiple of .*heads=3"),
        ("qwen3_5_text", {"linear_key_head_dim": 24}, "linear_key_head_dim=24 is not supported; .* multiple of 16"),
        ("qwen3_5_text", {"linear_conv_kernel_dim": 9}, "linear_conv_kernel_dim=9 is more than 8"),
        ("qwen3_next", {"hidden_act": "gelu"}, "hidden_act=gelu is not supported; only silu is"),
        ("qwen3_5_moe_text", {"num_experts": 7}, "num_experts_per_tok=8 exceeds num_experts=7"),
        ("lfm2", {"layer_types": ["conv"]}, "layer_types must name conv or full_attention for each of 9 layers"),
        ("lfm2_moe", {"layer_types": [1] * 9}, "layer_types must name conv or full_attention for each of 9 layers"),
        ("lfm2_moe", {"num_experts": 3}, "num_experts_per_tok=4 exceeds num_experts=3"),
        ("kimi_linear", {"linear_head_dim": 24}, "heads of 24 elements are not supported"),
        ("kimi_linear", {"linear_conv_kernel_dim": 9}, "short_conv_kernel_size=9 is more than 8"),
        ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope=False is not supported; only True is"),
        ("kimi_linear", {"moe_router_activation_func": "softmax"}, "scoring_func=softmax is not .* only sigmoid is"),
        ("kimi_linear", {"mlp_layer_types": ["sparse"]}, "mlp_layer_types must name dense or sparse for each of 9"),
        ("kimi_linear", {"linear_attn_config": [1]}, "linear_attn_config=.* is not an object"),
        ("kimi_linear", {"linear_attn_config": {"gate_lower_bound": -5.0}}, "gate_lower_bound=-5.0 is not supported"),
        ("kimi_linear", {"linear_attn_config": {"full_attn_layers": [1, 3]}}, "name each of the layers 1 to 9 once"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused(
    tmp_path: Path, model_type: str, changes: Mapping[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        _read(tmp_path, model_type, **changes)
    assert str(tmp_path) in str(caught.value)
