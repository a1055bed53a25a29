"""The part of the model that each rank holds: half-open ranges for every layer and rank, as plain ints.

Owns every sharding decision. Loader, pools, kernels, recovery and re-sharding read these ranges and never divide by
`tp_size` themselves. Knows no tensors, devices or processes.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import prod
from typing import NamedTuple

from configs.kept_types import Kept, kept_types
from configs.kv_pages import PageBytes, dtype_bytes
from configs.layers import Amounts, Axis, Columns, Cut, HeadGroups, LayerSpec, elements_of
from configs.model_config import ModelConfig, check_tensor_parallel_size
from configs.quantization import MXFP4_BYTES
from configs.schema import EngineConfig

_LARGEST_GRANULE = 128
_VOCAB_GRANULE = 64
_LARGEST_LEAF = 512
_FEWEST_LEAVES = 12  # for few columns, where these allow it: so many ranks get an even share, within a third
# The price of summing leaves on GPUs counts for more where columns are many. On an H200, of 12288 columns, 256 rows and
# the norm behind them: 8 leaves 56 us, 12 leaves 65, 24 leaves 80, and 45 where cuBLAS adds as it likes.
_LEAVES_OF_COLUMNS = ((16384, 16), (4096, 8))
_WIDE_LEAF_UNIT = 64


class Span(NamedTuple):
    """The half-open range [start, stop)."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class LayerShard:
    """One rank's part of one layer, or of the vocabulary, in indices of the whole model.

    No span of heads is empty; one of columns is only where ranks outnumber columns, or granules that are not cut finer.
    A rank's query heads spread evenly over its KV heads.
    """

    spans: Mapping[Axis, Span]

    def __getitem__(self, axis: Axis) -> Span:
        return self.spans[axis]

    def span_of(self, cut: Cut) -> Span:
        """Rows or columns of a tensor that is cut so."""
        span = self.spans[cut.axis]
        return Span(span.start * cut.width, span.stop * cut.width)

    def amount(self, amounts: Amounts) -> int:
        """The amount that all of the rank's indices, and what it has whole, account for."""
        return sum(amount * (1 if axis is None else self.spans[axis].size) for axis, amount in amounts.items())


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
    """[layer][rank], of `ModelConfig.all_layers`"""
    vocab: tuple[Span, ...]
    """[rank]: rows of the embedding and of the LM head, whole granules but for the last one. A span is empty only
    where the vocabulary has fewer rows than there are ranks."""

    @classmethod
    def create(cls, model: ModelConfig, tp_size: int, *, exact: bool = False) -> ShardPlan:
        """Plans `tp_size` ranks. Raises ConfigError when the model's heads cannot be dealt to that many.

        Args:
            exact: deal heads and columns in whole leaves of exact sums; `configs.numerics.check_exact` has passed.
        """
        check_tensor_parallel_size(model, tp_size)
        vocab = _spans(min(rows, model.vocab_size) for rows in _running_total(_deal_vocab(model.vocab_size, tp_size)))
        # Elements that each rank holds so far. Columns go where least is held, so they even out what heads and
        # vocabulary rows leave uneven, and what one layer's granules leave over is made good in the next.
        row_elements = elements_of(model.outer_tensors)[Axis.VOCABULARY]
        held = [span.size * row_elements for span in vocab]
        layers = []
        for i, layer in enumerate(model.all_layers):
            spans: list[dict[Axis, Span]] = [{} for _ in range(tp_size)]
            for axis in layer.axes:
                if isinstance(axis, HeadGroups):
                    dealt = _deal_heads(axis, tp_size, i, axis.leaf_heads if exact else 1)
                else:
                    granule = leaf_columns(axis.size) if exact else column_granule(axis, tp_size)
                    dealt = _deal_columns(axis, granule, layer.weight_elements[axis.axis], held)
                for rank, new in enumerate(dealt):
                    spans[rank].update(new)
                    held[rank] += sum(layer.weight_elements[axis] * span.size for axis, span in new.items())
            layers.append(tuple(LayerShard(spans_of_rank) for spans_of_rank in spans))
        return cls(model=model, tp_size=tp_size, layers=tuple(layers), vocab=vocab)

    def shard(self, layer: int, rank: int) -> LayerShard:
        """The part of `layer` that `rank` holds."""
        return self.layers[layer][rank]

    @property
    def max_vocab_rows(self) -> int:
        """Rows of the largest vocabulary span: the width every rank pads its logits to when they are gathered."""
        return max(span.size for span in self.vocab)

    def kv_elements_per_token(self, rank: int) -> int:
        """Elements of keys and values that one token takes in the KV pool of `rank`, all layers together."""
        return sum(self._kv_elements(rank))

    def kv_page_bytes(self, rank: int, page_size: int, kv_dtype: str) -> PageBytes:
        """Bytes of a page of `page_size` tokens in the KV pool of `rank`."""
        return PageBytes(*(elements * page_size * dtype_bytes(kv_dtype) for elements in self._kv_elements(rank)))

    def _kv_elements(self, rank: int) -> tuple[int, int]:
        """The terms of `kv_elements_per_token`: of the layers that see all tokens, and of those with a window."""
        full = windowed = 0
        for layer, shards in zip(self.model.all_layers, self.layers, strict=True):
            elements = shards[rank].amount(layer.mixer.token_elements)
            if layer.mixer.window is None:
                full += elements
            else:
                windowed += elements
        return full, windowed

    def weight_elements(self, rank: int) -> int:
        """Elements of all weights `rank` holds: its shards, and what every rank has whole.

        A tied LM head is the embedding's own rows and counts once.
        """
        outer = LayerShard({Axis.VOCABULARY: self.vocab[rank]}).amount(elements_of(self.model.outer_tensors))
        return outer + sum(
            shards[rank].amount(layer.weight_elements)
            for layer, shards in zip(self.model.all_layers, self.layers, strict=True)
        )

    def weight_bytes(self, rank: int, config: EngineConfig) -> int:
        """Bytes of them, once `config` is resolved; in FP8 without the scales, which are less than a hundredth."""
        element_bytes, kept = dtype_bytes(config.dtype), kept_types(config, self.model)
        saved = sum(
            sum(saved_bytes(layer, shards[rank], element_bytes, kept).values())
            for layer, shards in zip(self.model.all_layers, self.layers, strict=True)
        )
        return self.weight_elements(rank) * element_bytes - saved


