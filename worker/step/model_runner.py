"""The steps of one rank: `launch` starts a frame's step, and its tokens are read when they are available.

On CUDA all work is queued on the stream. If a captured shape holds the step, of decodes alone or with prompts, a CUDA
graph of the whole step is replayed. Any other step, and every step of a backend without capture, runs eagerly through
the same code. Rows with filters, adjustments or logprobs are sampled again by kernels that are queued after the step's
own and before the next step reads their tokens.
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
from attention.state_pool import StatePool
from attention.step_shape import StepShape
from configs.errors import EngineError
from parallel.collectives.group import TensorParallelGroup
from worker.frame_checks import FrameLimits, check_frame
from worker.models.decoder import Decoder
from worker.protocol import StepFrame
from worker.sampling.sampler import Sampler
from worker.step.cuda_graph_runner import CudaGraphRunner, DeviceOutput
from worker.step.draft_passes import DraftPasses
from worker.step.pending_step import PendingStep
from worker.step.preparing import preparing
from worker.step.resampling import Resampling
from worker.step.scoring import Scoring
from worker.step.step import Extra, Step, StepOutput
from worker.step.step_inputs import StepInputs
from worker.step.step_layout import decode_shapes, prompt_shapes

_log = logging.getLogger(__name__)


class ModelRunner:
    """Owns what a step reads and writes on the device. On CUDA one stream, torch's current one, orders all work.

    Args:
        limits: every frame is checked against them.
        max_rows: maximum number of rows of a step.
        max_tokens: maximum number of input tokens of a step.
        max_sampled: maximum number of sampled inputs of a step, at least `max_rows`.
        max_graph_tokens: maximum number of input tokens of a captured step with prompts.
        state_pool: states of the model's recurrent layers. None if it has none.
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
        state_pool: StatePool | None = None,
    ) -> None:
        self._decoder = decoder
        self._backend = backend
        self._req_to_token_pool = req_to_token_pool
        self.token_to_kv_pool = token_to_kv_pool
        """The pool to which steps write."""
        self.state_pool = state_pool
        self._num_pages, self._num_window_pages = token_to_kv_pool.num_pages, token_to_kv_pool.num_window_pages
        self._sampler = sampler
        self._group = group
        self._limits = limits
        self._max_rows, self._max_sampled = max_rows, max_sampled
        self._max_graph_tokens = min(max_tokens, max_graph_tokens)
        self._inputs = StepInputs(
            req_to_token_pool,
            max_rows=max_rows + 1,  # one more row, for padding
            max_tokens=max_tokens,
            page_size=token_to_kv_pool.page_size,
            max_sampled=max_sampled,
            num_drafts=0 if decoder.draft_model is None else limits.max_samples - 1,
            state_pool=state_pool,
        )
        self._graphs = CudaGraphRunner(group)
        # All graphs write their logits and the draft head's input here.
        self._logits: torch.Tensor | None = None
        self._head_inputs: torch.Tensor | None = None
        self._draft_passes = DraftPasses(
            decoder,
            backend,
            self._inputs,
            sampler,
            self._graphs,
            num_rows=max_rows + 1,
            num_sampled=max_sampled,
            num_drafts=limits.max_samples - 1,
        )
        self._scoring = Scoring(decoder, sampler, max_rows)
        self._extras: tuple[Extra, ...] = (Resampling(sampler, self._inputs), self._draft_passes)
        nothing = torch.empty(0, dtype=torch.int64, device=group.device)
        self._nothing = DeviceOutput(nothing, nothing.float())  # output of a step that samples no row

    @property
    def table_bytes(self) -> int:
        """Bytes on the device that do not depend on the number of pages: the rows' adjustments and recurrent states."""
        states = 0 if self.state_pool is None else self.state_pool.num_bytes
        return self._sampler.adjustments.num_bytes + states

    def capture(self, which: Literal["all", "largest", "none"] = "all") -> None:
        """Captures steps at shapes of the ladders. The KV pool must not move afterwards.

        Does nothing if the backend cannot be captured.

        Args:
            which: shapes to capture now: all, none, or the largest of each ladder, since smaller graphs use their
                memory too. Other shapes are captured by `capture_next`, or when a second step has their shape.
        """
        backend, max_model_len = self._backend, self._limits.max_model_len
        if not backend.captures_cuda_graphs:
            return
        ladders = (
            decode_shapes(self._max_rows),
            prompt_shapes(self._max_rows, self._max_graph_tokens, max_model_len, self._max_sampled),
        )
        shapes = [it for ladder in ladders for shape in ladder for it in backend.capture_shapes(shape, max_model_len)]
        # All graphs write their logits to one buffer. Separate buffers took 8 GiB (Qwen3-8B at TP 1).
        self._logits = torch.empty(
            self._max_sampled, self._decoder.num_local_logits, dtype=torch.float32, device=self._group.device
        )
        self._head_inputs = self._draft_passes.new_head_inputs(max((shape.num_tokens for shape in shapes), default=0))
        self._graphs.offer(shapes)
        self._draft_passes.use_graphs(self._head_inputs, self._logits)
        if which != "none":
            captured = shapes if which == "all" else self._graphs.largest
            self._graphs.capture(self._step, captured, prepare=self._prepare)
            self._draft_passes.capture(captured)

    def capture_next(self) -> int:
        """Captures one missing shape of the ladders, between two steps. Returns how many are still missing."""
        missing = self._graphs.missing
        if missing:
            self._capture_one(missing.pop(0))
            if not missing:
                _log.info("rank %d: all CUDA graphs are captured", self._group.rank)
        return len(missing)

    def close(self) -> None:
        """Drops the graphs. Everything else is freed with this object."""
        self._graphs.close()

    def hidden_of(self, frame: StepFrame) -> torch.Tensor:
        """Hidden states [num_tokens, hidden_size] of all inputs of a step. Runs eagerly and samples nothing."""
        step = Step.of(frame)
        self._inputs.upload(step, step.shape)
        batch = self._inputs.batch(step)
        every = torch.arange(batch.num_tokens, device=self._group.device)
        return self._forward(replace(batch, sample_indices=every))

    def launch(self, frame: StepFrame) -> PendingStep:
        """Starts the step. The next one may be launched before this result is read.

        Raises:
            EngineError: the frame does not fit this rank's tables. Nothing has changed then.
        """
        step = Step.of(frame)
        self._check(step)
        graph = self._graph_for(step)
        step = self._upload(step, graph)
        output = self._run(step) if graph is None else self._replay(step, graph)
        for extra in self._extras:
            if extra.is_needed(step):
                extra.add(step, output)
        return PendingStep(self._group, step, output)

    def _check(self, step: Step) -> None:
        """Raises EngineError if the frame does not fit this rank's tables."""
        frame = step.frame
        check_frame(frame, self._limits)
        self._req_to_token_pool.check(frame.page_deltas, self._num_pages)
        self._req_to_token_pool.check_window_pages(frame.window_pages, self._num_window_pages)
        if self.state_pool is not None:
            self.state_pool.check(frame.state_copies)
        wrong = None
        if step.shape.num_sampled > self._max_sampled:
            wrong = f"samples {step.shape.num_sampled} inputs, and at most {self._max_sampled} fit"
        elif self._decoder.draft_model is None and (step.samples_per_row[~frame.has_tokens] > 1).any():
            wrong = "verifies drafts of the ranks, and this rank has no draft head"
        if wrong is not None:
            raise EngineError(f"step {frame.step} {wrong}; please report this bug")

    def _graph_for(self, step: Step) -> StepShape | None:
        """The shape of the graph to replay for the step, captured here if it is due. None if the step runs eagerly."""
        shape = None if step.is_scored else self._graphs.smallest(step.shape)
        if shape is None or self._graphs.is_captured(shape):
            return shape
        if not self._graphs.is_due(shape):
            return None
        self._capture_one(shape)
        return shape

    def _upload(self, step: Step, graph: StepShape | None) -> Step:
        """Queues the copy of the step's inputs and parameters, padded to the shape `graph` if it is given.

        Returns:
            The step. For eager steps, and for backends that plan on the host, its starts are read back from the device.
            Otherwise they are the frame's starts, which may be too high for rows with unverified drafts. Only masks and
            biases with an end read them, and rows with these have exact starts.
        """
        if graph is None or self._backend.plans_on_host:
            step = self._inputs.with_device_starts(step)
        self._draft_passes.prepare(step)
        if self.state_pool is not None:
            self.state_pool.copy(step.frame.state_copies)
        self._inputs.upload(step, graph or step.shape)
        self._sampler.update(step.frame)
        return step

    def _replay(self, step: Step, graph: StepShape) -> StepOutput:
        """Runs the step by replaying a captured graph."""
        self._backend.prepare_replay(graph, step.frame.starts, step.frame.lens)
        padded, num_sampled = self._graphs.replay(graph), len(step.sampled)
        step.resampled = self._sampler.find_resampled(step.sampled_rows, step.sampled_positions)
        return StepOutput(padded.tokens[:num_sampled], padded.logits[:num_sampled], graph, self._head_inputs)

    def _run(self, step: Step) -> StepOutput:
        """Runs the step eagerly."""
        batch, prompt_logprobs = self._inputs.batch(step), None
        head_inputs = self._draft_passes.new_head_inputs(step.shape.num_tokens)
        if step.is_scored:
            hidden, prompt_logprobs = self._scoring.run(step, batch, lambda batch: self._forward(batch, head_inputs))
        else:
            hidden = self._forward(batch, head_inputs)
        plain = self._nothing
        if len(step.sampled):
            step.resampled = resampled = self._sampler.find_resampled(step.sampled_rows, step.sampled_positions)
            plain = self._sample(hidden, step.shape, left_out=resampled.indices[resampled.is_redrawn])
        return StepOutput(plain.tokens, plain.logits, None, head_inputs, prompt_logprobs=prompt_logprobs)

    def _forward(self, batch: ForwardBatch, head_inputs: torch.Tensor | None = None) -> torch.Tensor:
        self._backend.init_forward_metadata(batch)
        return self._decoder.forward(batch, self._backend, head_inputs)

    def _sample(
        self,
        hidden: torch.Tensor,
        shape: StepShape,
        *,
        out: torch.Tensor | None = None,
        left_out: npt.NDArray[np.int64] | None = None,
    ) -> DeviceOutput:
        """Samples every row by the plain rule. The noise key is the new token's index in its whole sequence, which
        equals the row's current number of tokens. Preemption and recompute do not change it.

        Args:
            out: buffer for the logits, [num_sampled, columns of this rank] fp32. If None, a new tensor is made.
            left_out: indices of sampled rows that will be sampled again anyway.
        """
        rows, positions = self._inputs.sampled_rows(shape)
        logits = self._decoder.local_logits(hidden, out)
        tokens = self._sampler.sample(logits, rows, positions, left_out)
        self._inputs.take(rows.long(), tokens, positions)
        return DeviceOutput(tokens, logits)

    def _capture_one(self, shape: StepShape) -> None:
        with preparing():
            self._graphs.capture_one(self._step, shape, prepare=self._prepare)
            self._draft_passes.capture([shape])

    def _prepare(self, shape: StepShape) -> None:
        self._inputs.upload(Step.of(StepFrame(generation=0, step=0)), shape)

    def _step(self, shape: StepShape) -> DeviceOutput:
        """Runs a step of that shape over static buffers, which include its logits. A graph captures this function."""
        assert self._logits is not None, "a step was captured before `capture`"
        logits = self._logits[: shape.num_sampled]
        batch = self._inputs.graph_batch(shape)
        self._backend.prepare_capture(batch, shape)
        head_inputs = None if self._head_inputs is None else self._head_inputs[: shape.num_tokens]
        output = self._sample(self._decoder.forward(batch, self._backend, head_inputs), shape, out=logits)
        return replace(output, tokens=self._draft_passes.leave(output.tokens))
