"""The vocabulary of one rank: embedding rows in, logits out. Which ids a rank holds comes from the ShardPlan."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from parallel.group import TensorParallelGroup
from parallel.linear import Matmul, TensorSource
from parallel.plan import ShardPlan


class VocabParallelEmbedding:
    """Rows `plan.vocab[rank]` of the embedding; ids of other ranks contribute exact zeros to the sum."""

    def __init__(
        self, hidden_size: int, plan: ShardPlan, group: TensorParallelGroup, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._hidden_size = hidden_size
        self._span = plan.vocab[group.rank]
        self._group = group
        self._dtype = dtype
        self._device = device
        self._weight: torch.Tensor | None = None

    @property
    def weight(self) -> torch.Tensor:
        """[span.size, hidden_size]; a tied LM head uses this very tensor."""
        assert self._weight is not None, "weight before load"
        return self._weight

    def load(self, source: TensorSource, name: str) -> None:
        """Reads this rank's rows of `name`.weight."""
        weight = torch.empty(self._span.size, self._hidden_size, dtype=self._dtype, device=self._device)
        source.read(f"{name}.weight", weight, rows=self._span)
        self._weight = weight

    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids [num_tokens] int64 -> [num_tokens, hidden_size]; raises IndexError outside the vocabulary."""
        if self._group.size == 1:
            return F.embedding(input_ids, self.weight)
        local = input_ids - self._span.start
        elsewhere = (local < 0) | (local >= self._span.size)
        if self._span.size == 0:
            hidden = torch.zeros(len(input_ids), self._hidden_size, dtype=self._dtype, device=self._device)
        else:
            hidden = F.embedding(local.masked_fill_(elsewhere, 0), self.weight)
            # Filled, not multiplied: a NaN or infinity in row 0 must not leak into other tokens.
            hidden.masked_fill_(elsewhere.unsqueeze(1), 0.0)
        return self._group.all_reduce(hidden)


class ParallelLMHead:
    """Logits of rows `plan.vocab[rank]`, gathered into vocabulary order on every rank."""

    def __init__(
        self, hidden_size: int, plan: ShardPlan, group: TensorParallelGroup, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._hidden_size = hidden_size
        self._plan = plan
        self._group = group
        self._dtype = dtype
        self._device = device
        self._matmul: Matmul | None = None

    def load(self, source: TensorSource, name: str) -> None:
        """Reads this rank's rows of `name`.weight."""
        num_rows = self._plan.vocab[self._group.rank].size
        weight = torch.empty(num_rows, self._hidden_size, dtype=self._dtype, device=self._device)
        source.read(f"{name}.weight", weight, rows=self._plan.vocab[self._group.rank])
        # Not packed: for a moment the largest weight of all would be there twice.
        self._matmul = Matmul(weight, None, pack=False)

    def tie(self, embedding: VocabParallelEmbedding) -> None:
        """Uses the embedding's weight, which stays the only copy of these rows."""
        self._matmul = Matmul(embedding.weight, None, pack=False)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [num_rows, hidden_size] -> logits [num_rows, vocab_size] fp32, the same on every rank."""
        assert self._matmul is not None, "forward before load"
        local = self._matmul(hidden).float()
        if self._group.size == 1:
            return local
        padding = self._plan.max_vocab_rows - local.shape[1]
        # Ranks send equal messages; a padding column that ever reached the sampler must lose: -inf, not 0.
        gathered = self._group.all_gather(F.pad(local, (0, padding), value=float("-inf")))
        parts = [gathered[rank, :, : span.size] for rank, span in enumerate(self._plan.vocab)]
        return torch.cat(parts, dim=1)
