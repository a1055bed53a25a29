"""What every family of models must show beside the logits of tests/test_models.py: one function for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import load_file

from attention.kv_pool import TokenToKVPool
from attention.registry import needs_of
from benchmarks.make_checkpoint import write_checkpoint
from cluster.engine.messages import SamplingParams
from configs.attention import LatentShape
from configs.read_config import read_model_config
from configs.resolve import attention_needs
from configs.schema import EngineConfig, KVCacheConfig
from parallel.group import TensorParallelGroup
from parallel.plan import ShardPlan
from tests.local_group import Limits, LocalGroup
from tests.test_models import Case, Rank, check_logits, on_ranks
from worker.dummy_weights import DummyCheckpoint
from worker.models.decoder import Decoder
from worker.weights import Checkpoint

CPU = torch.device("cpu")


def decoder_of(plan: ShardPlan, rank: int, dtype: torch.dtype = torch.float32) -> Decoder:
    """One of `plan.tp_size` ranks, by itself."""
    group = TensorParallelGroup(rank=rank, size=plan.tp_size, device=CPU, collectives=None)
    return Decoder(plan.model, plan, group, dtype=dtype, device=CPU)


def check_greedy_tokens(case: Case, tp_size: int) -> None:
    """Compares with transformers through scheduler and runner: in batches and chunks, and from the prefix cache."""
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


def check_exact_logits(case: Case, dtype: torch.dtype, sizes: Sequence[int] = (1, 2, 3, 4)) -> None:
    """Every bit is the same on so many ranks, of a prompt alone, in chunks beside others, and token by token."""
    first, second = (np.random.default_rng(seed).integers(0, case.model.vocab_size, 37).tolist() for seed in (1, 2))

    def of_rank(group: TensorParallelGroup) -> list[torch.Tensor]:
        rank = Rank.create(case, group, dtype, exact=True)
        alone = [rank.logits([(row, 0, tokens)])[0] for row, tokens in ((1, first), (2, second))]
        chunks = [rank.logits([(1, 0, first[:11]), (2, 0, second[:5])]), rank.logits([(2, 5, second[5:24])])]
        chunks += [rank.logits([(2, i, [second[i]]), (1, i - 13, [first[i - 13]])])[::-1] for i in range(24, 37)]
        chunks.append(rank.logits([(1, 24, first[24:])]))
        of_second = [chunks[0][1], chunks[1][0], *(rows[1] for rows in chunks[2:-1])]
        of_first = [rows[0] for rows in (chunks[0], *chunks[2:])]
        return [*alone, torch.cat(of_first), torch.cat(of_second)]

    expected = on_ranks(1, of_rank)[0][:2] * 2
    assert all(logits.isfinite().all() for logits in expected)
    for size in sizes:
        for logits in on_ranks(size, of_rank):
            for rows, meant in zip(logits, expected, strict=True):
                assert torch.equal(rows.view(torch.int32), meant.view(torch.int32)), size


def check_bytes_read(case: Case, tp_size: int) -> None:
    """Every rank reads what the plan counts for it, and no more."""
    plan = ShardPlan.create(case.model, tp_size)
    for rank in range(tp_size):
        with Checkpoint.open(case.path, case.model) as checkpoint:
            decoder_of(plan, rank).load(checkpoint)
            assert checkpoint.bytes_read == 4 * plan.weight_elements(rank)


def check_dummy_weights(case: Case, tmp_path: Path) -> None:
    """Random weights make one model here and in transformers."""
    write_checkpoint(case.path, tmp_path)
    dummy = DummyCheckpoint(case.model)
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        made = torch.empty_like(tensor)
        dummy.read(name, made)
        assert torch.equal(made, tensor), name
    hf = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    check_logits(Case(hf, tmp_path, read_model_config(tmp_path)), 2)


def check_backend_needs(case: Case) -> None:
    """Ranks ask of a backend what was asked before the start, of the model alone."""
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
