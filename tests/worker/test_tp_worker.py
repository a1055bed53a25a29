"""TPWorker: frames in, tokens out, on one rank and on several; and SmolLM2 against transformers."""

from __future__ import annotations

import gc
import multiprocessing
import resource
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import psutil  # type: ignore[import-untyped]  # ships no types
import pytest
import torch
from safetensors.torch import save_file

import worker.tp_worker
from attention import registry
from attention.step_shape import StepShape
from configs.errors import ConfigError, EngineError, OutOfMemoryError
from configs.model_config import ModelConfig
from configs.schema import EngineConfig
from parallel.collectives.group import TensorParallelGroup
from parallel.plan import ShardPlan
from tests.helpers.dense_model import dense_model
from tests.helpers.forks import start_forked
from tests.helpers.rank_threads import on_ranks
from tests.helpers.rerun_graphs import PagedBackend, RerunGraphs
from worker.device.memory import free_bytes
from worker.models.decoder import Decoder
from worker.protocol import (
    ALWAYS,
    BIAS_DTYPE,
    COUNT_DTYPE,
    PARAMS_DTYPE,
    REQUESTED_DTYPE,
    FrameKind,
    RowFlag,
    StepFrame,
    StepResult,
)
from worker.sampling.sampler import default_params
from worker.step.cuda_graph_runner import DeviceOutput
from worker.step.model_runner import ModelRunner
from worker.tp_worker import TPWorker
from worker.weights.checkpoint import expected_shapes
from worker.weights.shard import naming_the_rank
from worker.weights.weight_memory import WeightMemory

PAGE_SIZE = 8
MODEL = dense_model(num_hidden_layers=2, vocab_size=300)
_Row = tuple[int, Sequence[int] | None, bool]


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint of MODEL."""
    generator = torch.Generator().manual_seed(0)
    path = tmp_path_factory.mktemp("tiny")
    tensors = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in expected_shapes(MODEL).items()}
    save_file(tensors, path / "model.safetensors")
    return path


def _config(path: Path, **changes: Any) -> EngineConfig:
    return EngineConfig(
        **{
            "model": str(path),
            "device": "cpu",
            "dtype": "float32",
            "attention": {"prefill_backend": "torch_native", "decode_backend": "torch_native"},
            "kv_cache": {"page_size": PAGE_SIZE},
            "scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": 512},
            **changes,
        }
    )


def _worker(path: Path, model: ModelConfig, group: TensorParallelGroup | None = None, **changes: Any) -> TPWorker:
    group = group or TensorParallelGroup.single()
    worker = TPWorker(
        config=_config(path, **changes),
        model=model,
        model_path=path,
        plan=ShardPlan.create(model, group.size),
        group=group,
    )
    worker.shard.load()
    worker.allocate(num_pages=200, max_model_len=128)
    return worker


def _records(dtype: np.dtype[np.void], *records: tuple[float, ...]) -> npt.NDArray[np.void]:
    return np.array(list(records), dtype)


def _params(row: int, **values: Any) -> npt.NDArray[np.void]:
    params = default_params(1)
    params["row"] = row
    for name, value in values.items():
        params[name] = value
    return params


class Frames:
    """Makes the frames a scheduler would: positions, pages and step numbers of a few rows."""

    def __init__(self) -> None:
        self._step = 0
        self._next_page = 1
        self._lengths: dict[int, int] = {}
        self._num_pages: dict[int, int] = {}

    def restart(self, row: int) -> None:
        """The row is given to a new request, with pages of its own."""
        self._lengths[row] = self._num_pages[row] = 0

    def step(self, rows: Sequence[_Row], *params: npt.NDArray[np.void], **sections: Any) -> bytes:
        """A frame of (row, tokens or None for the last sampled one, sample), with other sections by name."""
        self._step += 1
        starts, lens, flags, token_ids, deltas = [], [], [], [], []
        for row, tokens, sample in rows:
            start, count = self._lengths.get(row, 0), 1 if tokens is None else len(tokens)
            starts.append(start)
            lens.append(count)
            flags.append((RowFlag.HAS_TOKENS if tokens is not None else 0) | (RowFlag.SAMPLE if sample else 0))
            token_ids += list(tokens or ())
            self._lengths[row] = start + count
            while self._num_pages.setdefault(row, 0) * PAGE_SIZE < start + count:
                deltas.append((row, self._num_pages[row], self._next_page))
                self._num_pages[row] += 1
                self._next_page += 1
        return StepFrame(
            generation=3,
            step=self._step,
            rows=np.array([row for row, _, _ in rows], np.int32),
            starts=np.array(starts, np.int32),
            lens=np.array(lens, np.int32),
            flags=np.array(flags, np.int32),
            token_ids=np.array(token_ids, np.int32),
            page_deltas=np.array(deltas, np.int32).reshape(-1, 3),
            params=np.concatenate(params) if params else np.empty(0, PARAMS_DTYPE),
            **sections,
        ).encode()

    def close(self) -> bytes:
        self._step += 1
        return StepFrame(generation=3, step=self._step, kind=FrameKind.CLOSE).encode()


class Sent:
    """A FrameSource over frames that are all there."""

    def __init__(self, frames: Sequence[bytes]) -> None:
        self._frames = iter(frames)

    def recv(self, timeout_s: float) -> bytes:
        return next(self._frames)

    def poll(self) -> bytes | None:
        return next(self._frames)


def _run(worker: TPWorker, frames: Sequence[bytes]) -> list[StepResult]:
    """The worker's results for the frames, through its loop."""
    results: list[bytes] = []
    worker.run(Sent(frames), results.append)
    return [StepResult.decode(result) for result in results]


