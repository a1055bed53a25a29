"""A spare runs every kind of step before it is a rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from configs.load import parse_engine_config
from configs.read_config import read_model_config
from configs.resolve import HostFacts, resolve
from worker.tp_worker import TPWorker
from worker.warm_up import _run_steps


@pytest.mark.parametrize(("most_rows", "most_tokens", "expected"), [(256, 4096, 12), (20, 100, 6)])
def test_steps_of_few_and_many_rows_run_with_and_without_cached_pages(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch, most_rows: int, most_tokens: int, expected: int
) -> None:
    scheduler = {"max_num_seqs": most_rows, "max_num_batched_tokens": most_tokens}
    given = {"model": str(tiny_path), "device": "cpu", "scheduler": scheduler, "kv_cache": {"num_tokens": 1024}}
    model = read_model_config(tiny_path)
    config = resolve(parse_engine_config(given), model, HostFacts(num_cores=2, num_gpus=0)).config
    launch, frames = TPWorker.launch, []

    def launched(worker, frame):  # type: ignore[no-untyped-def]
        frames.append(frame)
        return launch(worker, frame)

    monkeypatch.setattr(TPWorker, "launch", launched)
    _run_steps(config, model, torch.device("cpu"))
    assert len(frames) == expected
    assert max(len(frame.rows) for frame in frames) == min(most_rows, 256)
    assert max(len(frame.token_ids) for frame in frames) <= most_tokens
    assert any(frame.starts.any() and (frame.lens == 1).all() for frame in frames)
