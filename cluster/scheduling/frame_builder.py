"""Builds one step's frame. Each part of the scheduler adds to the sections that it owns."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from cluster.scheduling.request import Request
from worker.protocol import COUNT_DTYPE, PARAMS_DTYPE, FrameKind, Int32Array, StepFrame, UInt32Array
from worker.sections import Array

_values = attrgetter(*[name for name in PARAMS_DTYPE.names or () if name != "row"])
"""Reads the fields of a `SamplingParams` that the ranks get, in the order of PARAMS_DTYPE."""


class FrameBuilder:
    """Collects the arrays of a frame's sections."""

    def __init__(self) -> None:
        self._parts: dict[str, list[Array]] = {}

    def add(self, **parts: Array) -> None:
        """Appends an array to each named section."""
        for name, part in parts.items():
            self._parts.setdefault(name, []).append(part)

    def add_page_deltas(self, *deltas: Int32Array | None) -> None:
        """Appends page deltas, each [n, 3]. Ignores None and empty arrays."""
        for part in deltas:
            if part is not None and len(part):
                self.add(page_deltas=part)

    def add_masks(self, masks: Sequence[tuple[int, UInt32Array]]) -> None:
        """Adds (row, mask) pairs for tokens to be sampled. Masks of one row are in the order of its tokens."""
        if masks:
            self.add(mask_rows=np.array([row for row, _ in masks], np.int32), masks=np.stack([it for _, it in masks]))

    def start_rows(self, requests: Sequence[Request]) -> None:
        """Adds the parameters and adjustments of newly admitted requests. Tokens and pages are added elsewhere."""
        if not requests:
            return
        self.add(params=_params(requests))
        self.add_masks([(request.row, request.mask) for request in requests if request.mask is not None])
        for request in requests:
            if (adjustments := request.adjustments) is not None:
                self.add(biases=_with_row(adjustments.biases, request.row))
                self.add(requested=_with_row(adjustments.requested, request.row))
                if adjustments.counts_answer:
                    self.add(counts=_counts(request, adjustments.counts_prompt))

    def build(self, generation: int, step: int, kind: FrameKind) -> StepFrame:
        """The frame with all added sections."""
        sections = {name: parts[0] if len(parts) == 1 else np.concatenate(parts) for name, parts in self._parts.items()}
        return StepFrame(generation, step, kind, **sections)


def _params(requests: Sequence[Request]) -> npt.NDArray[np.void]:
    """PARAMS_DTYPE records of newly admitted requests."""
    params = np.zeros(len(requests), PARAMS_DTYPE)
    for index, request in enumerate(requests):
        params[index] = (request.row, *_values(request.sampling))
    return params


def _with_row(records: npt.NDArray[np.void], row: int) -> npt.NDArray[np.void]:
    records = records.copy()
    records["row"] = row
    return records


def _counts(request: Request, counts_prompt: bool) -> npt.NDArray[np.void]:
    """COUNT_DTYPE records: how often each token id occurs in the answer, and whether in the prompt."""
    tokens: Int32Array = request.tokens
    if not counts_prompt:
        tokens = tokens[request.num_prompt_tokens :]
    ids, places = np.unique(tokens, return_inverse=True)
    counts = np.zeros(len(ids), COUNT_DTYPE)
    counts["row"], counts["token_id"] = request.row, ids
    num_prompt = request.num_prompt_tokens if counts_prompt else 0
    counts["in_prompt"][places[:num_prompt]] = 1
    counts["num_generated"] = np.bincount(places[num_prompt:], minlength=len(ids))
    return counts