def _generate(worker: TPWorker, prompt: Sequence[int], count: int, **params: Any) -> list[int]:
    frames = Frames()
    sent = [frames.step([(1, prompt, True)], _params(1, **params))]
    sent += [frames.step([(1, None, True)]) for _ in range(count - 1)]
    return [int(result.tokens[0]) for result in _run(worker, [*sent, frames.close()])]


SAMPLED: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0.8, "seed": 8, "top_p": 0.9, "top_k": 50},
]


@pytest.mark.parametrize("params", SAMPLED)
def test_chunks_preemption_and_neighbours_do_not_change_a_requests_tokens(
    tiny_path: Path, params: dict[str, Any]
) -> None:
    worker = _worker(tiny_path, MODEL)
    prompt = list(range(5, 25))
    expected = _generate(worker, prompt, 12, **params)

    frames = Frames()
    own = _params(2, **params)
    sent = [
        # A chunk that is not sampled, beside a neighbour with other parameters.
        frames.step([(5, [9, 8, 7], True), (2, prompt[:11], False)], own, _params(5, temperature=1.5, seed=1)),
        frames.step([(2, prompt[11:], True), (5, None, True)]),
        *(frames.step([(5, None, True), (2, None, True)]) for _ in range(5)),
    ]
    # Preempted after six tokens: another row recomputes prompt and tokens, then goes on.
    frames.restart(4)
    sent.append(frames.step([(4, [*prompt, *expected[:6]], True), (5, None, True)], _params(4, **params)))
    sent += [frames.step([(4, None, True)]) for _ in range(5)]
    results = _run(worker, [*sent, frames.close()])
    assert [len(result.tokens) for result in results[:3]] == [1, 2, 2]
    tokens = [int(results[1].tokens[0])] + [int(result.tokens[1]) for result in results[2:7]]
    tokens += [int(result.tokens[0]) for result in results[7:]]
    assert tokens == expected
    assert (results[0].generation, [result.step for result in results]) == (3, list(range(1, len(results) + 1)))


@pytest.mark.parametrize("tp_size", [2, 3, 4])
def test_every_number_of_ranks_gives_the_same_tokens_on_every_rank(tiny_path: Path, tp_size: int) -> None:
    for params in SAMPLED:
        expected = _generate(_worker(tiny_path, MODEL), range(30, 47), 10, **params)
        results = on_ranks(
            tp_size,
            lambda group, params=params: _generate(_worker(tiny_path, MODEL, group), range(30, 47), 10, **params),
        )
        assert results == [expected] * tp_size


ADJUSTED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "seed": 3, "top_p": 0.95},
    {"repetition_penalty": 1.4, "frequency_penalty": 1.5, "presence_penalty": 0.5},
    {"temperature": 1.2, "seed": 4, "top_k": 40, "repetition_penalty": 1.1},
    {"temperature": 1.0, "seed": 5, "frequency_penalty": -0.5, "num_logprobs": 2},
    {"temperature": 1.0, "seed": 6},
]
"""Of the last two rows and the third, a mask and biases go with it: see `_adjustments`."""
PROMPT = list(range(5, 25))


