"""The vocabulary on one rank: the embedding and the LM head. The ShardPlan says which ids a rank holds."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from parallel.collectives.group import TensorParallelGroup
from parallel.numerics.arithmetic import FAST, Arithmetic
from parallel.numerics.kernels.cpu_products import TILE, pack_in_place
from parallel.numerics.tensor_source import TensorSource
from parallel.numerics.weight import CpuWeight, Weight
from parallel.plan import ShardPlan, Span


class _Rows(Protocol):
    def read(self, source: TensorSource, name: str, span: Span) -> None: ...
    def fill(self, row: int, value: float) -> None: ...
    def lookup(self, rows: torch.Tensor) -> torch.Tensor: ...
    def weight(self, num_rows: int, arithmetic: Arithmetic) -> Weight: ...


class _PlainRows:
    """Rows of the vocabulary as in a checkpoint, [num_rows, hidden_size], for GPUs."""

    def __init__(self, num_rows: int, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.rows = torch.empty(num_rows, hidden_size, dtype=dtype, device=device)

    def read(self, source: TensorSource, name: str, span: Span) -> None:
        """Reads rows `span` of tensor `name` into the first rows."""
        source.read(name, self.rows[: span.size], rows=span)

    def fill(self, row: int, value: float) -> None:
        self.rows[row] = value

    def lookup(self, rows: torch.Tensor) -> torch.Tensor:
        """Looks up rows: [num_tokens, hidden_size]."""
        return torch.index_select(self.rows, 0, rows)

    def weight(self, num_rows: int, arithmetic: Arithmetic) -> Weight:
        """A weight over the first rows, which shares their memory."""
        return arithmetic.weight(self.rows[:num_rows], None)


class _PackedRows:
    """Rows packed for products on a CPU, since a tied LM head multiplies with all of them. A lookup gathers its row
    from a tile, which costs a few microseconds per token."""

    def __init__(self, num_rows: int, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._packed = torch.empty(-(-num_rows // TILE), hidden_size, TILE, dtype=dtype, device=device)

    def read(self, source: TensorSource, name: str, span: Span) -> None:
        rows = self._packed.view(-1, self._packed.shape[1])
        source.read(name, rows[: span.size], rows=span)
        rows[span.size :] = 0
        pack_in_place(rows)

    def fill(self, row: int, value: float) -> None:
        self._packed[row // TILE, :, row % TILE] = value

    def lookup(self, rows: torch.Tensor) -> torch.Tensor:
        return self._packed[rows // TILE, :, rows % TILE]

    def weight(self, num_rows: int, arithmetic: Arithmetic) -> Weight:
        return CpuWeight.of_packed(self._packed, num_rows)


def _vocabulary_rows(num_rows: int, hidden_size: int, dtype: torch.dtype, device: torch.device) -> _Rows:
    return (_PlainRows if device.type == "cuda" else _PackedRows)(num_rows, hidden_size, dtype, device)


class VocabParallelEmbedding:
    """Rows `plan.vocab[rank]` of the embedding. For other ranks' ids it contributes -0.0, which changes no bit of a
    sum.

    All ids of other ranks look up one additional row of -0.0. So no NaN or infinity in this rank's rows reaches other
    tokens.
    """

    def __init__(
        self, hidden_size: int, plan: ShardPlan, group: TensorParallelGroup, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._hidden_size = hidden_size
        self._span = plan.vocab[group.rank]
        self._group = group
        self._dtype = dtype
        self._device = device
        self._vocab_size = plan.vocab[-1].stop
        self._rows: _Rows | None = None  # span.size + 1 rows
        self._row_of: torch.Tensor | None = None  # [vocab_size] int32: index in _rows of each id

    def load(self, source: TensorSource, name: str) -> None:
        """Reads this rank's rows of `name`.weight."""
        num_rows = self._span.size
        self._rows = _vocabulary_rows(num_rows + 1, self._hidden_size, self._dtype, self._device)
        self._rows.read(source, f"{name}.weight", self._span)
        self._rows.fill(num_rows, -0.0)
        self._row_of = torch.full((self._vocab_size,), num_rows, dtype=torch.int32, device=self._device)
        self._row_of[slice(*self._span)] = torch.arange(num_rows, dtype=torch.int32, device=self._device)

    def tied_weight(self, arithmetic: Arithmetic) -> Weight:
        """The weight for a tied LM head, which shares this embedding's memory."""
        assert self._rows is not None, "weight before load"
        return self._rows.weight(self._span.size, arithmetic)

    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Looks up input_ids [num_tokens] int64. An id outside the vocabulary raises IndexError on CPU; on CUDA it
        makes the device unusable for the process.

        Returns:
            [num_tokens, hidden_size], a tensor that belongs to the caller.
        """
        assert self._rows is not None, "forward before load"
        assert self._row_of is not None, "forward before load"
        if isinstance(self._rows, _PlainRows):
            if self._group.size == 1:
                return self._rows.lookup(input_ids)
            found = self._group.look_up(input_ids, self._row_of, self._rows.rows)
            if found is not None:
                return found
        return self._group.all_reduce(self._rows.lookup(torch.index_select(self._row_of, 0, input_ids)))


class ParallelLMHead:
    """The LM head: logits of rows `plan.vocab[rank]`. `whole_logits` combines those of all ranks."""

    def __init__(
        self,
        hidden_size: int,
        plan: ShardPlan,
        group: TensorParallelGroup,
        arithmetic: Arithmetic = FAST,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._arithmetic = arithmetic
        self._hidden_size = hidden_size
        self._plan = plan
        self._group = group
        self._dtype = dtype
        self._device = device
        self._weight: Weight | None = None

    def load(self, source: TensorSource, name: str) -> None:
        """Reads this rank's rows of `name`.weight."""
        span = self._plan.vocab[self._group.rank]
        rows = _vocabulary_rows(span.size, self._hidden_size, self._dtype, self._device)
        rows.read(source, f"{name}.weight", span)
        self._weight = rows.weight(span.size, self._arithmetic)

    def tie(self, embedding: VocabParallelEmbedding) -> None:
        """Uses the embedding's weight and memory."""
        self._weight = embedding.tied_weight(self._arithmetic)

    @property
    def num_local_columns(self) -> int:
        """Number of this rank's columns of logits."""
        return self._plan.vocab[self._group.rank].size

    def local_logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Computes logits in fp32 without rounding.

        Args:
            hidden: [num_rows, hidden_size].
            out: [num_rows, num_local_columns] fp32, written. If None, a new tensor.

        Returns:
            [num_rows, num_local_columns] fp32.
        """
        assert self._weight is not None, "forward before load"
        return self._weight.in_fp32(hidden, out)


def whole_logits(local: torch.Tensor, plan: ShardPlan, group: TensorParallelGroup) -> torch.Tensor:
    """Gathers every rank's columns [num_rows, num_local_columns] in vocabulary order.

    Returns:
        [num_rows, vocab_size], equal on every rank. With one rank, `local` itself.
    """
    if group.size == 1:
        return local
    padding = plan.max_vocab_rows - local.shape[1]
    # Ranks send messages of equal size. Padding columns are -inf, so that the sampler can never choose one.
    gathered = group.all_gather(F.pad(local, (0, padding), value=float("-inf")))
    return torch.cat([gathered[rank, :, : span.size] for rank, span in enumerate(plan.vocab)], dim=1)
