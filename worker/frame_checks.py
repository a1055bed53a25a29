"""Checks of a frame against a rank's tables, so that a wrong frame is an error before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from configs.errors import EngineError
from worker.protocol import (
    MAX_ITEMS,
    MAX_PROMPT_LOGPROBS,
    MAX_ROW_BIASES,
    MAX_ROW_REQUESTED,
    Int32Array,
    Records,
    RowFlag,
    StepFrame,
    mask_words,
)

# Plain integers, because operations on enumerations take a microsecond each.
_HAS_TOKENS = int(RowFlag.HAS_TOKENS)
_SAMPLE = int(RowFlag.SAMPLE)


@dataclass(frozen=True, slots=True)
class FrameLimits:
    """Sizes of a rank's tables."""

    num_rows: int
    """Rows of the request table, padding included. Valid rows are 1 to num_rows - 1."""
    vocab_size: int
    max_model_len: int
    max_samples: int = 1
    """Maximum number of sampled inputs of a row in one step."""


def check_frame(frame: StepFrame, limits: FrameLimits) -> None:
    """Raises EngineError unless every section of a step fits `limits` and the other sections."""
    wrong = None if len(frame.rows) else "has no rows"
    for name, find_fault in _FAULTS.items():
        if wrong is None and name in frame.arrays and frame.arrays[name].size:
            wrong = find_fault(frame.arrays[name], frame, limits)
    if wrong is not None:
        raise EngineError(f"step {frame.step} of generation {frame.generation} {wrong}; please report this bug")


def _check_rows(rows: Int32Array, frame: StepFrame, limits: FrameLimits) -> str | None:
    return None if _is_inside(rows, 1, limits.num_rows) else f"names a row outside 1 to {limits.num_rows - 1}"


def _check_num_samples(num_samples: Int32Array, frame: StepFrame, limits: FrameLimits) -> str | None:
    is_sampled = (frame.flags & _SAMPLE) != 0
    if len(num_samples) != np.count_nonzero(is_sampled) or (num_samples > frame.lens[is_sampled]).any():
        return "has num_samples for other rows than those with SAMPLE, or above a row's inputs"
    if _is_inside(num_samples, 1, limits.max_samples + 1):
        return None
    return f"samples {num_samples.max()} inputs of a row; at least 1 and at most {limits.max_samples}"


def _check_lens(lens: Int32Array, frame: StepFrame, limits: FrameLimits) -> str | None:
    if len(frame.num_samples) and (wrong := _check_num_samples(frame.num_samples, frame, limits)) is not None:
        return wrong
    has_tokens = frame.has_tokens
    known = lens[~has_tokens]
    if (
        lens.min() < 1
        or not (known == (frame.samples_per_row[~has_tokens].clip(1) if len(frame.num_samples) else 1)).all()
    ):
        return "has a row of impossible length"
    if (num_inputs := int(lens[has_tokens].sum())) != len(frame.token_ids):
        return f"has {len(frame.token_ids)} token ids for {num_inputs} inputs"
    if frame.starts.min() < 0 or (frame.starts + lens).max() > limits.max_model_len:
        return f"has a row outside positions 0 to {limits.max_model_len - 1}"
    return None


def _check_num_wanted(num_wanted: Int32Array, frame: StepFrame, limits: FrameLimits) -> str | None:
    is_sampled = (frame.flags & _SAMPLE) != 0
    if len(num_wanted) != np.count_nonzero(is_sampled) or not _is_inside(num_wanted, 0, limits.max_samples):
        return f"wants drafts of other rows than it samples, or more than {limits.max_samples - 1} of one"
    if ((frame.starts + frame.lens)[is_sampled] + num_wanted - 1).max() > limits.max_model_len:
        return "wants drafts after the last position"
    return None


def _check_token_ids(token_ids: Int32Array, frame: StepFrame, limits: FrameLimits) -> str | None:
    if _is_inside(token_ids, 0, limits.vocab_size):
        return None
    return f"has a token id outside a vocabulary of {limits.vocab_size}"


def _check_params(params: Records, frame: StepFrame, limits: FrameLimits) -> str | None:
    return _check_rows(params["row"], frame, limits)


def _check_ids(records: Records, name: str, limits: FrameLimits) -> str | None:
    if _is_inside(records["row"], 1, limits.num_rows) and _is_inside(records["token_id"], 0, limits.vocab_size):
        return None
    return f"has {name} outside its rows or a vocabulary of {limits.vocab_size}"


def _check_biases(biases: Records, frame: StepFrame, limits: FrameLimits) -> str | None:
    if (wrong := _check_ids(biases, "a bias", limits)) is not None:
        return wrong
    # NaN and +inf fail the comparison.
    if not (biases["value"] < np.inf).all():
        return "has a bias that is NaN or +inf"
    too_many = np.bincount(biases["row"]).max() > MAX_ROW_BIASES
    return f"has a row with more than {MAX_ROW_BIASES} biases" if too_many else None


