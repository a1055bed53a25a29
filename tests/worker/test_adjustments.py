"""Penalties, biases and masks of a row, against plain references, and what a frame does to the rows' tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.draws import draw, draw_by_torch, sampler_alone
from worker.protocol import ALWAYS, BIAS_DTYPE, COUNT_DTYPE, REQUESTED_DTYPE, StepFrame, mask_words
from worker.sampling.adjustments import RowAdjustments, adjusted
from worker.sampling.sampler import default_params

VOCAB = 70
CPU = torch.device("cpu")
Records = list[tuple[float, ...]]


def frame_of(
    params: npt.NDArray[np.void] | None = None,
    biases: Records | None = None,
    masks: dict[int, list[int]] | None = None,
    counts: Records | None = None,
    requested: Records | None = None,
) -> StepFrame:
    """A frame as the ranks read it: its arrays are views of bytes."""
    frame = StepFrame(1, 1, biases=np.array(biases or [], BIAS_DTYPE), counts=np.array(counts or [], COUNT_DTYPE))
    frame.requested = np.array(requested or [], REQUESTED_DTYPE)
    if params is not None:
        frame.params = params
    if masks:
        bits = np.zeros((len(masks), 32 * mask_words(VOCAB)), np.uint8)
        for row_bits, ids in zip(bits, masks.values(), strict=True):
            row_bits[ids] = 1
        frame.mask_rows = np.array(list(masks), np.int32)
        frame.masks = np.packbits(bits, axis=1, bitorder="little").view(np.uint32)
    return StepFrame.decode(frame.encode())


def params_of(row: int, **values: Any) -> npt.NDArray[np.void]:
    params = default_params(1)
    params["row"] = row
    for name, value in values.items():
        params[name] = value
    return params


def logits_of(seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))


def reference(
    logits: torch.Tensor,
    prompt: list[int],
    answer: list[int],
    params: np.void,
    biases: Records,
    allowed: list[int] | None,
) -> list[float]:
    """Token by token, in Python's fp64, rounded to fp32 where the sampler rounds."""
    penalties = ("repetition_penalty", "frequency_penalty", "presence_penalty")
    repetition, frequency, presence = (float(params[name]) for name in penalties)
    out = []
    for token, logit in enumerate(logits.tolist()):
        if token in prompt or token in answer:
            logit = logit / repetition if logit > 0 else logit * repetition
        logit -= answer.count(token) * frequency
        logit -= (token in answer) * presence
        rounded = np.float32(logit)
        position = len(prompt) + len(answer)
        for _, biased, value, until in sorted(biases, reverse=True):  # a ban last: nothing brings a token back
            if biased == token and position < until:
                rounded += np.float32(value)
        out.append(float(rounded) if allowed is None or token in allowed else -np.inf)
    return out


tokens = st.lists(st.integers(0, VOCAB - 1), max_size=30)


