"""The draft head's passes behind a step: one over all of the step's tokens, and one for each draft after the first.

The first leaves the head's keys and values in the pages that hold the model's. The token that follows one is the next
input or what was sampled there. Behind a chunk that is not the last it is not known here, nor behind a page that other
requests go on from: a wrong one there costs drafts that are wrong, and no answer depends on drafts.
"""

from __future__ import annotations

import numpy as np
import torch

from attention.backend import AttentionBackend
from attention.forward_batch import ForwardBatch
from attention.step_shape import StepShape
from worker.drafts import StepDrafts
from worker.layers.step import Step
from worker.models.decoder import Decoder
from worker.protocol import RowFlag, StepFrame
from worker.sampler import Sampler
from worker.step_inputs import StepInputs
from worker.step_layout import shape_of
from worker.upload import upload


class DraftPasses:
    """Makes the drafts that frames ask for, where there is a head. Queues everything on the step's stream."""

    def __init__(self, decoder: Decoder, backend: AttentionBackend, inputs: StepInputs, sampler: Sampler) -> None:
        self._decoder = decoder
        self._backend = backend
        self._inputs = inputs
        self._sampler = sampler

    def new_states(self, num_tokens: int) -> torch.Tensor | None:
        """Room for what the head reads of so many tokens; None: there is none."""
        head = self._decoder.draft_model
        return None if head is None else head.empty_states(num_tokens)

    def run(
        self,
        frame: StepFrame,
        shape: StepShape,
        states: torch.Tensor | None,
        tokens: torch.Tensor,
        drafts: StepDrafts | None = None,
        kept: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """[num_sampled_rows, most wanted] int64, device: drafts of what follows each sampled row's last token, as many
        of each as the frame wants; None where it wants none.

        Args:
            shape: the frame's own. It was uploaded, and nothing after it.
            states: `new_states` of its tokens or more, filled.
            tokens: [num_sampled] int64, as they were sampled at last; -1 for a NaN.
            drafts: those that the step verified, and which of `tokens` count after that; None: all.
        """
        head = self._decoder.draft_model
        if head is None or states is None:
            return None
        batch = self._inputs.batch(frame, shape)
        lasts, following = batch.sample_indices.long(), batch.input_ids.roll(-1)
        following.index_copy_(0, lasts, tokens.clamp(min=0))
        if drafts is not None and kept is not None:
            # This and the positions below wait for the device, as whoever launches the next step does anyway.
            lasts = lasts[drafts.lasts(tokens, kept).nonzero().view(-1)]
        wanted = frame.num_wanted
        most = int(wanted.max(initial=0))
        hidden = head.reduced(states[: shape.num_tokens])
        embedded = self._decoder.embedded(following)
        output, hidden = head.forward(embedded, hidden, self._step_of(batch), lasts if most else lasts[:0])
        if not most:
            return None
        ids = self._predicted(output)
        found = ids.new_zeros(len(wanted), most)
        found[:, 0] = ids
        deep = np.flatnonzero(wanted > 1)
        is_sampled = np.flatnonzero(frame.draws)
        ends = (frame.starts + frame.lens)[is_sampled]
        if drafts is not None:
            ends = batch.positions[lasts].cpu().numpy().astype(np.int32) + 1
        ends, wanted = ends[deep], wanted[deep]
        rows, one = frame.rows[is_sampled[deep]], np.ones(len(deep), np.int32)
        at = upload(deep, ids.device)
        ids, hidden = ids[at], hidden[at]
        for place in range(1, most):
            # A row that wants fewer stays at its last place, behind which it may have no page.
            starts = ends + np.minimum(place - 1, wanted - 2)
            frame = StepFrame(0, 0, rows=rows, starts=starts, lens=one, flags=one * int(RowFlag.SAMPLE))
            self._inputs.upload(frame, shape_of(frame))
            step = self._step_of(self._inputs.batch(frame, shape_of(frame)))
            output, hidden = head.forward(self._decoder.embedded(ids), hidden, step, None)
            ids = self._predicted(output)
            found[at, place] = ids
        return found

    def _predicted(self, output: torch.Tensor) -> torch.Tensor:
        """[num_rows] int64: the tokens that the head's first output predicts."""
        head = self._decoder.draft_model
        assert head is not None, "there is no head"
        found = head.predicted(output)
        if found is not None:
            return found
        rows = torch.zeros(len(output), dtype=torch.int32, device=output.device)  # row 0 is greedy
        return self._sampler.sample(self._decoder.local_logits(output), rows, rows).clamp_(min=0)

    def _step_of(self, batch: ForwardBatch) -> Step:
        self._backend.init_forward_metadata(batch)
        return self._decoder.step_of(batch, self._backend)
