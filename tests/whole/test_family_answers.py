"""What every family of models must show against transformers, from config and checkpoint to logits and greedy tokens.

The models are those of test_families.py, test_moe_models.py and test_latent_models.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

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
from configs.read_config import read_model_config
from configs.resolve import attention_needs
from configs.schema import EngineConfig, KVCacheConfig
from parallel.plan import ShardPlan
from tests.helpers.family_checks import check_exact_logits, decoder_of
from tests.helpers.local_group import Limits, LocalGroup
from tests.whole import test_families, test_latent_models, test_moe_models
from tests.whole.test_models import Case, check_logits
from worker.weights.checkpoint import Checkpoint, expected_shapes
from worker.weights.dummy_weights import DummyCheckpoint

CPU = torch.device("cpu")
MODULES = test_families, test_moe_models, test_latent_models
MODELS: dict[str, ModuleType] = {name: module for module in MODULES for name in module.MODELS}
BF16, FP32 = torch.bfloat16, torch.float32
EXACT = [
    pytest.param(name, dtype, marks=[pytest.mark.slow] * (dtype is not usual), id=f"{name} {dtype}")
    for module, usual in ((test_families, BF16), (test_moe_models, FP32))
    for name in module.MODELS
    for dtype in (BF16, FP32)
]


def _on(
    ranks: Iterable[Iterable[int]], slow: Iterable[Iterable[int]] = ((), (), ())
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Runs a test on so many ranks for the models of each of MODULES."""
    given = []
    for module, sizes, slow_sizes in zip(MODULES, ranks, slow, strict=True):
        for name in module.MODELS:
            given += [pytest.param(name, size) for size in sizes]
            given += [pytest.param(name, size, marks=pytest.mark.slow) for size in slow_sizes]
    return pytest.mark.parametrize(("case", "tp_size"), given, indirect=["case"])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    return functools.cache(lambda name: MODELS[name].case_of(name, tmp_path_factory.mktemp(name)))


@pytest.fixture(params=MODELS)
def case(request: pytest.FixtureRequest, made: Callable[[str], Case]) -> Case:
    return made(request.param)


@_on([(1, 3), (1, 3, 8), (1, 3, 6)], slow=[(2, 4), (2, 4, 5, 6, 7), (2, 4)])
def test_logits_equal_transformers_on_any_number_of_ranks(case: Case, tp_size: int) -> None:
    check_logits(case, tp_size)


@_on([(3,), (3,), (4,)], slow=[(1,), (1, 5), (1,)])
def test_greedy_tokens_equal_transformers_through_the_runner(case: Case, tp_size: int) -> None:
    """In batches and chunks, and from the prefix cache."""
    generator, vocab_size = np.random.default_rng(7), case.model.vocab_size
    prompts = [generator.integers(0, vocab_size, length).tolist() for length in (1, 5, 17, 40, 70)]
    prompts.append(prompts[-1][:50] + prompts[0])
    group = LocalGroup(case.path, tp_size, num_pages=64)
    try:
        sampling = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
        requests = [(prompt, sampling) for prompt in prompts]
        batched = group.generate(requests, Limits(64, chunk=32), at_once=True).tokens
        cached = group.generate(requests, Limits(64, prefix_caching=True), at_once=False)
    finally:
        group.close()
    assert cached.tokens == batched
    assert cached.stats.total_prefix_hit_tokens >= 48
    for prompt, answer in zip(prompts, batched, strict=True):
        with torch.inference_mode():
            logits = case.hf(torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :]
        assert answer == logits.argmax(-1).tolist()


@pytest.mark.parametrize(("case", "dtype"), EXACT, indirect=["case"])
def test_exact_logits_are_the_same_bits_however_they_are_computed(case: Case, dtype: torch.dtype) -> None:
    check_exact_logits(case, dtype)


def test_tensors_are_those_of_the_checkpoint_and_experts_those_of_transformers_layers(case: Case) -> None:
    stored = load_file(case.path / "model.safetensors")
    assert expected_shapes(case.model) == {name: tuple(tensor.shape) for name, tensor in stored.items()}
    mixtures = [isinstance(layer.feed_forward, MixtureOfExperts) for layer in case.model.layers]
    if any(mixtures) and hasattr(case.hf.model.layers[0], "mlp"):
        assert mixtures == [hasattr(layer.mlp, "experts") for layer in case.hf.model.layers]


@_on([(1, 3), (1, 3), (1, 4, 6)])
def test_ranks_read_what_the_plan_counts_for_them_and_no_more(case: Case, tp_size: int) -> None:
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
    most = case.model.layers[0].mixer.axes[0].num_heads
    for tp_size in range(1, most + 1):
        sizes = {"tensor_parallel_size": tp_size, "kv_cache": KVCacheConfig(page_size=32)}
        config = EngineConfig(model="m", device="cpu", dtype="float32", numerics="fast", **sizes)
        plan, asked = ShardPlan.create(case.model, tp_size), []
        for rank in range(tp_size):
            layers = decoder_of(plan, rank).attention_layers
            asked.append(needs_of(TokenToKVPool(layers, num_pages=1, page_size=32, dtype=torch.float32, device=CPU)))
        together = replace(asked[0], latents=frozenset[LatentShape]().union(*(needs.latents for needs in asked)))
        assert together == attention_needs(config, case.model)
