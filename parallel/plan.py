"""Which part of the model each rank holds: half-open ranges for every layer and rank, as plain ints.

Owns every sharding decision. Loader, pools, kernels, recovery and re-sharding read these ranges and never divide by
`tp_size` themselves. Knows no tensors, devices or processes.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from configs.model_config import ModelConfig, check_tensor_parallel_size

_MLP_GRANULE = 128
"""Columns: the width of an fp8 scale block and of a tensor-core tile."""
_VOCAB_GRANULE = 64


class Span(NamedTuple):
    """The half-open range [start, stop)."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class LayerShard:
    """One rank's part of one layer, in indices of the whole model. No range is empty unless `mlp` has to be."""

    q_heads: Span
    """Rows of the query projection and columns of the output projection, in heads."""
    kv_heads: Span
    """Key/value heads. The rank's query heads spread evenly over them."""
    mlp: Span
    """Rows of gate and up, columns of down. Empty only where the layer has fewer columns than ranks."""


@dataclass(frozen=True)
class ShardPlan:
    """The ranges of every rank.

    In each layer the query heads, MLP columns and vocabulary rows of ranks 0, 1, ... follow one another and cover the
    model exactly once. Key/value heads do so too while `tp_size <= num_key_value_heads`; beyond that each is
    replicated on neighbouring ranks, and every rank has exactly one.
    """

    model: ModelConfig
    tp_size: int
    layers: tuple[tuple[LayerShard, ...], ...]
    """[layer][rank]"""
    vocab: tuple[Span, ...]
    """[rank]: rows of the embedding and of the LM head, whole granules but for the last one. A span is empty only
    where the vocabulary has fewer rows than there are ranks."""

    @classmethod
    def create(cls, model: ModelConfig, tp_size: int) -> ShardPlan:
        """Plans `tp_size` ranks. Raises ConfigError when the model's heads cannot be dealt to that many."""
        check_tensor_parallel_size(model, tp_size)
        vocab = _spans(min(rows, model.vocab_size) for rows in _running_total(_deal_vocab(model.vocab_size, tp_size)))
        # What each rank holds so far. MLP columns go where least is held, so they even out what heads and vocabulary
        # rows leave uneven, and what one layer's granules leave over is made good in the next.
        held = [span.size * _vocab_row_elements(model) for span in vocab]
        layers = []
        for layer in range(model.num_hidden_layers):
            heads = _deal_heads(model, tp_size, layer)
            held = [
                elements + _attention_elements(model, q_heads.size, kv_heads.size)
                for elements, (q_heads, kv_heads) in zip(held, heads, strict=True)
            ]
            columns = _deal_mlp(model, held)
            held = [
                elements + count * _mlp_column_elements(model) for elements, count in zip(held, columns, strict=True)
            ]
            mlp = _spans(_running_total(columns))
            layers.append(
                tuple(
                    LayerShard(q_heads=q_heads, kv_heads=kv_heads, mlp=span)
                    for (q_heads, kv_heads), span in zip(heads, mlp, strict=True)
                )
            )
        return cls(model=model, tp_size=tp_size, layers=tuple(layers), vocab=vocab)

    def shard(self, layer: int, rank: int) -> LayerShard:
        """What `rank` holds of `layer`."""
        return self.layers[layer][rank]

    @property
    def max_vocab_rows(self) -> int:
        """Rows of the largest vocabulary span: the width every rank pads its logits to when they are gathered."""
        return max(span.size for span in self.vocab)

    def kv_heads_total(self, rank: int) -> int:
        """Key/value heads of `rank`, summed over the layers."""
        return sum(shards[rank].kv_heads.size for shards in self.layers)

    def kv_elements_per_token(self, rank: int) -> int:
        """Elements of keys and values that one token takes in the KV pool of `rank`, all layers together."""
        return 2 * self.model.head_dim * self.kv_heads_total(rank)

    def weight_elements(self, rank: int) -> int:
        """Elements of all weights `rank` holds: its shards, and the norms and output biases every rank has.

        A tied LM head is the embedding's own rows and counts once.
        """
        model = self.model
        replicated = model.hidden_size + model.num_hidden_layers * _replicated_elements(model)
        sharded = self.vocab[rank].size * _vocab_row_elements(model)
        for shards in self.layers:
            shard = shards[rank]
            sharded += _attention_elements(model, shard.q_heads.size, shard.kv_heads.size)
            sharded += shard.mlp.size * _mlp_column_elements(model)
        return replicated + sharded

    @property
    def weight_skew(self) -> float:
        """Weights of the heaviest rank over the mean: 1.0 is even."""
        return _skew([self.weight_elements(rank) for rank in range(self.tp_size)])

    @property
    def kv_skew(self) -> float:
        """KV elements per token of the heaviest rank over the mean: 1.0 is even."""
        return _skew([self.kv_elements_per_token(rank) for rank in range(self.tp_size)])


