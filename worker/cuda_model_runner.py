"""The steps of a CUDA rank: a frame is queued on the stream and its tokens are read later.

A step that a captured shape holds, of decodes alone or with prompts, replays a CUDA graph of the whole step; any other
runs eagerly through the same code. Rows with filters, adjustments or logprobs are sampled again behind it, before the
next step reads their tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from attention.backend import AttentionBackend
from attention.forward_batch import ForwardBatch
from attention.kv_pool import ReqToTokenPool, TokenToKVPool
from parallel.group import TensorParallelGroup
from worker.cuda_graph_runner import CudaGraphRunner, StepOutput
from worker.cuda_sampler import CudaSampler, LogprobTensors
from worker.models.decoder import Decoder
from worker.prompt_scores import CHUNK_ROWS, TargetScores, WantedTokens, score_in_chunks
from worker.protocol import FrameLimits, Int32Array, RowFlag, StepFrame, StepResult
from worker.step_inputs import StepInputs
from worker.step_layout import StepShape, decode_shapes, prompt_shapes
from worker.upload import upload


class CudaModelRunner:
    """Owns what a step reads and leaves on the device. One stream, torch's current one, orders everything.

    Args:
        max_rows: most rows of a step.
        max_tokens: most input tokens of a step.
        max_graph_tokens: most input tokens of a captured step with prompts.
        limits: frames are checked against them.
    """

    def __init__(
        self,
        decoder: Decoder,
        backend: AttentionBackend,
        req_to_token_pool: ReqToTokenPool,
        token_to_kv_pool: TokenToKVPool,
        sampler: CudaSampler,
        group: TensorParallelGroup,
        limits: FrameLimits,
        *,
        max_rows: int,
        max_tokens: int,
        max_graph_tokens: int,
    ) -> None:
        self._decoder = decoder
        self._backend = backend
        self._req_to_token_pool = req_to_token_pool
        self._num_pages = token_to_kv_pool.num_pages
        self._sampler = sampler
        self._group = group
        self._limits = limits
        self._max_rows = max_rows
        self._max_graph_tokens = min(max_tokens, max_graph_tokens)
        self._inputs = StepInputs(
            req_to_token_pool,
            max_rows=max_rows + 1,  # with a row for padding
            max_tokens=max_tokens,
            page_size=token_to_kv_pool.page_size,
            device=group.device,
        )
        self._graphs = CudaGraphRunner(group)

    @property
    def table_bytes(self) -> int:
        """Bytes on the device that stay as they are however many pages there are: the rows' adjustments."""
        return self._sampler.adjustments.num_bytes

    def capture(self, *, largest: bool = False, on_progress: Callable[[float], None] | None = None) -> None:
        """Captures steps at every shape of the ladders, or only their `largest`; the KV pool must stay where it is."""
        if self._backend.captures_cuda_graphs:
            prompts = prompt_shapes(self._max_rows, self._max_graph_tokens, self._limits.max_model_len)
            ladders = decode_shapes(self._max_rows), prompts
            shapes = [shape for ladder in ladders for shape in (ladder[-1:] if largest else ladder)]
            nothing = StepFrame(generation=0, step=0)
            # One for all graphs, kept by their outputs: what each had of its own came to 8 GiB (Qwen3-8B at TP 1).
            logits = torch.empty(
                self._max_rows, self._decoder.num_local_logits, dtype=torch.float32, device=self._group.device
            )
            self._graphs.capture(
                lambda shape: self._step(shape, logits[: shape.num_sampled]),
                shapes,
                prepare=lambda shape: self._inputs.upload(nothing, shape),
                on_progress=on_progress,
            )

    def launch(self, frame: StepFrame) -> CudaStep:
        """Queues the step.

        Raises:
            EngineError: the frame does not fit this rank's tables.
        """
        frame.check(self._limits)
        self._req_to_token_pool.apply(frame.page_deltas, self._num_pages)
        self._sampler.update(frame)
        is_sampled = (frame.flags & RowFlag.SAMPLE) != 0
        step, sampled = StepShape.of(frame), frame.rows[is_sampled]
        shape = None if len(frame.targets) else self._graphs.smallest(step)
        self._inputs.upload(frame, shape or step)
        scores = None
        if shape is not None:
            output = self._graphs.replay(shape)
            output = StepOutput(output.tokens[: len(sampled)], output.logits[: len(sampled)])
        else:
            batch = self._inputs.batch(frame, step)
            if len(frame.targets):
                hidden, scores = self._forward_and_score(frame, batch)
            else:
                hidden = self._forward(batch)
            if len(sampled):
                output = self._sample(hidden, step)
        if len(sampled) == 0:
            return CudaStep.record(self._group, frame, None, sampled, None, scores)
        chosen = self._sampler.choose(sampled, (frame.starts + frame.lens)[is_sampled])
        logprobs = None
        if len(chosen.which):
            rows, positions = self._inputs.sampled_rows(step)
            logprobs = self._sampler.resample(output.logits, rows, positions, output.tokens, chosen)
            self._inputs.last_tokens.index_copy_(0, rows.long(), output.tokens)
        asked = chosen.which[chosen.num_logprobs >= 0].astype(np.int32)
        return CudaStep.record(self._group, frame, output.tokens, asked, logprobs, scores)

    def _step(self, shape: StepShape, logits: torch.Tensor) -> StepOutput:
        """A step of that shape over static buffers, its logits among them: what a graph captures."""
        return self._sample(self._forward(self._inputs.graph_batch(shape)), shape, logits)

    def _forward(self, batch: ForwardBatch) -> torch.Tensor:
        self._backend.init_forward_metadata(batch)
        return self._decoder.forward(batch, self._backend)

    def _forward_and_score(self, frame: StepFrame, batch: ForwardBatch) -> tuple[torch.Tensor, TargetScores]:
        """Hidden states of the rows that are sampled, and scores of the frame's targets."""
        wanted, device = WantedTokens.of(frame), self._group.device
        hidden = self._forward(replace(batch, sample_indices=upload(wanted.tokens, device)))
        scored = hidden.index_select(0, upload(wanted.scored, device))
        targets, k = upload(frame.targets.astype(np.int64), device), int(frame.scores["k"].max())
        scores = score_in_chunks(
            scored,
            targets,
            min(CHUNK_ROWS, self._max_rows),
            lambda states, ids: self._sampler.score(self._decoder.local_logits(states), ids, k),
        )
        return hidden.index_select(0, upload(wanted.sampled, device)), scores

    def _sample(self, hidden: torch.Tensor, shape: StepShape, out: torch.Tensor | None = None) -> StepOutput:
        """The plain rule for every sampled row. The noise key is the new token's index in its whole sequence, which is
        how many tokens the row has now.

        Args:
            out: for the logits, [num_sampled, columns of this rank] fp32. None: a new tensor.
        """
        rows, positions = self._inputs.sampled_rows(shape)
        logits = self._decoder.local_logits(hidden, out)
        tokens = self._sampler.sample(logits, rows, positions)
        self._inputs.last_tokens.index_copy_(0, rows.long(), tokens)
        return StepOutput(tokens, logits)


