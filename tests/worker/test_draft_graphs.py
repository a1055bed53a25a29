"""The draft head's passes from graphs: the same drafts as eager ones make, and nothing is copied between them.

Drafts that are verified are known answers with errors, so that steps are the same whatever a head of random weights
says, and that says something else after every other token.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attention import registry
from benchmarks.speculation import Foreseeing
from cluster.messages.engine import SamplingParams
from cluster.scheduling.drafter import StepTimes
from configs.schema import AttentionConfig, SpeculationConfig
from tests.helpers import eagle3, mtp
from tests.helpers.families import case_of
from tests.helpers.local_group import Limits, LocalGroup
from tests.helpers.rerun_graphs import PagedBackend, RerunGraphs
from tests.whole.test_window_answers import NUM_WINDOW_PAGES, Model, limits, model
from worker.protocol import StepResult
from worker.step.step_inputs import StepInputs
from worker.tp_worker import TPWorker

__all__ = ["model"]

WAYS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 3, "top_p": 0.9},
    {"frequency_penalty": 0.7, "num_logprobs": 1},
    {"temperature": 0.8, "seed": 4},
]


@dataclass
class Run:
    """The steps of some requests."""

    steps: list[tuple[list[int], list[int], list[list[int]]]] = field(default_factory=list)
    """Tokens of each, how many each row has, and drafts of what follows."""
    passes: Counter[str] = field(default_factory=Counter)
    """Replays by name, of all ranks."""
    num_uploads: int = 0
    """Copies of frames to the device, of all ranks."""


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps and passes run from what stands for graphs; what steps take on a busy machine chooses nothing."""
    monkeypatch.setattr(StepTimes, "of", lambda _, sizes, **__: 1 + 0.01 * np.asarray(sizes, np.float64))
    monkeypatch.setattr("worker.step.model_runner.CudaGraphRunner", RerunGraphs)
    monkeypatch.setitem(registry.IMPLEMENTATIONS, "torch_native", PagedBackend)


def drafted(
    path: Path,
    tp_size: int,
    within: Limits,
    monkeypatch: pytest.MonkeyPatch,
    known: list[list[int]],
    *,
    is_eager: bool,
    **sizes: Any,
) -> Run:
    """Answers 14 requests by steps from graphs. Their rows come and go. If `is_eager`, the draft passes are eager.

    Args:
        known: the answers without drafts, once a call has found them.
    """
    monkeypatch.setattr(PagedBackend, "plans_on_host", is_eager)
    by_name = AttentionConfig(backend="torch_native")
    group = LocalGroup(path, tp_size, 96, max_model_len=160, attention=by_name, speculation=within.speculation, **sizes)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 320, int(rng.integers(1, 80))).tolist() for _ in range(14)]
    prompts[-1] = prompts[2] + prompts[3]  # a prefix hit, if there are such
    requests = [
        (prompt, SamplingParams(**{"temperature": 0.0, "max_tokens": 4 + 3 * index, "ignore_eos": True, **way}))
        for index, (prompt, way) in enumerate(zip(prompts, 4 * WAYS, strict=False))
    ]
    plain = Limits(num_pages=96, num_window_pages=sizes.get("num_window_pages"), window=within.window)
    # One answer, where all are known, because the group captures until it has a first step.
    found = group.generate(requests[:1] if known else requests, plain, at_once=True).tokens
    known += found[len(known) :]
    wholes = {index + 1: [*prompt, *known[index]] for index, (prompt, _) in enumerate(requests)}
    run, names, uploads = Run(), list[str](), list[int]()
    replay, upload, result = RerunGraphs.replay_pass, StepInputs.upload, group.result

    def replayed(graphs: RerunGraphs, name: str, shape: Any) -> None:
        names.append(name)
        replay(graphs, name, shape)

    def uploaded(inputs: StepInputs, step: Any, shape: Any, **how: bool) -> None:
        uploads.append(step.frame.step)
        upload(inputs, step, shape, **how)

    def taken() -> StepResult:
        step = result()
        run.steps.append((step.tokens.tolist(), step.num_tokens.tolist(), step.drafts.tolist()))
        return step

    with monkeypatch.context() as patched:
        patched.setattr(RerunGraphs, "replay_pass", replayed)
        patched.setattr(StepInputs, "upload", uploaded)
        patched.setattr(group, "result", taken)
        patched.setattr("cluster.scheduling.scheduler.Drafter", partial(Foreseeing, wholes=wholes, rate=0.8))
        answers = group.generate(requests, within, at_once=True)
        group.close()
    assert answers.tokens == known
    assert 0.3 < answers.stats.total_accepted / answers.stats.total_drafted < 0.9
    run.passes, run.num_uploads = Counter(names), len(uploads)
    return run


