"""What every rank verifies of a frame before it touches a table: a wrong frame is an error, never a wild write."""

from __future__ import annotations

from dataclasses import dataclass

from configs.errors import EngineError
from worker.protocol import RowFlag, StepFrame


@dataclass(frozen=True, slots=True)
class FrameLimits:
    """What a rank's tables hold."""

    num_rows: int
    """Rows of the request table, padding included: valid rows are 1 to num_rows - 1."""
    vocab_size: int
    max_model_len: int


def check_frame(frame: StepFrame, limits: FrameLimits) -> None:
    """Raises EngineError unless rows, lengths, token ids and positions of `frame` fit `limits`."""
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
    if wrong is not None:
        raise EngineError(f"step {frame.step} of generation {frame.generation} {wrong}")


def _within(frame: StepFrame, num_rows: int) -> bool:
    if frame.rows.min() < 1 or frame.rows.max() >= num_rows:
        return False
    parameterised = frame.params["row"]
    return len(parameterised) == 0 or bool(parameterised.min() >= 1 and parameterised.max() < num_rows)
