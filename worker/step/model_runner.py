"""The steps of one rank: a frame is launched, and its tokens are read when they are there.

On CUDA all is queued on the stream. A step that a captured shape holds, of decodes alone or with prompts, replays a
CUDA graph of the whole step; any other, and every step where the backend captures nothing, runs eagerly through the
same code. Rows with filters, adjustments or logprobs are looked at again behind it, before the next step reads their
tokens.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from attention.backend import AttentionBackend
from attention.forward_batch import ForwardBatch
from attention.kv_pool import ReqToTokenPool, TokenToKVPool
from attention.step_shape import StepShape
from configs.errors import EngineError
from parallel.collectives.group import TensorParallelGroup
from worker.models.decoder import Decoder
from worker.protocol import FrameLimits, StepFrame
from worker.sampling.drafts import StepDrafts
from worker.sampling.logprobs import LogprobTensors
from worker.sampling.sampler import Sampler
from worker.step.cuda_graph_runner import CudaGraphRunner, DeviceOutput
from worker.step.draft_passes import DraftPasses
from worker.step.items import Items
from worker.step.pending_step import PendingStep
from worker.step.preparing import preparing
from worker.step.prompt_logprobs import CHUNK_ROWS, WantedTokens
from worker.step.step_inputs import StepInputs
from worker.step.step_layout import decode_shapes, prompt_shapes, sampled_inputs, shape_of
from worker.upload import upload

_log = logging.getLogger(__name__)


class ModelRunner:
    """Owns what a step reads and leaves on the device. On CUDA one stream, torch's current one, orders everything.

    Args:
        limits: frames are checked against them.
        max_rows: most rows of a step.
        max_tokens: most input tokens of a step.
        max_sampled: most sampled inputs of a step, no fewer than `max_rows`.
        max_graph_tokens: most input tokens of a captured step with prompts.
    """

    def __init__(
        self,
        decoder: Decoder,
        backend: AttentionBackend,
        req_to_token_pool: ReqToTokenPool,
        token_to_kv_pool: TokenToKVPool,
        sampler: Sampler,
        group: TensorParallelGroup,
        limits: FrameLimits,
        *,
        max_rows: int,
        max_tokens: int,
        max_sampled: int,
        max_graph_tokens: int,
    ) -> None:
        self._decoder = decoder
        self._backend = backend
        self._req_to_token_pool = req_to_token_pool
        self.token_to_kv_pool = token_to_kv_pool
        """The pool that steps write to."""
        self._num_pages, self._num_window_pages = token_to_kv_pool.num_pages, token_to_kv_pool.num_window_pages
        self._sampler = sampler
        self._group = group
        self._limits = limits
        self._max_rows, self._max_sampled = max_rows, max_sampled
        self._max_graph_tokens = min(max_tokens, max_graph_tokens)
        self._inputs = StepInputs(
            req_to_token_pool,
            max_rows=max_rows + 1,  # with a row for padding
            max_tokens=max_tokens,
            page_size=token_to_kv_pool.page_size,
            max_sampled=max_sampled,
            num_drafts=0 if decoder.draft_model is None else limits.max_draws - 1,
        )
        self._graphs = CudaGraphRunner(group)
        # All graphs write theirs here, and what the draft head reads.
        self._logits: torch.Tensor | None = None
        self._states: torch.Tensor | None = None
        self._draft_passes = DraftPasses(
            decoder,
            backend,
            self._inputs,
            sampler,
            self._graphs,
            num_rows=max_rows + 1,
            num_sampled=max_sampled,
            num_drafts=limits.max_draws - 1,
        )

    @property
    def table_bytes(self) -> int:
        """Bytes on the device that stay as they are however many pages there are: the rows' adjustments."""
        return self._sampler.adjustments.num_bytes

    def capture(self, which: Literal["all", "largest", "none"] = "all") -> None:
        """Captures steps at shapes of the ladders; the KV pool must stay where it is.

        Does nothing where the backend cannot be captured.

        Args:
            which: shapes captured now: all, or the largest of each ladder, in whose memory those of the others find
                room. Each of the rest is captured by `capture_next`, or when a step of its shape comes for the second
                time.
        """
        backend, max_model_len = self._backend, self._limits.max_model_len
        if not backend.captures_cuda_graphs:
            return
        ladders = (
            decode_shapes(self._max_rows),
            prompt_shapes(self._max_rows, self._max_graph_tokens, max_model_len, self._max_sampled),
        )
        shapes = [it for ladder in ladders for shape in ladder for it in backend.capture_shapes(shape, max_model_len)]
        # One for all graphs, kept by their outputs: what each had of its own came to 8 GiB (Qwen3-8B at TP 1).
        self._logits = torch.empty(
            self._max_sampled, self._decoder.num_local_logits, dtype=torch.float32, device=self._group.device
        )
        self._states = self._draft_passes.new_states(max((shape.num_tokens for shape in shapes), default=0))
        self._graphs.offer(shapes)
        self._draft_passes.use_graphs(self._states, self._logits)
        if which != "none":
            captured = shapes if which == "all" else self._graphs.largest
            self._graphs.capture(self._step, captured, prepare=self._prepare)
            self._draft_passes.capture(captured)

    def capture_next(self) -> int:
        """Captures one shape of the ladders that is missing, between two steps; returns how many are missing then."""
        missing = self._graphs.missing
        if missing:
            self._capture_one(missing.pop(0))
            if not missing:
                _log.info("rank %d: all CUDA graphs are captured", self._group.rank)
        return len(missing)

    def close(self) -> None:
        """Drops the graphs; the rest goes with this object."""
        self._graphs.close()

    def hidden_of(self, frame: StepFrame) -> torch.Tensor:
        """Hidden states [num_tokens, hidden_size] of all inputs of a step, which runs eagerly and samples nothing."""
        shape = shape_of(frame)
        self._inputs.upload(frame, shape)
        batch = self._inputs.batch(frame, shape)
        every = torch.arange(batch.num_tokens, device=self._group.device)
        return self._forward(replace(batch, sample_indices=every))

    def launch(self, frame: StepFrame) -> PendingStep:
        """Starts the step; the next one may be launched before its result is taken.

        Raises:
            EngineError: the frame does not fit this rank's tables. Nothing has changed then.
        """
        frame.check(self._limits)
        self._req_to_token_pool.check(frame.page_deltas, self._num_pages)
        self._req_to_token_pool.check_places(frame.window_pages, self._num_window_pages)
        which, num_after = sampled_inputs(frame)
        step, sampled = shape_of(frame), frame.rows[which]
        lacks_drafts = self._decoder.draft_model is None and (frame.draws[~frame.has_tokens] > 1).any()
        if step.num_sampled > self._max_sampled or lacks_drafts:
            raise EngineError(
                f"step {frame.step} samples {step.num_sampled} inputs, at most {self._max_sampled}, or drafts that it "
                "does not bring"
            )
        shape = None if len(frame.prompt_targets) or len(frame.items) else self._graph_for(step)
        if shape is None or self._backend.plans_on_host:
            frame = self._inputs.placed(frame)
            step = shape_of(frame)
        self._draft_passes.prepare(frame)
        self._inputs.upload(frame, shape or step)
        self._sampler.update(frame)
        hidden, prompt_logprobs, states = None, None, self._states
        if shape is not None:
            self._backend.prepare_replay(shape, frame.starts, frame.lens)
            output = self._graphs.replay(shape)
            output = DeviceOutput(output.tokens[: len(sampled)], output.logits[: len(sampled)])
        else:
            states = self._draft_passes.new_states(step.num_tokens)
            hidden, prompt_logprobs = self._forward_with_logprobs(frame, self._inputs.batch(frame, step), states)
        if len(sampled) == 0:
            self._draft_passes.run(frame, shape, states, torch.empty(0, dtype=torch.int64, device=self._group.device))
            return PendingStep(self._group, frame, None, sampled, None, prompt_logprobs)
        resampled = self._sampler.find_resampled(sampled, (frame.starts + frame.lens)[which] - num_after)
        if hidden is not None:
            output = self._sample(hidden, step, left_out=resampled.indices[resampled.is_redrawn])
        logprobs, kept = None, None
        drafts = StepDrafts.of(frame, self._inputs.inputs_after_samples(step)) if len(frame.num_draws) else None
        if len(resampled.indices) or drafts is not None:
            rows, positions = self._inputs.sampled_rows(step)
            if len(resampled.indices):
                logprobs = self._sampler.resample(output.logits, rows, positions, output.tokens, resampled, drafts)
            rows = rows.long()
            if drafts is not None:
                kept = drafts.kept(output.tokens)
                # Its logprobs are in this order too.
                resampled, _ = resampled.by_place(drafts)
                rows = rows * drafts.lasts(output.tokens, kept)  # row 0, which is padding, takes the others
            self._inputs.take(rows, output.tokens, positions)
        asked = resampled.indices[resampled.num_logprobs >= 0].astype(np.int32)
        new = self._draft_passes.run(frame, shape, states, output.tokens, kept)
        if new is not None:
            self._inputs.take_drafts(upload(frame.rows[frame.draws > 0].astype(np.int64), self._group.device), new)
        return PendingStep(self._group, frame, output.tokens, asked, logprobs, prompt_logprobs, kept, new)

    def _graph_for(self, step: StepShape) -> StepShape | None:
        """The shape of the graph that is replayed for `step`, captured here if that is due; None: it runs eagerly."""
        shape = self._graphs.smallest(step)
        if shape is None or self._graphs.is_captured(shape):
            return shape
        if not self._graphs.is_due(shape):
            return None
        self._capture_one(shape)
        return shape

    def _capture_one(self, shape: StepShape) -> None:
        with preparing():
            self._graphs.capture_one(self._step, shape, prepare=self._prepare)
            self._draft_passes.capture([shape])

    def _prepare(self, shape: StepShape) -> None:
        self._inputs.upload(StepFrame(generation=0, step=0), shape)

    def _step(self, shape: StepShape) -> DeviceOutput:
        """A step of that shape over static buffers, its logits among them: what a graph captures."""
        assert self._logits is not None, "a graph's step before capture"
        logits = self._logits[: shape.num_sampled]
        batch = self._inputs.graph_batch(shape)
        self._backend.prepare_capture(batch, shape)
        states = None if self._states is None else self._states[: shape.num_tokens]
        output = self._sample(self._decoder.forward(batch, self._backend, states), shape, out=logits)
        return replace(output, tokens=self._draft_passes.leave(output.tokens))

    def _forward(self, batch: ForwardBatch, states: torch.Tensor | None = None) -> torch.Tensor:
        self._backend.init_forward_metadata(batch)
        return self._decoder.forward(batch, self._backend, states)

    def _forward_with_logprobs(
        self, frame: StepFrame, batch: ForwardBatch, states: torch.Tensor | None
    ) -> tuple[torch.Tensor, LogprobTensors | None]:
        """Hidden states of the rows that are sampled, and log probabilities: of the frame's prompt targets, and then
        of what its items' rows asked for."""
        num_targets, num_items = len(frame.prompt_targets), len(frame.items)
        if num_targets + num_items == 0:
            return self._forward(batch, states), None
        items, device = Items.of(frame), self._group.device
        if num_items:
            batch = items.seen_in(batch)
        wanted = WantedTokens.of(frame, items.lasts)
        hidden = self._forward(replace(batch, sample_indices=upload(wanted.tokens, device)), states)
        scored = hidden.index_select(0, upload(wanted.scored, device))
        # An item has no one token as its target.
        targets = upload(np.concatenate((frame.prompt_targets, np.zeros(num_items, np.int64))), device)
        asked = self._sampler.asked_by(np.concatenate((np.zeros(num_targets, np.int32), frame.items["row"])))
        k = int(frame.prompt_runs["k"].max(initial=0))
        num_rows = min(CHUNK_ROWS, self._max_rows)  # whole rows of logits: no more than a decode has
        chunks = [
            self._sampler.logprobs_of(self._decoder.local_logits(states), ids, k, asked_ids)
            for states, ids, asked_ids in zip(
                *(torch.split(rows, num_rows) for rows in (scored, targets, asked)), strict=True
            )
        ]
        return hidden.index_select(0, upload(wanted.sampled, device)), LogprobTensors.joined(chunks)

    def _sample(
        self,
        hidden: torch.Tensor,
        shape: StepShape,
        *,
        out: torch.Tensor | None = None,
        left_out: npt.NDArray[np.int64] | None = None,
    ) -> DeviceOutput:
        """The plain rule for every sampled row. The noise key is the new token's index in its whole sequence, which is
        how many tokens the row has now, and which preemption and recompute do not change.

        Args:
            out: for the logits, [num_sampled, columns of this rank] fp32. None: a new tensor.
            left_out: indices of sampled rows that are redrawn anyway.
        """
        rows, positions = self._inputs.sampled_rows(shape)
        logits = self._decoder.local_logits(hidden, out)
        tokens = self._sampler.sample(logits, rows, positions, left_out)
        self._inputs.take(rows.long(), tokens, positions)
        return DeviceOutput(tokens, logits)
