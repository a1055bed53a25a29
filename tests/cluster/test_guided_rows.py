"""Requests with a guide in the scheduler: what waits for a mask, what does not, and how such a request ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cluster.messages.engine import Finished, FinishReason, GenerateRequest, SamplingParams, StepOutput
from cluster.scheduling import limits as limits_module
from cluster.scheduling.limits import SchedulerLimits
from cluster.scheduling.scheduler import Scheduler
from configs.errors import GuideError, OverloadedError, RequestError
from tests.helpers import fake_engine
from tests.helpers.fake_engine import EOS
from worker.protocol import RowFlag, StepFrame, StepResult, UInt32Array

LIMITS = replace(fake_engine.LIMITS, max_num_batched_tokens=64, prefill_chunk_size=16)


def mask_of(*ids: int) -> UInt32Array:
    mask = np.zeros(2, np.uint32)
    for i in ids:
        mask[i // 32] |= np.uint32(1 << (i % 32))
    return mask


class HandGuide:
    """A guide whose masks are given by hand."""

    def __init__(self) -> None:
        self.accepted: list[int] = []
        self.mask: UInt32Array | None = None
        self.error: RequestError | None = None
        self.is_finished = False
        self.ahead: list[UInt32Array] = []
        self.num_closes = 0

    def allow(self, *ids: int) -> None:
        self.mask = mask_of(*ids)

    def accept(self, tokens: Sequence[int], drafts: Sequence[int] = ()) -> None:
        self.accepted += tokens
        self.mask = None

    def poll(self) -> UInt32Array | None:
        assert not self.num_closes, "asked after its end"
        if self.error is not None:
            raise self.error
        return self.mask

    def close(self) -> None:
        self.num_closes += 1


class Steps:
    """A scheduler whose steps the test launches and retires; each row's tokens count upwards."""

    def __init__(self, limits: SchedulerLimits = LIMITS) -> None:
        self.guides: dict[int, HandGuide] = {}
        self.scheduler = Scheduler(limits, make_guide=lambda request: self.guides.get(request.id))
        self.frames: deque[StepFrame] = deque()
        self.tokens: dict[int, list[int]] = {}
        self.ended: dict[int, Finished] = {}
        self.limits = limits

    def add(self, guided: bool = False, num_tokens: int = 6, **sampling: Any) -> int:
        request_id = len(self.tokens) + 1
        self.tokens[request_id] = []
        if guided:
            self.guides[request_id] = HandGuide()
        prompt = (np.arange(num_tokens, dtype=np.int32) + request_id) % 30
        params = SamplingParams(**{"max_tokens": 5, **sampling})
        request = GenerateRequest(id=request_id, prompt=prompt.tobytes(), sampling=params)
        self.ended.update((refusal.id, refusal) for refusal in self.scheduler.add([request]))
        self.scheduler.check_integrity()
        return request_id

    def launch(self) -> StepFrame | None:
        frame = self.scheduler.next_step()
        self.scheduler.check_integrity()
        self._take(self.scheduler.drain_finished())
        if frame is not None:
            encoded = frame.encode()
            assert len(encoded) <= self.limits.max_frame_bytes
            self.frames.append(StepFrame.decode(encoded))
        return frame

    def retire(self, token: int = 20) -> None:
        frame = self.frames.popleft()
        num_sampled = int(np.count_nonzero(frame.flags & RowFlag.SAMPLE))
        result = StepResult(frame.generation, frame.step, np.full(num_sampled, token, np.int32))
        self._take(self.scheduler.retire(result))
        self.scheduler.check_integrity()

    def _take(self, output: StepOutput | None) -> None:
        if output is None:
            return
        ids = np.frombuffer(output.ids, np.int64).tolist()
        for request_id, token in zip(ids, np.frombuffer(output.tokens, np.int32).tolist(), strict=True):
            assert request_id not in self.ended, "a token after the finish"
            self.tokens[request_id].append(token)
        for finished in output.finished:
            assert finished.id not in self.ended, "two finishes"
            self.ended[finished.id] = finished

    def check_idle(self) -> None:
        assert self.launch() is None
        assert not self.scheduler.has_work
        assert not self.scheduler.is_awaiting_masks
        assert all(guide.num_closes == 1 for guide in self.guides.values())
        assert self.scheduler.stats().num_owned_pages == 0


def masks_of(frame: StepFrame | None) -> dict[int, list[int]]:
    """Row -> allowed ids of a frame's masks."""
    assert frame is not None
    bits = np.unpackbits(frame.masks.view(np.uint8), axis=1, bitorder="little") if len(frame.masks) else []
    return {
        row: np.flatnonzero(row_bits).tolist() for row, row_bits in zip(frame.mask_rows.tolist(), bits, strict=True)
    }


