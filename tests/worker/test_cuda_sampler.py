"""The sampler's kernels draw what torch draws, from whole or sharded rows, alone or in a batch.

Without a GPU its kernels run in Triton's interpreter, with small blocks so that small vocabularies take several.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from parallel.collectives.group import TensorParallelGroup
from tests.helpers.draws import CPU, Params, draw, draw_by_torch, plan_of, sampler_alone
from worker.protocol import BIAS_DTYPE, COUNT_DTYPE, PARAMS_DTYPE, REQUESTED_DTYPE, StepFrame, mask_words
from worker.sampling import sampler as sampler_module
from worker.sampling import torch_sampling
from worker.sampling.adjustments import RowAdjustments, adjusted
from worker.sampling.kernels import adjustments as adjustments_kernels
from worker.sampling.kernels import sampling
from worker.sampling.logprobs import LogprobTensors
from worker.sampling.sampler import ResampledRows, Sampler, SamplingTables, default_params

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
VOCAB = 1500


@pytest.fixture(
    params=[
        pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled for the GPU")),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ]
)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where the kernels run."""
    if request.param == "cpu":
        for name, size in (("_BLOCK", 512), ("_SLICE", 256), ("_GROUP", 32), ("_SEARCH_BLOCK", 1024)):
            monkeypatch.setattr(sampling, name, size)
        monkeypatch.setattr(adjustments_kernels, "_BLOCK", 1024)
        monkeypatch.setattr(adjustments_kernels, "_BIASES", 32)
    return torch.device(request.param)


def _params(*records: dict[str, Any]) -> Params:
    """One record each, of rows 1, 2, ..."""
    params = default_params(len(records))
    params["row"] = np.arange(1, len(records) + 1)
    for i, values in enumerate(records):
        for name, value in values.items():
            params[name][i] = value
    return params


MANY = _params(
    {},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.7, "seed": 2, "top_k": 5, "num_logprobs": 3},
    {"temperature": 1.3, "seed": 3, "top_p": 0.8},
    {"temperature": 1.0, "seed": 4, "min_p": 0.1, "num_logprobs": 0},
    {"temperature": 2.0, "seed": -5, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 5.0, "seed": 2**62, "top_p": 0.999},
    {"temperature": 0.6, "seed": 2**63 - 1, "top_k": 20, "top_p": 0.95},
    {"top_k": 3, "top_p": 0.5, "num_logprobs": 5},
)
FEW = _params(
    {},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.7, "seed": 2, "top_k": 5, "num_logprobs": 3},
    {"temperature": 1.3, "seed": 3, "top_p": 0.8, "num_logprobs": 0},
    {"temperature": 2.0, "seed": -5, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
)


def _logits(num_rows: int, seed: int = 0, vocab: int = VOCAB) -> Tensor:
    return 3 * torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed))


def _positions(count: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng(count).integers(0, 100_000, count)


def _alone(vocab: int, num_rows: int, device: torch.device) -> Sampler:
    return sampler_alone(vocab, num_rows, device, use_triton=True)


def _assert_draws_alike(logits: Tensor, params: Params, positions: npt.NDArray[np.int64], device: torch.device) -> None:
    expected, their_logprobs = draw_by_torch(logits, params, positions)
    tokens, logprobs = draw(_alone(logits.shape[1], len(params), device), logits, params, positions)
    assert tokens == expected
    _assert_logprobs_close(logprobs, their_logprobs)


def _assert_logprobs_close(logprobs: LogprobTensors | None, expected: LogprobTensors | None) -> None:
    if logprobs is None or expected is None:
        assert logprobs is expected
        return
    # Half a unit in the last place each for the CPU's fp32 maximum, sum and difference.
    tolerance = {"rtol": 0.0, "atol": 2e-5}  # the CPU's own sum over a whole vocabulary errs by 1e-5 in fp32
    torch.testing.assert_close(logprobs.logprobs.cpu(), expected.logprobs, **tolerance)
    torch.testing.assert_close(logprobs.top_logprobs.cpu(), expected.top_logprobs, **tolerance)
    assert torch.equal(logprobs.top_ids.cpu(), expected.top_ids)
    torch.testing.assert_close(logprobs.requested_logprobs.cpu(), expected.requested_logprobs, **tolerance)


class _Turns:
    """Collectives between threads of which one runs at a time: Triton's interpreter is not made for more."""

    turn = threading.Lock()

    def __init__(self, rank: int, slots: list[Tensor], met: threading.Barrier) -> None:
        self._rank, self._slots, self._met = rank, slots, met

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        self._slots[self._rank] = x
        self.barrier()
        torch.stack(self._slots, out=out)
        self.barrier()

    def barrier(self) -> None:
        self.turn.release()
        try:
            self._met.wait(60)
        finally:
            self.turn.acquire()

    def all_reduce(self, x: Tensor) -> None:
        raise NotImplementedError

    def abort(self, reason: str) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


def _run_ranks(size: int, device: torch.device, body: Callable[[TensorParallelGroup], Any]) -> list[Any]:
    """Runs `body` once per rank; returns results, or the errors raised, in rank order."""
    results: list[Any] = [None] * size
    slots, met = [torch.empty(0)] * size, threading.Barrier(size)

    def rank_main(rank: int) -> None:
        with _Turns.turn:
            try:
                collectives = _Turns(rank, slots, met)
                results[rank] = body(TensorParallelGroup(rank=rank, size=size, device=device, collectives=collectives))
            except Exception as error:  # noqa: BLE001 - handed to the test
                results[rank] = error
                met.abort()

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    return results


def test_draws_the_tokens_that_torch_draws(device: torch.device) -> None:
    for seed in range(1 if device.type == "cpu" else 20):
        logits = _logits(len(MANY), seed)
        _assert_draws_alike(logits, MANY, _positions(len(MANY)) + seed, device)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [128_256, 151_669])