def _adjustments(rows: Sequence[int]) -> dict[str, Any]:
    """Sections that give rows 3 and up counts, 5 and up biases and 6 a mask, as the scheduler would."""
    biases = [(row, 7, -np.inf, 24) for row in rows if row >= 5] + [(row, 8, 6.5, ALWAYS) for row in rows if row >= 5]
    counts = [(row, token, 0, 1) for row in rows if row in (3, 4) for token in PROMPT]
    return {
        "biases": _records(BIAS_DTYPE, *biases),
        "counts": _records(COUNT_DTYPE, *counts),
        "requested": _records(REQUESTED_DTYPE, *((row, 299) for row in rows if row == 5)),
        "mask_rows": np.array([row for row in rows if row == 6], np.int32),
        "masks": np.full((int(6 in rows), 10), 0x0F0F0F0F, np.uint32),
    }


def _generate_adjusted(worker: TPWorker, rows: Sequence[int], count: int) -> list[list[int]]:
    frames = Frames()
    params = [_params(row, **ADJUSTED[row - 1]) for row in rows]
    sent = [frames.step([(row, PROMPT, True) for row in rows], *params, **_adjustments(rows))]
    sent += [frames.step([(row, None, True) for row in rows]) for _ in range(count - 1)]
    results = _run(worker, [*sent, frames.close()])
    return [[int(result.tokens[i]) for result in results] for i in range(len(rows))]


def test_adjusted_rows_get_their_tokens_alone_in_a_batch_and_on_any_number_of_ranks(tiny_path: Path) -> None:
    worker = _worker(tiny_path, MODEL)
    every = range(1, len(ADJUSTED) + 1)
    together = _generate_adjusted(worker, every, 12)
    assert [_generate_adjusted(worker, [row], 12)[0] for row in every] == together
    # Neighbours with adjustments do not change a row without.
    assert _generate_adjusted(worker, [1, 2], 12) == together[:2]
    # And each has its effect.
    plain = [_generate(worker, PROMPT, 12, temperature=1.0, seed=seed) for seed in (5, 6)]
    assert together[0] != together[2]
    assert together[4] != plain[0]
    assert together[5] != plain[1]
    assert all(token % 8 < 4 for token in together[5])
    assert on_ranks(3, lambda group: _generate_adjusted(_worker(tiny_path, MODEL, group), every, 12)) == 3 * [together]


@pytest.mark.parametrize("tp_size", [1, 2, 3])
def test_captured_steps_give_the_tokens_of_eager_ones(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch, tp_size: int
) -> None:
    every = range(1, len(ADJUSTED) + 1)
    expected = _generate_adjusted(_worker(tiny_path, MODEL), every, 12)
    replayed: list[StepShape] = []
    replay = RerunGraphs.replay

    def recorded(self: RerunGraphs, shape: StepShape) -> DeviceOutput:
        replayed.append(shape)
        return replay(self, shape)

    monkeypatch.setattr(RerunGraphs, "replay", recorded)
    monkeypatch.setattr("worker.step.model_runner.CudaGraphRunner", RerunGraphs)
    monkeypatch.setitem(registry.IMPLEMENTATIONS, "torch_native", PagedBackend)
    body = lambda group: _generate_adjusted(_worker(tiny_path, MODEL, group), every, 12)  # noqa: E731
    assert on_ranks(tp_size, body) == tp_size * [expected]
    # 120 prompt tokens of six rows, and six decodes beside two rows of padding.
    assert sorted(set(replayed)) == [StepShape(8, 8, 8), StepShape(128, 9, 8)]
    assert len(replayed) == 12 * tp_size