def test_a_guided_request_waits_for_each_mask_and_another_one_does_not() -> None:
    steps = Steps()
    guided, plain = steps.add(guided=True), steps.add(max_tokens=12)
    guide = steps.guides[guided]
    assert steps.launch().rows.tolist() == [1]  # type: ignore[union-attr]
    assert steps.scheduler.stats().num_waiting == 1
    assert steps.scheduler.is_awaiting_masks
    guide.allow(20, 21)
    frame = steps.launch()
    assert masks_of(frame) == {2: [20, 21]}
    assert frame is not None
    assert sorted(frame.rows.tolist()) == [1, 2]
    steps.retire()
    assert steps.launch().rows.tolist() == [1]  # type: ignore[union-attr]
    steps.retire()
    assert guide.accepted == steps.tokens[guided] == [20]
    assert steps.launch().rows.tolist() == [1]  # type: ignore[union-attr]
    guide.allow(20)
    steps.retire()
    frame = steps.launch()
    assert frame is not None
    assert frame.rows.tolist() == [1, 2]
    assert masks_of(frame) == {2: [20]}
    assert len(steps.tokens[plain]) > len(steps.tokens[guided])


def test_only_guided_requests_that_wait_leave_nothing_to_launch() -> None:
    steps = Steps()
    guided = steps.add(guided=True, max_tokens=2)
    for _ in range(2):
        assert steps.launch() is None
        assert steps.scheduler.has_work
        assert steps.scheduler.is_awaiting_masks
        steps.guides[guided].allow(20)
        assert steps.launch() is not None
        assert steps.launch() is None
        assert not steps.scheduler.is_awaiting_masks
        steps.retire()
    steps.guides[guided].allow(20)
    steps.check_idle()
    assert steps.ended[guided] == Finished(id=guided, reason=FinishReason.LENGTH)


@pytest.mark.parametrize("max_tokens", [1, 5])
def test_a_finished_guide_ends_the_request_with_stop_also_at_its_length(max_tokens: int) -> None:
    steps = Steps()
    guided = steps.add(guided=True, max_tokens=max_tokens)
    steps.guides[guided].allow(20)
    steps.launch()
    steps.retire()
    assert guided not in steps.ended
    assert steps.launch() is None
    steps.guides[guided].is_finished = True
    steps.check_idle()
    assert steps.ended[guided] == Finished(id=guided, reason=FinishReason.STOP)
    assert steps.tokens[guided] == [20]


def test_end_of_sequence_ends_a_guided_request_without_asking_its_guide() -> None:
    steps = Steps()
    guided = steps.add(guided=True)
    steps.guides[guided].allow(EOS)
    steps.launch()
    steps.retire(EOS)
    assert steps.ended[guided] == Finished(id=guided, reason=FinishReason.STOP, stop_token_id=EOS)
    assert steps.guides[guided].accepted == []
    steps.check_idle()


@pytest.mark.parametrize("num_tokens", [0, 1])
@pytest.mark.parametrize(
    ("error", "code"),
    [(GuideError("no way on"), "grammar_error"), (OverloadedError("not just now"), "engine_overloaded")],
)
def test_a_guides_error_ends_its_request_alone(num_tokens: int, error: RequestError, code: str) -> None:
    steps = Steps()
    guided, plain = steps.add(guided=True), steps.add()
    guide = steps.guides[guided]
    for _ in range(num_tokens):
        guide.allow(20)
        steps.launch()
        steps.retire()
    guide.error = error
    steps.launch()
    assert steps.ended[guided] == Finished(id=guided, reason=FinishReason.ERROR, error=str(error), error_code=code)
    while steps.frames:
        steps.retire()
        steps.launch()
    assert steps.ended[plain].reason is FinishReason.LENGTH
    steps.check_idle()


def test_a_mask_that_leaves_nothing_is_the_requests_error() -> None:
    # Of what the grammar allows, the other parameters leave nothing: end of sequence is banned before min_tokens.
    for sampling, allowed in (({}, ()), ({"min_tokens": 2}, (EOS,)), ({"allowed_token_ids": (1, 2)}, (3, 4))):
        steps = Steps()
        guided = steps.add(guided=True, **sampling)
        steps.guides[guided].allow(*allowed)
        assert steps.launch() is None
        assert steps.ended[guided].error_code == "grammar_error"
        steps.check_idle()