class CudaStep:
    """A queued step and the copies of its results to pinned memory."""

    def __init__(
        self,
        group: TensorParallelGroup,
        frame: StepFrame,
        tokens: torch.Tensor | None,
        logprob_rows: Int32Array,
        logprobs: LogprobTensors | None,
        scores: TargetScores | None,
        done: Any,
    ) -> None:
        self._group = group
        self._frame = frame
        self._tokens = tokens
        self._logprob_rows = logprob_rows
        self._logprobs = logprobs
        self._scores = scores
        self._done = done

    @classmethod
    def record(
        cls,
        group: TensorParallelGroup,
        frame: StepFrame,
        tokens: torch.Tensor | None,
        logprob_rows: Int32Array,
        logprobs: LogprobTensors | None,
        scores: TargetScores | None,
    ) -> CudaStep:
        """Queues the copies and the event behind them.

        Args:
            tokens: [num_sampled] int64, device; None when no row was sampled.
            logprob_rows: indices of the sampled rows that asked for logprobs.
            scores: of the frame's targets; None when it has none.
        """
        # A non-blocking copy to the host lands in pinned memory, which the event says is filled.
        on_host = None if tokens is None else tokens.to("cpu", non_blocking=True)
        copied = None
        if logprobs is not None:
            copied = LogprobTensors(*(part.to("cpu", non_blocking=True) for part in logprobs))
        host_scores = None if scores is None else scores.to_host()
        done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch does not annotate it
        done.record()
        return cls(group, frame, on_host, logprob_rows, copied, host_scores, done)

    def is_done(self) -> bool:
        return bool(self._done.query())

    def result(self) -> StepResult:
        self._done.synchronize()
        # A sum whose wait was ended goes on with what there is: those tokens must not get out.
        self._group.check_alive()
        result = self._sampled()
        if self._scores is not None:
            self._scores.put_into(result)
        return result

    def _sampled(self) -> StepResult:
        frame = self._frame
        if self._tokens is None:
            return StepResult(frame.generation, frame.step, tokens=np.empty(0, np.int32))
        tokens = self._tokens.numpy().astype(np.int32)
        if self._logprobs is None:
            return StepResult(frame.generation, frame.step, tokens=tokens)
        return StepResult(
            generation=frame.generation,
            step=frame.step,
            tokens=tokens,
            logprob_rows=self._logprob_rows,
            logprobs=self._logprobs.logprobs.numpy(),
            top_ids=self._logprobs.top_ids.numpy().astype(np.int32),
            top_logprobs=self._logprobs.top_logprobs.numpy(),
            asked_logprobs=self._logprobs.asked_logprobs.numpy(),
        )
