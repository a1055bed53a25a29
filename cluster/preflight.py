"""What can be found wrong with a model before any process of the group exists."""

from __future__ import annotations

from configs.checkpoint import resolve_model_path
from configs.model_config import read_model_config
from configs.schema import EngineConfig


def check_checkpoint(config: EngineConfig) -> None:
    """Reads the headers of the model's files, as every rank does, and none of their weights. Of random weights and of a
    model on the Hub only the config is read.

    Raises:
        CheckpointError: files are missing, truncated, of an unsafe kind or of another model than their config.
    """
    from worker.weights import Checkpoint  # imports torch, which takes a second

    path = resolve_model_path(config.model, config.revision, weights=config.has_local_weights)
    model = read_model_config(path)
    if config.has_local_weights:
        Checkpoint.open(path, model).close()
