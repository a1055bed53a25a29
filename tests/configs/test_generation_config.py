"""Sampling values that a model brings: what is read, what the operator's settings do to it, what is left out."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from configs.errors import ConfigError
from configs.generation_config import read_generation_defaults
from configs.load import parse_engine_config
from configs.schema import GenerationDefaults


def write(folder: Path, content: Any) -> Path:
    (folder / "generation_config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def setting(value: Any) -> Any:
    return parse_engine_config({"model": "a/b", "server": {"generation_config": value}}).server.generation_config


def test_the_operators_values_go_over_the_models(tmp_path: Path) -> None:
    path = write(tmp_path, {"temperature": 0.6, "top_k": 20, "eos_token_id": [1, 2]})
    assert read_generation_defaults(path, setting("auto")) == GenerationDefaults(temperature=0.6, top_k=20)
    over = setting({"temperature": 1, "max_new_tokens": 9})
    assert read_generation_defaults(path, over) == GenerationDefaults(temperature=1.0, top_k=20, max_new_tokens=9)
    assert read_generation_defaults(path, setting("off")) == GenerationDefaults()


def test_a_model_that_does_not_sample_is_greedy(tmp_path: Path) -> None:
    greedy = write(tmp_path, {"temperature": 0.6, "do_sample": False})
    assert read_generation_defaults(greedy, "auto") == GenerationDefaults(temperature=0.0)
    samples = write(tmp_path, {"temperature": 0.6, "do_sample": True})
    assert read_generation_defaults(samples, "auto") == GenerationDefaults(temperature=0.6)


@pytest.mark.parametrize("content", ["{", "[]", "null"])
def test_a_file_that_is_no_object_changes_nothing(tmp_path: Path, content: str) -> None:
    assert read_generation_defaults(write(tmp_path, content), "auto") == GenerationDefaults()


def test_a_model_without_the_file_has_none(tmp_path: Path) -> None:
    assert read_generation_defaults(tmp_path, "auto") == GenerationDefaults()


def test_a_value_of_the_file_that_makes_no_sense_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path, {"temperature": -1, "top_p": "x", "top_k": 5, "min_p": None})
    with caplog.at_level(logging.WARNING):
        assert read_generation_defaults(path, "auto") == GenerationDefaults(top_k=5)
    assert "temperature, top_p" in caplog.text


@pytest.mark.parametrize(
    ("value", "match"),
    [
        ({"temperature": 5}, r"server\.generation_config\.temperature=5: must be less than or equal to 2"),
        ({"tempratur": 1}, r"unknown setting server\.generation_config\.tempratur"),
        ("on", r"server\.generation_config='on': must be 'auto' or 'off'"),
    ],
)
def test_a_wrong_setting_is_named(value: object, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        setting(value)