def check(
    path: Path, tp_size: int, within: Limits, monkeypatch: pytest.MonkeyPatch, *, at_once: bool = False, **sizes: Any
) -> None:
    """Checks that graphs draft what eager passes do. `at_once`: they are captured as steps need them."""
    monkeypatch.setattr(TPWorker, "allocate", partialmethod(TPWorker.allocate, at_once=at_once))
    known: list[list[int]] = []
    eager, run = (
        drafted(path, tp_size, within, monkeypatch, known, is_eager=is_eager, **sizes) for is_eager in (True, False)
    )
    assert run.steps == eager.steps
    drafts = [draft for _, _, of_rows in run.steps for of_row in of_rows for draft in of_row if draft >= 0]
    assert len(drafts) > 100
    assert len(set(drafts)) > 20
    num_drafts = within.speculation.num_drafts
    assert not eager.passes
    assert run.passes["first"] > tp_size * len(run.steps) / 3
    assert (run.passes["next"] > run.passes["first"]) == (num_drafts > 2)
    num_deep = sum(len(of_rows) > 0 and len(of_rows[0]) > 1 for _, _, of_rows in run.steps)
    assert at_once or run.num_uploads == tp_size * (len(run.steps) + num_deep)
    # Rows at their end want fewer than others, at some time.
    counts = {tuple(sorted({sum(draft >= 0 for draft in of_row) for of_row in of_rows})) for _, _, of_rows in run.steps}
    assert num_drafts == 1 or any(len(count) > 2 for count in counts)


def random_head(path: Path, num_drafts: int, **sizes: int) -> SpeculationConfig:
    torch.manual_seed(5)
    head = eagle3.Head({**eagle3.HEAD, **sizes}, torch.empty(0))
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
    eagle3.write(head, path)
    return SpeculationConfig(method="eagle3", model=str(path), num_speculative_tokens=num_drafts)


@pytest.mark.parametrize(
    ("tp_size", "num_drafts", "changes", "at_once"),
    [
        (1, 1, {}, False),
        (1, 7, {"num_pages": 24}, False),
        (2, 3, {"prefix_caching": True, "chunk": 64, "max_num_seqs": 5}, False),
        (2, 5, {"max_num_seqs": 6}, True),
    ],
)
def test_graphs_of_eagle3_draft_what_eager_passes_do(
    small_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tp_size: int,
    num_drafts: int,
    changes: dict[str, Any],
    at_once: bool,
) -> None:
    within = Limits(**{"num_pages": 96, "speculation": random_head(tmp_path, num_drafts), **changes})
    check(small_path, tp_size, within, monkeypatch, at_once=at_once)


def test_graphs_draft_what_eager_passes_do_beside_windows(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128}
    head = random_head(tmp_path, 4, **sizes, vocab_size=320, draft_vocab_size=200)
    within = limits(num_pages=96, num_window_pages=NUM_WINDOW_PAGES, prefix_caching=True, speculation=head)
    check(model.path, 2, within, monkeypatch, num_window_pages=NUM_WINDOW_PAGES)


@pytest.mark.parametrize(("tp_size", "num_drafts"), [(1, 6), (2, 2)])
def test_graphs_of_mtp_draft_what_eager_passes_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tp_size: int, num_drafts: int
) -> None:
    mtp.Head(case_of("glm4_moe", tmp_path)).write(tmp_path)
    speculation = SpeculationConfig(method="mtp", num_speculative_tokens=num_drafts)
    check(tmp_path, tp_size, Limits(num_pages=96, speculation=speculation), monkeypatch)
