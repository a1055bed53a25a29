"""Turns logits into tokens by one rule for every row, independent of the batch.

    token = argmax over allowed v of  logit_v / temperature + gumbel(seed, position, v)

Noise is a hash of seed, position and token id, so no generator has state. At temperature 0 the rule has no noise. Ties
go to the smallest id. Each row is computed on its own, so its neighbours cannot change a bit of it. If any rank has a
NaN among a row's logits, the row's token is -1 on all ranks.

Logits are sharded by vocabulary. The plain rule, without filters, needs only two numbers a row from each rank, and a
CUDA graph can contain it. On GPUs ranks also exchange a list of their likeliest tokens, from which rows with a small
top-k are sampled. Rows with other filters or adjustments are then sampled again from complete rows of logits, which log
probabilities need too. The arithmetic is in worker/sampling/kernels (CUDA) and worker/sampling/torch_sampling.py (CPU).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from parallel.collectives.group import TensorParallelGroup
from parallel.layers.embedding import whole_logits
from parallel.plan import ShardPlan
from worker.protocol import PARAMS_DTYPE, RECORD_WORDS, Int32Array, StepFrame
from worker.sampling import torch_sampling
from worker.sampling.adjustments import RowAdjustments
from worker.sampling.drafts import StepDrafts
from worker.sampling.logprobs import LogprobTensors
from worker.upload import upload

_CHUNK_ROWS = 128
"""Maximum number of rows sampled again at a time: each needs about 30 bytes a logit and, on CUDA, one SM."""


class ResampledRows(NamedTuple):
    """Rows of a batch that need more than the plain rule. The arrays are on the host."""

    indices: npt.NDArray[np.int64]
    """[num_resampled]: indices into the batch."""
    is_redrawn: npt.NDArray[np.bool_]
    """[num_resampled]: whether the row has filters or adjustments. Other rows only need logprobs."""
    num_logprobs: Int32Array
    """[num_resampled]: number of likeliest tokens with logprobs besides the sampled token's; -1 for no logprobs."""
    num_requested: int
    """The largest number of tokens for which one row requests log probabilities by id (`StepFrame.requested`)."""
    are_adjusted: bool
    """Whether some of the rows have adjustments."""

    def by_index_in_row(self, drafts: StepDrafts) -> tuple[ResampledRows, list[int]]:
        """Sorts the rows by their index within a request, because a token after a draft depends on the tokens before
        it. Also returns where the rows of each index end in that order."""
        order = np.argsort(drafts.index_in_row[self.indices], kind="stable")
        ends = np.cumsum(np.bincount(drafts.index_in_row[self.indices])).tolist()
        indices, is_redrawn, num_logprobs = self.indices[order], self.is_redrawn[order], self.num_logprobs[order]
        return ResampledRows(indices, is_redrawn, num_logprobs, self.num_requested, self.are_adjusted), ends


NONE_RESAMPLED = ResampledRows(np.empty(0, np.int64), np.empty(0, np.bool_), np.empty(0, np.int32), 0, False)


