"""The draft head's passes behind a step: one over all of the step's tokens, and one for each draft after the first.

The first pass leaves the head's keys and values of these tokens in the pages that hold the model's. The token that
follows each is the next input or, where one was sampled, that. The one behind a chunk that is not the last is not known
here, and whatever stands there takes its place; so it is with pages that another request continues in another way. That
costs drafts that are wrong, and no answer depends on drafts.
"""

from __future__ import annotations

import numpy as np
import torch

from attention.backend import AttentionBackend
from attention.forward_batch import ForwardBatch
from attention.step_shape import StepShape
from worker.drafts import StepDrafts
from worker.models.decoder import Decoder
from worker.models.draft_head import DraftModel
from worker.protocol import RowFlag, StepFrame
from worker.step_inputs import StepInputs
from worker.step_layout import shape_of
from worker.upload import upload


class DraftPasses:
    """Makes the drafts that frames ask for. Queues everything on the step's stream."""

    def __init__(self, head: DraftModel, decoder: Decoder, backend: AttentionBackend, inputs: StepInputs) -> None:
        self._head = head
        self._decoder = decoder
        self._backend = backend
        self._inputs = inputs

    def run(
        self,
        frame: StepFrame,
        shape: StepShape,
        states: torch.Tensor,
        tokens: torch.Tensor,
        drafts: StepDrafts | None,
        kept: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """[num_sampled_rows, most wanted] int64, device: drafts of what follows each sampled row's last token, as many
        of each as the frame wants; None where it wants none.

        Args:
            shape: the frame's own. It was uploaded, and nothing after it.
            states: `DraftModel.empty_states` of its tokens or more, filled.
            tokens: [num_sampled] int64, as they were sampled at last; -1 for a NaN.
            drafts: those that the step verified, and which of `tokens` count after that; None: all.
        """
        batch = self._inputs.batch(frame, shape)
        self._backend.init_forward_metadata(batch)
        lasts, following = batch.sample_indices.long(), batch.input_ids.roll(-1)
        following.index_copy_(0, lasts, tokens.clamp(min=0))
        if drafts is not None and kept is not None:
            # Backends plan by positions on the host, which are those behind what was kept; and this step's tokens are
            # waited for anyway.
            lasts = lasts[drafts.lasts(tokens, kept).nonzero().view(-1)]
        wanted = frame.num_wanted
        most = int(wanted.max(initial=0))
        hidden = self._head.reduced(states[: shape.num_tokens])
        output, hidden = self._pass(batch, following, hidden, lasts if most else lasts[:0])
        if not most:
            return None
        ids = self._head.predicted(output)
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
            shape = shape_of(frame)
            self._inputs.upload(frame, shape)
            batch = self._inputs.batch(frame, shape)
            self._backend.init_forward_metadata(batch)
            output, hidden = self._pass(batch, ids, hidden, None)
            ids = self._head.predicted(output)
            found[at, place] = ids
        return found

    def _pass(
        self, batch: ForwardBatch, following: torch.Tensor, hidden: torch.Tensor, keep: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        embedded = self._decoder.embedded(following)
        return self._head.forward(embedded, hidden, self._decoder.step_of(batch, self._backend), keep)