def test_draws_the_tokens_that_torch_draws_from_a_whole_vocabulary(vocab: int) -> None:
    params = _params(*[{name: record[name] for name in PARAMS_DTYPE.names or ()} for record in np.tile(MANY, 6)])
    params["row"] = np.arange(1, len(params) + 1)
    params["seed"] += np.arange(len(params))
    _assert_draws_alike(_logits(len(params), 3, vocab), params, _positions(len(params)), torch.device("cuda"))


def test_noise_is_the_cpu_samplers_for_every_seed_and_position(device: torch.device) -> None:
    rng = np.random.default_rng(0)
    count = 12 if device.type == "cpu" else 24
    params = _params(*[{"temperature": 1.0}] * count)
    params["seed"] = rng.integers(-(2**63), 2**63 - 1, count)
    params["seed"][:4] = [0, -1, 2**63 - 1, -(2**63)]
    positions = rng.integers(0, 2**31 - 2, count)
    positions[:4] = [0, 1, 2**31 - 2, 2**17]
    # Of equal logits the noise alone decides.
    _assert_draws_alike(torch.zeros(count, VOCAB), params, positions, device)


@pytest.mark.parametrize("use_triton", [True, False])
@pytest.mark.parametrize("tp_size", [2, 3])
def test_shards_draw_what_the_whole_row_draws(tp_size: int, use_triton: bool, device: torch.device) -> None:
    if device.type == "cuda" and not use_triton:
        pytest.skip("torch draws on the CPU")
    logits, positions = _logits(len(FEW)), _positions(len(FEW))
    logits[3] = (logits[3] / 4).round()  # ties across the shards
    expected, their_logprobs = draw_by_torch(logits, FEW, positions)
    plan = plan_of(tp_size, VOCAB)

    def body(group: TensorParallelGroup) -> tuple[list[int], LogprobTensors | None]:
        span = plan.vocab[group.rank]
        cuda = Sampler(plan, group, len(FEW) + 1, use_triton=use_triton)
        return draw(cuda, logits[:, span.start : span.stop].contiguous(), FEW, positions)

    for tokens, logprobs in _run_ranks(tp_size, device, body):
        assert tokens == expected
        _assert_logprobs_close(logprobs, their_logprobs)


