"""The input for starting an engine, which other modules use to describe and change it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from configs.model_config import ModelConfig
from configs.schema import EngineConfig


@dataclass(frozen=True)
class EngineSpec:
    """One tensor-parallel group to start."""

    config: EngineConfig
    """Resolved, except for what the ranks' memory decides."""
    model: ModelConfig
    model_path: Path
    tokenizer_path: Path
    """The directory with the tokenizer."""
    given: EngineConfig
    """The configuration before it was resolved. Another number of ranks resolves it again."""
