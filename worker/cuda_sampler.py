"""The sampler on CUDA: the rule of worker/sampler.py, with logits sharded by vocabulary and the host never waiting.

Every row is sampled by the plain rule, which a CUDA graph can hold and which moves two numbers a row between ranks.
Rows with filters, adjustments or logprobs are sampled again behind it, from whole rows of logits.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from parallel.group import TensorParallelGroup
from parallel.plan import ShardPlan
from worker.adjustments import RowAdjustments
from worker.kernels.adjustments import adjust_logits
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
from worker.prompt_scores import TargetScores
from worker.protocol import PARAMS_DTYPE, Int32Array, StepFrame
from worker.sampler import default_params
from worker.upload import upload

_CHUNK_ROWS = 128
"""Rows sampled again at a time, which bounds their memory: about 30 bytes for each logit. One SM works on a row."""


class LogprobTensors(NamedTuple):
    """Log probabilities, before adjustments, temperature and filters, of the rows that want them; on the device."""

    logprobs: torch.Tensor
    """[num_logprob_rows] fp32: of the sampled token."""
    top_ids: torch.Tensor
    """[num_logprob_rows, k] int64: likeliest tokens, descending, equal ones by id; k is the most asked for."""
    top_logprobs: torch.Tensor
    """[num_logprob_rows, k] fp32."""
    asked_logprobs: torch.Tensor
    """[num_logprob_rows, m] fp32: of the tokens that were asked for; m is the most a row asked for."""


class Chosen(NamedTuple):
    """Rows of a batch that are sampled again; on the host."""

    which: npt.NDArray[np.int64]
    """[num_chosen]: indices into the batch."""
    num_logprobs: Int32Array
    """[num_chosen]: how many of the likeliest tokens each wants besides its own; -1 for none."""
    num_asked: int
    """The most tokens that one of them wants the log probability of."""
    are_adjusted: bool
    """Some of them have adjustments."""


class SamplingTables:
    """Every row's sampling parameters, on host and device; greedy until set.

    Args:
        num_rows: rows of the request table; row 0 is padding and stays greedy.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._device = device
        self.params = default_params(num_rows)
        """[num_rows] PARAMS_DTYPE."""
        words = self.params.copy().view(np.int32).reshape(num_rows, RECORD_WORDS)
        self.records = torch.from_numpy(words).to(device)
        """[num_rows, RECORD_WORDS] int32: PARAMS_DTYPE records."""

    def update(self, records: npt.NDArray[np.void]) -> None:
        """Queues the change of some rows, for the kernels launched after it.

        Args:
            records: PARAMS_DTYPE, of distinct rows, 1 to num_rows - 1. May be changed once this returns.
        """
        assert records.dtype == PARAMS_DTYPE, f"records of {records.dtype}"
        self.params[records["row"]] = records
        words = np.ascontiguousarray(records).view(np.int32).reshape(-1, RECORD_WORDS)
        staged = upload(words, self._device)
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
        self.adjustments = RowAdjustments(num_rows, max(span.stop for span in plan.vocab), group.device)

    def update(self, frame: StepFrame) -> None:
        """Queues what a checked frame says of its rows, for what is launched after it."""
        if len(frame.params):
            self.tables.update(frame.params)
        self.adjustments.update(frame)

    def choose(self, rows: Int32Array, positions: npt.NDArray[np.integer]) -> Chosen:
        """Which rows of a batch need more than the plain rule.

        Args:
            rows: [batch_size]: rows of the request table.
            positions: [batch_size]: of the tokens to be sampled.
        """
        params = self.tables.params[rows]
        filtered = (params["temperature"] > 0) & (
            (params["top_k"] > 0) | (params["top_p"] < 1.0) | (params["min_p"] > 0.0)
        )
        touched = self.adjustments.touched(rows, positions)
        which = np.flatnonzero(filtered | touched | (params["num_logprobs"] >= 0))
        num_asked = int(self.adjustments.num_asked(rows[which]).max(initial=0))
        return Chosen(which, params["num_logprobs"][which], num_asked, bool(touched.any()))

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
        chosen: Chosen,
    ) -> LogprobTensors | None:
        """Samples the chosen rows again, and counts their tokens. Launches kernels only; not for a graph.

        Args:
            logits, rows, positions: as `sample` had them.
            tokens: [batch_size] int64: what `sample` returned; changed in place where it was chosen.

        Returns:
            The logprobs of the chosen rows that want them, in order; None when none does.
        """
        which = upload(chosen.which, self._group.device)
        parts = []
        for start in range(0, len(which), _CHUNK_ROWS):
            chunk = which[start : start + _CHUNK_ROWS]
            whole = self._whole(logits.index_select(0, chunk))
            chunk_rows, chunk_positions = rows.index_select(0, chunk), positions.index_select(0, chunk)
            wants = np.flatnonzero(chosen.num_logprobs[start : start + _CHUNK_ROWS] >= 0)
            # What the logprobs are of: the logits as they are before adjustments.
            raw, wanted = None, None
            if len(wants):
                wanted = upload(wants, self._group.device)
                raw = whole.index_select(0, wanted)
            if chosen.are_adjusted:
                adjust_logits(whole, chunk_rows, chunk_positions, self.tables.records, self.adjustments)
            drawn = self._draw(whole, chunk_rows, chunk_positions)
            tokens.index_copy_(0, chunk, drawn)
            if chosen.are_adjusted:
                self.adjustments.count(chunk_rows.long(), drawn)
            if raw is not None and wanted is not None:
                asked = self.adjustments.asked[chunk_rows.index_select(0, wanted).long(), : chosen.num_asked]
                most = int(chosen.num_logprobs.max())
                parts.append(_logprobs(raw, drawn.index_select(0, wanted), most, asked))
        return LogprobTensors(*map(torch.cat, zip(*parts, strict=True))) if parts else None

    def score(self, logits: torch.Tensor, targets: torch.Tensor, k: int) -> TargetScores:
        """Log probabilities of given tokens. Launches kernels only; not for a graph.

        Args:
            logits: [num_rows, span.size] fp32; takes about 20 bytes for each logit of the vocabulary.
            targets: [num_rows] int64, device.
            k: how many of the likeliest tokens are wanted too.
        """
        return TargetScores(*_logprobs(self._whole(logits), targets, k, targets[:, None])[:3])

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


def _logprobs(logits: torch.Tensor, tokens: torch.Tensor, k: int, asked: torch.Tensor) -> LogprobTensors:
    ranked, logprobs = rank_logprobs(logits, tokens)
    top = ranked.topk(k).values if k else ranked[:, :0]
    return LogprobTensors(logprobs, ranked_ids(top), ranked_logprobs(top), ranked_logprobs(ranked.gather(1, asked)))
