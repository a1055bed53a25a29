"""The sampler on CUDA: the rule of worker/sampler.py, with logits sharded by vocabulary and the host never waiting.

Every row is sampled by the plain rule, which a CUDA graph can hold and which moves two numbers a row between ranks.
Rows with filters or logprobs are sampled again behind it, from whole rows of logits.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from parallel.group import TensorParallelGroup
from parallel.plan import ShardPlan
from worker.kernels.sampling import (
    RECORD_WORDS,
    best_candidates,
    filter_thresholds,
    rank_logprobs,
    ranked_ids,
    ranked_logprobs,
    reduce_candidates,
    reduce_tokens,
)
from worker.protocol import PARAMS_DTYPE, Int32Array
from worker.sampler import default_params

_CHUNK_ROWS = 128
"""Rows sampled again at a time, which bounds their memory: about 30 bytes for each logit. One SM works on a row."""


class LogprobTensors(NamedTuple):
    """Log probabilities, before temperature and filters, of the rows that asked; on the device."""

    logprobs: torch.Tensor
    """[num_logprob_rows] fp32: of the sampled token."""
    top_ids: torch.Tensor
    """[num_logprob_rows, k] int64: likeliest tokens, descending, equal ones by id; k is the most asked for."""
    top_logprobs: torch.Tensor
    """[num_logprob_rows, k] fp32."""


class SamplingTables:
    """Every row's sampling parameters on the device; greedy until set.

    Args:
        num_rows: rows of the request table; row 0 is padding and stays greedy.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._device = device
        words = default_params(num_rows).view(np.int32).reshape(num_rows, RECORD_WORDS)
        self.records = torch.from_numpy(words).to(device)
        """[num_rows, RECORD_WORDS] int32: PARAMS_DTYPE records."""

    def update(self, records: npt.NDArray[np.void]) -> None:
        """Queues the change of some rows, for the kernels launched after it.

        Args:
            records: PARAMS_DTYPE, of distinct rows, 1 to num_rows - 1. May be changed once this returns.
        """
        assert records.dtype == PARAMS_DTYPE, f"records of {records.dtype}"
        words = np.ascontiguousarray(records).view(np.int32).reshape(-1, RECORD_WORDS)
        staged = _upload(words, self._device)
        self.records.index_copy_(0, staged[:, 0].long(), staged)


class CudaSampler:
    """Samples rows of which this rank has the logits of ids `plan.vocab[group.rank]`.

    Every rank of the group makes the same calls and arrives at the same tokens.

    Args:
        num_rows: rows of the request table, padding row 0 included.
    """

    def __init__(self, plan: ShardPlan, group: TensorParallelGroup, num_rows: int) -> None:
        self._plan = plan
        self._group = group
        self._span = plan.vocab[group.rank]
        self.tables = SamplingTables(num_rows, group.device)

    def sample(self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """One token for each row by temperature and noise alone; a CUDA graph may capture it.

        Args:
            logits: [batch_size, span.size] fp32, unchanged; -inf for what must not be chosen.
            rows: [batch_size] int32, device: rows of the request table.
            positions: [batch_size] int32, device: index of the token to be sampled in its whole sequence.

        Returns:
            [batch_size] int64, device.
        """
        candidates = best_candidates(logits, rows, positions, self.tables.records, self._span.start)
        if self._group.size > 1:
            candidates = self._group.all_gather(reduce_candidates(candidates)[0])
        return reduce_tokens(candidates)

    def resample(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        tokens: torch.Tensor,
        which: npt.NDArray[np.integer],
        num_logprobs: Int32Array,
    ) -> LogprobTensors | None:
        """Samples the rows again that have filters or want logprobs. Launches kernels only; not for a graph.

        Args:
            logits, rows, positions: as `sample` had them.
            tokens: [batch_size] int64: what `sample` returned; changed in place at `which`.
            which: [num_chosen]: indices into the batch, distinct.
            num_logprobs: [num_chosen]: how many of the likeliest tokens each wants besides its own; -1 for none.

        Returns:
            The logprobs of those of `which` that want them, in order; None when none does.
        """
        chosen = _upload(which.astype(np.int64, copy=False), self._group.device)
        most = int(num_logprobs.max(initial=-1))
        parts = []
        for start in range(0, len(which), _CHUNK_ROWS):
            chunk = chosen[start : start + _CHUNK_ROWS]
            whole = self._whole(logits.index_select(0, chunk))
            drawn = self._draw(whole, rows.index_select(0, chunk), positions.index_select(0, chunk))
            tokens.index_copy_(0, chunk, drawn)
            wants = np.flatnonzero(num_logprobs[start : start + _CHUNK_ROWS] >= 0)
            if len(wants):
                asked = _upload(wants, self._group.device)
                parts.append(_logprobs(whole.index_select(0, asked), drawn.index_select(0, asked), most))
        return LogprobTensors(*map(torch.cat, zip(*parts, strict=True))) if parts else None

    def _whole(self, logits: torch.Tensor) -> torch.Tensor:
        """This rank's columns -> every rank's, in vocabulary order: [num_rows, vocab_size], contiguous."""
        if self._group.size == 1:
            return logits
        padding = self._plan.max_vocab_rows - logits.shape[1]
        gathered = self._group.all_gather(F.pad(logits, (0, padding), value=float("-inf")))
        return torch.cat([part[:, : span.size] for part, span in zip(gathered, self._plan.vocab, strict=True)], dim=1)

    def _draw(self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Tokens [num_rows] int64 of whole rows of logits, filters applied."""
        thresholds = filter_thresholds(logits, rows, self.tables.records)
        return reduce_tokens(best_candidates(logits, rows, positions, self.tables.records, 0, thresholds))


def _logprobs(logits: torch.Tensor, tokens: torch.Tensor, k: int) -> LogprobTensors:
    ranked, logprobs = rank_logprobs(logits, tokens)
    top = ranked.topk(k).values if k else ranked[:, :0]
    return LogprobTensors(logprobs, ranked_ids(top), ranked_logprobs(top))


def _upload(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """A copy on the device. The host does not wait: torch reuses the pinned memory only after the copy."""
    source = torch.from_numpy(np.require(array, requirements="W"))
    return source.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else source.clone()
