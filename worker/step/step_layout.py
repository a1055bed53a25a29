"""The layout of a step's frame in the buffer copied to the device, and the shapes to which steps are padded.

The buffer is int32. With B = `max_rows`:

    rows B | starts B | num_drafts B | sampled S | sample_tokens S | cu_seqlens_q B + 1 | token_ids | page deltas

S is the maximum number of sampled inputs: B, or more if rows with drafts may be sampled several times.

All parts but the page deltas have fixed offsets, so that captured graphs find them. The deltas follow the token ids.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from attention.step_shape import FEW_ROWS, StepShape
from worker.protocol import Int32Array, StepFrame
from worker.step.step import Step

LAST_TOKEN = -1
"""Stands, in place of a token id, for the row's last sampled token. -2 and lower stand for its drafts."""
_DECODE_SIZES = (1, 2, 4, *range(8, 257, 8))
_PROMPT_SIZES = (16, *range(32, 129, 32), *range(192, 513, 64), *range(640, 4097, 128), *range(4608, 8193, 512))
_DRAFT_SIZES = (4, 8)  # smaller than prompts': the inputs of a row or two with drafts
_FEW_ROWS_TOKENS = 2048  # in larger steps, padding rows and their logits cost little in comparison
_LEAST_GRAPH_TOKENS = 2048
# FLOPs of one layer on one rank that take an H200 1.2 ms. Its eager launches take 0.4 to 0.9 ms, or over 2 on a busy
# host.
_LAUNCH_BOUND_FLOPS = 0.8e12


def smallest(ladder: Sequence[StepShape], step: StepShape) -> StepShape | None:
    """The shape with the fewest tokens that holds `step`, from `ladder`, a sorted list. None if no shape does."""
    first = bisect.bisect_left(ladder, step.num_tokens, key=lambda shape: shape.num_tokens)
    return next((shape for shape in ladder[first:] if shape.holds(step)), None)


def decode_shapes(max_rows: int) -> list[StepShape]:
    """The shapes to which decodes are padded, up to `max_rows` rows; closer where a step's cost grows with each row.

    Padding costs at most 7 rows up to 256 and 31 above.
    """
    sizes = {size for size in (*_DECODE_SIZES, *range(288, max_rows, 32)) if size < max_rows}
    return [StepShape(size, size, size) for size in sorted(sizes | {max_rows})]


def launch_bound_tokens(flops_per_token: float) -> int:
    """Number of input tokens up to which launching a step may take longer than running it, so a CUDA graph pays off.

    Args:
        flops_per_token: FLOPs of the matrix products of one layer on one rank, two for a multiply-add.
    """
    return max(_LEAST_GRAPH_TOKENS, int(_LAUNCH_BOUND_FLOPS / flops_per_token))


def prompt_shapes(max_rows: int, max_tokens: int, max_model_len: int, max_sampled: int) -> list[StepShape]:
    """The shapes to which steps with prompts or drafts are padded, capped by `max_tokens`, `max_model_len` and 8192.

    If `max_sampled` is above `max_rows`, some shapes are for steps with drafts, with up to `max_sampled` samples.

    Padding costs at most 31 tokens up to 128, 63 up to 512, 127 up to 4096 and 511 above. Up to 2048 tokens each size
    exists twice: with few rows, for prompts that run alone or with few other rows, and with the maximum number of rows.
    The attention backend decides which shapes are captured in several variants.
    """
    most_tokens = min(max_tokens, max_model_len, _PROMPT_SIZES[-1])
    shapes, before = [], 0
    sizes = _PROMPT_SIZES if max_sampled == max_rows else (*_DRAFT_SIZES, *_PROMPT_SIZES)
    for num_tokens in sorted({size for size in sizes if size < most_tokens} | {most_tokens}):
        has_drafts, before = max_rows < max_sampled > before and num_tokens > 2, num_tokens
        few, many = (min(most, max_rows, num_tokens - 1) for most in (FEW_ROWS, max_rows))
        is_for_drafts = num_tokens in _DRAFT_SIZES and num_tokens < most_tokens  # the ladder's end also serves prompts
        if few and (few == many or num_tokens <= _FEW_ROWS_TOKENS) and not is_for_drafts:
            shapes.append(StepShape(num_tokens, few + 1, few))
        if has_drafts:  # with fewer rows than tokens, or the shape would be a decode
            shapes.append(StepShape(num_tokens, min(many + 1, num_tokens - 1), min(num_tokens, max_sampled)))
        elif many > few:
            shapes.append(StepShape(num_tokens, many + 1, many))
    return shapes