@pytest.mark.parametrize("tp_size", [1, 3])
def test_a_group_that_serves_at_once_captures_a_shape_when_it_comes_again(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch, tp_size: int
) -> None:
    every = range(1, len(ADJUSTED) + 1)
    expected = _generate_adjusted(_worker(tiny_path, MODEL), every, 12)
    captured, capture_one = [], RerunGraphs.capture_one

    def recorded(self: RerunGraphs, step: Any, shape: StepShape, **prepare: Any) -> None:
        captured.append(shape)
        capture_one(self, step, shape, **prepare)

    monkeypatch.setattr(RerunGraphs, "capture_one", recorded)
    monkeypatch.setattr("worker.step.model_runner.CudaGraphRunner", RerunGraphs)
    monkeypatch.setitem(registry.IMPLEMENTATIONS, "torch_native", PagedBackend)

    def body(group: TensorParallelGroup) -> list[list[int]]:
        worker = _worker(tiny_path, MODEL, group)
        captured.clear()
        worker.allocate(num_pages=200, max_model_len=128, at_once=True)
        return _generate_adjusted(worker, every, 12)

    assert on_ranks(tp_size, body) == tp_size * [expected]
    # The prompts' shape comes once.
    assert captured[-tp_size:] == tp_size * [StepShape(8, 8, 8)]
    assert StepShape(128, 9, 8) not in captured


@pytest.mark.parametrize("tp_size", [1, 3])
def test_graphs_captured_between_steps_give_the_same_tokens_and_find_room_in_the_largest(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch, tp_size: int
) -> None:
    every = range(1, len(ADJUSTED) + 1)
    expected = _generate_adjusted(_worker(tiny_path, MODEL), every, 12)
    monkeypatch.setattr("worker.step.model_runner.CudaGraphRunner", RerunGraphs)
    monkeypatch.setitem(registry.IMPLEMENTATIONS, "torch_native", PagedBackend)

    def body(group: TensorParallelGroup) -> list[list[int]]:
        worker = _worker(tiny_path, MODEL, group)
        worker.allocate(num_pages=200, max_model_len=128, later=True)
        assert worker._runner is not None
        graphs = worker._runner._graphs
        largest = [graphs._prompts[-1], graphs._decodes[-1]]
        assert list(graphs._captured) == largest
        num_left = len(graphs.missing)
        capture = StepFrame(3, 0, kind=FrameKind.CAPTURE).encode()
        results = _run(worker, [*num_left * [capture], capture, Frames().close()])
        assert [int(result.tokens[0]) for result in results] == [*reversed(range(num_left)), 0]
        others = list(graphs._captured)[2:]
        assert sorted(others) == sorted([*graphs._decodes[:-1], *graphs._prompts[:-1]])
        assert others[0] == StepShape(1, 1, 1)
        assert [shape.num_rows for shape in others] == sorted(shape.num_rows for shape in others)
        return _generate_adjusted(worker, every, 12)

    assert on_ranks(tp_size, body) == tp_size * [expected]