@given(
    prompt=tokens,
    answer=tokens,
    repetition=st.sampled_from([1.0, 1.05, 2.0, 0.5]),
    frequency=st.sampled_from([0.0, 0.3, -2.0, 2.0]),
    presence=st.sampled_from([0.0, 0.7, -1.1]),
    finite=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100, width=32), max_size=5),
    banned=st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([10, 30, ALWAYS]), max_size=5),
    allowed=st.none() | st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=VOCAB),
    seed=st.integers(0, 5),
)
def test_a_rows_logits_are_those_of_the_plain_formulas(
    prompt: list[int],
    answer: list[int],
    repetition: float,
    frequency: float,
    presence: float,
    finite: dict[int, float],
    banned: dict[int, int],
    allowed: list[int] | None,
    seed: int,
) -> None:
    row = 2
    params = params_of(row, repetition_penalty=repetition, frequency_penalty=frequency, presence_penalty=presence)
    biases: Records = [(row, token, value, ALWAYS) for token, value in finite.items()]
    biases += [(row, token, -np.inf, until) for token, until in banned.items()]
    # Half of the answer comes with the frame, as after a preemption; the other half is counted here.
    known, sampled = answer[: len(answer) // 2], answer[len(answer) // 2 :]
    counts: Records = [(row, t, known.count(t), int(t in prompt)) for t in sorted({*prompt, *known})]
    adjustments = RowAdjustments(4, VOCAB, CPU)
    adjustments.update(frame_of(params, biases, {row: allowed} if allowed else None, counts))
    for token in sampled:
        adjustments.count(torch.tensor([row]), torch.tensor([token]))
    logits = logits_of(seed)
    before = logits.clone()
    position = len(prompt) + len(answer)
    got = adjusted(logits, adjustments, row, position, params[0])
    assert torch.equal(logits, before)
    assert got.tolist() == reference(logits, prompt, answer, params[0], biases, allowed)
    if not adjustments.changed(np.array([row], np.int32), np.array([position]))[0]:
        assert torch.equal(got, logits)


def test_the_repetition_penalty_is_that_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    history = [3, 9, 9, 41, 69]
    expected = transformers.RepetitionPenaltyLogitsProcessor(penalty=1.3)(torch.tensor([history]), logits_of()[None])[0]
    params = params_of(1, repetition_penalty=1.3)
    adjustments = RowAdjustments(2, VOCAB, CPU)
    adjustments.update(frame_of(params, counts=[(1, t, 0, 1) for t in sorted(set(history))]))
    torch.testing.assert_close(adjusted(logits_of(), adjustments, 1, 5, params[0]), expected, rtol=3e-7, atol=0.0)


def test_a_row_that_is_given_away_starts_with_nothing() -> None:
    adjustments = RowAdjustments(5, VOCAB, CPU)
    penalties = {"repetition_penalty": 1.5, "presence_penalty": 1.0}
    both = np.concatenate([params_of(1, **penalties), params_of(3, **penalties)])
    adjustments.update(
        frame_of(
            both,
            biases=[(1, 4, 2.0, ALWAYS), (3, 4, -np.inf, 50), (3, 5, 1.0, ALWAYS)],
            masks={1: [1, 2], 3: [5, 6]},
            counts=[(1, 7, 3, 1), (3, 8, 1, 0)],
            requested=[(1, 11), (3, 12), (3, 13)],
        )
    )
    rows, positions = np.array([1, 3], np.int32), np.array([10, 10])
    assert adjustments.changed(rows, positions).all()
    assert adjustments.num_requested(rows).tolist() == [1, 2]
    kept = adjusted(logits_of(), adjustments, 3, 10, both[1])
    adjustments.update(frame_of(params_of(1)))
    assert adjustments.changed(rows, positions).tolist() == [False, True]
    assert adjustments.num_requested(rows).tolist() == [0, 2]
    assert torch.equal(adjusted(logits_of(), adjustments, 1, 10, params_of(1)[0]), logits_of())
    assert torch.equal(adjusted(logits_of(), adjustments, 3, 10, both[1]), kept)
    # Nor do the counts of before come back with penalties.
    again = params_of(1, presence_penalty=1.0)
    adjustments.update(frame_of(again))
    assert torch.equal(adjusted(logits_of(), adjustments, 1, 10, again[0]), logits_of())


def test_a_mask_holds_until_it_is_replaced() -> None:
    adjustments = RowAdjustments(3, VOCAB, CPU)
    params = params_of(2)
    adjustments.update(frame_of(params, masks={2: [0, 31, 32, 69]}))
    for frame, allowed in ((frame_of(), [0, 31, 32, 69]), (frame_of(masks={2: [33, 64]}), [33, 64])):
        adjustments.update(frame)
        got = adjusted(logits_of(), adjustments, 2, 5, params[0])
        assert torch.isfinite(got).nonzero().squeeze(1).tolist() == allowed


def test_a_bias_ends_where_it_says() -> None:
    adjustments = RowAdjustments(2, VOCAB, CPU)
    adjustments.update(frame_of(params_of(1), biases=[(1, 4, -np.inf, 8), (1, 9, 1.0, 6)]))
    row = np.array([1], np.int32)
    for position, changed in ((5, [4, 9]), (6, [4]), (7, [4]), (8, [])):
        got = adjusted(logits_of(), adjustments, 1, position, params_of(1)[0])
        assert (got != logits_of()).nonzero().squeeze(1).tolist() == changed
        assert adjustments.changed(row, np.array([position])).tolist() == [bool(changed)]


def test_counts_do_not_overflow() -> None:
    adjustments = RowAdjustments(2, VOCAB, CPU)
    params = params_of(1, frequency_penalty=1.0)
    adjustments.update(frame_of(params, counts=[(1, 4, 16382, 1), (1, 5, 100_000, 0)]))
    for _ in range(3):
        for token in (4, 5):
            adjustments.count(torch.tensor([1]), torch.tensor([token]))
    got = adjusted(torch.zeros(VOCAB), adjustments, 1, 9, params[0])
    assert got[[4, 5, 6]].tolist() == [-16383.0, -16383.0, 0.0]


def test_a_token_is_drawn_from_adjusted_logits_and_logprobs_are_of_the_models() -> None:
    logits = torch.stack([logits_of(1), logits_of(2), logits_of(3)])
    params = default_params(3)
    params["row"] = (1, 2, 3)
    params["num_logprobs"] = (2, -1, 0)
    params["temperature"] = (0.0, 1.0, 1.0)
    params["seed"] = (5, 6, 7)
    positions = np.array([4, 4, 4])
    allowed = {1: [5, 6, 9], 2: [40, 41, 68]}
    sampler = sampler_alone(VOCAB, 3, use_triton=False)
    sampler.update(frame_of(params, masks=allowed, requested=[(1, 5), (1, 6), (3, 7)]))
    plain, plain_logprobs = draw_by_torch(logits, params, positions)
    masked = logits.clone()
    for row, ids in allowed.items():
        masked[row - 1] = -np.inf
        masked[row - 1, ids] = logits[row - 1, ids]
    tokens, logprobs = draw(sampler, logits, params, positions)
    assert tokens == draw_by_torch(masked, params, positions)[0]
    assert tokens[0] in allowed[1]
    assert tokens[1] in allowed[2]
    assert tokens[2] == plain[2]
    assert logprobs is not None
    assert plain_logprobs is not None
    expected = logits.log_softmax(-1)
    assert logprobs.logprobs.tolist() == [expected[0, tokens[0]].item(), expected[2, tokens[2]].item()]
    assert torch.equal(logprobs.top_ids, plain_logprobs.top_ids)
    assert logprobs.requested_logprobs[0].tolist() == expected[0, [5, 6]].tolist()
    assert logprobs.requested_logprobs[1, 0] == expected[2, 7]
