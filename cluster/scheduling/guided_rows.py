"""Requests with a guide: they wait for masks, the others never do.

Such a request joins the queue only once the mask of its first token is there. Its row is not ready after a launch:
at `retire` the guide takes the token, and when the mask of the next one is there the row may decode again. Whether the
answer is complete is known by then as well, so a guided answer that is complete ends with STOP, also where its last
token uses up its length.
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
    """News of the guides since the last poll, besides rows that became ready."""

    admissible: list[Request] = field(default_factory=list)
    """Requests whose first mask is there."""
    ended: list[tuple[Request, FinishReason, RequestError | None]] = field(default_factory=list)
    """Requests that end here, and the error of those that end with ERROR."""


class GuidedRows:
    """Requests with a guide, from `hold` to `forget`. Writes `RowTable.ready` of their rows."""

    def __init__(self, limits: SchedulerLimits, rows: RowTable) -> None:
        self._limits = limits
        self._rows = rows
        self._held: dict[int, Request] = {}  # by id: they have no row
        self._awaiting: dict[int, Request] = {}  # by row: the guide has their last token
        self._masks: dict[int, UInt32Array] = {}  # by row: of rows that are ready
        self._ahead: dict[int, list[UInt32Array]] = {}  # by row: the masks behind its drafts

    @property
    def num_held(self) -> int:
        """Requests that wait outside the queue."""
        return len(self._held)

    @property
    def num_held_tokens(self) -> int:
        return sum(len(request.tokens) for request in self._held.values())

    @property
    def num_awaiting(self) -> int:
        """Rows that wait for a mask."""
        return len(self._awaiting)

    def hold(self, request: Request) -> None:
        """Keeps a request without a row until its mask is there."""
        self._held[request.id] = request

    def take_tokens(self, rows: Int32Array, tokens: Int32Array, stopped: npt.NDArray[np.bool_]) -> None:
        """Gives the guides the tokens of a retired step.

        Args:
            rows: of the tokens; live ones.
            stopped: these tokens end their row, which no guide has to know.
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
        """Asks the guides that still owe a mask; rows that get theirs become ready, as many as a frame can tell."""
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
        """[len(rows)] drafts that each of the guided `rows` may have: there are masks behind them, and room for all."""
        counts = np.array([len(self._ahead.get(row, ())) for row in rows.tolist()], np.int32)
        room = self._limits.max_num_masks - len(self._masks)
        return np.diff(np.minimum(np.cumsum(counts), room), prepend=0).astype(np.int32)

    def add_masks(self, decodes: Decodes, sampled: Int32Array, builder: FrameBuilder) -> None:
        """Adds the masks of the rows that became ready, one for each of a row's inputs in their order. The guided ones
        of the rows `sampled` are ready again when their next masks are there."""
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
        """The request is about to lose its row. True: it is held now; False: its mask is there, so it may be queued.

        `is_lost`: its mask may have gone with a step whose result will not come; its guide has it still.
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
        """The request has ended, and still has its row if it had one. Returns whether it was held."""
        _guide_of(request).close()
        self._awaiting.pop(request.row, None)
        self._masks.pop(request.row, None)
        self._ahead.pop(request.row, None)
        return self._held.pop(request.id, None) is not None

    def check_integrity(self) -> set[int]:
        """Ids of the held requests. Raises AssertionError unless the rows' states agree."""
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
        """The mask of the token after `num_tokens`; None if it is not there, or the request ends."""
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
        """Masks behind drafts, up to the first that the request's other parameters leave nothing of."""
        masks: list[UInt32Array] = []
        try:
            for place, mask in enumerate(_guide_of(request).ahead, start=1):
                masks.append(self._checked(request, mask, num_tokens + place))
        except GuideError:
            pass  # that is so only if the draft before it is right
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
