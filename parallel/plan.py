"""The shard plan: which part of the model each rank holds, as half-open ranges for every layer and rank.

This module owns every sharding decision. Loader, pools, kernels, recovery and resizing read these ranges and never
divide by `tp_size`. It knows no tensors, devices or processes.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import prod
from typing import NamedTuple

from configs.kv_pages import PageBytes, dtype_bytes
from configs.layers import Amounts, Axis, Columns, Cut, HeadGroups, LayerSpec, elements_of
from configs.model_config import ModelConfig, check_tensor_parallel_size
from configs.numerics import leaf_columns
from configs.quantization import MXFP4_BYTES
from configs.schema import EngineConfig, resolved
from configs.weight_dtypes import WeightDtypes, weight_dtypes

_LARGEST_GRANULE = 128
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
    """One rank's part of one layer, or of the vocabulary, in indices of the whole model.

    A rank always has heads. It has no columns only if there are more ranks than columns or granules. A rank's query
    heads are spread evenly over its KV heads.
    """

    spans: Mapping[Axis, Span]

    def __getitem__(self, axis: Axis) -> Span:
        return self.spans[axis]

    def span_of(self, cut: Cut) -> Span:
        """The rows or columns that this rank holds of a tensor with this cut."""
        span = self.spans[cut.axis]
        return Span(span.start * cut.width, span.stop * cut.width)

    def amount(self, amounts: Amounts) -> int:
        """The amount on this rank: amounts per index times the rank's indices, plus what every rank holds whole."""
        return sum(amount * (1 if axis is None else self.spans[axis].size) for axis, amount in amounts.items())


@dataclass(frozen=True)
class ShardPlan:
    """The ranges of every rank.

    In each layer, the query heads, MLP columns and vocabulary rows of ranks 0, 1, ... are consecutive and cover the
    model exactly once. So do the KV heads while `tp_size <= num_key_value_heads`. With more ranks, every rank has
    exactly one KV head, and neighbouring ranks hold copies of it.
    """

    model: ModelConfig
    tp_size: int
    layers: tuple[tuple[LayerShard, ...], ...]
    """[layer][rank], for `ModelConfig.all_layers`"""
    vocab: tuple[Span, ...]
    """[rank]: rows of the embedding and of the LM head, in whole granules except for the last one. A rank has none only
    if the vocabulary has fewer rows than there are ranks."""

    @classmethod
    def create(cls, model: ModelConfig, tp_size: int, *, exact: bool = False) -> ShardPlan:
        """Plans `tp_size` ranks.

        Args:
            exact: divide heads and columns in whole leaves of the exact sums. `configs.numerics.check_exact` must have
                passed.

        Raises:
            ConfigError: the model's heads cannot be divided among this number of ranks.
        """
        check_tensor_parallel_size(model, tp_size)
        vocab = _spans(min(rows, model.vocab_size) for rows in _running_total(_deal_vocab(model.vocab_size, tp_size)))
        # Elements that each rank holds so far. Columns go to the rank with the fewest, so they compensate for uneven
        # heads, vocabulary rows and granules of earlier layers.
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
        """The largest number of vocabulary rows on a rank. Every rank pads its logits to this width before they are
        gathered."""
        return max(span.size for span in self.vocab)

    def kv_elements_per_token(self, rank: int) -> int:
        """Number of KV elements per token in the pool of `rank`, over all layers."""
        return sum(self._kv_elements(rank))

    def kv_page_bytes(self, rank: int, config: EngineConfig) -> PageBytes:
        """Bytes of a page, and of a cached state, in the pool of `rank`. `config` is resolved."""
        element_bytes = config.kv_cache.page_size * dtype_bytes(config.kv_dtype)
        full, windowed = (elements * element_bytes for elements in self._kv_elements(rank))
        return PageBytes(full, windowed, self._state_bytes(rank, config.dtype)[0])

    def _kv_elements(self, rank: int) -> tuple[int, int]:
        """The two parts of `kv_elements_per_token`: layers that see all tokens, and layers with a window."""
        full = windowed = 0
        for layer, shards in zip(self.model.all_layers, self.layers, strict=True):
            elements = shards[rank].amount(layer.mixer.token_elements)
            if layer.mixer.window is None:
                full += elements
            else:
                windowed += elements
        return full, windowed

    def state_bytes(self, rank: int, config: EngineConfig) -> int:
        """Bytes of the recurrent layers' states and recent entries on `rank`, of all requests that may run at once,
        for a resolved `config`."""
        num_rows = resolved(config.scheduler.max_num_seqs) + 1  # padding included
        return num_rows * sum(self._state_bytes(rank, config.dtype))

    def _state_bytes(self, rank: int, dtype: str) -> tuple[int, int]:
        """Bytes of one state on `rank`, and of the recent entries of a running request."""
        stored = recent = 0
        for layer, shards in zip(self.model.all_layers, self.layers, strict=True):
            for it in layer.mixer.state:
                entry = shards[rank].amount(it.elements) * (4 if it.is_fp32 else dtype_bytes(dtype))
                stored, recent = stored + (not it.num_recent) * entry, recent + it.num_recent * entry
        return stored, recent

    def weight_elements(self, rank: int) -> int:
        """Number of weight elements on `rank`: its shards and what all ranks hold whole. A tied LM head counts once."""
        outer = LayerShard({Axis.VOCABULARY: self.vocab[rank]}).amount(elements_of(self.model.outer_tensors))
        return outer + sum(
            shards[rank].amount(layer.weight_elements)
            for layer, shards in zip(self.model.all_layers, self.layers, strict=True)
        )

    def weight_bytes(self, rank: int, config: EngineConfig) -> int:
        """Bytes of the weights on `rank`, for a resolved `config`. FP8 scales, less than 1 %, are not counted."""
        element_bytes, dtypes = dtype_bytes(config.dtype), weight_dtypes(config, self.model)
        saved = sum(
            sum(saved_bytes(layer, shards[rank], element_bytes, dtypes).values())
            for layer, shards in zip(self.model.all_layers, self.layers, strict=True)
        )
        return self.weight_elements(rank) * element_bytes - saved


