"""What every rank verifies of a frame before it touches a table: a wrong frame is an error, never a wild write."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from configs.errors import EngineError
from worker.protocol import MAX_ROW_ASKED, MAX_ROW_BIASES, MAX_TARGETS, RowFlag, StepFrame, mask_words


@dataclass(frozen=True, slots=True)
class FrameLimits:
    """What a rank's tables hold."""

    num_rows: int
    """Rows of the request table, padding included: valid rows are 1 to num_rows - 1."""
    vocab_size: int
    max_model_len: int


def check_frame(frame: StepFrame, limits: FrameLimits) -> None:
    """Raises EngineError unless rows, lengths, token ids, positions, adjustments and scores of `frame` fit `limits`."""
    has_tokens = (frame.flags & RowFlag.HAS_TOKENS) != 0
    wrong = None
    if len(frame.rows) == 0:
        wrong = "has no rows"
    elif not _within(frame, limits.num_rows):
        wrong = f"names a row outside 1 to {limits.num_rows - 1}"
    elif frame.lens.min() < 1 or not (frame.lens[~has_tokens] == 1).all():
        wrong = "has a row of impossible length"
    elif int(frame.lens[has_tokens].sum()) != len(frame.token_ids):
        wrong = f"has {len(frame.token_ids)} token ids for {int(frame.lens[has_tokens].sum())} inputs"
    elif len(frame.token_ids) and not (frame.token_ids.min() >= 0 and frame.token_ids.max() < limits.vocab_size):
        wrong = f"has a token id outside a vocabulary of {limits.vocab_size}"
    elif not (frame.starts.min() >= 0 and (frame.starts + frame.lens).max() <= limits.max_model_len):
        wrong = f"has a row outside positions 0 to {limits.max_model_len - 1}"
    else:
        wrong = _wrong_adjustment(frame, limits) or _wrong_score(frame, limits)
    if wrong is not None:
        raise EngineError(f"step {frame.step} of generation {frame.generation} {wrong}")


def _within(frame: StepFrame, num_rows: int) -> bool:
    if frame.rows.min() < 1 or frame.rows.max() >= num_rows:
        return False
    return len(frame.params) == 0 or _is_inside(frame.params["row"], 1, num_rows)


def _wrong_adjustment(frame: StepFrame, limits: FrameLimits) -> str | None:
    for name, records in (("a bias", frame.biases), ("a count", frame.counts), ("an asked token", frame.asked)):
        if len(records) and not (
            _is_inside(records["row"], 1, limits.num_rows) and _is_inside(records["token_id"], 0, limits.vocab_size)
        ):
            return f"has {name} outside its rows or a vocabulary of {limits.vocab_size}"
    if len(frame.biases):
        # NaN and +inf fail the comparison.
        if not (frame.biases["value"] < np.inf).all():
            return "has a bias that is no number to add"
        if np.bincount(frame.biases["row"]).max() > MAX_ROW_BIASES:
            return f"has a row with more than {MAX_ROW_BIASES} biases"
    if len(frame.counts) and not (
        frame.counts["num_generated"].min() >= 0 and _is_inside(frame.counts["in_prompt"], 0, 2)
    ):
        return "has a count below 0"
    if len(frame.asked) and np.bincount(frame.asked["row"]).max() > MAX_ROW_ASKED:
        return f"has a row that asks for more than {MAX_ROW_ASKED} log probabilities"
    if len(frame.mask_rows):
        if not _is_inside(frame.mask_rows, 1, limits.num_rows) or len(np.unique(frame.mask_rows)) < len(
            frame.mask_rows
        ):
            return "has a mask of a row that is not there, or two of one row"
        if frame.masks.shape[1] != mask_words(limits.vocab_size):
            return f"has masks of {frame.masks.shape[1]} words for a vocabulary of {limits.vocab_size}"
        if not frame.masks.any(axis=1).all():
            return "has a mask that allows nothing"
    return None


def _is_inside(values: npt.NDArray[np.int32], first: int, end: int) -> bool:
    return bool(values.min() >= first and values.max() < end)


def _wrong_score(frame: StepFrame, limits: FrameLimits) -> str | None:
    scores, targets = frame.scores, frame.targets
    if len(scores) == len(targets) == 0:
        return None
    if len(targets) > MAX_TARGETS or int(scores["num"].sum()) != len(targets) or (scores["num"] < 1).any():
        return f"has {len(targets)} targets for scores of {scores['num'].tolist()} positions; at most {MAX_TARGETS} fit"
    if not (_is_inside(targets, 0, limits.vocab_size) and _is_inside(scores["k"], 0, limits.vocab_size + 1)):
        return f"has a target or a number of likeliest tokens outside a vocabulary of {limits.vocab_size}"
    # Where each record's row stands in the frame; records of rows that it does not name, or out of order, are missed.
    is_scored = np.isin(frame.rows, scores["row"]) & ((frame.flags & RowFlag.HAS_TOKENS) != 0)
    at = np.flatnonzero(is_scored)
    if not np.array_equal(frame.rows[at], scores["row"]):
        return "has scores of a row without tokens, or out of order"
    ends = scores["start"] + scores["num"]
    if (scores["start"] < frame.starts[at]).any() or (ends > frame.starts[at] + frame.lens[at]).any():
        return "has scores of positions that are no inputs"
    return None
