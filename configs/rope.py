"""A rotary position embedding. Plain data. worker/layers/rotary.py computes it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """A rotary embedding: its base, and for long-context models how the frequencies are scaled."""

    theta: float
    """Base of the geometric series of frequencies."""
    scaling_type: str = "default"
    """One of default, linear, llama3, yarn, longrope, dynamic. Any other type is refused when the model is read."""
    scaling: tuple[tuple[str, Any], ...] = ()
    """The parameters for `scaling_type`, sorted by name. A longrope without `long_factor` uses its short factors."""
    partial: float = 1.0
    """The share of a head's elements that is rotated, from the first one on. If 0, positions affect the layer only
    through `temperature`."""
    interleaved: bool = False
    """Whether the checkpoint rotates pairs of neighbours (2i, 2i + 1). Such weights are reordered into halves when they
    are read. Scores do not change, because queries and keys are reordered alike."""

    temperature: tuple[float, int] | None = None
    """(a, n): queries are multiplied by 1 + a * log(1 + floor((position + 1) / n)) (Llama 4)."""

    def max_context(self, max_position_embeddings: int) -> int:
        """The longest sequence that the embedding supports. With YaRN this exceeds the model's
        `max_position_embeddings`."""
        scaling = dict(self.scaling)
        if self.scaling_type == "longrope" and "long_factor" not in scaling:
            return int(scaling["original_max_position_embeddings"])
        if self.scaling_type != "yarn":
            return max_position_embeddings
        return max(max_position_embeddings, int(scaling["original_max_position_embeddings"] * scaling["factor"]))


def yarn_mscale(factor: float, weight: float) -> float:
    """YaRN's attention factor for contexts that are `factor` times as long (arXiv 2309.00071)."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