def saved_bytes(layer: LayerSpec, shard: LayerShard, element_bytes: int, dtypes: WeightDtypes) -> dict[Fraction, int]:
    """Bytes that a shard's quantised weights save against `element_bytes` per element, per `TensorSpec.share`."""
    saved: dict[Fraction, int] = {}
    for kind, each in ((layer.fp8_elements, dtypes.fp8), (layer.mxfp4_elements, dtypes.mxfp4 * MXFP4_BYTES)):
        for share, amounts in kind.items() if each else ():
            saved[share] = saved.get(share, 0) + int(shard.amount(amounts) * (element_bytes - each))
    return saved


def column_granule(columns: Columns, tp_size: int) -> int:
    """Columns per granule: a power of two up to 128 that divides the columns, or `columns.finest_granule`.

    It is the largest that leaves every rank a granule, or a smaller one, down to `columns.finest_granule`, if that
    makes the widest rank narrower. For published dense models the result is 128 or 64; only toy models get less than
    32. Columns that may be empty (experts) leave some ranks without any instead of using smaller granules.
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


def vocab_granule(vocab_size: int, tp_size: int) -> int:
    """Vocabulary rows per granule: 64, or fewer if a rank would get none."""
    granule = _VOCAB_GRANULE
    while granule > 1 and -(-vocab_size // granule) < tp_size:
        granule //= 2
    return granule


def blocks_of(span: Span, size: int) -> Span:
    """The blocks of `size` indices that contain `span`."""
    return Span(span.start // size, -(-span.stop // size))


def as_matrix(shape: Sequence[int]) -> tuple[int, ...]:
    """Rows and columns of a tensor as a matrix. With three or more dimensions it is stacked matrices: the first two
    dimensions belong to the rows, all others to the columns. A vector has rows only."""
    split = min(len(shape) - 1, 2)
    return (prod(shape[:split]), prod(shape[split:])) if len(shape) > 1 else tuple(shape)


def _deal_heads(axis: HeadGroups, tp_size: int, layer: int, unit: int) -> list[dict[Axis, Span]]:
    """The query heads and KV heads of each rank in one layer.

    Args:
        unit: number of heads that stay together. It divides a group, and every rank gets at least one unit.
    """
    group = axis.num_heads // axis.num_groups
    if tp_size <= axis.num_groups:
        group_spans = list(_spans(_running_total(_deal_evenly(axis.num_groups, tp_size, layer))))
        counts = [span.size * group for span in group_spans]
    else:
        # Floor or ceiling never gives a KV head more ranks than it has units: ceil(tp_size / num_groups) <= group/unit.
        group_spans, counts = [], []
        for head, num_ranks in enumerate(_deal_evenly(tp_size, axis.num_groups, layer)):
            group_spans.extend([Span(head, head + 1)] * num_ranks)
            counts.extend(count * unit for count in _deal_evenly(group // unit, num_ranks, layer))
    head_spans = _spans(_running_total(counts))
    return [{axis.heads: heads, axis.groups: groups} for heads, groups in zip(head_spans, group_spans, strict=True)]


def _deal_columns(columns: Columns, granule: int, column_elements: int, held: Sequence[int]) -> list[dict[Axis, Span]]:
    """The columns of each rank in one layer: one granule each, then each further granule to the rank with the fewest
    elements. No rank gets more than the ceiling of an even share, because all ranks wait for the widest one at the
    all-reduce.

    Args:
        granule: divides the columns.
        column_elements: number of elements of all tensors per column.
        held: number of elements that each rank holds.
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
    """The vocabulary rows of each rank, in whole granules. The last rank's rows may exceed the vocabulary."""
    granule = vocab_granule(vocab_size, tp_size)
    num_granules = -(-vocab_size // granule)
    return [count * granule for count in _deal_evenly(num_granules, tp_size, 0)]


def _deal_evenly(units: int, receivers: int, layer: int) -> list[int]:
    """Divides `units` among `receivers`, floor or ceiling each. Each layer gives the ceiling to different receivers, so
    over any range of layers two receivers differ by at most one unit."""
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
