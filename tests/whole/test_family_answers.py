"""Every family of models against transformers, from config and checkpoint to logits and greedy tokens.

Small random models, tests/helpers/families.py, in each format of weights, on each number of ranks, by each backend that
runs on CPUs as fast as this, and through the runner: by pairs. tests/whole/test_attention_models.py has each feature of
each backend.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from attention.kv_pool import TokenToKVPool
from attention.registry import needs_of
from benchmarks.make_checkpoint import write_checkpoint
from cluster.messages.engine import SamplingParams
from configs.attention import LatentShape
from configs.layers import MixtureOfExperts
from configs.numerics import check_exact
from configs.read_config import read_model_config
from configs.resolve import attention_needs
from configs.schema import EngineConfig, KVCacheConfig
from parallel.plan import ShardPlan
from tests.helpers.families import FAMILIES, FORMATS, Case, case_of, in_format
from tests.helpers.family_checks import ExactLogits, check_logits, decoder_of
from tests.helpers.local_group import Limits, LocalGroup
from tests.helpers.pairs import pairs
from worker.weights.checkpoint import Checkpoint, expected_shapes
from worker.weights.dummy_weights import DummyCheckpoint

CPU = torch.device("cpu")
RANKS = range(1, 9)
Made = Callable[..., Case]


def _is_there(name: str, tp_size: int, weights: str) -> bool:
    return tp_size in FAMILIES[name].ranks and (weights != "MXFP4" or name == "gpt_oss")


def _is_compared(name: str, tp_size: int, weights: str, way: str) -> bool:
    serves = {"torch_native": True, "cpu": True, "runner": tp_size <= 5}
    return _is_there(name, tp_size, weights) and serves[way]


def _has_same_bits(name: str, tp_size: int, weights: str, _dtype: torch.dtype) -> bool:
    return _is_there(name, tp_size, weights) and 1 < tp_size <= 4


def _params(cases: list[tuple[Any, ...]], usual: Callable[[str], tuple[int, ...]]) -> list[Any]:
    """Of (family, number of ranks, ...) each, slow but on the usual numbers of ranks."""
    return [
        pytest.param(*it, marks=[pytest.mark.slow] * (it[1] not in usual(it[0])), id="-".join(map(str, it)))
        for it in cases
    ]


def _usual(name: str) -> tuple[int, ...]:
    ranks = FAMILIES[name].ranks
    return (1, 3, ranks[-1])


COMPARED = pairs([*FAMILIES], RANKS, [*FORMATS], ["torch_native", "cpu", "runner"], allowed=_is_compared)
EXACT = pairs(
    [*FAMILIES], RANKS, ["plain", "FP8 by blocks", "MXFP4"], [torch.float32, torch.bfloat16], allowed=_has_same_bits
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    @functools.cache
    def make(name: str, weights: str = "plain") -> Case:
        path = tmp_path_factory.mktemp(name)
        return case_of(name, path) if weights == "plain" else in_format(make(name), weights, path)

    return make


@pytest.fixture(scope="module")
def of_one_rank(made: Made) -> Callable[..., ExactLogits]:
    @functools.cache
    def make(name: str, weights: str, dtype: torch.dtype) -> ExactLogits:
        return ExactLogits.of(made(name, weights), dtype)

    return make


@pytest.fixture(params=FAMILIES)
def case(request: pytest.FixtureRequest, made: Made) -> Case:
    return made(request.param)


@pytest.mark.parametrize(("name", "tp_size", "weights", "way"), _params(COMPARED, _usual))
def test_answers_equal_transformers(made: Made, name: str, tp_size: int, weights: str, way: str) -> None:
    if way == "runner":
        check_greedy_tokens(made(name, weights), tp_size)
    else:
        check_logits(made(name, weights), tp_size, way)


def check_greedy_tokens(case: Case, tp_size: int) -> None:
    """Compares with transformers in batches and chunks, and alone, from the prefix cache; in exact numerics where the
    family may have them."""
    generator, vocab_size = np.random.default_rng(7), case.model.vocab_size
    prompts = [generator.integers(0, vocab_size, length).tolist() for length in (1, 5, 17, 40, 70)]
    prompts.append(prompts[-1][:50] + prompts[0])
    group = LocalGroup(case.path, tp_size, num_pages=64)
    try:
        sampling = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        requests = [(prompt, sampling) for prompt in prompts]
        batched = group.generate(requests, Limits(64, chunk=32), at_once=True).tokens
        cached = group.generate(requests[-2:], Limits(64, prefix_caching=True), at_once=False)
    finally:
        group.close()
    assert cached.tokens == batched[-2:]
    # Recurrent layers have a state after 64 tokens, and the prompts share 50: tests/whole/test_recurrent.py.
    assert case.model.has_states or cached.stats.total_prefix_hit_tokens >= 48
    for prompt, answer in zip(prompts, batched, strict=True):
        with torch.inference_mode():
            logits = case.hf(torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :]
        assert answer == logits.argmax(-1).tolist()


@pytest.mark.parametrize(("name", "tp_size", "weights", "dtype"), _params(EXACT, lambda _: (2, 3, 4)))
def test_exact_logits_are_the_same_bits_on_any_number_of_ranks(
    made: Made, of_one_rank: Callable[..., ExactLogits], name: str, tp_size: int, weights: str, dtype: torch.dtype
) -> None:
    """In FP8 the weights are those of the plain model, and so are the bits."""
    same = weights if weights == "MXFP4" else "plain"
    of_one_rank(name, same, dtype).check(made(name, weights), tp_size)


def test_every_family_may_be_exact_on_gpus_too(case: Case) -> None:
    check_exact(case.model, "cuda", min(4, case.model.num_attention_heads))


def test_tensors_are_those_of_the_checkpoint_and_experts_those_of_transformers_layers(case: Case) -> None:
    stored = load_file(case.path / "model.safetensors")
    assert expected_shapes(case.model) == {name: tuple(tensor.shape) for name, tensor in stored.items()}
    mixtures = [isinstance(layer.feed_forward, MixtureOfExperts) for layer in case.model.layers]
    if any(mixtures) and hasattr(case.hf.model.layers[0], "mlp"):
        assert mixtures == [hasattr(layer.mlp, "experts") for layer in case.hf.model.layers]


def test_ranks_read_what_the_plan_counts_for_them_and_no_more(case: Case) -> None:
    for tp_size in (1, 3, case.model.num_attention_heads):
        plan = ShardPlan.create(case.model, tp_size)
        for rank in range(tp_size):
            with Checkpoint.open(case.path, case.model) as checkpoint:
                decoder_of(plan, rank).load(checkpoint)
                assert checkpoint.bytes_read == 4 * plan.weight_elements(rank)


def test_dummy_weights_are_one_model_here_and_in_transformers(case: Case, tmp_path: Path) -> None:
    write_checkpoint(case.path, tmp_path)
    dummy = DummyCheckpoint(case.model)
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        made = torch.empty_like(tensor)
        dummy.read(name, made)
        assert torch.equal(made, tensor), name
    hf = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    check_logits(Case(hf, tmp_path, read_model_config(tmp_path)), 2)


def test_ranks_ask_of_a_backend_what_was_asked_of_the_model_before_the_start(case: Case) -> None:
    most = case.model.num_attention_heads
    for tp_size in range(1, most + 1):
        sizes = {"tensor_parallel_size": tp_size, "kv_cache": KVCacheConfig(page_size=32)}
        config = EngineConfig(model="m", device="cpu", dtype="float32", numerics="fast", **sizes)
        plan, asked = ShardPlan.create(case.model, tp_size), []
        for rank in range(tp_size):
            layers = decoder_of(plan, rank).attention_layers
            asked.append(needs_of(TokenToKVPool(layers, num_pages=1, page_size=32, dtype=torch.float32, device=CPU)))
        together = replace(asked[0], latents=frozenset[LatentShape]().union(*(needs.latents for needs in asked)))
        assert together == attention_needs(config, case.model)