def saved_bytes(layer: LayerSpec, shard: LayerShard, element_bytes: int, kept: Kept) -> dict[Fraction, int]:
    """Bytes that a shard's weights take less than `element_bytes` an element, by the share of the tokens."""
    saved: dict[Fraction, int] = {}
    for kind, each in ((layer.fp8_elements, kept.fp8), (layer.mxfp4_elements, kept.mxfp4 * MXFP4_BYTES)):
        for share, amounts in kind.items() if each else ():
            saved[share] = saved.get(share, 0) + int(shard.amount(amounts) * (element_bytes - each))
    return saved


def column_granule(columns: Columns, tp_size: int) -> int:
    """Columns of the unit in which a layer's columns are dealt.

    The largest power of two up to 128 that divides them and leaves every rank at least one unit; or a smaller one, not
    below `columns.finest_granule`, if with that the widest rank has fewer. For published dense models that is 128, or
    64; below 32 only toy models go. Columns that may be empty (of experts) leave some ranks without any instead.
    """
    num_finest, rest = divmod(columns.size, columns.finest_granule)
    if columns.may_be_empty and not rest and num_finest < tp_size:
        return columns.finest_granule
    granules = [_LARGEST_GRANULE >> i for i in range(_LARGEST_GRANULE.bit_length())]
    allowed = [granule for granule in granules if columns.size % granule == 0 and columns.size // granule >= tp_size]
    fine = [granule for granule in allowed if granule >= columns.finest_granule]
    return min(
        fine or allowed[:1] or [1], key=lambda granule: (-(-columns.size // granule // tp_size) * granule, -granule)
    )


def leaf_columns(size: int) -> int:
    """Columns of a leaf of the exact sums over `size` columns: of the matrix alone, whatever the number of ranks.

    An eighth of 4096 or more, a sixteenth of 16384 or more; of fewer the largest power of two up to 512 that divides
    them into at least 12 leaves, or else into the most.
    """
    for least, num_leaves in _LEAVES_OF_COLUMNS:
        if size >= least and size % (num_leaves * _WIDE_LEAF_UNIT) == 0:
            return size // num_leaves
    leaf = _LARGEST_LEAF
    while leaf > 1 and (size % leaf or size // leaf < _FEWEST_LEAVES):
        leaf //= 2
    return leaf


def vocab_granule(vocab_size: int, tp_size: int) -> int:
    """Rows of the unit in which the vocabulary is dealt: 64, or less where a rank would get none."""
    granule = _VOCAB_GRANULE
    while granule > 1 and -(-vocab_size // granule) < tp_size:
        granule //= 2
    return granule


def blocks_of(span: Span, size: int) -> Span:
    """Blocks of `size` indices that hold those of `span`."""
    return Span(span.start // size, -(-span.stop // size))


def as_matrix(shape: Sequence[int]) -> tuple[int, ...]:
    """Rows and columns of a tensor: one of three dimensions is matrices below one another, one of more has all but the
    first two in its rows, and a vector has rows alone."""
    split = min(len(shape) - 1, 2)
    return (prod(shape[:split]), prod(shape[split:])) if len(shape) > 1 else tuple(shape)


def _deal_heads(axis: HeadGroups, tp_size: int, layer: int, unit: int) -> list[dict[Axis, Span]]:
    """Heads, and heads of their groups, of each rank in one layer.

    Args:
        unit: heads that stay together: divides a group, and there are as many units as ranks.
    """
    group = axis.num_heads // axis.num_groups
    if tp_size <= axis.num_groups:
        group_spans = list(_spans(_running_total(_deal_evenly(axis.num_groups, tp_size, layer))))
        counts = [span.size * group for span in group_spans]
    else:
        # Floor/ceil never deals a KV head more ranks than it has units: ceil(tp_size / num_groups) <= group / unit.
        group_spans, counts = [], []
        for head, num_ranks in enumerate(_deal_evenly(tp_size, axis.num_groups, layer)):
            group_spans.extend([Span(head, head + 1)] * num_ranks)
            counts.extend(count * unit for count in _deal_evenly(group // unit, num_ranks, layer))
    head_spans = _spans(_running_total(counts))
    return [{axis.heads: heads, axis.groups: groups} for heads, groups in zip(head_spans, group_spans, strict=True)]


def _deal_columns(columns: Columns, granule: int, column_elements: int, held: Sequence[int]) -> list[dict[Axis, Span]]:
    """Columns of each rank in one layer: one granule each, then each to the rank that holds the least.

    No rank gets more than the ceiling of an even share: all ranks wait for the widest one at the layer's all-reduce.

    Args:
        granule: divides the columns.
        column_elements: elements of all tensors that one column accounts for.
        held: elements that each rank holds.
    """
    tp_size = len(held)
    granule_elements = granule * column_elements
    num_granules = columns.size // granule
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
    return [{columns.axis: span} for span in _spans(_running_total(count * granule for count in counts))]


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
