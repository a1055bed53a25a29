"""Reads a Ray Serve config file and `a.b=c` overrides into an `EngineConfig`. Each error line names a fix.

This module owns the form of the file. `schema.py` defines the settings, and `resolve.py` decides `auto` values.
"""

from __future__ import annotations

import difflib
import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from configs.checkpoint import model_name
from configs.errors import ConfigError
from configs.schema import EngineConfig

IMPORT_PATH = "cluster.app:build_app"
_HTTP_PREFIX, _ARGS_PREFIX = "http_options.", "applications.0.args."


@dataclass(frozen=True)
class AppConfig:
    """One config file with its overrides applied."""

    engine: EngineConfig
    name: str
    """Name of the Ray Serve application."""
    route_prefix: str
    host: str
    port: int
    places: Mapping[str, str]
    """Origin of each given setting, by dotted name: `FILE:LINE`, or `--set`."""
    document: Mapping[str, Any]
    """The whole file for Ray Serve. Keys that are not Lockstep's (logging, runtime environment) are passed on as they
    are."""

    @property
    def served_model_name(self) -> str:
        """The first model name for clients."""
        return next(iter(self.engine.model_names), None) or model_name(self.engine.model)


def load_app_config(path: Path, overrides: Sequence[str] = ()) -> AppConfig:
    """Reads a Ray Serve config file with one application whose `args` are an `EngineConfig`.

    Args:
        overrides: `key=value` with the value in YAML, such as `tensor_parallel_size=3` or `kv_cache.num_tokens=4096`.
            Keys are those of `args`, and also `http_options.host` and `http_options.port`.

    Raises:
        ConfigError: the file, a key or a value is wrong. The message has a line for each problem, with the file's line
            if known.
    """
    document, lines = _read_yaml(path)
    application = _only_application(document, path)
    args = application.get("args") or {}
    http = document.get("http_options") or {}
    for section, value in (("applications[0].args", args), ("http_options", http)):
        if not isinstance(value, dict):
            raise ConfigError(f"{path}: {section} is a {type(value).__name__}; it must be a mapping of settings")
    args = _underscored(args)
    http = dict(http)
    given = {}
    for override in overrides:
        key, value = _split_override(override)
        if key.startswith(_HTTP_PREFIX):
            http[_http_option(key)] = value
        else:
            _assign(args, key, value)
            lines.pop(_ARGS_PREFIX + key, None)
            given[key] = "--set"
    application = {**application, "args": args}
    document = {**document, "http_options": http, "applications": [application]}
    ours = (key for key in lines if key.startswith(_ARGS_PREFIX))
    places = {key.removeprefix(_ARGS_PREFIX): f"{path}:{lines[key]}" for key in ours}
    port = http.get("port", 8000)
    if isinstance(port, bool) or not isinstance(port, int) or not 1 <= port <= 65535:
        raise ConfigError(f"http_options.port={port!r}: must be an integer from 1 to 65535")
    route_prefix = application.get("route_prefix", "/")
    if not isinstance(route_prefix, str) or not route_prefix.startswith("/"):
        raise ConfigError(f"{path}: applications[0].route_prefix={route_prefix!r} must begin with /")
    engine = _parse(args, places)
    host = http.get("host", "127.0.0.1")
    if not isinstance(host, str):
        raise ConfigError(f'http_options.host={host!r}: must be an address or a name; put "::" in quotes')
    check_exposure(host, engine)
    return AppConfig(
        engine=engine,
        name=str(application.get("name", "default")),
        route_prefix=route_prefix,
        host=host,
        port=port,
        places={**places, **given},
        document=document,
    )