@pytest.mark.parametrize(("tp_size", "spread"), [(1, 3.0), (2, 0.02), (3, 0.4)])
def test_rows_with_a_small_top_k_draw_what_the_whole_row_draws_without_being_looked_at_again(
    tp_size: int, spread: float, device: torch.device
) -> None:
    count = 12 if device.type == "cpu" else 200
    rng = np.random.default_rng(tp_size)
    params = _params(*[{"temperature": 1.0}] * count)
    params["seed"], params["temperature"] = rng.integers(0, 1 << 40, count), rng.choice([0.3, 0.6, 1.0, 1.7], count)
    params["top_k"] = rng.choice([1, 2, 5, 20, 63, 64], count)
    params["top_p"] = rng.choice([1.0, 0.95, 0.5, 0.01], count)
    params["min_p"] = rng.choice([0.0, 0.05, 0.9], count)
    logits = spread * torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(tp_size))
    logits = logits.bfloat16().float()  # many are equal, few enough for a list
    logits[0, ::3] = -math.inf
    logits[1, 5:] = -math.inf
    positions = _positions(count)
    expected, _ = draw_by_torch(logits, params, positions)
    plan = plan_of(tp_size, VOCAB)

    def body(group: TensorParallelGroup) -> tuple[list[int], int]:
        span = plan.vocab[group.rank]
        sampler = Sampler(plan, group, count + 1, use_triton=True)
        drawn, _ = draw(sampler, logits[:, span.start : span.stop].contiguous(), params, positions)
        return drawn, len(sampler.find_resampled(params["row"], positions).indices)

    assert _run_ranks(tp_size, device, body) == tp_size * [(expected, 0)]


