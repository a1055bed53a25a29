"""What a changed config file would do to the app that runs with the old one: replace, restart or update parts of it.

The effects are those of Ray Serve for a declared file: `serve deploy`, or `cluster serve` with a dashboard.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter

from configs.load import AppConfig, all_settings

_ARGS = "applications[0].args"
_DEPLOYMENT = "applications[0].deployments[0]"
_SCALING = f"{_DEPLOYMENT}.autoscaling_config."
# Options of `deployments[0]` that Ray Serve counts as the app's code. If they change, Ray Serve replaces replicas.
_REPLACING_OPTIONS = (
    "ray_actor_options",
    "placement_group_bundles",
    "placement_group_strategy",
    "placement_group_bundle_label_selector",
    "placement_group_fallback_strategy",
    "max_replicas_per_node",
    "gang_scheduling_config",
    "request_router_config",
    "deployment_actors",
    "autoscaling_config.policy",
)
_REPLACING_SECTIONS = ("import_path", "runtime_env", "autoscaling_policy")
_FIXED_SECTIONS = ("http_options", "grpc_options", "proxy_location", "controller_options")


class Effect(StrEnum):
    """What Ray Serve does after a change."""

    IN_PLACE = "in place"
    REPLACES = "replaces every replica"
    NEW_APP = "starts another app and deletes this one"
    FIXED = "not while Ray Serve runs: `serve shutdown` first"


@dataclass(frozen=True)
class Change:
    """One changed setting."""

    key: str
    """Dotted name. For settings in `args`, the form that `--set` takes."""
    before: object
    """None if the setting was not given."""
    after: object
    effect: Effect


def changes(before: AppConfig, after: AppConfig) -> list[Change]:
    """All differences, in the file's order. Settings are compared by value, everything else by its text."""
    found = [
        Change(name, old, new, Effect.REPLACES)
        for name in all_settings()
        if (old := attrgetter(name)(before.engine)) != (new := attrgetter(name)(after.engine))
    ]
    old_leaves, new_leaves = _outside_args(before), _outside_args(after)
    if not found and _args(before) != _args(after):
        # Ray Serve compares texts, so a default that is spelled out counts as a change.
        found.append(Change(_ARGS, "written so", "written otherwise", Effect.REPLACES))
    begins_or_ends_to_scale = _scales(old_leaves) != _scales(new_leaves)
    for key in {**old_leaves, **new_leaves}:
        if (old := old_leaves.get(key)) != (new := new_leaves.get(key)):
            found.append(Change(key, old, new, _effect(key, begins_or_ends_to_scale)))
    return found


def _args(app: AppConfig) -> str:
    return json.dumps(app.document["applications"][0]["args"], sort_keys=True, default=str)


def _outside_args(app: AppConfig) -> dict[str, object]:
    """The values outside `args`, by path, each with its default."""
    leaves = {key: value for key, value in _leaves(app.document) if not key.startswith(_ARGS)}
    leaves.pop(f"{_DEPLOYMENT}.name", None)
    return leaves | {
        "http_options.host": app.host,
        "http_options.port": app.port,
        "applications[0].name": app.name,
        "applications[0].route_prefix": app.route_prefix,
    }


def _leaves(value: object, key: str = "") -> Iterator[tuple[str, object]]:
    """All values that are neither mappings nor lists, by path."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{key}[{index}]")
    else:
        yield key, value


def _scales(leaves: Mapping[str, object]) -> bool:
    return any(key.startswith(_SCALING) for key in leaves)


def _effect(key: str, begins_or_ends_to_scale: bool) -> Effect:
    if _is_of(key, "", _FIXED_SECTIONS):
        return Effect.FIXED
    if key == "applications[0].name":
        return Effect.NEW_APP
    if key.startswith(_SCALING) and begins_or_ends_to_scale:
        return Effect.REPLACES  # Ray Serve applies changed bounds without replacing replicas
    if _is_of(key, f"{_DEPLOYMENT}.", _REPLACING_OPTIONS) or _is_of(key, "applications[0].", _REPLACING_SECTIONS):
        return Effect.REPLACES
    return Effect.IN_PLACE


def _is_of(key: str, prefix: str, sections: tuple[str, ...]) -> bool:
    """Whether `key` equals one of `sections` (all under `prefix`) or lies inside one."""
    return any(key == prefix + name or key.startswith((f"{prefix}{name}.", f"{prefix}{name}[")) for name in sections)
