"""How the model's makers would have it sampled: generation_config.json, under what the server's operator sets."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pydantic

from configs.schema import GenerationDefaults

logger = logging.getLogger(__name__)


def read_generation_defaults(model_path: Path, setting: str | GenerationDefaults) -> GenerationDefaults:
    """Values for requests that name none: each of the operator's (`server.generation_config`), else the file's, else
    None."""
    if setting == "off":
        return GenerationDefaults()
    path = model_path / "generation_config.json"
    own = _read(path) if path.is_file() else GenerationDefaults()
    if taken := own.model_dump(exclude_none=True):
        logger.info("sampling defaults of the model: %s", ", ".join(f"{k}={v}" for k, v in taken.items()))
    if isinstance(setting, str):
        return own
    return own.model_copy(update=setting.model_dump(exclude_none=True))


def _read(path: Path) -> GenerationDefaults:
    """The file's values; one that makes no sense is left out with a warning, as the file is not the operator's."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        logger.warning("%s cannot be read and is ignored: %s", path.name, error)
        return GenerationDefaults()
    if not isinstance(content, dict):
        return GenerationDefaults()
    # `do_sample` is not read: what it leaves unset would mean greedy to transformers, and 1.0 to every client.
    known = {name: content[name] for name in GenerationDefaults.model_fields if content.get(name) is not None}
    try:
        return GenerationDefaults.model_validate(known)
    except pydantic.ValidationError as error:
        wrong = {str(problem["loc"][0]) for problem in error.errors()}
        logger.warning("%s: %s out of range, ignored", path.name, ", ".join(sorted(wrong)))
        return GenerationDefaults.model_validate({name: value for name, value in known.items() if name not in wrong})
