"""Families that are more than a Llama layer against transformers: Gemma 2 and 3, gpt-oss, Phi 3, GLM 4, Llama 4.

From config.json and checkpoint to logits and greedy tokens, in fp32, on 1 to 4 ranks.
"""

from __future__ import annotations

import json
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from configs.biased_mixture import BiasedMixture
from configs.errors import CheckpointError
from configs.families import FAMILIES
from configs.layers import DenseMLP, GroupedQueryAttention, HeadGroups
from configs.model_config import ModelConfig
from configs.read_config import read_model_config
from configs.rope import RopeConfig
from parallel.plan import Span, leaf_columns
from tests.conftest import ROOT
from tests.helpers.family_checks import check_exact_logits, random_case
from tests.whole.test_models import Case, check_logits, save
from worker.layers.rotary import inverse_frequencies
from worker.weights.checkpoint import Checkpoint, expected_shapes

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 384,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
# Windows below the prompts' lengths; softcaps that scores and logits reach.
MODELS: dict[str, dict[str, Any]] = {
    "gemma2": {
        "sliding_window": 8,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3_text": {
        "sliding_window": 8,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 24,
        "final_logit_softcapping": 3.0,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        },
    },
    # Heads turn in part; q, k and v are one tensor, and gate and up; every prompt with its answer is a long one.
    "phi3": {
        "head_dim": 16,
        "sliding_window": 24,
        "pad_token_id": 0,
        "original_max_position_embeddings": 8,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.75,
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
            "long_factor": [1.0, 1.5, 2.5, 4.0, 8.0, 16.0],
        },
    },
    "glm4": {"pad_token_id": 0, "rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, **LLAMA3}},
    # Chunks that prompts leave; of the layers with experts one has positions, and one has none.
    "llama4_text": {
        "pad_token_id": 0,
        "attention_chunk_size": 8,
        "no_rope_layer_interval": 2,
        "attn_scale": 0.5,
        "floor_scale": 4,
        "intermediate_size": 96,
        "intermediate_size_mlp": 384,
        "moe_layers": [0, 1],
        "num_local_experts": 6,
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, **LLAMA3},
    },
    # 96 columns are 3 units of 32: on 4 ranks, one has none.
    "gpt_oss": {
        "sliding_window": 8,
        "intermediate_size": 96,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "swiglu_limit": 0.6,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "beta_fast": 8.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 512,
        },
    },
}


def case_of(model_type: str, path: Path) -> Case:
    return random_case(model_type, {**SIZES, **MODELS[model_type]}, path)


@pytest.mark.slow
def test_leaves_of_several_heads_and_many_columns_are_the_same_bits_on_any_ranks(tmp_path: Path) -> None:
    torch.manual_seed(0)
    wide = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 16, "intermediate_size": 4096}
    hf = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**{**SIZES, **wide}, attn_implementation="eager"))
    save(hf, tmp_path)
    case = Case(hf, tmp_path, read_model_config(tmp_path))
    (axis,) = case.model.layers[0].mixer.axes
    assert isinstance(axis, HeadGroups)
    assert (axis.leaf_heads, leaf_columns(4096)) == (2, 512)
    for dtype in (torch.float32, torch.bfloat16):
        check_exact_logits(case, dtype, (1, 2, 3, 5, 8))


# ---- config.json


def _attention(model: ModelConfig, layer: int = 0) -> GroupedQueryAttention:
    mixer = model.layers[layer].mixer
    assert isinstance(mixer, GroupedQueryAttention)
    return mixer


def _read(directory: Path, model_type: str, **changes: Any) -> ModelConfig:
    config = {"model_type": model_type, **SIZES, **changes}
    config = {key: value for key, value in config.items() if value is not ...}
    (directory / "config.json").write_text(json.dumps(config))
    return read_model_config(directory)


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text", "gpt_oss"])
def test_what_a_config_leaves_out_is_as_transformers_has_it(tmp_path: Path, model_type: str) -> None:
    left_out = dict.fromkeys(("num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings"), ...)
    # As many heads as the family has KV heads by default, and layers for one whole turn of the windows.
    counts = {key: value for key, value in MODELS[model_type].items() if key.startswith("num_")}
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


