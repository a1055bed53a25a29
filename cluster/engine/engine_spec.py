"""The input for starting an engine, which other modules also use to describe and change the engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from configs.model_config import ModelConfig
from configs.resolve import HostFacts
from configs.schema import EngineConfig


@dataclass(frozen=True)
class EngineSpec:
    """One tensor-parallel group to start."""

    config: EngineConfig
    """The configuration after `resolve`. Only values that depend on the ranks' memory are still open."""
    model: ModelConfig
    model_path: Path
    tokenizer_path: Path
    """The directory with the tokenizer."""
    given: EngineConfig
    """The configuration before `resolve`, which is resolved again for another number of ranks."""
    host: HostFacts
    """The facts with which `given` was resolved."""