def test_of_more_equal_tokens_than_a_list_holds_every_group_takes_the_same(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    if device.type == "cpu":
        # So that some rows are searched as wholes.
        monkeypatch.setattr(sampling, "_MOST_GROUPS", type(sampling._MOST_GROUPS)(4))
    params = _params(*[{"temperature": 2.0, "top_k": k, "seed": k} for k in (1, 20, 64)])
    logits = torch.zeros(3, VOCAB)
    logits[1, 700:710] = 1.0
    logits[2, ::2] = -5.0
    positions = _positions(3)

    def drawn(tp_size: int) -> list[list[int]]:
        plan = plan_of(tp_size, VOCAB)

        def body(group: TensorParallelGroup) -> list[list[int]]:
            span = plan.vocab[group.rank]
            sampler = Sampler(plan, group, 4, use_triton=True)
            local = logits[:, span.start : span.stop].contiguous()
            return [draw(sampler, local, params, positions + i)[0] for i in range(2 if device.type == "cpu" else 6)]

        first, *others = _run_ranks(tp_size, device, body)
        assert all(other == first for other in others)
        return first

    tokens = drawn(1)
    assert drawn(2) == drawn(3) == tokens
    of_ones, of_ties, of_halves = zip(*tokens, strict=True)
    assert max(of_ones) < 128
    assert set(of_ties) <= {*range(700, 710), *range(118)}, "ten are likelier, and 118 of the others fit"
    assert set(of_halves) <= set(range(1, 256, 2))


@pytest.mark.parametrize("tp_size", [1, 3])
def test_scores_of_given_tokens_are_those_of_the_cpu(tp_size: int, device: torch.device) -> None:
    logits, plan = _logits(5), plan_of(tp_size, VOCAB)
    logits[2] = (logits[2] / 4).round()  # ties across the shards
    targets = torch.tensor([0, VOCAB - 1, 700, 3, 3])

    def body(group: TensorParallelGroup) -> list[LogprobTensors]:
        span = plan.vocab[group.rank]
        cuda = Sampler(plan, group, 2, use_triton=True)
        local = logits[:, span.start : span.stop].contiguous().to(device)
        on_device = targets.to(device)
        return [cuda.logprobs_of(local, on_device, k, on_device[:, None]).to_host() for k in (0, 6)]

    for scores in _run_ranks(tp_size, device, body):
        for k, ours in zip((0, 6), scores, strict=True):
            expected = torch_sampling.token_logprobs(logits, targets, k, targets[:, None])
            torch.testing.assert_close(ours.logprobs, expected.logprobs, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(ours.top_logprobs, expected.top_logprobs, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(ours.requested_logprobs, expected.requested_logprobs, atol=1e-5, rtol=1e-5)
            assert torch.equal(ours.top_ids, expected.top_ids)


@pytest.mark.parametrize("use_triton", [True, False])
def test_a_rank_without_vocabulary_rows_draws_with_the_others(use_triton: bool, device: torch.device) -> None:
    if device.type == "cuda" and not use_triton:
        pytest.skip("torch draws on the CPU")
    plan = plan_of(4, 3)
    assert min(span.size for span in plan.vocab) == 0
    logits = torch.tensor([[0.5, 2.0, 2.0], [-torch.inf, -torch.inf, -torch.inf]])
    params = _params({}, {"temperature": 1.0, "seed": 3})

    def body(group: TensorParallelGroup) -> list[int]:
        span = plan.vocab[group.rank]
        cuda = Sampler(plan, group, len(params) + 1, use_triton=use_triton)
        return draw(cuda, logits[:, span.start : span.stop].contiguous(), params, _positions(2))[0]

    assert _run_ranks(4, device, body) == [[1, 0]] * 4


def test_neighbours_do_not_change_a_row(device: torch.device) -> None:
    logits, positions = _logits(len(FEW)), _positions(len(FEW))
    together, logprobs = draw(_alone(VOCAB, len(FEW), device), logits, FEW, positions)
    assert logprobs is not None
    requested = np.flatnonzero(FEW["num_logprobs"] >= 0).tolist()
    for i in range(len(FEW)):
        one = slice(i, i + 1)
        alone, own = draw(_alone(VOCAB, len(FEW), device), logits[one], FEW[one], positions[one])
        assert alone == [together[i]]
        if own is not None:
            j = requested.index(i)
            assert torch.equal(own.logprobs, logprobs.logprobs[j : j + 1])
            assert torch.equal(own.top_ids[0], logprobs.top_ids[j, : own.top_ids.shape[1]])


ADJUSTED = _params(
    {},
    {"temperature": 0.7, "seed": 2, "top_k": 30, "repetition_penalty": 1.3, "num_logprobs": 2},
    {"frequency_penalty": 0.7, "presence_penalty": -1.1, "num_logprobs": 0},
    {"temperature": 1.0, "seed": 4, "repetition_penalty": 0.8, "frequency_penalty": -0.4, "top_p": 0.95},
    {"temperature": 1.0, "seed": 5},
)
POSITIONS = np.array([40, 50, 60, 70, 80])


def _adjusting(vocab: int) -> StepFrame:
    """Counts for the rows of ADJUSTED with penalties; biases for the third and on, masks for the last two."""
    rng = np.random.default_rng(0)
    counts = np.zeros(3 * 400, COUNT_DTYPE)
    counts["row"] = np.repeat([2, 3, 4], 400)
    counts["token_id"] = np.concatenate([rng.permutation(vocab)[:400] for _ in range(3)])
    counts["num_generated"], counts["in_prompt"] = rng.integers(0, 4, 1200), rng.integers(0, 2, 1200)
    biases = np.zeros(3 * 100, BIAS_DTYPE)
    biases["row"] = np.repeat([3, 4, 5], 100)
    biases["token_id"] = np.concatenate([rng.permutation(vocab)[:100] for _ in range(3)])
    biases["value"], biases["until"] = rng.normal(0, 5, 300), rng.choice([50, 2**31 - 1], 300)
    # Some of the same tokens are banned as well, for as long or not.
    bans = biases[::5].copy()
    bans["value"], bans["until"] = -np.inf, rng.choice([50, 2**31 - 1], 60)
    return StepFrame(
        1,
        1,
        params=ADJUSTED,
        counts=counts,
        biases=np.concatenate([biases, bans]),
        requested=np.array([(2, 3), (2, vocab - 1), (3, 9)], REQUESTED_DTYPE),
        mask_rows=np.array([4, 5], np.int32),
        masks=rng.integers(0, 2**32, (2, mask_words(vocab)), np.uint32),
    )


@pytest.mark.parametrize("vocab", [VOCAB, pytest.param(151_669, marks=pytest.mark.gpu)])
def test_adjusts_logits_as_the_cpu_does_in_every_bit(vocab: int, device: torch.device) -> None:
    on_cpu, cuda = RowAdjustments(6, vocab, CPU), _alone(vocab, 5, device)
    on_cpu.update(_adjusting(vocab))
    cuda.update(_adjusting(vocab))
    logits = _logits(5, vocab=vocab)
    logits[:, :40] = -torch.inf
    expected = [adjusted(logits[i], on_cpu, i + 1, int(POSITIONS[i]), ADJUSTED[i]) for i in range(5)]
    assert torch.equal(expected[0], logits[0])
    rows = torch.from_numpy(ADJUSTED["row"].copy()).to(device)
    got = logits.to(device)
    adjustments_kernels.adjust_logits(
        got, rows, torch.from_numpy(POSITIONS.astype(np.int32)).to(device), cuda.tables.records, cuda.adjustments
    )
    assert torch.equal(got.cpu().view(torch.int32), torch.stack(expected).view(torch.int32))


@pytest.mark.parametrize("tp_size", [1, 3])
def test_adjusted_rows_draw_and_count_as_on_the_cpu(tp_size: int, device: torch.device) -> None:
    vocab, num_steps = (600, 2) if device.type == "cpu" else (VOCAB, 20)
    plan, on_cpu = plan_of(tp_size, vocab), sampler_alone(vocab, 5, use_triton=False)
    on_cpu.update(_adjusting(vocab))
    # Steep, so that what was drawn is drawn again unless its counts forbid it.
    steps = [(4 * _logits(5, 7, vocab), POSITIONS + step) for step in range(num_steps)]
    expected = [draw(on_cpu, logits, ADJUSTED, positions) for logits, positions in steps]

    def body(group: TensorParallelGroup) -> list[Any]:
        span = plan.vocab[group.rank]
        cuda = Sampler(plan, group, len(ADJUSTED) + 1, use_triton=True)
        frame, draws = _adjusting(vocab), []
        for logits, positions in steps:
            cuda.update(frame)
            frame = StepFrame(1, 1)
            draws.append(draw(cuda, logits[:, span.start : span.stop].contiguous(), ADJUSTED, positions))
        return [*draws, cuda.adjustments.marks[2:5].cpu()]

    for *draws, marks in _run_ranks(tp_size, device, body):
        for (tokens, logprobs), (their_tokens, their_logprobs) in zip(draws, expected, strict=True):
            assert tokens == their_tokens
            _assert_logprobs_close(logprobs, their_logprobs)
        assert torch.equal(marks, on_cpu.adjustments.marks[2:5])


def test_a_row_without_adjustments_keeps_its_token_beside_rows_that_have_some(device: torch.device) -> None:
    cuda = _alone(VOCAB, 5, device)
    cuda.update(_adjusting(VOCAB))
    logits = _logits(5)
    beside, _ = draw(cuda, logits, ADJUSTED, POSITIONS)
    alone, _ = draw(_alone(VOCAB, 5, device), logits[:1], ADJUSTED[:1], POSITIONS[:1])
    assert beside[:1] == alone


def _thresholds(logits: Tensor, params: Params, device: torch.device) -> Tensor:
    tables = SamplingTables(len(params) + 1, device)
    tables.update(params)
    rows = torch.arange(1, len(params) + 1, dtype=torch.int32, device=device)
    return sampling.filter_thresholds(logits.to(device), rows, tables.records).cpu()


def test_negative_zero_ties_with_zero(device: torch.device) -> None:
    # Zeros of both signs tie for the 150th place and outweigh the ones; the 200 positive zeros alone do not.
    logits = torch.cat([torch.ones(100), torch.zeros(200), -torch.zeros(1200)]).unsqueeze(0)
    params = _params({"temperature": 1.0, "top_k": 150, "top_p": 0.5})
    assert _thresholds(logits, params, device).tolist() == [0.0]


def test_filters_allow_the_tokens_the_cpu_sampler_allows(device: torch.device) -> None:
    records = [
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "top_k": 2},  # most likely of two groups
        {"temperature": 0.01, "top_k": 7},
        {"temperature": 3.0, "top_k": 700},  # more than there are groups
        {"temperature": 3.0, "top_k": VOCAB - 1},
        {"temperature": 3.0, "top_k": VOCAB, "top_p": 0.7},
        {"temperature": 1.0, "top_p": 1e-6},
        {"temperature": 0.3, "top_p": 0.5},
        {"temperature": 50.0, "top_p": 0.97},  # nearly flat: more candidates than one block searches
        {"temperature": 1.0, "top_k": 100, "top_p": 0.6, "min_p": 0.05},
        {"temperature": 2.0, "min_p": 1.0},
        {"temperature": 1.0, "top_p": float(np.nextafter(np.float32(1), np.float32(0)))},
        {"temperature": 1.5, "top_k": 50, "top_p": 0.99, "min_p": 1e-4},
        {"temperature": 1.0},
        {"top_k": 4, "top_p": 0.1, "min_p": 0.5},
    ]
    params = _params(*records)
    logits = _logits(len(params), 5)
    logits[-6:] = logits[-6:].round()  # many ties with every threshold
    logits[0, ::2] = -torch.inf
    thresholds = _thresholds(logits, params, device)
    for i, record in enumerate(params):
        scores = logits[i].double() / max(float(record["temperature"]), 1e-9)
        expected = None
        if record["temperature"] > 0:
            expected = torch_sampling._threshold(
                scores, int(record["top_k"]), float(record["top_p"]), float(record["min_p"])
            )
        allowed = torch.ones(VOCAB, dtype=torch.bool) if expected is None else scores >= expected
        assert torch.equal(scores >= thresholds[i], allowed), records[i]


def test_the_only_possible_token_is_drawn(device: torch.device) -> None:
    logits = torch.full((len(FEW), VOCAB), -torch.inf)
    logits[:, 1234] = -7.5
    tokens, _ = draw(_alone(VOCAB, len(FEW), device), logits, FEW, _positions(len(FEW)))
    assert tokens == [1234] * len(FEW)


def test_equal_logits_go_to_the_smallest_id(device: torch.device) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [300, 700, 1400]] = 5.0
    params = _params({"num_logprobs": 5})
    tokens, logprobs = draw(_alone(VOCAB, 1, device), logits, params, _positions(1))
    assert tokens == [300]
    assert logprobs is not None
    assert logprobs.top_ids.tolist() == [[300, 700, 1400, 0, 1]]


def test_a_row_of_minus_infinity_gets_a_token_of_the_vocabulary(device: torch.device) -> None:
    logits = torch.full((len(FEW), VOCAB), -torch.inf)
    tokens, _ = draw(_alone(VOCAB, len(FEW), device), logits, FEW, _positions(len(FEW)))
    assert tokens == [0] * len(FEW)


@pytest.mark.parametrize(("use_triton", "at"), [(True, 1234), (False, 0), (False, VOCAB - 1)])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_row_with_a_nan_gets_no_token_and_the_others_notice_nothing(
    use_triton: bool, at: int, device: torch.device
) -> None:
    if not use_triton and device.type == "cuda":
        pytest.skip("torch's twin is for the CPU")
    logits, positions = _logits(len(FEW)), _positions(len(FEW))
    expected, their_logprobs = draw_by_torch(logits, FEW, positions)
    assert their_logprobs is not None
    asking = np.flatnonzero(FEW["num_logprobs"] >= 0)
    for victims in ([0, 2, 4], [1, 3]):
        broken, whole = logits.clone(), torch.from_numpy(~np.isin(asking, victims))
        broken[torch.tensor(victims)[:, None], [1, 700, at]] = torch.tensor([torch.inf, -torch.inf, torch.nan])
        tokens, logprobs = draw(sampler_alone(VOCAB, len(FEW), device, use_triton=use_triton), broken, FEW, positions)
        assert tokens == [-1 if i in victims else token for i, token in enumerate(expected)]
        assert logprobs is not None
        assert logprobs.logprobs.isnan().tolist() == (~whole).tolist()
        torch.testing.assert_close(logprobs.logprobs.cpu()[whole], their_logprobs.logprobs[whole], rtol=0, atol=2e-5)


def test_a_nan_that_a_mask_or_a_ban_hides_is_still_one(device: torch.device) -> None:
    logits, rows, positions = _logits(3), torch.arange(1, 4, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    logits[:, 40] = torch.nan
    frame = StepFrame(
        generation=1,
        step=1,
        params=_params({}, {"repetition_penalty": 1.5}, {}),
        biases=np.array([(3, 40, -np.inf, 9), (3, 41, -np.inf, 9)], BIAS_DTYPE),
        mask_rows=np.array([1], np.int32),
        masks=np.full((1, mask_words(VOCAB)), 1, np.uint32),
    )
    for use_triton in (True, False) if device.type == "cpu" else (True,):
        sampler = sampler_alone(VOCAB, 3, device, use_triton=use_triton)
        sampler.update(frame)
        local, of, at = logits.to(device), rows.to(device), positions.to(device)
        resampled = sampler.find_resampled(rows.numpy(), positions.numpy())
        assert resampled.is_redrawn.tolist() == [True] * 3
        tokens = sampler.sample(local, of, at, resampled.indices)
        sampler.resample(local, of, at, tokens, resampled)
        assert tokens.tolist() == [-1] * 3


def test_only_chosen_rows_are_sampled_again_however_they_are_cut(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler_module, "_CHUNK_ROWS", 2)
    logits, positions = _logits(len(MANY)).to(device), _positions(len(MANY))
    expected, their_logprobs = draw_by_torch(logits.cpu(), MANY, positions)
    cuda = _alone(VOCAB, len(MANY), device)
    cuda.tables.update(MANY)
    rows = torch.from_numpy(MANY["row"].copy()).to(device)
    tokens = torch.full((len(MANY),), -1, device=device)
    tokens[8] = expected[8]
    which, is_redrawn = np.array([2, 4, 5, 7, 8]), np.array([True] * 4 + [False])  # the last has no filters
    at = torch.from_numpy(positions.astype(np.int32)).to(device)
    resampled = ResampledRows(which, is_redrawn, MANY["num_logprobs"][which], 0, False)
    logprobs = cuda.resample(logits, rows, at, tokens, resampled)
    drawn = tokens.cpu().numpy()
    assert drawn[which].tolist() == np.array(expected)[which].tolist()
    assert (np.delete(drawn, which) == -1).all()
    _assert_logprobs_close(logprobs, their_logprobs)  # these rows are all that ask
    silent = ResampledRows(which[2:4], is_redrawn[2:4], MANY["num_logprobs"][which[2:4]], 0, False)
    assert cuda.resample(logits, rows, at, tokens, silent) is None
    # Nor does who is left out of the plain rule change the others.
    plain = cuda.sample(logits, rows, at)
    assert cuda.sample(logits, rows, at, which)[[0, 1, 3, 6]].tolist() == plain[[0, 1, 3, 6]].tolist()
    assert not cuda.sample(logits, rows, at, np.arange(len(MANY))).any()


def test_logprobs_without_likeliest_tokens_are_the_tokens_own(device: torch.device) -> None:
    params = _params({"num_logprobs": 0}, {"temperature": 1.0, "num_logprobs": 0})
    _assert_draws_alike(_logits(2), params, _positions(2), device)


def test_tables_change_the_given_rows_and_padding_stays_greedy(device: torch.device) -> None:
    tables = SamplingTables(5, device)
    read_only = np.frombuffer(_params({"temperature": 1.0, "seed": -9, "top_k": 3}).tobytes(), PARAMS_DTYPE)
    row_3 = read_only.copy()
    row_3["row"] = 3
    tables.update(row_3)
    tables.update(read_only)
    records = tables.records.cpu().numpy().view(PARAMS_DTYPE).reshape(5)
    expected = default_params(5)
    expected[1], expected[3] = read_only[0], row_3[0]
    assert (records == expected).all()
    logits = _logits(1)
    cuda = _alone(VOCAB, 1, device)
    padding = torch.zeros(1, dtype=torch.int32, device=device)
    assert cuda.sample(logits.to(device), padding, padding).tolist() == logits.argmax(1).tolist()


@pytest.mark.gpu
def test_a_graph_samples_what_is_in_its_buffers_and_tables() -> None:
    device, vocab = torch.device("cuda"), 50_304
    params = _params({}, *[{"temperature": 0.5 * (i + 1), "seed": i} for i in range(6)])
    count = len(params)
    cuda = _alone(vocab, count, device)
    logits = torch.zeros(count, vocab, device=device)
    rows = torch.zeros(count, dtype=torch.int32, device=device)
    positions = torch.zeros(count, dtype=torch.int32, device=device)
    cuda.sample(logits, rows, positions)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = cuda.sample(logits, rows, positions)
    rows.copy_(torch.from_numpy(params["row"].copy()))
    for seed in range(3):
        params["seed"] += 1
        cuda.tables.update(params)
        at, fresh = _positions(count) + seed, _logits(count, seed, vocab)
        logits.copy_(fresh)
        positions.copy_(torch.from_numpy(at.astype(np.int32)))
        graph.replay()
        assert tokens.tolist() == draw_by_torch(fresh, params, at)[0]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_the_host_never_waits_for_the_device() -> None:
    device = torch.device("cuda")
    cuda = _alone(VOCAB, len(MANY), device)
    logits, rows = _logits(len(MANY)).to(device), torch.from_numpy(MANY["row"].copy()).to(device)
    positions = torch.zeros_like(rows)
    every = np.arange(len(MANY))
    resampled = ResampledRows(every, np.ones(len(MANY), np.bool_), MANY["num_logprobs"], 0, True)
    cuda.resample(logits, rows, positions, cuda.sample(logits, rows, positions), resampled)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        cuda.update(StepFrame(1, 1, params=MANY))
        tokens = cuda.sample(logits, rows, positions)
        logprobs = cuda.resample(logits, rows, positions, tokens, resampled)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert logprobs is not None
