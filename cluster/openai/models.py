"""The served model, as /v1/models shows it."""

from __future__ import annotations

from datetime import UTC, datetime

from cluster.openai.wire import ModelCard, ModelList
from cluster.requests.served_model import ServedModel


def model_card(model: ServedModel, name: str) -> ModelCard:
    """The card of `model`. Raises RequestError (404) if `name` is the name of another model."""
    model.check_name(name)
    created_at = datetime.fromtimestamp(model.started, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    numerics = "fast" if model.info is None else model.info.numerics
    return ModelCard(name, model.started, created_at, name, model.max_model_len, model.formats.tool_template, numerics)


def model_list(model: ServedModel) -> ModelList:
    """The served model, under each of its names without `*`."""
    names = [model.model_name, *(name for name in model.other_names if "*" not in name)]
    return ModelList(data=[model_card(model, name) for name in names], first_id=names[0], last_id=names[-1])