def _check_counts(counts: Records, frame: StepFrame, limits: FrameLimits) -> str | None:
    if (wrong := _check_ids(counts, "a count", limits)) is not None:
        return wrong
    is_count = counts["num_generated"].min() >= 0 and _is_inside(counts["in_prompt"], 0, 2)
    return None if is_count else "has a count below 0"


def _check_requested(requested: Records, frame: StepFrame, limits: FrameLimits) -> str | None:
    if (wrong := _check_ids(requested, "a requested token", limits)) is not None:
        return wrong
    too_many = np.bincount(requested["row"]).max() > MAX_ROW_REQUESTED
    return f"has a row that requests more than {MAX_ROW_REQUESTED} log probabilities" if too_many else None


def _check_masks(mask_rows: Int32Array, frame: StepFrame, limits: FrameLimits) -> str | None:
    if not _is_inside(mask_rows, 1, limits.num_rows):
        return f"has a mask of a row outside 1 to {limits.num_rows - 1}"
    most = np.ones(limits.num_rows, np.int32)
    most[frame.rows] = frame.samples_per_row.clip(1)
    if (np.bincount(mask_rows, minlength=limits.num_rows) > most).any():
        return "has more masks of a row than tokens sampled for it"
    if frame.masks.shape[1] != mask_words(limits.vocab_size):
        return f"has masks of {frame.masks.shape[1]} words for a vocabulary of {limits.vocab_size}"
    return None if frame.masks.any(axis=1).all() else "has a mask that allows nothing"


def _check_prompt_runs(runs: Records, frame: StepFrame, limits: FrameLimits) -> str | None:
    targets = frame.prompt_targets
    if len(targets) > MAX_PROMPT_LOGPROBS or int(runs["num"].sum()) != len(targets) or (runs["num"] < 1).any():
        positions = runs["num"].tolist()
        return f"has {len(targets)} prompt targets for {positions} positions; at most {MAX_PROMPT_LOGPROBS} fit"
    if not (_is_inside(targets, 0, limits.vocab_size) and _is_inside(runs["k"], 0, limits.vocab_size + 1)):
        return f"has a target or a number of likeliest tokens outside a vocabulary of {limits.vocab_size}"
    # The index in the frame of each record's row. Records of rows outside the frame, or out of order, cause a mismatch.
    at = np.flatnonzero(np.isin(frame.rows, runs["row"]) & frame.has_tokens)
    if not np.array_equal(frame.rows[at], runs["row"]):
        return "has prompt log probabilities of a row without tokens, or out of order"
    ends = runs["start"] + runs["num"]
    if (runs["start"] < frame.starts[at]).any() or (ends > frame.starts[at] + frame.lens[at]).any():
        return "has prompt log probabilities of positions that are not inputs"
    return None


def _check_prompt_targets(targets: Int32Array, frame: StepFrame, limits: FrameLimits) -> str | None:
    return None if len(frame.prompt_runs) else f"has {len(targets)} prompt targets for no positions"


def _check_items(items: Records, frame: StepFrame, limits: FrameLimits) -> str | None:
    if len(items) > MAX_ITEMS or items["len"].min() < 1 or not _is_inside(items["row"], 1, limits.num_rows):
        return f"has an item without tokens or without a row, or more than {MAX_ITEMS} items"
    num_items = np.bincount(items["row"], minlength=limits.num_rows)
    num_tokens = np.bincount(items["row"], items["len"], limits.num_rows)
    whole = (frame.flags & (_HAS_TOKENS | _SAMPLE)) == _HAS_TOKENS | _SAMPLE
    rows = frame.rows[whole & (num_items[frame.rows] > 0)]
    if not np.array_equal(items["row"], np.repeat(rows, num_items[rows])):
        return "has items of a row without HAS_TOKENS and SAMPLE, or out of order"
    return "has items longer than a row" if (num_tokens[frame.rows] > frame.lens).any() else None


def _is_inside(values: Int32Array, first: int, end: int) -> bool:
    return bool(values.min() >= first and values.max() < end)


_FAULTS: dict[str, Callable[[Any, StepFrame, FrameLimits], str | None]] = {
    "rows": _check_rows,
    "lens": _check_lens,
    "num_wanted": _check_num_wanted,
    "token_ids": _check_token_ids,
    "params": _check_params,
    "biases": _check_biases,
    "mask_rows": _check_masks,
    "counts": _check_counts,
    "requested": _check_requested,
    "prompt_runs": _check_prompt_runs,
    "prompt_targets": _check_prompt_targets,
    "items": _check_items,
}
"""The check of each section that is not empty. Returns None, or a fault that completes "step 3 of generation 1 ..."."""
