"""Ranks of another number go on with the keys, values and states that others left."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from attention.kv_pool import FP8, TokenToKVPool
from attention.persistent_kv import take_kv, take_states
from attention.state_pool import StatePool
from configs.layers import Axis
from configs.model_config import ModelConfig
from parallel.persistent_memory import Keeper, PersistentMemory, kv_block, state_block
from parallel.plan import ShardPlan
from tests.helpers.families import case_of
from tests.helpers.family_checks import decoder_of
from tests.whole.test_weight_change import CPU, family_decoder, family_model

NUM_PAGES, PAGE_SIZE = 5, 4


def pool_of(
    model: ModelConfig, size: int, rank: int, dtype: torch.dtype, memory: PersistentMemory | None
) -> TokenToKVPool:
    """The pool of one rank, in persistent memory if there is any."""
    layers = family_decoder(model, size, rank, exact=False, dtype=torch.float32).attention_layers
    new = None if memory is None else lambda layer_id, num_bytes: memory.new(kv_block(layer_id), num_bytes)
    return TokenToKVPool(layers, num_pages=NUM_PAGES, page_size=PAGE_SIZE, dtype=dtype, device=CPU, allocate=new)


@pytest.mark.parametrize(
    ("family", "dtype", "before", "after"),
    [
        ("head_norms", torch.float32, 1, 2),
        ("head_norms", torch.bfloat16, 3, 2),
        ("head_norms", FP8, 2, 4),
        ("tied", torch.float32, 4, 3),
        ("latents", torch.bfloat16, 2, 3),
        ("sparse", torch.bfloat16, 3, 2),
        ("draft_head", torch.float32, 3, 2),
    ],
)
def test_every_rank_has_its_heads_of_the_pages_that_are_wanted(
    tmp_path: Path, keeper: Keeper, family: str, dtype: torch.dtype, before: int, after: int
) -> None:
    model = family_model(tmp_path, family)
    plan, others = ShardPlan.create(model, after), ShardPlan.create(model, before)
    left = [PersistentMemory(keeper.address, rank, CPU) for rank in range(before)]
    random = torch.Generator().manual_seed(0)
    heads = {
        layer_id: torch.randint(0, 120, (NUM_PAGES + 1, PAGE_SIZE, 64, 512), dtype=torch.uint8, generator=random)
        for layer_id in range(len(model.all_layers))
    }

    def of(layer_id: int, shards: ShardPlan, rank: int, tensor: torch.Tensor) -> torch.Tensor:
        """The bytes that `tensor` of a rank has where all is there."""
        span = shards.shard(layer_id, rank).spans.get(Axis.KV_HEADS)
        width = tensor.shape[-1] * tensor.itemsize
        of_heads = heads[layer_id][:, :, slice(0, 1) if span is None else slice(*span), :width]
        return of_heads.view((*tensor.shape[:-1], width)) if span is None else of_heads

    for rank in range(before):
        pool = pool_of(model, before, rank, dtype, left[rank])
        for layer_id in heads:
            for tensor in pool.pages(layer_id):
                tensor.view(torch.uint8)[:] = of(layer_id, others, rank, tensor)
    pages = torch.tensor([2, 5, 3])
    for rank in range(after):
        pool = pool_of(model, after, rank, dtype, None)
        for layer_id in heads:
            for tensor in pool.pages(layer_id):
                tensor.view(torch.uint8).zero_()
            take_kv(pool, layer_id, pages, plan, rank, others, left)
            for tensor in pool.pages(layer_id):
                assert torch.equal(tensor.view(torch.uint8)[pages], of(layer_id, plan, rank, tensor)[pages])
                assert not tensor.view(torch.uint8)[[1, 4]].any()


@pytest.mark.parametrize(
    ("family", "before", "after"),
    [
        ("qwen3_5", 2, 3),
        ("qwen3_5", 3, 1),
        ("granite_4", 1, 4),
        ("granite_4", 4, 3),
        ("lfm2", 3, 2),
        ("kimi_linear", 2, 3),
    ],
)
def test_every_rank_has_its_part_of_the_states_that_are_wanted(
    tmp_path: Path, keeper: Keeper, family: str, before: int, after: int
) -> None:
    """Each element of a state is a number that says to which part, index and place in the whole model it belongs."""
    model, num_slots = case_of(family, tmp_path).model, 7

    def pool_of_states(size: int, rank: int, memory: PersistentMemory | None) -> StatePool:
        layers = decoder_of(ShardPlan.create(model, size), rank).state_layers
        new = None if memory is None else lambda layer_id, num_bytes: memory.new(state_block(layer_id), num_bytes)
        return StatePool(layers, 3, num_slots - 3, CPU, new)

    def expected(layer_id: int, tensor: int, shards: ShardPlan, rank: int) -> torch.Tensor:
        """[num_slots + 1, elements]"""
        spec = [it for it in model.all_layers[layer_id].mixer.state if not it.num_recent][tensor]
        of_tokens = []
        for token in range(spec.num_tokens):
            for part, (axis, each) in enumerate(spec.parts):
                span = shards.shard(layer_id, rank)[axis]
                of_tokens.append(torch.arange(span.start * each, span.stop * each) + 10_000 * (token * 10 + part))
        slots = torch.arange(num_slots + 1).view(-1, 1) * 1_000_000
        return (slots + torch.cat(of_tokens)).float()

    plan, others = ShardPlan.create(model, after), ShardPlan.create(model, before)
    left = [PersistentMemory(keeper.address, rank, CPU) for rank in range(before)]
    recurrent = [i for i, layer in enumerate(model.all_layers) if layer.mixer.state]
    for rank in range(before):
        pool = pool_of_states(before, rank, left[rank])
        for layer_id in recurrent:
            for index, tensor in enumerate(pool.slots(layer_id)):
                tensor[:] = expected(layer_id, index, others, rank)
    slots = torch.tensor([2, 7, 3])
    for rank in range(after):
        pool = pool_of_states(after, rank, None)
        for layer_id in recurrent:
            take_states(pool, layer_id, slots, plan, rank, others, left)
            for index, tensor in enumerate(pool.slots(layer_id)):
                assert torch.equal(tensor[slots], expected(layer_id, index, plan, rank)[slots])
                assert not tensor[[1, 4, 5, 6]].any()