@pytest.mark.parametrize(("tp_size", "captured"), [(1, False), (3, True), (3, False), (1, True)])
def test_a_nan_on_one_rank_costs_one_row_its_token_on_all_ranks_and_no_other(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch, tp_size: int, captured: bool
) -> None:
    every = range(1, len(ADJUSTED) + 1)
    expected = _generate_adjusted(_worker(tiny_path, MODEL), every, 12)
    if captured:
        monkeypatch.setattr("worker.step.model_runner.CudaGraphRunner", RerunGraphs)
        monkeypatch.setitem(registry.IMPLEMENTATIONS, "torch_native", PagedBackend)
    now, launch, local_logits = threading.local(), ModelRunner.launch, Decoder.local_logits

    def launched(self: ModelRunner, frame: StepFrame) -> Any:
        now.step, now.is_last = frame.step, self._group.rank == tp_size - 1
        return launch(self, frame)

    def planted(self: Decoder, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        local = local_logits(self, hidden, out)
        # Row 1 in step 2, row 2 in step 3, ...; where the sixth row's mask hides it.
        if getattr(now, "is_last", False) and now.step in every[1:]:
            local[now.step - 2, 4] = torch.nan
        return local

    monkeypatch.setattr(ModelRunner, "launch", launched)
    monkeypatch.setattr(Decoder, "local_logits", planted)
    generate = lambda group: _generate_adjusted(_worker(tiny_path, MODEL, group), every, 12)  # noqa: E731
    of_ranks = on_ranks(tp_size, generate)
    for tokens in of_ranks:
        for row, own, meant in zip(every, tokens, expected, strict=True):
            end = row if row < len(ADJUSTED) else 12
            assert own[:end] == meant[:end]
            assert row == len(ADJUSTED) or own[end] == -1
    assert of_ranks == tp_size * of_ranks[:1]


def test_an_answer_with_penalties_is_counted_as_it_grows_and_goes_on_from_counts(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits: list[npt.NDArray[np.float32]] = []

    def recorded(self: Decoder, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        local = unrecorded(self, hidden, out)
        logits.append(local[0].numpy().copy())
        return local

    unrecorded = Decoder.local_logits
    monkeypatch.setattr(Decoder, "local_logits", recorded)
    worker = _worker(tiny_path, MODEL)
    params = {"repetition_penalty": 1.2, "frequency_penalty": 0.4, "presence_penalty": 0.3}
    prompt = _records(COUNT_DTYPE, *((2, token, 0, 1) for token in PROMPT))
    frames = Frames()
    sent = [frames.step([(2, PROMPT, True)], _params(2, **params), counts=prompt)]
    sent += [frames.step([(2, None, True)]) for _ in range(19)]
    answer = [int(result.tokens[0]) for result in _run(worker, [*sent, frames.close()])]
    for i, raw in enumerate(logits):
        scores = raw.astype(np.float64)
        seen = [*{*PROMPT, *answer[:i]}]
        scores[seen] = np.where(scores[seen] > 0, scores[seen] / 1.2, scores[seen] * 1.2)
        for token in set(answer[:i]):
            scores[token] -= 0.4 * answer[:i].count(token) + 0.3
        assert answer[i] == scores.argmax()
    assert len(set(answer)) > 10
    counts = [(4, t, answer[:9].count(t), int(t in PROMPT)) for t in sorted({*PROMPT, *answer[:9]})]
    frames = Frames()
    sent = [frames.step([(4, PROMPT + answer[:9], True)], _params(4, **params), counts=_records(COUNT_DTYPE, *counts))]
    sent += [frames.step([(4, None, True)]) for _ in range(10)]
    assert [int(result.tokens[0]) for result in _run(worker, [*sent, frames.close()])] == answer[9:]


def test_tokens_asked_for_get_their_logprobs_behind_the_likeliest(tiny_path: Path) -> None:
    frames = Frames()
    requested = _records(REQUESTED_DTYPE, (1, 17), (1, 4), (3, 4))
    rows = [(1, [1, 2, 3], True), (2, [9, 9], True), (3, [1, 2, 3], True), (4, [1, 2, 3], True)]
    params = [_params(row, num_logprobs=k) for row, k in ((1, 299), (2, -1), (3, 0), (4, 1))]
    [result] = _run(_worker(tiny_path, MODEL), [frames.step(rows, *params, requested=requested), frames.close()])
    assert result.logprob_rows.tolist() == [0, 2, 3]
    of = dict(zip(result.top_ids[0].tolist(), result.top_logprobs[0].tolist(), strict=True))
    assert result.requested_logprobs.shape == (3, 2)
    assert result.requested_logprobs[0].tolist() == [of[17], of[4]]
    assert result.requested_logprobs[1, 0] == of[4]


def test_bfloat16_and_a_step_of_chunks_alone_run(tiny_path: Path) -> None:
    worker = _worker(tiny_path, MODEL, dtype="bfloat16")
    frames = Frames()
    results = _run(
        worker,
        [frames.step([(1, [1, 2, 3], False), (2, [4, 5], False)]), frames.step([(1, [6], True)]), frames.close()],
    )
    assert [len(result.tokens) for result in results] == [0, 1]
    assert 2 * worker.kv_page_bytes().full == _worker(tiny_path, MODEL).kv_page_bytes().full


def test_logprobs_come_back_for_the_rows_that_asked(tiny_path: Path) -> None:
    frames = Frames()
    sent = [
        frames.step(
            [(1, [1, 2, 3], True), (2, [4, 5, 6, 7], True)], _params(1, num_logprobs=-1), _params(2, num_logprobs=4)
        ),
        frames.close(),
    ]
    (result,) = _run(_worker(tiny_path, MODEL), sent)
    assert result.logprob_rows.tolist() == [1]
    assert result.top_ids.shape == result.top_logprobs.shape == (1, 4)
    # Greedy: the sampled token is the likeliest.
    assert result.top_ids[0, 0] == result.tokens[1]
    assert result.logprobs[0] == result.top_logprobs[0, 0]
    assert (np.diff(result.top_logprobs[0]) <= 0).all()


def test_reports_progress_and_the_bytes_of_its_weights(tiny_path: Path) -> None:
    worker = TPWorker(
        config=_config(tiny_path),
        model=MODEL,
        model_path=tiny_path,
        plan=ShardPlan.create(MODEL, 1),
        group=TensorParallelGroup.single(),
    )
    shares: list[float] = []
    worker.shard.load(shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert worker.shard.num_bytes == sum(4 * int(np.prod(shape)) for shape in expected_shapes(MODEL).values())
    assert worker.kv_page_bytes() == (2 * 2 * PAGE_SIZE * 2 * 16 * 4, 0, 0)
    assert free_bytes(worker.device) > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"generation": 4}, "step 2 of generation 4 after step 1 of generation 3"),
        ({"step": 3}, "step 3 of generation 3 after step 1"),
        ({"rows": [9]}, "a row outside 1 to 8"),
        ({"rows": [0]}, "a row outside 1 to 8"),
        ({"lens": [2]}, "0 token ids for 2 inputs|impossible length"),
        ({"starts": [128]}, "outside positions 0 to 127"),
        ({"flags": [3], "token_ids": [300]}, "outside a vocabulary of 300"),
        ({"flags": [3], "token_ids": [1, 2]}, "2 token ids for 1 inputs"),
        ({"page_deltas": [[1, 1, 201]]}, "page delta"),
        ({"rows": [], "starts": [], "lens": [], "flags": []}, "has no rows"),
        ({"biases": _records(BIAS_DTYPE, (9, 3, 1.0, ALWAYS))}, "a bias outside"),
        ({"biases": _records(BIAS_DTYPE, (1, 300, 1.0, ALWAYS))}, "a bias outside"),
        ({"biases": _records(BIAS_DTYPE, (1, 3, np.nan, ALWAYS))}, "is NaN or "),
        ({"biases": _records(BIAS_DTYPE, (1, 3, np.inf, ALWAYS))}, "is NaN or "),
        ({"biases": _records(BIAS_DTYPE, *(2049 * [(1, 3, 0.0, ALWAYS)]))}, "more than 2048 biases"),
        ({"counts": _records(COUNT_DTYPE, (1, -1, 1, 1))}, "a count outside"),
        ({"counts": _records(COUNT_DTYPE, (1, 1, -1, 1))}, "a count below 0"),
        ({"requested": _records(REQUESTED_DTYPE, (0, 1))}, "a requested token outside"),
        ({"requested": _records(REQUESTED_DTYPE, *(129 * [(1, 3)]))}, "more than 128 log probabilities"),
        ({"mask_rows": [1, 1], "masks": np.ones((2, 10), np.uint32)}, "more masks of a row"),
        ({"mask_rows": [1], "masks": np.ones((1, 9), np.uint32)}, "masks of 9 words"),
        ({"mask_rows": [1], "masks": np.zeros((1, 10), np.uint32)}, "allows nothing"),
    ],
)
def test_a_frame_that_does_not_fit_ends_the_loop_with_an_engine_error(
    tiny_path: Path, change: dict[str, Any], message: str
) -> None:
    frames = Frames()
    first, second = frames.step([(1, [1, 2, 3], True)]), StepFrame.decode(frames.step([(1, None, True)]))
    for name, value in change.items():
        setattr(second, name, np.array(value, np.int32) if isinstance(value, list) else value)
    with pytest.raises(EngineError, match=message):
        _run(_worker(tiny_path, MODEL), [first, second.encode()])