def mlp_granule(intermediate_size: int, tp_size: int) -> int:
    """Columns of the unit in which a layer's MLP is dealt.

    The largest power of two up to 128 that divides `intermediate_size` and leaves every rank at least one unit. For
    published models that is 128, or 64; below 32 only toy models go.
    """
    granule = _MLP_GRANULE
    while granule > 1 and (intermediate_size % granule or intermediate_size // granule < tp_size):
        granule //= 2
    return granule


def vocab_granule(vocab_size: int, tp_size: int) -> int:
    """Rows of the unit in which the vocabulary is dealt: 64, or less where a rank would get none."""
    granule = _VOCAB_GRANULE
    while granule > 1 and -(-vocab_size // granule) < tp_size:
        granule //= 2
    return granule


def _deal_heads(model: ModelConfig, tp_size: int, layer: int) -> list[tuple[Span, Span]]:
    """(query heads, KV heads) of each rank in one layer."""
    num_kv = model.num_key_value_heads
    group = model.num_attention_heads // num_kv
    if tp_size <= num_kv:
        kv_spans = _spans(_running_total(_deal_evenly(num_kv, tp_size, layer)))
        return [(Span(kv.start * group, kv.stop * group), kv) for kv in kv_spans]
    # Floor/ceil never deals a KV head more ranks than it has query heads: ceil(tp_size / num_kv) <= group.
    q_counts: list[int] = []
    kv_spans_of_ranks: list[Span] = []
    for kv_head, num_ranks in enumerate(_deal_evenly(tp_size, num_kv, layer)):
        q_counts.extend(_deal_evenly(group, num_ranks, layer))
        kv_spans_of_ranks.extend([Span(kv_head, kv_head + 1)] * num_ranks)
    return list(zip(_spans(_running_total(q_counts)), kv_spans_of_ranks, strict=True))


def _deal_mlp(model: ModelConfig, held: Sequence[int]) -> list[int]:
    """MLP columns of each rank in one layer: one granule each, then each to the rank that holds the least.

    No rank gets more than the ceiling of an even share: all ranks wait for the widest one at the layer's all-reduce.
    """
    tp_size = len(held)
    granule = mlp_granule(model.intermediate_size, tp_size)
    granule_elements = granule * _mlp_column_elements(model)
    num_granules = model.intermediate_size // granule
    at_least = 1 if num_granules >= tp_size else 0
    at_most = -(-num_granules // tp_size)
    counts = [at_least] * tp_size
    lightest = [(elements + at_least * granule_elements, rank) for rank, elements in enumerate(held)]
    heapq.heapify(lightest)
    for _ in range(num_granules - at_least * tp_size):
        elements, rank = lightest[0]
        counts[rank] += 1
        if counts[rank] < at_most:
            heapq.heapreplace(lightest, (elements + granule_elements, rank))
        else:
            heapq.heappop(lightest)
    return [count * granule for count in counts]


def _deal_vocab(vocab_size: int, tp_size: int) -> list[int]:
    """Rows of each rank, as whole granules: the last may reach beyond the vocabulary."""
    granule = vocab_granule(vocab_size, tp_size)
    num_granules = -(-vocab_size // granule)
    return [count * granule for count in _deal_evenly(num_granules, tp_size, 0)]


def _deal_evenly(units: int, receivers: int, layer: int) -> list[int]:
    """Floor or ceil of `units / receivers` each. Who gets the ceil moves on by layer, so that over any run of layers
    two receivers differ by one unit at most."""
    floor, extra = divmod(units, receivers)
    counts = [floor] * receivers
    for i in range(extra):
        counts[(layer * extra + i) % receivers] += 1
    return counts


def _running_total(counts: Iterable[int]) -> list[int]:
    totals = [0]
    for count in counts:
        totals.append(totals[-1] + count)
    return totals


def _spans(borders: Iterable[int]) -> tuple[Span, ...]:
    borders = tuple(borders)
    return tuple(Span(start, stop) for start, stop in itertools.pairwise(borders))


def _attention_elements(model: ModelConfig, num_q: int, num_kv: int) -> int:
    width = 2 * (num_q + num_kv) * model.head_dim  # q and o, k and v
    bias = (num_q + 2 * num_kv) * model.head_dim if model.qkv_bias else 0
    return width * model.hidden_size + bias


def _mlp_column_elements(model: ModelConfig) -> int:
    return 3 * model.hidden_size + (2 if model.mlp_bias else 0)


def _vocab_row_elements(model: ModelConfig) -> int:
    return model.hidden_size * (1 if model.tie_word_embeddings else 2)


def _replicated_elements(model: ModelConfig) -> int:
    """Of one layer: both norms, the head norms, and the biases that are added after an all-reduce."""
    norms = 2 * model.hidden_size + (2 * model.head_dim if model.qk_norm else 0)
    return norms + model.hidden_size * (int(model.o_bias) + int(model.mlp_bias))


def _skew(amounts: Sequence[int]) -> float:
    return max(amounts) * len(amounts) / sum(amounts)
