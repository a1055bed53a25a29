"""The draft head's passes after a step: one over all tokens of the step, and one for each draft after the first.

The first pass stores the head's keys and values in the pages that hold the model's. The head needs the token after each
input: the next input, or the sampled token. After a chunk that is not the last, this rank does not know the next token.
After a page of a shared prefix, requests differ in it. In both cases the head reads a wrong token. This makes drafts
worse, but no answer depends on drafts.

If the backend plans nothing for decodes on the host, passes are CUDA graphs, and the host neither copies nor waits
between them. The first pass has its own graph of the step's shape, since rows with filters or adjustments have their
final tokens only after the step's graph. The first pass is eager after eager steps, and after prompts, which take
longer to run than to launch. Each pass after the first replays one graph, which first advances every row.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F

from attention.backend import AttentionBackend
from attention.forward_batch import ForwardBatch
from attention.step_shape import FEW_ROWS, StepShape
from worker.models.decoder import Decoder
from worker.models.draft_head import DraftModel
from worker.protocol import Int32Array, RowFlag, StepFrame
from worker.sampling.sampler import Sampler
from worker.step.cuda_graph_runner import CudaGraphRunner
from worker.step.preparing import preparing
from worker.step.step import Step, StepOutput
from worker.step.step_inputs import StepInputs
from worker.upload import upload

_FEW_TOKENS = 2 * FEW_ROWS  # larger shapes that sample less than half of their tokens are for prompts
# Names of graphs: of first passes, of first passes that only store keys and values, and of passes after the first.
_FIRST, _READ, _NEXT = "first", "read", "next"


class DraftPasses:
    """Makes the drafts that frames request, if there is a draft head. Queues all work on the step's stream.

    Args:
        graphs: also holds the graphs of steps.
        num_rows: maximum number of rows of a step, padding included.
        num_sampled: maximum number of sampled inputs of a step.
        num_drafts: maximum number of drafts of a row.
    """

    def __init__(
        self,
        decoder: Decoder,
        backend: AttentionBackend,
        inputs: StepInputs,
        sampler: Sampler,
        graphs: CudaGraphRunner,
        *,
        num_rows: int,
        num_sampled: int,
        num_drafts: int,
    ) -> None:
        self._decoder = decoder
        self._backend = backend
        self._inputs = inputs
        self._sampler = sampler
        self._graphs = graphs
        self._num_drafts = num_drafts
        # Buffers of graphs: the head's input from captured steps, and logits. If None, all passes are eager.
        self._head_inputs: torch.Tensor | None = None
        self._logits: torch.Tensor | None = None
        head_inputs, device = self.new_head_inputs(num_rows), decoder.device
        self._tokens = torch.zeros(num_sampled, dtype=torch.int64, device=device)
        # Per row of the step: how many sampled inputs do not count, the last pass's draft and hidden state, and the
        # last position that a pass may use.
        self._num_dropped = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self._ids = torch.zeros(num_rows, dtype=torch.int64, device=device)
        width = 0 if head_inputs is None else head_inputs.shape[2]
        self._hidden = torch.zeros(num_rows, width, dtype=decoder.dtype, device=device)
        self._lasts = torch.zeros(num_rows, dtype=torch.int32, device=device)

    def new_head_inputs(self, num_tokens: int) -> torch.Tensor | None:
        """An empty buffer for the head's input for `num_tokens` tokens. None without a draft head."""
        head = self._decoder.draft_model
        return None if head is None else head.empty_head_inputs(num_tokens)

    def use_graphs(self, head_inputs: torch.Tensor | None, logits: torch.Tensor) -> None:
        """Enables the capture of passes, if the backend allows it.

        Args:
            head_inputs: the buffer from `new_head_inputs` that captured steps fill. None without a draft head.
            logits: [num_rows or more, columns of this rank] fp32, which passes may overwrite.
        """
        if not self._backend.plans_on_host:
            self._head_inputs, self._logits = head_inputs, logits

    def leave(self, tokens: torch.Tensor) -> torch.Tensor:
        """Copies `tokens` [num_sampled] int64 of a captured step to where the graph of its first pass reads them."""
        return tokens if self._head_inputs is None else self._tokens[: len(tokens)].copy_(tokens)

    def capture(self, shapes: Sequence[StepShape]) -> None:
        """Captures the passes that may follow captured steps of `shapes`."""
        for shape in sorted(shapes, reverse=True) if self._head_inputs is not None else ():
            if shape.num_tokens <= max(2 * shape.num_sampled, _FEW_TOKENS):
                self._capture(_FIRST, shape)
            if shape.is_decode:
                self._capture(_READ, shape)
                if self._num_drafts > 1:
                    self._capture(_NEXT, shape)

    def prepare(self, step: Step) -> None:
        """Captures the passes that the step needs after its first pass, before the step is uploaded."""
        if self._head_inputs is not None and step.frame.num_wanted.max(initial=0) > 1:
            shape = self._rows_of(step.frame)
            if not self._graphs.has_pass(_NEXT, shape):
                with preparing():
                    self._capture(_NEXT, shape)

    def is_needed(self, step: Step) -> bool:
        """Whether there is a draft head and it reads the step's tokens."""
        return self._decoder.draft_model is not None and step.makes_drafts

    def add(self, step: Step, output: StepOutput) -> None:
        """Makes the requested number of drafts of the tokens after each sampled row's last one, and stores them for the
        next step. The step must be the last one uploaded, and its tokens final."""
        frame, captured, head_inputs = step.frame, output.captured, output.head_inputs
        assert head_inputs is not None, "a step with a draft head has its inputs"
        is_sampled, wanted = step.samples_per_row > 0, np.zeros(len(frame.rows), np.int32)
        if len(frame.num_wanted):
            wanted[is_sampled] = frame.num_wanted
        most = int(wanted.max())
        self._num_dropped.zero_()
        if output.accepted is not None:
            self._num_dropped.index_add_(0, self._inputs.rows_of_samples(step.shape), (~output.accepted).int())
        names = (_FIRST,) if most else (_READ, _FIRST)
        name = next((it for it in names if captured is not None and self._graphs.has_pass(it, captured)), None)
        if captured is not None and name is not None:
            self._graphs.replay_pass(name, captured)
        else:
            self._inputs.restore_starts(captured or step.shape)
            batch = self._inputs.batch(step, of_draft_head=True)
            self._backend.init_forward_metadata(batch)
            self._first(batch, _following(batch, output.tokens, batch.sample_indices), head_inputs, predicts=most > 0)
        if not most:
            return
        drafts = torch.stack([self._ids[: len(wanted)].clone(), *self._more(frame, wanted)], 1)
        if not is_sampled.all():
            drafts = drafts.index_select(0, upload(np.flatnonzero(is_sampled), drafts.device))
        output.drafts = drafts
        self._inputs.take_drafts(upload(frame.rows[is_sampled].astype(np.int64), drafts.device), drafts)

    def _more(self, frame: StepFrame, wanted: Int32Array) -> Iterator[torch.Tensor]:
        """Yields the drafts, [num_rows] int64, of each pass after the first. Rows that want fewer drafts get
        meaningless ones."""
        num_rows, most = len(wanted), int(wanted.max())
        if most == 1:
            return
        # A row that wants fewer drafts stays at its last position, as the next page may be missing. A row that wants
        # only one draft becomes padding.
        rows, more = frame.rows * (wanted > 1), (wanted - 1).clip(0)
        if self._head_inputs is not None:
            shape = self._rows_of(frame)
            self._inputs.upload(_decodes(rows, np.zeros_like(rows)), shape, use_frame_starts=True)
            starts = (self._inputs.next_starts(shape.num_rows) - 1).clamp_(min=0)
            self._inputs.starts(shape.num_rows).copy_(starts)
            self._lasts.zero_()
            self._lasts[:num_rows].copy_(upload(more, self._lasts.device))
            self._lasts[: shape.num_rows].add_(starts)
        else:
            # This waits for the device.
            placed = self._inputs.with_device_starts(_decodes(rows, np.zeros_like(rows)))
            host_starts = (placed.frame.starts - 1) * (rows > 0)
            lasts = host_starts + more
        for _ in range(1, most):
            if self._head_inputs is not None:
                self._graphs.replay_pass(_NEXT, shape)
            else:
                host_starts = np.minimum(host_starts + 1, lasts)
                moved = _decodes(rows, host_starts)
                self._inputs.upload(moved, moved.shape, use_frame_starts=True)
                batch = self._inputs.batch(moved, of_draft_head=True)
                self._backend.init_forward_metadata(batch)
                self._next(batch)
            yield self._ids[:num_rows].clone()

    def _rows_of(self, frame: StepFrame) -> StepShape:
        """The shape of the graphs of passes after the first."""
        num_rows = len(frame.rows)
        shape = self._graphs.smallest(StepShape(num_rows, num_rows, num_rows))
        assert shape is not None, "more rows than the largest shape"
        return shape

    def _capture(self, name: str, shape: StepShape) -> None:
        self._inputs.upload(Step.of(StepFrame(generation=0, step=0)), shape)
        self._inputs.graph_batch(shape, of_draft_head=True)  # fills the tensors like the step before the pass
        self._num_dropped.zero_()
        self._lasts.zero_()
        run = self._captured_next if name == _NEXT else functools.partial(self._captured_first, predicts=name == _FIRST)
        self._graphs.capture_pass(name, shape, functools.partial(run, shape))

    def _captured_first(self, shape: StepShape, *, predicts: bool) -> None:
        assert self._head_inputs is not None, "a pass was captured before use_graphs"
        self._inputs.restore_starts(shape)
        batch, tokens = self._inputs.graph_batch(shape, of_draft_head=True), self._tokens[: shape.num_sampled]
        self._backend.prepare_capture(batch, shape)
        if shape.is_decode:
            following = tokens.clamp(min=0)
        else:
            # The samples of padding are at the last token, which may belong to a row.
            is_padding = self._inputs.rows_of_samples(shape) == shape.num_rows - 1
            following = _following(batch, tokens, batch.sample_indices.masked_fill(is_padding, shape.num_tokens))
        self._first(batch, following, self._head_inputs, predicts=predicts)

    def _first(
        self, batch: ForwardBatch, following: torch.Tensor, head_inputs: torch.Tensor, *, predicts: bool
    ) -> None:
        head = self._head()
        keep = None if predicts else batch.sample_indices[:0]
        if predicts and batch.num_tokens > batch.batch_size:
            keep = (batch.paged.cu_seqlens_q[1:] - 1 - self._num_dropped[: batch.batch_size]).clamp_(min=0)
        hidden, step = head.reduced(head_inputs[: batch.num_tokens]), self._decoder.step_of(batch, self._backend)
        output, hidden = head.forward(self._decoder.embedded(following), hidden, step, keep)
        if predicts:
            self._put(output, hidden)

    def _captured_next(self, shape: StepShape) -> None:
        starts = self._inputs.starts(shape.num_rows)
        torch.minimum(starts + 1, self._lasts[: shape.num_rows], out=starts)
        batch = self._inputs.graph_batch(shape, of_draft_head=True)
        self._backend.prepare_capture(batch, shape)
        self._next(batch)

    def _next(self, batch: ForwardBatch) -> None:
        """Runs any pass after the first."""
        step, ids = self._decoder.step_of(batch, self._backend), self._ids[: batch.batch_size]
        self._put(*self._head().forward(self._decoder.embedded(ids), self._hidden[: len(ids)], step, None))

    def _put(self, output: torch.Tensor, hidden: torch.Tensor) -> None:
        """Stores a pass's `hidden` and the drafts that its `output` predicts."""
        num_rows = len(output)
        ids = self._head().predicted(output)
        if ids is None:
            rows = torch.zeros(num_rows, dtype=torch.int32, device=output.device)  # row 0 is greedy
            logits = self._decoder.local_logits(output, None if self._logits is None else self._logits[:num_rows])
            ids = self._sampler.sample(logits, rows, rows).clamp_(min=0)
        self._ids[:num_rows].copy_(ids)
        self._hidden[:num_rows].copy_(hidden)

    def _head(self) -> DraftModel:
        assert self._decoder.draft_model is not None, "there is no head"
        return self._decoder.draft_model


def _following(batch: ForwardBatch, tokens: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """[num_tokens] int64: the token after each input. After the inputs `at` [num_sampled] it is the sampled token in
    `tokens`, and after a row's unsampled last input it is 0. An `at` of num_tokens refers to no input."""
    following = F.pad(batch.input_ids, (0, 1))
    following = following.index_fill_(0, batch.paged.cu_seqlens_q[1:].long(), 0).roll(-1)
    return following.index_copy_(0, at.long(), tokens.clamp(min=0))[:-1]


def _decodes(rows: Int32Array, starts: Int32Array) -> Step:
    """A step with one input for each of `rows`, at positions `starts`."""
    ones = np.ones_like(rows)
    return Step.of(StepFrame(0, 0, rows=rows, starts=starts, lens=ones, flags=ones * int(RowFlag.SAMPLE)))