def test_refuses_unresolved_settings_a_foreign_plan_and_a_step_too_early(tiny_path: Path) -> None:
    def create(tp_size: int = 1, **changes: Any) -> TPWorker:
        return TPWorker(
            config=_config(tiny_path, **changes),
            model=MODEL,
            model_path=tiny_path,
            plan=ShardPlan.create(MODEL, tp_size),
            group=TensorParallelGroup.single(),
        )

    with pytest.raises(ConfigError, match="dtype=auto"):
        create(dtype="auto")
    with pytest.raises(ConfigError, match="tensor_parallel_size=2 does not fit 1"):
        create(2)
    with pytest.raises(EngineError, match="before allocate"):
        create().launch(StepFrame(generation=1, step=1))


def test_what_a_device_raises_names_rank_phase_and_what_to_do() -> None:
    gpu = torch.device("cuda:1")
    with (
        pytest.raises(EngineError, match=r"rank 2 on cuda:1 failed in a step: RuntimeError: bad kernel; .*BLOCKING=1"),
        naming_the_rank(2, gpu, "a step"),
    ):
        raise RuntimeError("bad kernel\nand a page of frames")
    with (
        pytest.raises(OutOfMemoryError, match=r"OutOfMemoryError: no room; lower kv_cache.memory_fraction"),
        naming_the_rank(0, gpu, "the profile run"),
    ):
        raise torch.OutOfMemoryError("no room")
    with pytest.raises(EngineError, match=r"^as it was$"), naming_the_rank(0, gpu, "a step"):
        raise EngineError("as it was")


