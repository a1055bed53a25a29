"""The input of an engine's start, which other parts of the engine describe, and change later."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from configs.model_config import ModelConfig
from configs.schema import EngineConfig


@dataclass(frozen=True)
class EngineSpec:
    """One tensor-parallel group to be started."""

    config: EngineConfig
    """Resolved: nothing is left to be decided but what the ranks' memory decides."""
    model: ModelConfig
    model_path: Path
    tokenizer_path: Path
    """The directory that holds the tokenizer."""
    given: EngineConfig
    """The configuration before it was resolved: another size decides anew."""
