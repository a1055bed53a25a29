"""What the whole run shares: one Ray cluster, one served model, one transformers reference; and the skips by hardware."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

SMOLLM2 = Path.home() / ".cache/lockstep/smollm2-135m-instruct/SmolLM2-135M-Instruct.Q4_1.gguf"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    wanted = {mark for item in items for mark in ("gpu", "multi_gpu") if item.get_closest_marker(mark)}
    if not wanted:
        return
    import torch

    num_gpus = torch.cuda.device_count()
    for item in items:
        for mark, needed in (("gpu", 1), ("multi_gpu", 2)):
            if item.get_closest_marker(mark) and num_gpus < needed:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA device(s), found {num_gpus}"))


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's file; `make setup` puts it there."""
    if not SMOLLM2.exists():
        pytest.skip(f"{SMOLLM2.name} is not in the cache; run `make setup`")
    return SMOLLM2
