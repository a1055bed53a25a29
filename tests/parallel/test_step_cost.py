"""What a step costs at the least, and what the hardware was measured to do: numerators and denominators of MFU, MBU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from configs.layers import Axis, Columns, Cut, LayerSpec, Role, TensorSpec
from configs.read_config import read_model_config
from configs.schema import EngineConfig
from configs.weight_dtypes import WeightDtypes
from parallel.plan import ShardPlan
from parallel.step_cost import AttentionCost, StepCost
from tests.helpers.dense_model import dense_model
from worker.device.peaks import measure_peaks
from worker.weights.checkpoint import expected_shapes

SHAPES = Path(__file__).resolve().parents[2] / "benchmarks/models"
SHAPE: dict[str, int] = {
    "hidden_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 32,
    "intermediate_size": 512,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
}
MODEL = dense_model(**SHAPE, tie_word_embeddings=False)
GROUP = StepCost.of(ShardPlan.create(MODEL, 1), 2)


def ints(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(values, np.int32)


def test_flops_are_those_that_pytorch_counts_in_transformers() -> None:
    config = transformers.LlamaConfig(**SHAPE, attn_implementation="eager")
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.inference_mode():
        cache = model(torch.zeros(1, 100, dtype=torch.long), use_cache=True).past_key_values
        with FlopCounterMode(display=False) as counter:
            model(torch.zeros(1, 1, dtype=torch.long), past_key_values=cache)
    flops, _ = GROUP.step(ints(100), ints(1), 1)
    assert flops == counter.get_total_flops()


@pytest.mark.parametrize("name", ["qwen3-8b", "qwen3-30b-a3b"])
def test_weights_in_fp8_count_one_byte_on_gpus_alone(name: str) -> None:
    model = read_model_config(SHAPES / name)
    plan = ShardPlan.create(model, 3)
    saved = sum(it.elements for it in model.tensors() if it.may_be_fp8)
    beside = 2 * 151936 * 4096 if name == "qwen3-8b" else 2 * 151936 * 2048 + 48 * 128 * 2048  # and norms
    assert 0 < sum(it.elements for it in model.tensors()) - saved - beside < 1e6
    plain, fp8 = StepCost.of(plan, 2), StepCost.of(plan, 2, dtypes=WeightDtypes(fp8=True))
    starts, lens = ints(*[0] * 5000), ints(*[1] * 5000)  # so many that every expert is hit
    assert plain.step(starts, lens, 1)[1] - fp8.step(starts, lens, 1)[1] == pytest.approx(saved)
    config = EngineConfig(model="m", device="cuda", dtype="bfloat16", quantization="fp8")
    assert (
        sum(plan.weight_bytes(rank, config) for rank in range(3))
        == sum(map(plan.weight_elements, range(3))) * 2 - saved
    )
    on_cpu = config.model_copy(update={"device": "cpu"})
    assert plan.weight_bytes(0, on_cpu) == 2 * plan.weight_elements(0)


def test_a_step_reads_every_weight_but_the_embedding_and_the_cache_of_every_row() -> None:
    layer = MODEL.hidden_size * (2 * (6 + 3) * 32 + 3 * 512 + 2)  # projections, MLP, two norms
    assert GROUP.weight_bytes == 2 * (3 * layer + MODEL.hidden_size + 1000 * 192)
    _, read = GROUP.step(ints(9, 0), ints(1, 30), 2)
    assert read - GROUP.weight_bytes == (10 + 30) * 3 * 2 * 3 * 32 * 2
    tied = StepCost.of(ShardPlan.create(replace(MODEL, tie_word_embeddings=True), 1), 2)
    assert tied.weight_bytes == GROUP.weight_bytes


@pytest.mark.parametrize("tp_size", [2, 3, 5])
def test_ranks_share_the_work_and_read_replicated_heads_twice(tp_size: int) -> None:
    plan = ShardPlan.create(MODEL, tp_size)
    group, ranks = StepCost.of(plan, 2), [StepCost.of(plan, 2, [rank]) for rank in range(tp_size)]
    step = ints(9, 0), ints(1, 30), 2
    assert group.step(*step)[0] == sum(rank.step(*step)[0] for rank in ranks)
    assert group.step(*step)[1] == sum(rank.step(*step)[1] for rank in ranks)
    norms = (tp_size - 1) * 192 * 7
    replicated = max(tp_size - 3, 0) * 3 * 2 * 32  # elements of a token's keys and values, each made of 192
    assert group.step(*step)[1] - GROUP.step(*step)[1] == 2 * (norms + replicated * (192 + 10 + 30))


@pytest.mark.parametrize("window", [None, 1, 7, 16])
def test_a_query_sees_what_its_window_lets_it(window: int | None) -> None:
    random = np.random.default_rng(0)
    for _ in range(200):
        starts, lens = random.integers(0, 40, 5), random.integers(1, 40, 5)
        pairs = tokens = 0
        for start, length in zip(starts, lens, strict=True):
            queries, keys = np.arange(start, start + length)[:, None], np.arange(start + length)[None]
            seen = (keys <= queries) & (keys > queries - (window or 1000))
            pairs += int(seen.sum())
            tokens += int(seen.any(0).sum())
        cost = AttentionCost(window, 1, 1)
        first = starts.astype(np.float64)
        assert (cost.pairs(first, first + lens), cost.tokens(first, first + lens)) == (pairs, tokens)


def test_layers_are_counted_by_their_windows() -> None:
    mixed = StepCost.of(
        ShardPlan.create(dense_model(**SHAPE, tie_word_embeddings=False, layer_windows=(None, 8, 8)), 1), 2
    )
    assert [layers.window for layers in mixed.attention] == [None, 8]
    assert 2 * mixed.attention[0].bytes_per_token == mixed.attention[1].bytes_per_token
    token = 2 * 3 * 32 * 2
    _, read = mixed.step(ints(99), ints(1), 1)
    assert read - mixed.weight_bytes == token * (100 + 8 + 8)


@dataclass(frozen=True)
class ToyExperts:
    """Eight experts of one matrix, of which a token is multiplied with two: a kind that no module of ours computes."""

    tensors: tuple[TensorSpec, ...] = tuple(
        TensorSpec(f"experts.{i}.weight", (192, 96), Role.MATRIX, Cut(Axis.MLP_COLUMNS, 1), share=Fraction(2, 8))
        for i in range(8)
    )
    axes: tuple[Columns, ...] = (Columns(Axis.MLP_COLUMNS, 96, finest_granule=32),)


@pytest.mark.parametrize("tp_size", [1, 3])
def test_a_kind_of_feed_forward_that_routes_tokens_is_counted_by_its_spec_alone(tp_size: int) -> None:
    dense = MODEL.layers[0]
    model = replace(MODEL, layers=(dense, LayerSpec(192, dense.mixer, ToyExperts())))
    plan = ShardPlan.create(model, tp_size)
    assert [shard[Axis.MLP_COLUMNS].size for shard in plan.layers[1]] == [96 // tp_size] * tp_size
    assert expected_shapes(model)["model.layers.1.experts.7.weight"] == (192, 96)
    cost = StepCost.of(plan, 2)
    without = StepCost.of(ShardPlan.create(replace(model, layers=model.layers[:1]), tp_size), 2)
    held = 8 * 192 * 96 * 2
    assert cost.routed == ((Fraction(1, 4), held),)
    attention = 2 * 192 * 2 * (6 + 3) * 32
    assert cost.flops_per_token - without.flops_per_token == attention + 2 * 2 * 192 * 96
    for num_tokens in (1, 3):
        _, read = cost.step(ints(0), ints(num_tokens), 0)
        _, without_experts = replace(cost, routed=()).step(ints(0), ints(num_tokens), 0)
        assert read - without_experts == pytest.approx(held * (1 - 0.75**num_tokens))


def test_only_positions_whose_logits_are_wanted_cost_the_head() -> None:
    chunk, _ = GROUP.step(ints(0), ints(64), 0)
    last, _ = GROUP.step(ints(0), ints(64), 1)
    assert last - chunk == 2 * 1000 * 192


def test_a_long_context_of_a_large_model_is_counted_exactly() -> None:
    cost = AttentionCost(None, 1, 1)
    assert cost.pairs(np.zeros(1), np.array([131072.0])) == 131072 * 131073 / 2


def test_a_device_does_some_work() -> None:
    peaks = measure_peaks(torch.device("cpu"), torch.float32)
    assert 1e8 < peaks.flops < 1e14
    assert 1e8 < peaks.bandwidth < 1e12