class StepLayout:
    """Offsets of the parts of the buffer.

    Args:
        max_rows: maximum number of rows of a step, padding included.
        max_tokens: maximum number of input tokens of a step, padding included.
        max_sampled: maximum number of sampled inputs of a step. A number below `max_rows` counts as `max_rows`.
    """

    def __init__(self, max_rows: int, max_tokens: int, max_sampled: int = 0) -> None:
        self._max_rows, self._max_sampled = max_rows, max(max_rows, max_sampled)
        self._cu_seqlens_q = 3 * max_rows + 2 * self._max_sampled
        self._token_ids = self._cu_seqlens_q + max_rows + 1
        self.capacity = self._token_ids + max_tokens + 3 * (max_rows + max_tokens)
        """Number of elements in the buffer. Page deltas that do not fit, after many prefix hits, are copied apart."""

    def rows(self, num_rows: int) -> slice:
        return slice(num_rows)

    def starts(self, num_rows: int) -> slice:
        return slice(self._max_rows, self._max_rows + num_rows)

    def num_drafts(self, num_rows: int) -> slice:
        return slice(2 * self._max_rows, 2 * self._max_rows + num_rows)

    def sampled(self, num_sampled: int) -> slice:
        return slice(3 * self._max_rows, 3 * self._max_rows + num_sampled)

    def sample_tokens(self, num_sampled: int) -> slice:
        return slice(self._cu_seqlens_q - self._max_sampled, self._cu_seqlens_q - self._max_sampled + num_sampled)

    def cu_seqlens_q(self, num_rows: int) -> slice:
        return slice(self._cu_seqlens_q, self._cu_seqlens_q + num_rows + 1)

    def token_ids(self, num_tokens: int) -> slice:
        return slice(self._token_ids, self._token_ids + num_tokens)

    def pack(self, out: Int32Array, step: Step, shape: StepShape) -> int:
        """Writes all parts but the page deltas, padded to `shape`. Returns the offset for the deltas.

        Args:
            out: [capacity] int32.
        """
        frame, num_rows = step.frame, len(step.frame.rows)
        rows, starts = out[self.rows(shape.num_rows)], out[self.starts(shape.num_rows)]
        rows[:num_rows], rows[num_rows:] = frame.rows, 0
        starts[:num_rows], starts[num_rows:] = frame.starts, 0
        num_drafts = out[self.num_drafts(shape.num_rows)]
        num_drafts[:num_rows], num_drafts[num_rows:] = np.maximum(step.samples_per_row - 1, 0), 0
        cu_seqlens_q = out[self.cu_seqlens_q(shape.num_rows)]
        cu_seqlens_q[0] = 0
        np.cumsum(frame.lens, out=cu_seqlens_q[1 : num_rows + 1])
        if shape.is_decode:
            cu_seqlens_q[num_rows + 1 :] = np.arange(num_rows + 1, shape.num_rows + 1)
        else:
            cu_seqlens_q[num_rows + 1 :] = cu_seqlens_q[num_rows]
            cu_seqlens_q[-1] = shape.num_tokens
        num_sampled = len(step.sampled)
        sampled, tokens = out[self.sampled(shape.num_sampled)], out[self.sample_tokens(shape.num_sampled)]
        sampled[:num_sampled], sampled[num_sampled:] = step.sampled, shape.num_rows - 1
        tokens[:num_sampled], tokens[num_sampled:] = step.sampled_tokens, shape.num_tokens - 1
        token_ids = self.token_ids(shape.num_tokens)
        _put_token_ids(out[token_ids], frame)
        return token_ids.stop


def _put_token_ids(out: npt.NDArray[np.int32], frame: StepFrame) -> None:
    has_tokens = frame.has_tokens
    if has_tokens.all():
        out[: len(frame.token_ids)] = frame.token_ids
        out[len(frame.token_ids) :] = LAST_TOKEN
        return
    out[:] = LAST_TOKEN
    lens = frame.lens
    if (lens[~has_tokens] > 1).any():
        ends = np.cumsum(lens)
        out[: ends[-1]] -= np.arange(ends[-1], dtype=np.int32) - np.repeat(ends - lens, lens).astype(np.int32)
    if has_tokens.any():
        given = np.repeat(has_tokens, lens)
        out[: len(given)][given] = frame.token_ids
