"""Builds the frame of a step after its rows got their pages."""

from __future__ import annotations

import numpy as np

from cluster.scheduling.decodes import Decodes
from cluster.scheduling.drafter import Drafter
from cluster.scheduling.frame_builder import FrameBuilder
from cluster.scheduling.guided_rows import GuidedRows
from cluster.scheduling.pages import RowPages
from cluster.scheduling.prefill import PrefillQueue
from cluster.scheduling.prefill_plan import PrefillPlan
from cluster.scheduling.row_table import RowTable
from cluster.scheduling.step_results import Launched
from worker.protocol import FrameKind, RowFlag, StepFrame

# A plain integer, because operations on enum members take a microsecond each.
_SAMPLE = int(RowFlag.SAMPLE)


class Launcher:
    """Builds frames. Without speculation, `drafter` is None."""

    def __init__(
        self, rows: RowTable, pages: RowPages, queue: PrefillQueue, guided: GuidedRows, drafter: Drafter | None
    ) -> None:
        self._rows = rows
        self._pages = pages
        self._queue = queue
        self._guided = guided
        self._drafter = drafter

    def launch(
        self, decodes: Decodes, prefills: PrefillPlan, generation: int, step: int, now: float
    ) -> tuple[StepFrame, Launched]:
        """Builds the frame of a step and the snapshot that its retirement needs, and advances the rows."""
        table, builder = self._rows, FrameBuilder()
        starts = table.num_computed[decodes.rows]
        # Before `commit`, which keeps states that this step computes
        self._pages.add_state_copies(builder, step)
        self._add_decodes(decodes, builder)
        builder.add_page_deltas(decodes.deltas, *prefills.deltas)
        ending = self._queue.commit(prefills, builder)
        table.ready[ending] = True
        sampled = np.concatenate((decodes.rows, ending))
        if self._drafter is not None:
            self._drafter.add(decodes, sampled, self._pages.capacity(sampled), builder)
        if table.num_guided:
            self._guided.add_masks(decodes, sampled, builder)
        builder.start_rows(prefills.admitted)
        self._pages.add_window_changes(builder)
        is_timed = self._drafter is not None and not prefills.rows
        kind = self._drafter.launch(decodes) if self._drafter is not None and is_timed else FrameKind.STEP
        frame = builder.build(generation, step, kind)
        # Ranks run steps in order, so the next step may use the window pages that this step is the last to read.
        self._pages.advance_windows(frame.rows, table.num_computed[frame.rows])
        table.in_flight[frame.rows] += 1
        table.ready[sampled[table.may_end(sampled)]] = False
        # For unverified drafts, the frame has upper bounds of rows' positions, and the snapshot has lower bounds.
        min_starts = frame.starts.copy()
        min_starts[: len(starts)] = starts
        launched = Launched(
            step=step,
            rows=frame.rows,
            starts=min_starts,
            sampled=sampled,
            num_samples=frame.num_samples,
            prefilled=ending.tolist(),
            prompt_runs=prefills.prompt_runs,
            item_rows=frame.items["row"],
            launched_s=now if is_timed else None,
        )
        return frame, launched

    def _add_decodes(self, decodes: Decodes, builder: FrameBuilder) -> None:
        """Adds the decoding rows to the frame, and counts their inputs as computed or unverified."""
        table, rows = self._rows, decodes.rows
        if not len(rows):
            return
        flags = np.full(len(rows), _SAMPLE, np.int32)
        if self._drafter is not None and decodes.has_drafts:
            flags |= self._drafter.add_tokens(decodes, builder)
        builder.add(
            rows=rows,
            starts=table.num_computed[rows] + table.num_unverified[rows],
            lens=decodes.num_samples,
            flags=flags,
        )
        table.num_computed[rows] += 1
        table.num_unverified[rows] += decodes.num_samples - 1
