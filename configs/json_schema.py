"""Builds the JSON Schema of the config file for editors. A test keeps configs/schema.json equal to it."""

from __future__ import annotations

from typing import Any

from configs.load import IMPORT_PATH
from configs.schema import EngineConfig


def config_file_schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of a Ray Serve config file with one Lockstep application. Ray's own keys are not
    checked, except those that Lockstep reads."""
    engine = EngineConfig.model_json_schema()
    definitions = engine.pop("$defs")
    definitions["EngineConfig"] = engine
    application = {
        "type": "object",
        "description": "The served model.",
        "required": ["import_path", "args"],
        "properties": {
            "name": {"type": "string", "default": "default", "description": "Of the Ray Serve application."},
            "route_prefix": {
                "type": "string",
                "pattern": "^/",
                "default": "/",
                "description": "Path that every route begins with.",
            },
            "import_path": {"const": IMPORT_PATH},
            "args": {"$ref": "#/$defs/EngineConfig"},
        },
    }
    http = {
        "type": "object",
        "description": "Where Ray Serve's proxies listen.",
        "properties": {
            "host": {"type": "string", "default": "127.0.0.1"},
            "port": {"type": "integer", "minimum": 1, "maximum": 65535, "default": 8000},
        },
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Lockstep config file",
        "type": "object",
        "required": ["applications"],
        "properties": {
            "applications": {"type": "array", "minItems": 1, "maxItems": 1, "items": application},
            "http_options": http,
        },
        "$defs": definitions,
    }