class SamplingKernels(Protocol):
    """The functions of kernels/sampling.py, which documents them, or of torch_sampling.py."""

    MAX_LISTED_TOP_K: int

    def plain_tokens(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        records: torch.Tensor,
        first_id: int,
        group: TensorParallelGroup,
    ) -> torch.Tensor:
        """A token for every row by temperature, noise and a small top-k."""

    def best_candidates(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        records: torch.Tensor,
        first_id: int,
        thresholds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The best token of each block of ids."""

    def reduce_tokens(self, candidates: torch.Tensor) -> torch.Tensor:
        """The id of the best token."""

    def filter_thresholds(self, logits: torch.Tensor, rows: torch.Tensor, records: torch.Tensor) -> torch.Tensor:
        """The smallest score that filters allow."""

    def token_logprobs(
        self, logits: torch.Tensor, tokens: torch.Tensor, k: int, requested: torch.Tensor
    ) -> LogprobTensors:
        """Log probabilities of given tokens and of the likeliest."""


def default_params(num_rows: int) -> npt.NDArray[np.void]:
    """[num_rows] records of greedy sampling without logprobs."""
    params = np.zeros(num_rows, PARAMS_DTYPE)
    params["top_p"] = params["repetition_penalty"] = 1.0
    params["num_logprobs"] = -1
    return params


class SamplingTables:
    """The sampling parameters of every row, on host and device. A row is greedy until `update` sets its parameters.

    Args:
        num_rows: rows of the request table. Row 0 is padding and stays greedy.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._device = device
        self.params = default_params(num_rows)
        """[num_rows] PARAMS_DTYPE: each row's parameters, on the host."""
        words = self.params.copy().view(np.int32).reshape(num_rows, RECORD_WORDS)
        self.records = torch.from_numpy(words).to(device)
        """[num_rows, RECORD_WORDS] int32: each row's parameters as words of a record, on the device."""

    def update(self, records: npt.NDArray[np.void]) -> None:
        """Queues new parameters of some rows. Kernels launched after this call read them.

        Args:
            records: PARAMS_DTYPE, of distinct rows, 1 to num_rows - 1. The caller may change them once this returns.
        """
        assert records.dtype == PARAMS_DTYPE, f"records of {records.dtype}"
        self.params[records["row"]] = records
        words = np.ascontiguousarray(records).view(np.int32).reshape(-1, RECORD_WORDS)
        staged = upload(words, self._device)
        self.records.index_copy_(0, staged[:, 0].long(), staged)


class Sampler:
    """Samples tokens from logits sharded by vocabulary: each rank has those of the ids `plan.vocab[group.rank]`.

    Every rank of the group makes the same calls and gets the same tokens.

    Args:
        num_rows: rows of the request table, padding row 0 included.
        use_triton: whether to use the Triton kernels. If None, they are used on CUDA only.
    """

    def __init__(
        self, plan: ShardPlan, group: TensorParallelGroup, num_rows: int, *, use_triton: bool | None = None
    ) -> None:
        self._plan = plan
        self._group = group
        self._span = plan.vocab[group.rank]
        self.tables = SamplingTables(num_rows, group.device)
        self.adjustments = RowAdjustments(num_rows, max(span.stop for span in plan.vocab), group.device)
        self._kernels: SamplingKernels
        if group.device.type == "cuda" if use_triton is None else use_triton:
            from worker.sampling.kernels import sampling
            from worker.sampling.kernels.adjustments import adjust_logits

            self._kernels, self._adjust_logits = sampling, adjust_logits
        else:
            self._kernels, self._adjust_logits = torch_sampling, torch_sampling.adjust_logits

    def update(self, frame: StepFrame) -> None:
        """Queues the row settings of a checked frame. Kernels launched after this call read them."""
        if len(frame.params):
            self.tables.update(frame.params)
        self.adjustments.update(frame)

    def find_resampled(self, rows: Int32Array, positions: npt.NDArray[np.integer]) -> ResampledRows:
        """Finds the rows of a batch that need more than the plain rule.

        Args:
            rows: [batch_size]: rows of the request table.
            positions: [batch_size]: positions of the tokens to be sampled.
        """
        params = self.tables.params[rows]
        top_k = params["top_k"]
        is_listed = (top_k > 0) & (top_k <= self._kernels.MAX_LISTED_TOP_K)
        filtered = (params["temperature"] > 0) & ~is_listed
        filtered &= (top_k > 0) | (params["top_p"] < 1.0) | (params["min_p"] > 0.0)
        changed = self.adjustments.changed(rows, positions)
        redrawn = filtered | changed
        indices = np.flatnonzero(redrawn | (params["num_logprobs"] >= 0))
        num_requested = int(self.adjustments.num_requested(rows[indices]).max(initial=0))
        return ResampledRows(
            indices, redrawn[indices], params["num_logprobs"][indices], num_requested, bool(changed.any())
        )

    def sample(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        left_out: npt.NDArray[np.int64] | None = None,
    ) -> torch.Tensor:
        """Samples one token for each row by temperature, noise and, on GPUs, a small top-k. A graph may capture it.

        Args:
            logits: [batch_size, span.size] fp32, unchanged. Tokens that must not be sampled have -inf.
            rows: [batch_size] int32, device: rows of the request table.
            positions: [batch_size] int32, device: index of the token to be sampled in its whole sequence.
            left_out: indices of rows to skip, because `resample` will sample them. They get token 0. None in a graph.

        Returns:
            [batch_size] int64, device; -1 for a row with a NaN.
        """
        if left_out is None or len(left_out) == 0:
            return self._plain(logits, rows, positions)
        tokens = torch.zeros(len(rows), dtype=torch.int64, device=self._group.device)
        if len(left_out) < len(rows):
            accepted = upload(np.delete(np.arange(len(rows)), left_out), self._group.device)
            own = self._plain(*(part.index_select(0, accepted) for part in (logits, rows, positions)))
            tokens.index_copy_(0, accepted, own)
        return tokens

    def resample(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        tokens: torch.Tensor,
        resampled: ResampledRows,
        drafts: StepDrafts | None = None,
    ) -> LogprobTensors | None:
        """Samples rows with filters or adjustments, counts their tokens, and computes log probabilities. Only launches
        kernels. A graph cannot capture it.

        Args:
            logits, rows, positions: the arguments of `sample`.
            tokens: [batch_size] int64: the result of `sample`. Changed in place for rows that are sampled again.
            drafts: the drafts of rows that are in the batch several times. None if no row is.

        Returns:
            Log probabilities for the `resampled` rows that request any, in their order; with `drafts`, in the order of
            `by_index_in_row`. None if no row requests any.
        """
        ends = [len(resampled.indices)]
        if drafts is not None:
            resampled, ends = resampled.by_index_in_row(drafts)
        indices, parts = upload(resampled.indices, self._group.device), []
        most = int(resampled.num_logprobs.max(initial=0))
        for index_in_row, part in _chunks(ends):
            chunk = indices[part]
            whole = whole_logits(logits.index_select(0, chunk), self._plan, self._group)
            wants = np.flatnonzero(resampled.num_logprobs[part] >= 0)
            # Logprobs are computed from the logits before adjustments.
            raw, wanting = None, chunk
            if len(wants):
                wanted = upload(wants, self._group.device)
                raw, wanting = whole.index_select(0, wanted), chunk.index_select(0, wanted)
            redrawn = np.flatnonzero(resampled.is_redrawn[part])
            if len(redrawn):
                again = chunk
                if len(redrawn) < len(chunk):
                    at = upload(redrawn, self._group.device)
                    again, whole = chunk.index_select(0, at), whole.index_select(0, at)
                accepted = None
                if index_in_row and drafts is not None:
                    self.adjustments.use_masks_after(index_in_row)
                    accepted = drafts.accepted(tokens).index_select(0, again)
                self._redraw(whole, rows, positions, again, tokens, resampled.are_adjusted, accepted)
            if raw is not None:
                requested = self.adjustments.requested[rows.index_select(0, wanting).long(), : resampled.num_requested]
                drawn = tokens.index_select(0, wanting).clamp_(min=0)
                parts.append(self._kernels.token_logprobs(raw, drawn, most, requested))
        return LogprobTensors.joined(parts) if parts else None

    def requested_by(self, rows: Int32Array) -> torch.Tensor:
        """[len(rows), m] int64, device: ids of the tokens for which `rows` request log probabilities. m is the largest
        number that one row requests; a row that requests fewer ends with meaningless ids."""
        num_requested = int(self.adjustments.num_requested(rows).max(initial=0))
        return self.adjustments.requested[upload(rows.astype(np.int64), self._group.device), :num_requested]

    def logprobs_of(
        self, logits: torch.Tensor, targets: torch.Tensor, k: int, requested: torch.Tensor
    ) -> LogprobTensors:
        """Log probabilities of given tokens. Only launches kernels. A graph cannot capture it.

        Args:
            logits: [num_rows, span.size] fp32. The call needs about 20 bytes for each entry of the vocabulary and row.
            targets: [num_rows] int64, device: the token of each row.
            k: number of likeliest tokens of each row to return too.
            requested: [num_rows, m] int64, device: ids of further tokens to return.
        """
        return self._kernels.token_logprobs(whole_logits(logits, self._plan, self._group), targets, k, requested)

    def _plain(self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self._kernels.plain_tokens(logits, rows, positions, self.tables.records, self._span.start, self._group)

    def _redraw(
        self,
        whole: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        again: torch.Tensor,
        tokens: torch.Tensor,
        are_adjusted: bool,
        accepted: torch.Tensor | None,
    ) -> None:
        """Samples the rows `again` of the batch from `whole`, their complete rows of logits, and changes `tokens`.

        `accepted`: [len(again)] bool, device: which of the new tokens count for penalties. None counts all.
        """
        kernels, records = self._kernels, self.tables.records
        rows, positions = rows.index_select(0, again), positions.index_select(0, again)
        if are_adjusted:
            self._adjust_logits(whole, rows, positions, records, self.adjustments)
        thresholds = kernels.filter_thresholds(whole, rows, records)
        drawn = kernels.reduce_tokens(kernels.best_candidates(whole, rows, positions, records, 0, thresholds))
        tokens.index_copy_(0, again, drawn)
        if are_adjusted:
            self.adjustments.count(rows.long(), drawn.clamp(min=0), accepted)


def _chunks(ends: list[int]) -> Iterator[tuple[int, slice]]:
    """Slices of at most _CHUNK_ROWS rows with the same index in their request, and that index."""
    for index_in_row, (start, end) in enumerate(pairwise((0, *ends))):
        for first in range(start, end, _CHUNK_ROWS):
            yield index_in_row, slice(first, min(first + _CHUNK_ROWS, end))
