"""Default sampling values: the operator's settings first, then the model's generation_config.json."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pydantic

from configs.schema import GenerationDefaults

logger = logging.getLogger(__name__)


def read_generation_defaults(model_path: Path, setting: str | GenerationDefaults) -> GenerationDefaults:
    """Values for requests that omit them: the operator's (`server.generation_config`), else the file's, else None."""
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
    """The file's values. A value out of range is dropped with a warning, because the file is not the operator's."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        logger.warning("%s cannot be read and is ignored: %s", path.name, error)
        return GenerationDefaults()
    if not isinstance(content, dict):
        return GenerationDefaults()
    known = {name: content[name] for name in GenerationDefaults.model_fields if content.get(name) is not None}
    # If `do_sample` is not set, it means greedy to transformers, and temperature 1.0 to API clients.
    if content.get("do_sample") is False:
        known["temperature"] = 0.0
    try:
        return GenerationDefaults.model_validate(known)
    except pydantic.ValidationError as error:
        wrong = {str(problem["loc"][0]) for problem in error.errors()}
        logger.warning("%s: no valid value for %s; the defaults are used instead", path.name, ", ".join(sorted(wrong)))
        return GenerationDefaults.model_validate({name: value for name, value in known.items() if name not in wrong})
