"""Reads the config of the draft head (the model's MTP layer, or `speculation.model`) and checks that it fits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from configs.attention import Feature
from configs.checkpoint import resolve_model_path
from configs.draft_head import Eagle3Head, MTPHead, QwenMTPHead
from configs.errors import CheckpointError, ConfigError
from configs.fields import Fields, read_json
from configs.layers import DenseMLP, GroupedQueryAttention
from configs.model_config import ModelConfig
from configs.read_config import read_model_config
from configs.schema import EngineConfig


def draft_head_path(config: EngineConfig, *, weights: bool = True) -> Path | None:
    """The directory of the draft head. Downloads the head first if it is on the Hub.

    Returns:
        None if the head is part of the model, or if `weights` is False and only the head's config is needed.

    Raises:
        ConfigError: the head cannot be found or downloaded.
    """
    name = config.speculation.model
    if name is None or (weights and config.load_format == "dummy"):
        return None
    try:
        return resolve_model_path(name, weights=weights)
    except CheckpointError as error:
        raise ConfigError(f"speculation.{error}") from error  # the message begins with `model=`


def with_draft_head(model: ModelConfig, config: EngineConfig) -> ModelConfig:
    """Adds the draft head of `speculation` to the model: its MTP layer, or the head that `speculation.model` names.

    Raises:
        ConfigError: the head is missing, cannot be read, or does not fit the model.
    """
    if config.speculation.method == "mtp":
        return replace(model, draft_head=_mtp_head(model, config.model))
    path = draft_head_path(config, weights=False)
    try:
        return model if path is None else replace(model, draft_head=_read(path, model))
    except CheckpointError as error:
        raise ConfigError(f"speculation.model={config.speculation.model} cannot be used: {error}") from error


def _mtp_head(model: ModelConfig, name: str) -> MTPHead:
    if not model.num_mtp_layers:
        raise ConfigError(
            f"speculation.method=mtp needs a layer for it in the checkpoint, and model={name} has none "
            "(num_nextn_predict_layers in its config.json)"
        )
    if any(prefix.startswith("mtp.") for prefix in model.unread):
        # The MTP layer has attention, and the feed-forward of the last layer.
        attention = next(layer.mixer for layer in reversed(model.layers) if not layer.mixer.state)
        return QwenMTPHead(layer=replace(model.layers[-1], mixer=attention), rms_norm_eps=model.rms_norm_eps)
    if Feature.SPARSE in model.layers[-1].mixer.features:
        raise ConfigError(
            f"speculation.method=mtp does not support sparse attention, which model={name} has; choose ngram or none"
        )
    # The MTP layer has the same shape as the last layer with experts.
    prefix = model.layer_prefix(model.num_hidden_layers)
    return MTPHead(layer=model.layers[-1], rms_norm_eps=model.rms_norm_eps, layer_prefix=prefix)


def _read(path: Path, model: ModelConfig) -> Eagle3Head:
    head, where = read_model_config(path), path / "config.json"
    fields = Fields(read_json(where), str(where))
    eagle = Fields(fields.values.get("eagle_config") or {}, f"{where}: eagle_config")
    is_eagle3 = any(str(name).endswith("Eagle3") for name in fields.values.get("architectures") or ())
    if not is_eagle3 or not eagle.flag("use_aux_hidden_state", True):
        raise CheckpointError(f"{where} is not an EAGLE-3 head, which reads states of several layers; choose one")
    vocab_size = fields.count("draft_vocab_size", model.vocab_size, at_most=model.vocab_size)
    for key, own, of_model in (
        ("num_hidden_layers", head.num_hidden_layers, 1),
        ("hidden_size", head.hidden_size, model.hidden_size),
        ("vocab_size", head.vocab_size, model.vocab_size),
        ("target_hidden_size", fields.integer("target_hidden_size", model.hidden_size), model.hidden_size),
    ):
        if own != of_model:
            raise CheckpointError(f"{where}: {key}={own} does not fit the model, for which it must be {of_model}")
    layer = head.layers[0]
    mixer = layer.mixer
    if not isinstance(mixer, GroupedQueryAttention) or not isinstance(layer.feed_forward, DenseMLP) or mixer.features:
        raise CheckpointError(f"{where}: only heads with plain attention and a dense MLP are supported")
    return Eagle3Head(
        layer=replace(layer, mixer=replace(mixer, input_size=2 * model.hidden_size)),
        rms_norm_eps=head.rms_norm_eps,
        vocab_size=vocab_size,
        model_vocab_size=model.vocab_size,
        state_layers=_state_layers(eagle, model.num_hidden_layers),
        norm_before_residual=fields.flag("norm_before_residual", False),
    )


def _state_layers(eagle: Fields, num_layers: int) -> tuple[int, ...]:
    """Indices of the layers at which the head reads the input states. Explicit ids in a checkpoint count the layer that
    a state enters or, if the first id is 1, the layer that it leaves."""
    found = eagle.integers("eagle_aux_hidden_state_layer_ids")
    if found and found[0] == 1:
        found = tuple(layer + 1 for layer in found)
    found = found or (2, num_layers // 2, num_layers - 3)
    if not all(0 <= layer < num_layers for layer in found):
        raise CheckpointError(f"{eagle.where}: states enter layers {list(found)}, and the model has {num_layers}")
    return found
