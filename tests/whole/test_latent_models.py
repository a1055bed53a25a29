"""DeepSeek-V2 and V3 against transformers, from config and checkpoint to logits and greedy tokens; plan, pool, cost."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from attention.kv_pool import FP8, TokenToKVPool
from configs.errors import CheckpointError, ConfigError
from configs.latent_attention import LatentAttention
from configs.layers import Axis, DenseMLP, MixtureOfExperts
from configs.model_config import ModelConfig
from configs.read_config import read_model_config
from parallel.collectives.group import TensorParallelGroup
from parallel.plan import ShardPlan
from parallel.step_cost import StepCost
from tests.conftest import ROOT
from tests.helpers.family_checks import decoder_of, random_case
from tests.helpers.rank_threads import on_ranks
from tests.whole.test_models import Case, Rank
from worker.weights.checkpoint import Checkpoint

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "intermediate_size": 96,
    "max_position_embeddings": 2048,
    "num_experts_per_tok": 3,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "rms_norm_eps": 0.01,  # which the latents' norms must not take
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "mscale": 0.707,
    "mscale_all_dim": 0.9,
}
# With one more layer than are computed.
V3: dict[str, Any] = {
    "q_lora_rank": 40,
    "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
}
MODELS: dict[str, dict[str, Any]] = {
    "lite": {"q_lora_rank": None, "rope_parameters": YARN},
    # Values wider than keys; and experts of two groups of four.
    "whole": {
        "q_lora_rank": 40,
        "v_head_dim": 32,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 0,
    },
    "v3": V3,
}
SHAPE = ROOT / "benchmarks" / "models" / "deepseek-v2-lite"


def case_of(name: str, path: Path) -> Case:
    model_type = "deepseek_v3" if name == "v3" else "deepseek_v2"
    return random_case(model_type, {**SIZES, **MODELS[name]}, path, factor=6.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tp_size", [1, 3, 4])
def test_a_token_leaves_one_latent_and_one_rotated_key_on_every_rank(
    tmp_path: Path, tp_size: int, dtype: torch.dtype
) -> None:
    model = _read(tmp_path, kv_lora_rank=512, qk_rope_head_dim=64)
    plan, name = ShardPlan.create(model, tp_size), str(dtype).removeprefix("torch.")
    per_token = (512 + 64) * dtype.itemsize * model.num_hidden_layers
    for rank in range(tp_size):
        layers = decoder_of(plan, rank, dtype).attention_layers
        pool = TokenToKVPool(layers, num_pages=7, page_size=16, dtype=dtype, device=CPU)
        assert sum(pages.nbytes for i in range(len(layers)) for pages in pool.pages(i)) == 8 * 16 * per_token
        assert plan.kv_page_bytes(rank, 16, name) == (16 * per_token, 0)


@pytest.mark.parametrize("name", MODELS)
def test_bf16_is_as_exact_as_transformers_bf16(name: str, tmp_path: Path) -> None:
    """Absorbed decodes round other numbers than transformers does."""
    case = case_of(name, tmp_path)
    tokens = torch.randint(0, SIZES["vocab_size"], (40,), generator=torch.Generator().manual_seed(3)).tolist()

    def body(group: TensorParallelGroup) -> list[torch.Tensor]:
        rank = Rank.create(case, group, torch.bfloat16)
        return rank.logits([(1, 0, tokens[:8])]) + [rank.logits([(1, i, tokens[i : i + 1])])[0] for i in range(8, 40)]

    [ours] = on_ranks(1, body)
    with torch.inference_mode():
        expected = case.hf(torch.tensor([tokens])).logits[0]
        theirs = copy.deepcopy(case.hf).bfloat16()(torch.tensor([tokens])).logits[0]
    # Of most positions: at some, a rounded state chooses other experts.
    rms = [(it.float() - expected).square().mean(1).sqrt().median() for it in (torch.cat(ours), theirs)]
    assert rms[0] <= 1.5 * rms[1]


def test_a_factor_of_latents_in_fp8_comes_from_the_checkpoint(tmp_path: Path) -> None:
    """Of a power of two nothing is rounded otherwise, but what leaves the range of FP8."""
    case, tokens = case_of("v3", tmp_path), list(range(40, 77))
    (with_factors := tmp_path / "with factors").mkdir()
    factors = {f"model.layers.{i}.self_attn.k_scale": torch.tensor(0.25) for i in range(3)}
    save_file(load_file(tmp_path / "model.safetensors") | factors, with_factors / "model.safetensors")
    with Checkpoint.open(with_factors, case.model) as checkpoint:
        assert checkpoint.kv_scales() == [(0.25,)] * 3

    def logits(of_case: Case, kv_dtype: torch.dtype | None, tp_size: int = 1) -> torch.Tensor:
        def body(group: TensorParallelGroup) -> torch.Tensor:
            rank = Rank.create(of_case, group, kv_dtype=kv_dtype)
            parts = [(0, 11), (11, 30), *((i, i + 1) for i in range(30, 37))]
            return torch.cat([rank.logits([(1, first, tokens[first:stop])])[0] for first, stop in parts])

        return on_ranks(tp_size, body)[0]

    exact, plain = logits(case, None), logits(case, FP8)
    scaled, of_three = (logits(replace(case, path=with_factors), FP8, size) for size in (1, 3))
    rms = [float((it - exact).square().mean(1).sqrt().median() / exact.std()) for it in (plain, scaled, of_three)]
    assert not torch.equal(scaled, plain), "small numbers have more bits by a quarter"
    assert all(0.0 < it < 0.2 for it in rms), rms


# ---- config.json


def _read(directory: Path, **changes: Any) -> ModelConfig:
    config = {"model_type": "deepseek_v2", **SIZES, **changes}
    if config["model_type"] == "deepseek_v3":
        config = {**config, **V3, **changes}
    (directory / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
    return read_model_config(directory)


def _parts(model: ModelConfig) -> tuple[LatentAttention, MixtureOfExperts]:
    """Of the last layer."""
    mixer, feed_forward = model.layers[-1].mixer, model.layers[-1].feed_forward
    assert isinstance(mixer, LatentAttention)
    assert isinstance(feed_forward, MixtureOfExperts)
    return mixer, feed_forward


def test_what_a_config_leaves_out_is_as_transformers_has_it(tmp_path: Path) -> None:
    left_out = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rms_norm_eps",
                "first_k_dense_replace", "num_key_value_heads")  # fmt: skip
    model = _read(tmp_path, **dict.fromkeys(left_out, ...))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    attention, experts = _parts(model)
    for key in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
        assert getattr(attention, key) == getattr(theirs, key), key
    assert attention.scale == (128 + 64) ** -0.5
    assert model.rms_norm_eps == theirs.rms_norm_eps
    assert attention.rope.theta == theirs.rope_parameters["rope_theta"]
    assert (experts.weight_scale, experts.num_groups) == (theirs.routed_scaling_factor, 1)
    assert all(isinstance(layer.feed_forward, MixtureOfExperts) for layer in model.layers)
    assert _parts(_read(tmp_path, q_lora_rank=None))[0].q_lora_rank is None


def test_layers_without_experts_are_the_first_and_those_between(tmp_path: Path) -> None:
    model = _read(tmp_path, num_hidden_layers=8, first_k_dense_replace=3, moe_layer_freq=2)
    dense = [isinstance(layer.feed_forward, DenseMLP) for layer in model.layers]
    assert dense == [True, True, True, True, False, True, False, True]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_routed_experts": ...}, "has no n_routed_experts"),
        ({"n_shared_experts": None}, "has no n_shared_experts"),
        ({"moe_intermediate_size": ...}, "has no moe_intermediate_size"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok=9 exceeds the experts of 1 of 1 groups"),
        ({"topk_method": "noaux_tc"}, "topk_method=noaux_tc is not supported"),
        ({"topk_method": "group_limited_greedy"}, "has no n_group"),
        ({"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 1}, "n_group=3 does not divide"),
        ({"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 5}, "less than topk_group=5"),
        ({"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 1}, "exceeds the experts of 1 of 4"),
        ({"scoring_func": "sigmoid"}, "scoring_func=sigmoid is not supported; only softmax is"),
        ({"norm_topk_prob": True}, "norm_topk_prob=True is not supported; only False is"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu is not supported; only silu is"),
        ({"moe_layer_freq": 0}, "moe_layer_freq=0 is less than 1"),
        ({"qk_rope_head_dim": 7}, "is odd"),
        ({"quantization_config": {"quant_method": "gptq"}}, "has a quantization_config"),
        ({"model_type": "deepseek_v3", "scoring_func": "softmax"}, "scoring_func=softmax is not .* only sigmoid is"),
        ({"model_type": "deepseek_v3", "topk_method": "greedy"}, "topk_method=greedy is not .* only noaux_tc is"),
        ({"model_type": "deepseek_v3", "n_group": 8, "topk_group": 3}, "n_group=8 leaves a group fewer than two"),
        ({"model_type": "deepseek_v3", "routed_scaling_factor": ...}, "has no routed_scaling_factor"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused(tmp_path: Path, changes: Mapping[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        _read(tmp_path, **changes)
    assert str(tmp_path) in str(caught.value)


# ---- plan and cost of DeepSeek-V2-Lite


@pytest.mark.parametrize("tp_size", range(1, 17))
def test_heads_are_dealt_one_by_one_and_every_rank_has_the_latent(tp_size: int) -> None:
    plan = ShardPlan.create(read_model_config(SHAPE), tp_size)
    for shards in plan.layers:
        heads = [shard[Axis.QUERY_HEADS] for shard in shards]
        assert [span.start for span in heads] == [0, *(span.stop for span in heads[:-1])]
        assert heads[-1].stop == 16
        assert {span.size for span in heads} <= {16 // tp_size, -(-16 // tp_size)}
        assert {shard[Axis.LATENT] for shard in shards} == {(0, 1)}
    assert {plan.kv_elements_per_token(rank) for rank in range(tp_size)} == {27 * 576}
    weights = [plan.weight_elements(rank) for rank in range(tp_size)]
    assert max(weights) * tp_size < 1.02 * sum(weights)


def test_more_ranks_than_heads_are_refused() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size=17 exceeds num_attention_heads=16"):
        ShardPlan.create(read_model_config(SHAPE), 17)


@pytest.mark.parametrize("tp_size", [1, 3])
def test_a_decode_reads_each_latent_once_a_rank_and_computes_in_the_absorbed_form(tp_size: int) -> None:
    plan = ShardPlan.create(read_model_config(SHAPE), tp_size)
    cost = StepCost.of(plan, 2)
    one = np.ones(1, np.int32)
    (near_flops, near_bytes), (far_flops, far_bytes) = (cost.step(n * one, one, 0) for n in (0, 1000))
    assert far_bytes - near_bytes == 1000 * tp_size * 27 * 576 * 2
    assert far_flops - near_flops == 1000 * 27 * 16 * 2 * (576 + 512)


def test_a_token_is_multiplied_with_as_many_weights_as_are_published() -> None:
    flops = StepCost.of(ShardPlan.create(read_model_config(SHAPE), 1), 2).flops_per_token
    assert flops / 2 == pytest.approx(2.4e9 - 102400 * 2048, rel=0.03)  # without the LM head