def _load_without_memory(said: Connection) -> None:
    """Sends what loading a shard of a gigabyte raises in a process that may not have more memory than it has."""
    model = replace(MODEL, vocab_size=1 << 22)
    plan, group = ShardPlan.create(model, 1), TensorParallelGroup.single()
    worker = TPWorker(
        config=_config(Path("any"), load_format="dummy"), model=model, model_path=Path("any"), plan=plan, group=group
    )
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms,) * 2)
    try:
        worker.shard.load()
    except Exception as error:  # noqa: BLE001 -- the parent looks at it
        said.send(error)


def test_a_shard_for_which_the_node_has_no_memory_is_refused_with_what_helps() -> None:
    heard, said = multiprocessing.Pipe()
    [process] = start_forked(_load_without_memory, [(said,)])
    assert heard.poll(30)
    error = heard.recv()
    process.join(10)
    assert isinstance(error, OutOfMemoryError), repr(error)
    assert "rank 0 on cpu failed in loading the weights: " in str(error)
    assert str(error).endswith("or use more ranks")
    with pytest.raises(OutOfMemoryError, match="MemoryError"), naming_the_rank(0, torch.device("cpu"), "a step"):
        raise MemoryError


def test_other_weights_for_which_the_node_has_no_memory_leave_those_that_serve(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object, **_: object) -> NoReturn:
        raise MemoryError

    rank, frames = _worker(tiny_path, MODEL), Frames()
    monkeypatch.setattr(WeightMemory, "stage", full)
    with pytest.raises(OutOfMemoryError, match="rank 0 on cpu failed in staging other weights: MemoryError"):
        rank.shard.stage(MODEL, tiny_path, None)
    with pytest.raises(EngineError):
        rank.shard.take_staged()
    assert len(rank.launch(StepFrame.decode(frames.step([(1, [3, 4], True)]))).result().tokens) == 1


def test_a_rank_that_leaves_drops_its_graphs_before_it_waits_and_its_pool_after_it(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CUDA: NCCL's abort, which ends what the device waits for, itself waits for the graphs."""
    rank = _worker(tiny_path, MODEL)
    runner = rank._runner
    assert runner is not None
    done: list[str] = []
    monkeypatch.setattr(ModelRunner, "close", lambda _: done.append("graphs"))
    monkeypatch.setattr(worker.tp_worker, "await_idle", lambda _: done.append("idle"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append(f"{pool() is None} {gc.get_freeze_count()}"))
    held: list[Any] = [runner]  # as a traceback may that is garbage itself
    held.append(held)
    pool = weakref.ref(runner)
    rank._device = torch.device("cuda:0")
    del runner, held
    gc.freeze()  # as `allocate` does there
    rank.leave()
    assert done == ["graphs", "idle", "True 0"]


def test_a_runner_that_is_dropped_is_in_no_cycle(tiny_path: Path) -> None:
    rank = _worker(tiny_path, MODEL)
    rank.launch(StepFrame.decode(Frames().step([(1, [3, 4], True)])))
    assert rank._runner is not None
    runner = weakref.ref(rank._runner)
    gc.disable()
    try:
        rank.close()
        assert runner() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("call", ["warm_up(EngineConfig(model='m', device='cuda'))", "read_ahead()"])
def test_what_is_ready_for_a_gpu_has_imported_the_kernels_and_touches_no_device(call: str) -> None:
    pytest.importorskip("triton", reason="a CPU install has no Triton")
    code = (
        "import sys, torch\n"
        "from configs.schema import EngineConfig\n"
        "from worker.warm_up import read_ahead, warm_up\n"
        "kernels = {'attention.kernels.decode', 'worker.sampling.kernels.sampling'}\n"
        "assert not kernels & set(sys.modules)\n"
        f"{call}\n"
        "assert kernels <= set(sys.modules)\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=True, timeout=120)