def test_a_longrope_is_short_where_no_sequence_may_be_longer_than_it_was_first_trained_for(tmp_path: Path) -> None:
    options = MODELS["phi3"]
    config = transformers.Phi3Config(**{**SIZES, **options, "original_max_position_embeddings": 512})
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
    ],
    ids=["gemma-2-2b", "gemma-3-1b", "gpt-oss-20b"],
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
        ("llama4_text", {"no_rope_layers": [1]}, "no_rope_layers or layer_types do not name 3 layers"),
        ("llama4_text", {"layer_types": ["sliding_attention"] * 3}, "must name chunked_attention or full_attention"),
        ("llama4_text", {"num_experts_per_tok": 17}, "num_experts_per_tok=17 exceeds num_local_experts=16"),
        ("llama4_text", {"hidden_act": "gelu"}, "hidden_act=gelu of experts is not supported"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused(
    tmp_path: Path, model_type: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        _read(tmp_path, model_type, **changes)
    assert str(tmp_path) in str(caught.value)


def _biased(model: ModelConfig) -> BiasedMixture:
    feed_forward = model.layers[0].feed_forward
    assert isinstance(feed_forward, BiasedMixture)
    return feed_forward


def test_a_step_counts_the_experts_that_tokens_hit(tmp_path: Path) -> None:
    model = _read(tmp_path, "gpt_oss", num_local_experts=32, num_experts_per_tok=4, num_hidden_layers=1)
    share = Fraction(4, 32)
    # Of one column gate, up and down: no bias is a product.
    assert sum(model.layers[0].product_elements[share].values()) == 32 * 3 * SIZES["hidden_size"]


def test_llama_4_is_the_text_part_of_a_checkpoint_with_images(tmp_path: Path) -> None:
    (text_path := tmp_path / "text").mkdir()
    case = case_of("llama4_text", text_path)
    text = json.loads((case.path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama4", "text_config": text}))
    tensors = load_file(case.path / "model.safetensors")
    beside = {"vision_model.class_embedding": torch.zeros(3)}
    save_file(beside | {f"language_model.{name}": it for name, it in tensors.items()}, tmp_path / "model.safetensors")
    check_logits(Case(case.hf, tmp_path, read_model_config(tmp_path)), 2)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama4"}))
    with pytest.raises(CheckpointError, match="has no text_config"):
        read_model_config(tmp_path)


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


def test_the_guide_has_a_row_for_every_family() -> None:
    cells = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", (ROOT / "docs/guides/models.md").read_text(), re.MULTILINE)
    rows = [name for cell in cells for name in re.findall(r"\w+", cell)]
    assert sorted(rows) == sorted(["model_type", *FAMILIES])  # with the table's head


@pytest.mark.parametrize("tp_size", [1, 3])
def test_gpt_oss_is_read_from_four_bits_as_transformers_unpacks_them(tmp_path: Path, tp_size: int) -> None:
    case = case_of("gpt_oss", tmp_path)
    plain, stored = load_file(tmp_path / "model.safetensors"), {}
    draw = torch.Generator().manual_seed(0)
    for name, tensor in plain.items():
        if not name.endswith("_proj") or ".experts." not in name:
            stored[name] = tensor
            continue
        num_experts, inputs, outputs = tensor.shape
        blocks = torch.randint(0, 256, (num_experts, outputs, inputs // 32, 16), generator=draw, dtype=torch.uint8)
        scales = torch.randint(120, 126, blocks.shape[:-1], generator=draw, dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    said = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
    }
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
    case.hf.load_state_dict(plain)
    read = Case(case.hf, tmp_path, read_model_config(tmp_path))
    check_logits(read, tp_size)
    # Parts of blocks, of two experts.
    name, rows, columns = "model.layers.1.mlp.experts.down_proj", Span(70, 150), Span(3, 40)
    with Checkpoint.open(tmp_path, read.model) as checkpoint:
        checkpoint.read(name, part := torch.empty(rows.size, columns.size), rows=rows, columns=columns)
    assert torch.equal(part, plain[name].flatten(0, 1)[70:150, 3:40])


def test_four_bits_are_refused_where_half_of_them_is_missing(tmp_path: Path) -> None:
    case = case_of("gpt_oss", tmp_path)
    name = "model.layers.0.mlp.experts.down_proj"
    stored = load_file(tmp_path / "model.safetensors")
    num_experts, inputs, outputs = stored.pop(name).shape
    stored[f"{name}_blocks"] = torch.zeros(num_experts, outputs, inputs // 32, 16, dtype=torch.uint8)
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"missing tensors: {name}"):
        Checkpoint.open(tmp_path, case.model)
    stored[name] = torch.zeros(num_experts, inputs, outputs, dtype=torch.uint8)
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"bytes without scales, or scales of others: {name}"):
        Checkpoint.open(tmp_path, case.model)