def test_a_mask_is_narrowed_by_the_allowed_ids() -> None:
    steps = Steps()
    guided = steps.add(guided=True, allowed_token_ids=(3, 20, 35))
    for allowed in ((1, 3, 35), (20, 21)):
        steps.guides[guided].allow(*allowed)
        assert masks_of(steps.launch()) == {1: sorted({3, 20, 35} & set(allowed))}
        steps.retire()


def test_an_aborted_guided_request_is_closed_once_in_every_state() -> None:
    for state in ("held", "in flight", "awaiting", "ready"):
        steps = Steps()
        guided = steps.add(guided=True)
        if state != "held":
            steps.guides[guided].allow(20)
            steps.launch()
        if state in ("awaiting", "ready"):
            steps.retire()
        if state == "ready":
            steps.guides[guided].allow(20)
            assert not steps.scheduler.poll_guides()
        steps.scheduler.abort([guided])
        steps.scheduler.check_integrity()
        steps.launch()
        if steps.frames:
            steps.retire()
        assert steps.ended[guided].reason is FinishReason.ABORT
        steps.check_idle()


def test_fail_all_closes_the_guides() -> None:
    steps = Steps()
    first, second = steps.add(guided=True), steps.add(guided=True)
    steps.guides[first].allow(20)
    steps.launch()
    assert {finished.id for finished in steps.scheduler.fail_all("rank 1 died").finished} == {first, second}
    assert [guide.num_closes for guide in steps.guides.values()] == [1, 1]


@pytest.mark.parametrize("has_mask", [False, True])
def test_a_preempted_guided_request_goes_on_where_it_was(has_mask: bool) -> None:
    limits = replace(LIMITS, num_pages=7, steps_in_flight=1, max_num_seqs=2)
    steps = Steps(limits)
    plain, guided = steps.add(num_tokens=10, max_tokens=15), steps.add(guided=True, num_tokens=10, max_tokens=6)
    guide = steps.guides[guided]
    guide.allow(20)
    steps.launch()
    steps.retire()
    assert steps.tokens[guided] == [20]
    if has_mask:
        guide.allow(20, 30)
    # Without its mask it stays where it is until the other one needs its pages.
    while not steps.scheduler.stats().total_preemptions:
        frame = steps.launch()
        assert frame is not None
        steps.retire()
        guide.allow(20, 30) if has_mask else None
    num_accepted = len(guide.accepted)
    assert steps.tokens[guided] == guide.accepted
    while plain not in steps.ended:
        steps.launch()
        steps.retire()
    guide.allow(20, 30)
    frame = steps.launch()
    assert list(masks_of(frame).values()) == [[20, 30]]
    steps.retire(30)
    assert guide.accepted == steps.tokens[guided] == [20] * num_accepted + [30]
    guide.is_finished = True
    steps.check_idle()


def test_a_frame_brings_no_more_masks_than_it_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits_module, "_MASKS_BYTES", 40)
    monkeypatch.setattr(limits_module, "_ADJUSTMENT_BYTES", 0)
    steps = Steps(replace(LIMITS, steps_in_flight=1))
    assert steps.limits.max_num_masks == 3
    ids = [steps.add(guided=True, max_tokens=4) for _ in range(8)]
    for _ in range(60):
        for guide in steps.guides.values():
            guide.allow(20)
        if steps.launch() is None:
            break
        steps.retire()
    # Nobody is passed over for long: all have ended.
    assert {steps.ended[i].reason for i in ids} == {FinishReason.LENGTH}
    steps.check_idle()


def test_admissions_wait_for_the_next_frame_when_what_their_rows_start_with_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits_module, "_ADJUSTMENT_BYTES", 0)
    monkeypatch.setattr(limits_module, "MAX_ROW_BIASES", 8)
    monkeypatch.setattr(limits_module, "MAX_ROW_REQUESTED", 0)
    steps = Steps(replace(LIMITS, max_model_len=16))
    # 6 counts of 16 bytes and 8 biases each; a frame holds a mask, 8 biases and 16 counts.
    for _ in range(4):
        steps.add(repetition_penalty=1.5, max_tokens=1, logit_bias=tuple((i, 1.0) for i in range(8)))
    frames = [steps.launch(), steps.launch()]
    assert [len(frame.params) for frame in frames if frame] == [1, 1]
    assert [len(frame.biases) for frame in frames if frame] == [8, 8]


