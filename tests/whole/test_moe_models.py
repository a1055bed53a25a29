"""Models with experts against transformers, from config and checkpoint to logits and greedy tokens, on 1 to 8 ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from configs.errors import CheckpointError
from configs.layers import Axis, DenseMLP, MixtureOfExperts
from configs.model_config import ModelConfig
from configs.read_config import read_model_config
from parallel.plan import ShardPlan
from parallel.step_cost import StepCost
from tests.conftest import ROOT
from tests.helpers.family_checks import random_case
from tests.whole.test_models import Case
from worker.weights.checkpoint import Checkpoint

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "intermediate_size": 96,
    "max_position_embeddings": 2048,
    "num_experts_per_tok": 3,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
}
# 96 and 160 columns are 3 and 5 units of 32: uneven on most numbers of ranks; on 8 some have none. 80 are cut finer.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", {"num_experts": 12, "moe_intermediate_size": 160, "norm_topk_prob": True}),
    "qwen3_moe_dense_layer": ("qwen3_moe", {"num_experts": 8, "moe_intermediate_size": 96, "mlp_only_layers": [1]}),
    "qwen3_moe_every_second": ("qwen3_moe", {"num_experts": 8, "moe_intermediate_size": 80, "decoder_sparse_step": 2}),
    "mixtral": ("mixtral", {"num_local_experts": 8, "sliding_window": 24}),
    "qwen2_moe": (
        "qwen2_moe",
        {"num_experts": 10, "moe_intermediate_size": 96, "shared_expert_intermediate_size": 160},
    ),
    # Heads turn in part.
    "glm4_moe": (
        "glm4_moe",
        {
            "n_routed_experts": 8,
            "moe_intermediate_size": 96,
            "routed_scaling_factor": 2.5,
            "attention_bias": True,
            "use_qk_norm": True,
            "pad_token_id": 0,
        },
    ),
}
SHAPES = ROOT / "benchmarks" / "models"


def case_of(name: str, path: Path) -> Case:
    model_type, options = MODELS[name]
    return random_case(model_type, {**SIZES, **options}, path)


@pytest.mark.parametrize("name", MODELS)
def test_a_missing_and_a_surplus_expert_are_named(name: str, tmp_path: Path) -> None:
    case = case_of(name, tmp_path)
    tensors = load_file(case.path / "model.safetensors")
    name = max(name for name in tensors if ".experts.3." in name)
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"missing tensors: {name}"):
        Checkpoint.open(tmp_path, case.model)
    surplus = name.replace(".experts.3.", ".experts.99.")
    save_file({**tensors, surplus: tensors[name].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"has no place for: {surplus}"):
        Checkpoint.open(tmp_path, case.model)


# ---- config.json

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 96},
    "mixtral": {"num_local_experts": 8},
    "qwen2_moe": {"num_experts": 8, "moe_intermediate_size": 96, "shared_expert_intermediate_size": 160},
}


def _read(directory: Path, model_type: str, **changes: Any) -> ModelConfig:
    config = {"model_type": model_type, **SIZES, **FAMILIES[model_type], **changes}
    config = {key: value for key, value in config.items() if value is not ...}
    (directory / "config.json").write_text(json.dumps(config))
    return read_model_config(directory)


def _mixture(model: ModelConfig) -> MixtureOfExperts:
    feed_forward = model.layers[0].feed_forward
    assert isinstance(feed_forward, MixtureOfExperts)
    return feed_forward


@pytest.mark.parametrize("model_type", FAMILIES)
def test_what_a_config_leaves_out_is_as_transformers_has_it(tmp_path: Path, model_type: str) -> None:
    left_out = dict.fromkeys(("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta"), ...)
    ours = _read(tmp_path, model_type, num_attention_heads=16, **left_out)
    given = {key: value for key, value in SIZES.items() if key not in left_out} | FAMILIES[model_type]
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


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
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
    ],
)
def test_a_config_of_experts_that_cannot_be_served_is_refused(
    tmp_path: Path, model_type: str, changes: Mapping[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        _read(tmp_path, model_type, **changes)
    assert str(tmp_path) in str(caught.value)


# ---- plan and cost of Qwen3-30B-A3B


@pytest.mark.parametrize(
    ("tp_size", "widest"), [(1, 768), (2, 384), (3, 256), (4, 192), (5, 160), (6, 128), (7, 128), (8, 96), (32, 32)]
)
def test_the_widest_rank_has_as_few_columns_as_units_of_32_allow(tp_size: int, widest: int) -> None:
    plan = ShardPlan.create(read_model_config(SHAPES / "qwen3-30b-a3b"), tp_size)
    for shards in plan.layers:
        spans = [shard[Axis.EXPERT_COLUMNS] for shard in shards]
        assert max(span.size for span in spans) == widest
        assert sum(span.size for span in spans) == 768
        assert not any(span.size % 32 for span in spans)
    weights = [plan.weight_elements(rank) for rank in range(tp_size)]
    assert max(weights) * tp_size < (1.05 if tp_size <= 8 else 1.15) * sum(weights)


def test_a_shared_expert_is_dealt_as_finely(tmp_path: Path) -> None:
    sizes = {"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632}
    plan = ShardPlan.create(_read(tmp_path, "qwen2_moe", **sizes), 8)
    for shards in plan.layers:
        assert [shard[Axis.SHARED_EXPERT_COLUMNS].size for shard in shards] == [704] * 8
        assert max(shard[Axis.EXPERT_COLUMNS].size for shard in shards) == 192


def test_few_tokens_read_few_experts() -> None:
    model = read_model_config(SHAPES / "qwen3-30b-a3b")
    cost = StepCost.of(ShardPlan.create(model, 1), 2)
    experts = 48 * 3 * 768 * 2048 * 2  # bytes of one in every layer
    everything = 2 * sum(tensor.elements for tensor in model.tensors()) - 2 * 151936 * 2048
    for num_rows, hit in ((1, 8), (4, 128 * (1 - (1 - 8 / 128) ** 4)), (4096, 128)):
        ones = np.ones(num_rows, np.int32)
        flops, read = cost.step(0 * ones, ones, 0)
        weights = read - num_rows * model.num_hidden_layers * 2 * 4 * 128 * 2
        assert weights == pytest.approx(everything - (128 - hit) * experts)
        assert flops / num_rows < 2 * 3.1e9
