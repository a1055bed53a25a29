"""The minimum work of a step: the FLOPs and bytes from which the reported MFU and MBU are computed.

Counted are matrix products and attention, two FLOPs per multiply-add; every weight once per step; every key and value
once per layer; and as many experts as the tokens use if they choose at random. Padding, recomputation, activations and
communication are not counted: the utilisation shows their cost.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from configs.latent_attention import LatentAttention
from configs.layers import Axis
from configs.weight_dtypes import PLAIN, WeightDtypes
from parallel.plan import ShardPlan, saved_bytes

_Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class AttentionCost:
    """The cost of attention in all layers with the same window."""

    window: int | None
    """Number of tokens that a query sees. If None, it sees all tokens before it."""
    flops_per_pair: int
    """FLOPs for a query and one visible key and value, over all heads and layers."""
    bytes_per_token: int
    """Bytes of a token's keys and values, over all layers."""

    def pairs(self, starts: _Float64Array, ends: _Float64Array) -> float:
        """Number of (query, visible key) pairs, for rows with queries at positions [start, end)."""
        return float((self._seen(ends) - self._seen(starts)).sum())

    def tokens(self, starts: _Float64Array, ends: _Float64Array) -> float:
        """Number of tokens whose keys and values are read, for rows with queries at positions [start, end)."""
        if self.window is None:
            return float(ends.sum())
        return float(np.minimum(ends, ends - starts + self.window - 1).sum())

    def _seen(self, num_queries: _Float64Array) -> _Float64Array:
        """Total number of keys that the first `num_queries` queries of a sequence see."""
        if self.window is None:
            return num_queries * (num_queries + 1) / 2
        growing = np.minimum(num_queries, self.window)
        return growing * (growing + 1) / 2 + (num_queries - growing) * self.window


@dataclass(frozen=True)
class StepCost:
    """The cost of steps, summed over some ranks of a group."""

    weight_bytes: int
    """Bytes of weights that every step reads. An embedding that is not also the LM head is not counted, because only a
    few of its rows are read."""
    flops_per_token: int
    """FLOPs per token of the layers' matrix products."""
    flops_per_logits: int
    """FLOPs of the LM head per position that needs logits."""
    attention: tuple[AttentionCost, ...]
    routed: tuple[tuple[Fraction, int], ...] = ()
    """Weights that only a share of the tokens uses, as pairs of share and bytes. `weight_bytes` excludes them."""

    @classmethod
    def of(
        cls,
        plan: ShardPlan,
        element_bytes: int,
        ranks: Iterable[int] | None = None,
        *,
        kv_element_bytes: int | None = None,
        dtypes: WeightDtypes = PLAIN,
    ) -> StepCost:
        """The cost for `ranks`, or for all ranks if None.

        Args:
            element_bytes: bytes per weight element.
            kv_element_bytes: bytes per KV element. If None, `element_bytes`.
            dtypes: which weights are stored in FP8 or MXFP4.
        """
        model, kv_element_bytes = plan.model, kv_element_bytes or element_bytes
        weight_bytes = layer_flops = vocab_rows = 0
        routed: dict[Fraction, int] = {}
        flops_per_pair: dict[int | None, int] = {}
        bytes_per_token: dict[int | None, int] = {}
        for rank in range(plan.tp_size) if ranks is None else ranks:
            rows = plan.vocab[rank].size
            vocab_rows += rows
            elements = plan.weight_elements(rank) - (0 if model.tie_word_embeddings else rows * model.hidden_size)
            weight_bytes += elements * element_bytes
            for i, layer in enumerate(model.all_layers):
                shard, mixer = plan.shard(i, rank), layer.mixer
                saved = saved_bytes(layer, shard, element_bytes, dtypes)
                weight_bytes -= sum(saved.values())
                for share, amounts in layer.product_elements.items():
                    elements = shard.amount(amounts)
                    layer_flops += int(2 * share * elements)
                    if share != 1:
                        routed[share] = routed.get(share, 0) + elements * element_bytes - saved.get(share, 0)
                # A chunk counts as a window of its size, which is the most that a query sees.
                window = mixer.chunk if mixer.window is None else mixer.window
                parts = [(window, mixer.pair_flops, mixer.token_elements)]
                if isinstance(mixer, LatentAttention) and mixer.top_k is not None:
                    # The chosen tokens count as a window. The indexer sees all tokens.
                    parts = [
                        (mixer.top_k, mixer.pair_flops, {Axis.LATENT: mixer.kept_dim}),
                        (None, mixer.index_pair_flops, {Axis.LATENT: mixer.index_dim}),
                    ]
                for seen, pair, token in parts:
                    flops_per_pair[seen] = flops_per_pair.get(seen, 0) + shard.amount(pair)
                    of_token = shard.amount(token) * kv_element_bytes
                    bytes_per_token[seen] = bytes_per_token.get(seen, 0) + of_token
        return cls(
            weight_bytes=weight_bytes - sum(routed.values()),
            flops_per_token=layer_flops,
            flops_per_logits=2 * vocab_rows * model.hidden_size,
            attention=tuple(
                AttentionCost(window, flops, bytes_per_token[window]) for window, flops in flops_per_pair.items()
            ),
            routed=tuple(routed.items()),
        )

    def step(self, starts: npt.NDArray[np.int32], lens: npt.NDArray[np.int32], num_logits: int) -> tuple[float, float]:
        """FLOPs and bytes read of one step.

        Args:
            starts: [num_rows] position of each row's first input token.
            lens: [num_rows] number of each row's input tokens.
            num_logits: number of positions that need logits.
        """
        first = starts.astype(np.float64)
        ends = first + lens
        flops = self.flops_per_token * float(lens.sum()) + self.flops_per_logits * float(num_logits)
        read = float(self.weight_bytes)
        for share, weight_bytes in self.routed:
            read += weight_bytes * (1 - float(1 - share) ** int(lens.sum()))
        for layers in self.attention:
            flops += layers.flops_per_pair * layers.pairs(first, ends)
            read += layers.bytes_per_token * layers.tokens(first, ends)
        return flops, read
