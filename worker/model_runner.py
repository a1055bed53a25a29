"""The steps of a CPU rank: a frame to tokens, synchronously. CUDA ranks have cuda_model_runner.py."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from attention.backend import AttentionBackend
from attention.forward_batch import ForwardBatch
from attention.kv_pool import ReqToTokenPool, TokenToKVPool
from worker.adjustments import RowAdjustments, adjusted
from worker.models.decoder import Decoder
from worker.pending_step import CompletedStep
from worker.prompt_scores import CHUNK_ROWS, TargetScores, WantedTokens, score_in_chunks, target_scores
from worker.protocol import FrameLimits, RowFlag, StepFrame, StepResult
from worker.sampler import SampledTokens, Sampler, default_params


class ModelRunner:
    """Owns the last token, the sampling parameters and the adjustments of every row; reads the page table, writes KV
    through the backend.

    Args:
        limits: frames are checked against them.
    """

    def __init__(
        self,
        decoder: Decoder,
        backend: AttentionBackend,
        req_to_token_pool: ReqToTokenPool,
        token_to_kv_pool: TokenToKVPool,
        limits: FrameLimits,
    ) -> None:
        self._decoder = decoder
        self._backend = backend
        self._req_to_token_pool = req_to_token_pool
        self._token_to_kv_pool = token_to_kv_pool
        self._limits = limits
        self._sampler = Sampler(limits.vocab_size, token_to_kv_pool.device)
        self._params = default_params(limits.num_rows)
        self._adjustments = RowAdjustments(limits.num_rows, limits.vocab_size, token_to_kv_pool.device)
        self._last_tokens = torch.zeros(limits.num_rows, dtype=torch.int64)

    def launch(self, frame: StepFrame) -> CompletedStep:
        """Applies the frame's deltas, runs one forward pass and samples.

        Raises:
            EngineError: the frame does not fit this rank's tables.
        """
        frame.check(self._limits)
        self._req_to_token_pool.apply(frame.page_deltas, self._token_to_kv_pool.num_pages)
        self._params[frame.params["row"]] = frame.params
        self._adjustments.update(frame)
        sampled = (frame.flags & RowFlag.SAMPLE) != 0
        if len(frame.targets) == 0:
            return CompletedStep(self._sampled(frame, sampled, self._forward(frame, sampled)))
        wanted = WantedTokens.of(frame)
        hidden = self._forward(frame, sampled, wanted.tokens)
        scores = self._score(frame, hidden.index_select(0, torch.from_numpy(wanted.scored)))
        result = self._sampled(frame, sampled, hidden.index_select(0, torch.from_numpy(wanted.sampled)))
        scores.put_into(result)
        return CompletedStep(result)

    def _sampled(self, frame: StepFrame, sampled: npt.NDArray[np.bool_], hidden: torch.Tensor) -> StepResult:
        """What the rows that are sampled bring; `hidden` [num_sampled, hidden_size] are their states."""
        if len(hidden) == 0:
            return StepResult(frame.generation, frame.step, tokens=np.empty(0, np.int32))
        rows = frame.rows[sampled]
        # The noise key: the new token's index in its whole sequence, which preemption and recompute do not change.
        positions = (frame.starts + frame.lens)[sampled].astype(np.int64)
        result = self._sample(self._decoder.logits(hidden), rows, positions)
        return StepResult(
            generation=frame.generation,
            step=frame.step,
            tokens=result.tokens.numpy().astype(np.int32),
            logprob_rows=result.logprob_rows,
            logprobs=result.logprobs.numpy(),
            top_ids=result.top_ids.numpy().astype(np.int32),
            top_logprobs=result.top_logprobs.numpy(),
            asked_logprobs=result.asked_logprobs.numpy(),
        )

    def _score(self, frame: StepFrame, hidden: torch.Tensor) -> TargetScores:
        """Scores of the frame's targets, of which `hidden` [num_targets, hidden_size] are the states before."""
        targets, k = torch.from_numpy(frame.targets.astype(np.int64)), int(frame.scores["k"].max())
        return score_in_chunks(
            hidden, targets, CHUNK_ROWS, lambda states, ids: target_scores(self._decoder.logits(states), ids, k)
        )

    def _sample(
        self, logits: torch.Tensor, rows: npt.NDArray[np.int32], positions: npt.NDArray[np.int64]
    ) -> SampledTokens:
        """A token for each of `rows`, kept as their last; and counted where there are penalties."""
        params, adjustments = self._params[rows], self._adjustments
        touched = np.flatnonzero(adjustments.touched(rows, positions)).tolist()
        row_ids = torch.from_numpy(rows.astype(np.int64))
        num_asked = int(adjustments.num_asked(rows).max(initial=0))
        result = self._sampler.sample(
            logits,
            params,
            positions,
            adjusted={i: adjusted(logits[i], adjustments, int(rows[i]), int(positions[i]), params[i]) for i in touched},
            asked=adjustments.asked[row_ids, :num_asked],
        )
        if touched:
            adjustments.count(row_ids, result.tokens)
        self._last_tokens.index_copy_(0, row_ids, result.tokens)
        return result

    def _forward(
        self, frame: StepFrame, sampled: npt.NDArray[np.bool_], wanted: npt.NDArray[np.int64] | None = None
    ) -> torch.Tensor:
        """Hidden states [num_sampled, hidden_size] of the rows that are sampled, or of the `wanted` inputs."""
        batch = ForwardBatch.create(
            req_pool_indices=frame.rows.astype(np.int64),
            prefix_lens=frame.starts.astype(np.int64),
            extend_lens=frame.lens.astype(np.int64),
            input_ids=self._input_ids(frame),
            page_table=self._req_to_token_pool.page_table,
            page_size=self._token_to_kv_pool.page_size,
            sampled=sampled,
        )
        if wanted is not None:
            batch = replace(batch, sample_indices=torch.from_numpy(wanted))
        self._backend.init_forward_metadata(batch)
        return self._decoder.forward(batch, self._backend)

    def _input_ids(self, frame: StepFrame) -> torch.Tensor:
        has_tokens = (frame.flags & RowFlag.HAS_TOKENS) != 0
        if not has_tokens.any():
            return self._last_tokens.index_select(0, torch.from_numpy(frame.rows.astype(np.int64)))
        given = torch.from_numpy(frame.token_ids.astype(np.int64))
        if has_tokens.all():
            return given
        from_frame = torch.from_numpy(np.repeat(has_tokens, frame.lens))
        rows = torch.from_numpy(np.repeat(frame.rows, frame.lens).astype(np.int64))
        return self._last_tokens.index_select(0, rows).masked_scatter_(from_frame, given)
