"""Requests with a guide. They wait for masks; other requests do not wait with them.

Such a request joins the queue only once the mask for its first token exists. After each launch its row is not ready.
When the step retires, the guide receives the token, and once the mask for the next token exists, the row may decode
again. By then the guide also knows whether the answer is complete. So a complete guided answer ends with STOP, even if
its last token uses up its length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from cluster.messages.engine import FinishReason
from cluster.scheduling.decodes import Decodes
from cluster.scheduling.frame_builder import FrameBuilder
from cluster.scheduling.limits import SchedulerLimits
from cluster.scheduling.request import Guide, Request, check_allows_a_token
from cluster.scheduling.row_table import RowTable
from configs.errors import GuideError, OverloadedError, RequestError
from worker.protocol import Int32Array, UInt32Array, mask_words


@dataclass(slots=True, eq=False)
class GuideNews:
    """Changes since the last poll, apart from rows that became ready."""

    admissible: list[Request] = field(default_factory=list)
    """Requests that have their first mask now."""
    ended: list[tuple[Request, FinishReason, RequestError | None]] = field(default_factory=list)
    """Requests to end, and why. The error is None unless the reason is ERROR."""


class GuidedRows:
    """Requests with a guide, from their arrival to their end. Writes `RowTable.ready` of their rows."""

    def __init__(self, limits: SchedulerLimits, rows: RowTable) -> None:
        self._limits = limits
        self._rows = rows
        self._held: dict[int, Request] = {}  # request id -> request without a row and a first mask
        self._awaiting: dict[int, Request] = {}  # row -> request with a token in its guide and no mask for the next one
        self._masks: dict[int, UInt32Array] = {}  # row -> mask of its next token, for ready rows
        self._ahead: dict[int, list[UInt32Array]] = {}  # row -> masks of the tokens after its drafts

    @property
    def num_held(self) -> int:
        """Number of requests that wait for their first mask and are not in the queue yet."""
        return len(self._held)

    @property
    def num_held_tokens(self) -> int:
        return sum(len(request.tokens) for request in self._held.values())

    @property
    def num_awaiting(self) -> int:
        """Number of rows that wait for a mask."""
        return len(self._awaiting)

    def hold(self, request: Request) -> None:
        """Stores a request without a row until its first mask exists."""
        self._held[request.id] = request

    def take_tokens(self, rows: Int32Array, tokens: Int32Array, stopped: npt.NDArray[np.bool_]) -> None:
        """Gives the tokens of a retired step to the guides.

        Args:
            rows: [num_tokens]: live row of each token.
            stopped: [num_tokens]: whether the token ends its row. The guide does not receive such a token.
        """
        accepting = self._rows.guided[rows] & ~stopped
        for row in dict.fromkeys(rows[accepting].tolist()):
            request = self._rows.request(row)
            drafts: Sequence[int] = ()
            if (history := request.history) is not None and history.chances is not None:
                drafts = history.drafts(self._limits.speculation.num_drafts)
            _guide_of(request).accept(tokens[accepting & (rows == row)].tolist(), drafts)
            self._awaiting[row] = request

    def poll(self) -> GuideNews:
        """Polls guides for missing masks. Rows that get their mask become ready, but no more rows than a frame has
        masks for."""
        news = GuideNews()
        for request in list(self._held.values()):
            if (mask := self._next_mask(request, len(request.tokens), news)) is not None:
                del self._held[request.id]
                request.mask = mask
                news.admissible.append(request)
        for row, request in list(self._awaiting.items()):
            if len(self._masks) >= self._limits.max_num_masks:
                break
            if (mask := self._next_mask(request, int(self._rows.num_known[row]), news)) is not None:
                del self._awaiting[row]
                self._rows.ready[row] = True
                self._masks[row] = mask
                self._ahead[row] = self._masks_ahead(request, int(self._rows.num_known[row]))
        return news

    def num_foreseen(self, rows: Int32Array) -> Int32Array:
        """[len(rows)]: number of drafts that each of the guided `rows` may verify: drafts with a mask that fits in the
        frame."""
        counts = np.array([len(self._ahead.get(row, ())) for row in rows.tolist()], np.int32)
        room = self._limits.max_num_masks - len(self._masks)
        return np.diff(np.minimum(np.cumsum(counts), room), prepend=0).astype(np.int32)

    def add_masks(self, decodes: Decodes, sampled: Int32Array, builder: FrameBuilder) -> None:
        """Adds the masks of all ready guided rows to the frame, one for each sampled input, in order. The guided rows
        in `sampled` are then not ready until their next masks exist."""
        num_samples = dict(zip(decodes.rows.tolist(), decodes.num_samples.tolist(), strict=True))
        builder.add_masks(
            [
                (row, mask)
                for row, first in self._masks.items()
                for mask in (first, *self._ahead[row][: num_samples[row] - 1])
            ]
        )
        self._masks.clear()
        self._ahead.clear()
        self._rows.ready[sampled[self._rows.guided[sampled]]] = False

    def requeue(self, request: Request, *, is_lost: bool) -> bool:
        """Prepares for the preemption of a request, which still has its row.

        Args:
            is_lost: whether a lost step may have had the request's mask. The guide then has to return the mask again.

        Returns:
            True if the request waits here for its mask. False if it may be queued.
        """
        row = request.row
        mask = self._masks.pop(row, request.mask)
        self._ahead.pop(row, None)
        if self._awaiting.pop(row, None) is not None or is_lost:
            self.hold(request)
            return True
        request.mask = mask
        return False

    def forget(self, request: Request) -> bool:
        """Removes an ended request, which still has its row if it had one. Returns True if it was in `_held`."""
        _guide_of(request).close()
        self._awaiting.pop(request.row, None)
        self._masks.pop(request.row, None)
        self._ahead.pop(request.row, None)
        return self._held.pop(request.id, None) is not None

    def check_integrity(self) -> set[int]:
        """Raises AssertionError if masks, rows and waiting requests contradict each other. Returns the ids of the
        requests that wait for their first mask without a row."""
        table = self._rows
        for row, request in self._awaiting.items():
            assert table.requests[row] is request, f"row {row} awaits a mask for another request"
            assert not table.ready[row], f"row {row} is ready without a mask"
            assert not table.in_flight[row], f"row {row} awaits a mask and is in flight"
        ready = np.flatnonzero(table.ready & table.guided)
        assert sorted(self._masks) == ready.tolist(), "a guided row is ready without a mask, or the other way round"
        assert not any(request.row for request in self._held.values()), "a held request has a row"
        return set(self._held)

    def _next_mask(self, request: Request, num_tokens: int, news: GuideNews) -> UInt32Array | None:
        """The mask for the token after `num_tokens` tokens. None if it does not exist yet, or the request ends."""
        guide = _guide_of(request)
        try:
            mask = guide.poll()
            if num_tokens > request.num_prompt_tokens and guide.is_finished:
                news.ended.append((request, FinishReason.STOP, None))
            elif mask is None:
                return None
            elif num_tokens >= request.max_total_tokens:
                news.ended.append((request, FinishReason.LENGTH, None))
            else:
                return self._checked(request, mask, num_tokens)
        except (GuideError, OverloadedError) as error:
            news.ended.append((request, FinishReason.ERROR, error))
        return None

    def _masks_ahead(self, request: Request, num_tokens: int) -> list[UInt32Array]:
        """The masks after drafts, up to the first one that allows no token with the request's parameters."""
        masks: list[UInt32Array] = []
        try:
            for place, mask in enumerate(_guide_of(request).ahead, start=1):
                masks.append(self._checked(request, mask, num_tokens + place))
        except GuideError:
            pass  # The error matters only if the draft before this mask is right, and then the guide is polled again.
        return masks

    def _checked(self, request: Request, mask: UInt32Array, position: int) -> UInt32Array:
        words = mask_words(self._limits.vocab_size)
        assert mask.dtype == np.uint32, f"a mask of {mask.dtype}"
        assert mask.shape == (words,), f"a mask of shape {mask.shape}, not ({words},)"
        if request.adjustments is not None:
            return request.adjustments.restricted(mask, position)
        check_allows_a_token(mask)
        return mask


def _guide_of(request: Request) -> Guide:
    assert request.guide is not None, f"request {request.id} has no guide"
    return request.guide
