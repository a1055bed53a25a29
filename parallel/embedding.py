"""The vocabulary of one rank: embedding rows in, logits out. Which ids a rank holds comes from the ShardPlan."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from parallel.group import TensorParallelGroup
from parallel.plan import ShardPlan
from parallel.weight import DenseWeight, TensorSource


class VocabParallelEmbedding:
    """Rows `plan.vocab[rank]` of the embedding; ids of other ranks contribute exact zeros to the sum.

    Those ids all look up one more row, of zeros: no NaN or infinity of this rank's rows can reach their tokens.
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
        self._rows: torch.Tensor | None = None  # [span.size + 1, hidden_size], the last of zeros
        self._row_of: torch.Tensor | None = None  # [vocab_size] int32: where in _rows an id is

    @property
    def weight(self) -> torch.Tensor:
        """[span.size, hidden_size]; a tied LM head uses this very memory."""
        assert self._rows is not None, "weight before load"
        return self._rows[: self._span.size]

    def load(self, source: TensorSource, name: str) -> None:
        """Reads this rank's rows of `name`.weight."""
        num_rows = self._span.size
        self._rows = torch.empty(num_rows + 1, self._hidden_size, dtype=self._dtype, device=self._device)
        source.read(f"{name}.weight", self._rows[:num_rows], rows=self._span)
        self._rows[num_rows] = 0
        self._row_of = torch.full((self._vocab_size,), num_rows, dtype=torch.int32, device=self._device)
        self._row_of[slice(*self._span)] = torch.arange(num_rows, dtype=torch.int32, device=self._device)

    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids [num_tokens] int64 -> [num_tokens, hidden_size], the caller's own.

        An id outside the vocabulary raises IndexError on CPU; on CUDA it ends the process's use of the device.
        """
        assert self._rows is not None, "forward before load"
        assert self._row_of is not None, "forward before load"
        if self._group.size == 1:
            return F.embedding(input_ids, self.weight)
        out = self._group.reduce_buffer((len(input_ids), self._hidden_size), self._dtype)
        hidden = torch.index_select(self._rows, 0, torch.index_select(self._row_of, 0, input_ids), out=out)
        total = self._group.all_reduce(hidden)
        return total if out is None or total is not out else total.clone()  # the residual stream outlives the buffer


class ParallelLMHead:
    """Logits of rows `plan.vocab[rank]`; `whole_logits` puts those of all ranks together."""

    def __init__(
        self, hidden_size: int, plan: ShardPlan, group: TensorParallelGroup, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._hidden_size = hidden_size
        self._plan = plan
        self._group = group
        self._dtype = dtype
        self._device = device
        self._weight: DenseWeight | None = None

    def load(self, source: TensorSource, name: str) -> None:
        """Reads this rank's rows of `name`.weight."""
        num_rows = self._plan.vocab[self._group.rank].size
        weight = torch.empty(num_rows, self._hidden_size, dtype=self._dtype, device=self._device)
        source.read(f"{name}.weight", weight, rows=self._plan.vocab[self._group.rank])
        # Not packed: for a moment the largest weight of all would be there twice.
        self._weight = DenseWeight(weight, None, pack=False)

    def tie(self, embedding: VocabParallelEmbedding) -> None:
        """Uses the embedding's weight, which stays the only copy of these rows."""
        self._weight = DenseWeight(embedding.weight, None, pack=False)

    @property
    def num_local_columns(self) -> int:
        """This rank's columns of the logits."""
        return self._plan.vocab[self._group.rank].size

    def local_logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """hidden [num_rows, hidden_size] -> logits [num_rows, num_local_columns] fp32; on CUDA never rounded.

        Args:
            out: to write to. None: a new tensor.
        """
        assert self._weight is not None, "forward before load"
        return self._weight.in_fp32(hidden, out)


def whole_logits(local: torch.Tensor, plan: ShardPlan, group: TensorParallelGroup) -> torch.Tensor:
    """Every rank's columns [num_rows, num_local_columns] in vocabulary order, [num_rows, vocab_size]: the same on every
    rank; of a group of one `local` itself."""
    if group.size == 1:
        return local
    padding = plan.max_vocab_rows - local.shape[1]
    # Ranks send equal messages; a padding column that ever reached the sampler must lose: -inf, not 0.
    gathered = group.all_gather(F.pad(local, (0, padding), value=float("-inf")))
    return torch.cat([gathered[rank, :, : span.size] for rank, span in enumerate(plan.vocab)], dim=1)
