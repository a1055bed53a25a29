"""Typed access to the values in a checkpoint's JSON files. Every error names file and key."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from configs.errors import CheckpointError
from configs.rope import RopeConfig

MOST_PARTS = 4096
"""Largest accepted number of layers, or of experts in a layer. Specs of all are built before any tensor is read."""


class Fields:
    """Typed access to one JSON object of a checkpoint. Every error names file and key."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def integer(self, key: str, default: int | None = None) -> int:
        return self._typed(key, default, (int,), "an integer")

    def count(self, key: str, default: int | None = None, at_most: int | None = None) -> int:
        """An integer of at least 1."""
        value = self.integer(key, default)
        if value < 1:
            raise CheckpointError(
                f"{self.where}: {key}={value} is less than 1; the checkpoint is corrupt, so download it again"
            )
        if at_most is not None and value > at_most:
            raise CheckpointError(
                f"{self.where}: {key}={value} is more than {at_most}; the checkpoint is corrupt, so download it again"
            )
        return value

    def kv_heads(self, num_q: int, default: int) -> int:
        """Number of KV heads of an attention with `num_q` query heads. An explicit null means one KV head per query
        head."""
        return self.count("num_key_value_heads", num_q if "num_key_value_heads" in self.values else default)

    def experts(self, key: str, num_experts: int, top_k: int) -> tuple[int, int]:
        """Number of experts, at `key`, and of those that a token takes. The arguments are the defaults."""
        num_experts, top_k = self.count(key, num_experts, MOST_PARTS), self.count("num_experts_per_tok", top_k)
        if top_k > num_experts:
            raise CheckpointError(f"{self.where}: num_experts_per_tok={top_k} exceeds {key}={num_experts}")
        return num_experts, top_k

    def number(self, key: str, default: float | None = None) -> float:
        return float(self._typed(key, default, (int, float), "a number"))

    def flag(self, key: str, default: bool) -> bool:
        return self._typed(key, default, (bool,), "true or false")

    def text(self, key: str, default: str | None = None) -> str:
        return self._typed(key, default, (str,), "a string")

    def part(self, key: str) -> Fields:
        """The object at `key`, or an empty one if the file has none."""
        return Fields(self._typed(key, {}, (dict,), "an object"), f"{self.where}: {key}")

    def numbers(self, key: str, default: Sequence[float]) -> tuple[float, ...]:
        """A list with the length of `default`. transformers 5 writes infinity as an object."""
        value = self.values.get(key)
        listed = [] if value is None else value if isinstance(value, list) else [value]
        found = [float(it["__float__"]) if isinstance(it, dict) and "__float__" in it else it for it in listed]
        if found and (len(found) != len(default) or not all(isinstance(it, (int, float)) for it in found)):
            raise CheckpointError(f"{self.where}: {key}={value!r} is not {len(default)} numbers")
        return tuple(found or default)

    def check(self, key: str, supported: object) -> None:
        """Raises CheckpointError if the file has another value than the supported one, which is the default."""
        value = self.values.get(key)
        if value is not None and value != supported:
            raise CheckpointError(f"{self.where}: {key}={value} is not supported; only {supported} is")

    def integers(self, key: str) -> tuple[int, ...]:
        """An integer or a list of integers. Empty if the file has none."""
        value = self.values.get(key)
        many = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(it, bool) or not isinstance(it, int) for it in many):
            raise CheckpointError(
                f"{self.where}: {key}={value!r} is neither an integer nor a list of integers; the checkpoint is corrupt"
            )
        return tuple(many)

    def _typed(self, key: str, default: Any, types: tuple[type, ...], what: str) -> Any:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(f"{self.where} has no {key}; the checkpoint is incomplete, so download it again")
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise CheckpointError(f"{self.where}: {key}={value!r} is not {what}")
        return value


def rotary_layers(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Whether each layer has a rotary embedding, as `no_rope_layers` says. Without it, every `no_rope_layer_interval`th
    layer has none.

    Raises CheckpointError if the list has fewer than `num_layers` entries.
    """
    # Despite the key's name, a 1 marks a layer with a rotary embedding. An empty list means the default.
    if said := fields.integers("no_rope_layers"):
        if len(said) < num_layers:
            raise CheckpointError(f"{fields.where}: no_rope_layers does not name {num_layers} layers")
        return tuple(map(bool, said[:num_layers]))
    interval = fields.count("no_rope_layer_interval", 4)
    return tuple((layer + 1) % interval != 0 for layer in range(num_layers))


def layer_types(
    fields: Fields, names: tuple[str, str], default: Sequence[str], key: str = "layer_types"
) -> Sequence[str]:
    """The type of each layer, one of `names`: `default` if the file does not have `key`.

    Raises CheckpointError if the file names other types, or has another number of layers than `default`.
    """
    types = fields.values.get(key)
    if types is None:
        return default
    if not isinstance(types, list) or len(types) != len(default) or not set(types) <= set(names):
        raise CheckpointError(f"{fields.where}: {key} must name {' or '.join(names)} for each of {len(default)} layers")
    return types


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:  # invalid JSON or UTF-8
        raise CheckpointError(f"{path} is corrupt: {error}; download it again") from None
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{path} is corrupt: it holds a {type(content).__name__}, not an object; download it again"
        )
    return content


_SCALING_KEYS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def checked_rope(theta: float, scaling_type: str, scaling: Mapping[str, Any], where: str) -> RopeConfig:
    if scaling_type not in _SCALING_KEYS:
        raise CheckpointError(
            f"{where}: rope scaling type {scaling_type} is not supported; supported are {', '.join(_SCALING_KEYS)}"
        )
    if scaling_type == "default":
        return RopeConfig(theta=theta)
    fields = Fields(scaling, f"{where}: rope scaling {scaling_type}")
    for key in _SCALING_KEYS[scaling_type]:
        if fields.number(key) <= 0:
            raise CheckpointError(f"{fields.where}: {key}={scaling[key]} is not positive")
    return RopeConfig(theta=theta, scaling_type=scaling_type, scaling=tuple(sorted(scaling.items())))