def parse_engine_config(args: Mapping[str, Any]) -> EngineConfig:
    """Parses `args` as an `EngineConfig`. In keys, `-` counts as `_`. Raises a ConfigError with a line for each
    problem."""
    return _parse(_underscored(args), {})


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`: `localhost`, or a loopback address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def all_settings() -> list[str]:
    """Dotted names of all settings, in the schema's order. Sections are not settings."""
    return list(_settings(EngineConfig, ""))


def _settings(section: type[BaseModel], prefix: str) -> Iterable[str]:
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _settings(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name


def check_exposure(host: str, engine: EngineConfig) -> None:
    """Raises ConfigError if other machines can reach the endpoint at `host` and no API key is required."""
    if engine.server.api_keys is None and not is_loopback(host):
        raise ConfigError(
            f"http_options.host={host} can be reached from other machines, and server.api_keys names no file of keys; "
            "make a key with `python -m cluster key ID`, or set http_options.host=127.0.0.1, or server.api_keys=false "
            "to answer whoever reaches the port"
        )


# ---- the file


def _read_yaml(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """The document, and the line number of each key by dotted path."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; give the path of a config file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no UTF-8 text: {error.reason} at byte {error.start}") from None
    lines: dict[str, int] = {}
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is not None:
            _collect_lines(root, "", lines, path)
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
        place = f"{path}:{mark.line + 1}" if mark is not None else str(path)
        raise ConfigError(f"{place} is no YAML: {getattr(error, 'problem', None) or error}") from None
    if not isinstance(document, dict):
        raise ConfigError(f"{path} holds no mapping; a Ray Serve config file begins with `applications:`")
    return document, lines


def _collect_lines(node: yaml.Node, prefix: str, lines: dict[str, int], path: Path) -> None:
    if isinstance(node, yaml.MappingNode):
        for key_node, value_node in node.value:
            key = prefix + str(key_node.value).replace("-", "_")
            line = key_node.start_mark.line + 1
            if key in lines:
                raise ConfigError(f"{path}:{line}: {key} is given twice, first on line {lines[key]}; keep one")
            lines[key] = line
            _collect_lines(value_node, f"{key}.", lines, path)
    elif isinstance(node, yaml.SequenceNode):
        for i, item in enumerate(node.value):
            _collect_lines(item, f"{prefix}{i}.", lines, path)


def _only_application(document: Mapping[str, Any], path: Path) -> dict[str, Any]:
    applications = document.get("applications")
    if not isinstance(applications, list) or len(applications) != 1 or not isinstance(applications[0], dict):
        raise ConfigError(f"{path}: `applications` must be a list of one application; a file serves one model")
    application: dict[str, Any] = applications[0]
    if application.get("import_path") != IMPORT_PATH:
        raise ConfigError(
            f"{path}: applications[0].import_path={application.get('import_path')!r}; it must be {IMPORT_PATH}"
        )
    return application


# ---- overrides


def _split_override(override: str) -> tuple[str, Any]:
    key, separator, text = override.partition("=")
    key = key.strip().replace("-", "_")
    if not separator or not all(key.split(".")):
        raise ConfigError(f"override {override!r} is not of the form key=value, e.g. tensor_parallel_size=3")
    try:
        return key, yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"override {override!r}: the value is no YAML; quote it") from None


def _http_option(key: str) -> str:
    option = key.removeprefix(_HTTP_PREFIX)
    if option not in ("host", "port"):
        raise ConfigError(f"unknown setting {key}; http_options.host and http_options.port can be set")
    return option


def _assign(args: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for i, section in enumerate(sections):
        inner = args.get(section)
        if inner is None:
            inner = {}
        if not isinstance(inner, dict):
            where = ".".join(sections[: i + 1])
            raise ConfigError(
                f"override {key}: {where}={inner!r} is a value and has no settings inside; give {where}=VALUE"
            )
        args[section] = dict(inner)
        args = args[section]
    args[name] = value


def _underscored(value: Any) -> Any:
    """A copy with `_` for `-` in all keys, also of nested mappings."""
    if isinstance(value, Mapping):
        return {str(key).replace("-", "_"): _underscored(inner) for key, inner in value.items()}
    return value


# ---- from pydantic's errors to lines


def _parse(args: Mapping[str, Any], places: Mapping[str, str]) -> EngineConfig:
    """Turns pydantic's errors into lines. `places` has the origin of each setting, which begins its line."""
    try:
        return EngineConfig.model_validate(dict(args))
    except ValidationError as error:
        problems = []
        for detail in error.errors(include_url=False):
            # For a setting with several types, pydantic adds the tried type in brackets, which is not a key.
            key = ".".join(str(part) for part in detail["loc"] if not str(part).startswith("<"))
            place = f"{places[key]}: " if key in places else ""
            problems.append(place + _problem(key, detail["type"], detail["msg"], detail["input"]))
        raise ConfigError("\n".join(problems)) from None


def _problem(key: str, kind: str, message: str, value: Any) -> str:
    if kind == "extra_forbidden":
        nearest = _nearest(key)
        return f"unknown setting {key}" + (f"; did you mean {nearest}?" if nearest else "")
    if kind == "missing":
        return f"{key} is missing; it has no default"
    rule = message.replace("Input should be", "must be")
    if kind == "model_type":
        rule = "must be a mapping of settings"
    return f"{key}={value!r}: {rule}"


def _nearest(key: str) -> str | None:
    """The setting or section that `key` was probably meant to be: one of the same name elsewhere, or the most similar
    one."""
    settings = all_settings()
    names = [*settings, *dict.fromkeys(setting.rpartition(".")[0] for setting in settings if "." in setting)]
    last = key.rpartition(".")[2]
    by_last = {name.rpartition(".")[2]: name for name in reversed(names)}
    if last in by_last:
        return by_last[last]
    prefix = key.removesuffix(last)
    siblings = {name.removeprefix(prefix): name for name in names if name.startswith(prefix)}
    for text, among in ((last, siblings), (key, dict(zip(names, names, strict=True))), (last, by_last)):
        if alike := difflib.get_close_matches(text, among, n=1):
            return among[alike[0]]
    return None
