"""Plans, pools and costs of models, those of published ones with experts and latents among them."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from attention.kv_pool import TokenToKVPool
from configs.errors import ConfigError
from configs.layers import Axis
from configs.read_config import read_model_config
from configs.schema import EngineConfig, KVCacheConfig
from parallel.plan import ShardPlan
from parallel.step_cost import StepCost
from tests.conftest import ROOT
from tests.helpers.dense_model import dense_model
from tests.helpers.families import EXPERTS, GROUPED, LATENTS
from tests.helpers.family_checks import decoder_of

CPU = torch.device("cpu")
SHAPES = ROOT / "benchmarks" / "models"
SHAPE = SHAPES / "deepseek-v2-lite"


@pytest.mark.parametrize("tp_size", [1, 2, 3, 4])
def test_the_pool_of_a_rank_takes_the_bytes_that_the_plan_counts(tp_size: int) -> None:
    model = dense_model(num_hidden_layers=3, intermediate_size=384)
    plan = ShardPlan.create(model, tp_size)
    config = EngineConfig(model="a/b", dtype="float32", kv_cache=KVCacheConfig(page_size=4))
    page = [sum(plan.kv_page_bytes(rank, config)) for rank in range(tp_size)]
    for rank in range(tp_size):
        layers = decoder_of(plan, rank).attention_layers
        pool = TokenToKVPool(layers, num_pages=7, page_size=4, dtype=torch.float32, device=CPU)
        taken = sum(tensor.nbytes for layer in layers for tensor in pool.pages(layer.layer_id))
        assert taken == 8 * page[rank]


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
    config = {**EXPERTS, "num_experts": 8, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632}
    transformers.Qwen2MoeConfig(**config).save_pretrained(tmp_path)
    plan = ShardPlan.create(read_model_config(tmp_path), 8)
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


def test_a_step_counts_the_experts_that_tokens_hit(tmp_path: Path) -> None:
    experts = {"num_local_experts": 32, "num_experts_per_tok": 4, "num_hidden_layers": 1}
    transformers.GptOssConfig(**{**GROUPED, **experts}).save_pretrained(tmp_path)
    model = read_model_config(tmp_path)
    share = Fraction(4, 32)
    # Of one column gate, up and down: no bias is a product.
    assert sum(model.layers[0].product_elements[share].values()) == 32 * 3 * GROUPED["hidden_size"]


# ---- plan and cost of DeepSeek-V2-Lite


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tp_size", [1, 3, 4])
def test_a_token_leaves_one_latent_and_one_rotated_key_on_every_rank(
    tmp_path: Path, tp_size: int, dtype: torch.dtype
) -> None:
    config = transformers.DeepseekV2Config(
        **{**LATENTS, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "q_lora_rank": None}
    )
    config.save_pretrained(tmp_path)
    model = read_model_config(tmp_path)
    plan = ShardPlan.create(model, tp_size)
    config = EngineConfig.model_validate({"model": "a/b", "dtype": str(dtype).removeprefix("torch.")})
    per_token = (512 + 64) * dtype.itemsize * model.num_hidden_layers
    for rank in range(tp_size):
        layers = decoder_of(plan, rank, dtype).attention_layers
        pool = TokenToKVPool(layers, num_pages=7, page_size=16, dtype=dtype, device=CPU)
        assert sum(pages.nbytes for i in range(len(layers)) for pages in pool.pages(i)) == 8 * 16 * per_token
        assert plan.kv_page_bytes(rank, config) == (16 * per_token, 0, 0)


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