def test_a_row_starts_with_its_requests_biases_counts_mask_and_asked_tokens() -> None:
    steps = Steps()
    steps.add()
    steps.add(
        num_tokens=3,  # 2, 3, 4
        logit_bias=((5, 1.5), (7, -100.0)),
        min_tokens=2,
        ignore_eos=True,
        stop_token_ids=(9, 1000),
        bad_words=((11,), (12, 13)),
        allowed_token_ids=(1, 5, 33),
        repetition_penalty=1.25,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        num_logprobs=0,
        logprob_token_ids=(30, 2),
    )
    frame = steps.launch()
    assert frame is not None
    assert sorted(frame.biases.tolist()) == [
        (2, 5, 1.5, 2**31 - 1),
        (2, 7, -np.inf, 5),
        (2, 7, -100.0, 2**31 - 1),
        (2, 9, -np.inf, 5),
        (2, 11, -np.inf, 2**31 - 1),
    ]
    assert masks_of(frame) == {2: [1, 5, 33]}
    assert frame.counts.tolist() == [(2, 2, 0, 1), (2, 3, 0, 1), (2, 4, 0, 1)]
    assert frame.requested.tolist() == [(2, 30), (2, 2)]
    assert frame.params[1].tolist()[-3:] == (1.25, 0.5, -0.5)
    again = StepFrame.decode(frame.encode())
    for name in ("params", "biases", "mask_rows", "masks", "counts", "requested"):
        assert np.array_equal(getattr(again, name), getattr(frame, name)), name


def test_a_resumed_row_starts_with_the_counts_of_its_answer() -> None:
    limits = replace(LIMITS, num_pages=7, steps_in_flight=1)
    for sampling, prompt_counts in (
        ({"frequency_penalty": 1.0}, {}),
        ({"repetition_penalty": 2.0}, dict.fromkeys(range(2, 12), 0)),
    ):
        steps = Steps(limits)
        first, second = steps.add(num_tokens=10, max_tokens=12), steps.add(num_tokens=10, max_tokens=12, **sampling)
        frame = steps.launch()
        assert frame is not None
        assert {(c["token_id"], c["num_generated"], c["in_prompt"]) for c in frame.counts} == {
            (i, 0, 1) for i in prompt_counts
        }
        while not (steps.scheduler.stats().total_preemptions and len(frame.params)):
            if steps.frames:
                steps.retire(3)
            frame = steps.launch()
            assert frame is not None
        answer = len(steps.tokens[second])
        assert first in steps.ended
        got = {c["token_id"]: (c["num_generated"], c["in_prompt"]) for c in frame.counts}
        assert got == dict.fromkeys(prompt_counts, (0, 1)) | {3: (answer, int(3 in prompt_counts))}


@pytest.mark.parametrize(
    ("sampling", "code"),
    [
        ({"logit_bias": ((40, 1.0),)}, "engine_error"),
        ({"allowed_token_ids": (-1,)}, "engine_error"),
        ({"num_logprobs": 0, "logprob_token_ids": tuple(range(40)) * 4}, "engine_error"),
        ({"logit_bias": tuple((i % 40, 0.0) for i in range(2049))}, "engine_error"),
        ({"allowed_token_ids": (EOS,), "min_tokens": 1}, "grammar_error"),
        ({"allowed_token_ids": (3,), "bad_words": ((3,),)}, "grammar_error"),
    ],
)
def test_parameters_that_no_row_can_have_are_refused(sampling: dict[str, Any], code: str) -> None:
    steps = Steps()
    refused, kept = steps.add(**sampling), steps.add(max_tokens=1)
    assert (steps.ended[refused].reason, steps.ended[refused].error_code) == (FinishReason.ERROR, code)
    steps.launch()
    steps.retire()
    assert kept in steps.ended
    steps.check_idle()


def test_a_grammar_that_makes_no_guide_is_refused() -> None:
    def refuse(request: GenerateRequest) -> None:
        raise GuideError("not a grammar")

    scheduler = Scheduler(LIMITS, make_guide=refuse)
    request = GenerateRequest(id=1, prompt=bytes(8), sampling=SamplingParams(max_tokens=1))
    refusal = Finished(id=1, reason=FinishReason.ERROR, error="not a grammar", error_code="grammar_error")
    assert scheduler.add([request]) == [refusal]
    assert not scheduler.has_work


def test_held_requests_count_for_the_queues_limits() -> None:
    steps = Steps(replace(LIMITS, max_num_queued_requests=2))
    ids = [steps.add(guided=True) for _ in range(3)]
    assert steps.ended[ids[2]].error_code == "engine_overloaded"
    assert (steps.scheduler.stats().num_waiting, steps.scheduler.stats().num_waiting_tokens) == (2, 12)
