"""Ranks of another number go on with the keys and values that others left."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from attention.kv_pool import FP8, TokenToKVPool
from attention.persistent_kv import take_kv
from configs.layers import Axis
from configs.model_config import ModelConfig
from parallel.persistent_memory import Keeper, PersistentMemory, kv_block
from parallel.plan import ShardPlan
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
