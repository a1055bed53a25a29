"""The sections of a frame that tell what a row's request asks of its logits: biases, asked ids, counts, masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from cluster.scheduling.request import Request
from worker.protocol import COUNT_DTYPE, Int32Array, StepFrame, UInt32Array


def add_adjustments(frame: StepFrame, admitted: Sequence[Request], masks: Mapping[int, UInt32Array]) -> None:
    """Puts into `frame` what the rows of `admitted` start with, and `masks`, by row, of rows that go on."""
    rows_of_masks, all_masks = list(masks), list(masks.values())
    biases, counts, asked = [], [], []
    for request in admitted:
        if request.mask is not None:
            rows_of_masks.append(request.row)
            all_masks.append(request.mask)
        if (adjustments := request.adjustments) is None:
            continue
        biases.append(_with_row(adjustments.biases, request.row))
        asked.append(_with_row(adjustments.asked, request.row))
        if adjustments.counts_answer:
            counts.append(_counts(request, adjustments.counts_prompt))
    if all_masks:
        frame.mask_rows, frame.masks = np.array(rows_of_masks, np.int32), np.stack(all_masks)
    if biases:
        frame.biases, frame.asked = np.concatenate(biases), np.concatenate(asked)
    if counts:
        frame.counts = np.concatenate(counts)


def _with_row(records: npt.NDArray[np.void], row: int) -> npt.NDArray[np.void]:
    records = records.copy()
    records["row"] = row
    return records


def _counts(request: Request, counts_prompt: bool) -> npt.NDArray[np.void]:
    """COUNT_DTYPE records of a request's tokens."""
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
