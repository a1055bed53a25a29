"""Checks of a model and its tokenizer before any process of the group starts."""

from __future__ import annotations

import logging
from pathlib import Path

from cluster.text.tokenizer import Tokenizer
from configs.checkpoint import holds_tokenizer, is_local, resolve_model_path, resolve_tokenizer_path
from configs.errors import CheckpointError
from configs.model_config import ModelConfig
from configs.read_config import read_model_config
from configs.read_draft_head import draft_head_path, with_draft_head
from configs.schema import EngineConfig
from worker.weights.checkpoint import Checkpoint, with_own_lm_head

logger = logging.getLogger(__name__)


def check_checkpoint(config: EngineConfig, *, serves_text: bool = True) -> None:
    """Reads the headers of the model's files, as every rank does, and the scales of an FP8 KV cache. For random weights
    and for a model on the Hub, reads only the config.

    Args:
        serves_text: whether a tokenizer is needed.

    Raises:
        CheckpointError: files are missing, truncated or unsafe, do not fit their config, or have unsupported FP8 KV
            scales.
    """
    path = resolve_model_path(config.model, config.revision, weights=config.has_local_weights)
    model = read_model(config, path)
    tokenizer = find_tokenizer(config, path)
    if config.has_local_weights:
        head = config.speculation.model
        if head is None or is_local(head):
            model = with_draft_head(model, config)
        with Checkpoint.open(path, model, None if model.draft_head is None else draft_head_path(config)) as checkpoint:
            if config.kv_cache.dtype != "auto":
                checkpoint.kv_scales()
    if serves_text and not holds_tokenizer(tokenizer):
        raise CheckpointError(f"{tokenizer} holds no tokenizer; set `tokenizer` to a directory with one")


def read_model(config: EngineConfig, path: Path) -> ModelConfig:
    """The model at `path`, without a draft head. Raises CheckpointError if a file is missing or corrupt."""
    model = read_model_config(path, config.max_model_len)
    return with_own_lm_head(model, path) if config.has_local_weights else model


def check_tokenizer(config: EngineConfig) -> None:
    """Loads the tokenizer as a replica does, with the same warnings. Random weights may be served without one.

    Raises:
        CheckpointError, ConfigError: there is no tokenizer, or it cannot be used.
    """
    if config.load_format == "dummy" and config.tokenizer is None:
        return
    model_path = resolve_model_path(config.model, config.revision, weights=config.has_local_weights)
    read_tokenizer(config, read_model_config(model_path), find_tokenizer(config, model_path))


def find_tokenizer(config: EngineConfig, model_path: Path) -> Path:
    """The directory with the tokenizer for the model at `model_path`. Raises CheckpointError if none exists."""
    if config.tokenizer is None:
        return model_path
    return resolve_tokenizer_path(config.tokenizer, config.model, config.revision)


def read_tokenizer(config: EngineConfig, model: ModelConfig, path: Path) -> Tokenizer:
    """Loads the tokenizer at `path`. This takes tenths of a second, or seconds for the largest vocabularies. Warns if
    the tokenizer has ids that `model` lacks.

    Raises:
        CheckpointError, ConfigError: the tokenizer or `server.chat_template` is missing or cannot be used.
    """
    tokenizer = Tokenizer.load(path, chat_template=config.server.chat_template)
    if tokenizer.vocab_size > model.vocab_size:
        logger.warning(
            "the tokenizer at %s has ids up to %d, %s has embeddings for 0 to %d: texts with one of the other tokens, "
            "%r the first, are refused",
            path,
            tokenizer.vocab_size - 1,
            config.model,
            model.vocab_size - 1,
            tokenizer.token_text(model.vocab_size),
        )
    return tokenizer
