"""A rotary position embedding. Plain data; worker/layers/rotary.py computes it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: base and, for long-context models, how its frequencies are scaled."""

    theta: float
    """Base of the geometric series of frequencies."""
    scaling_type: str = "default"
    """default, linear, llama3, yarn, longrope or dynamic; anything else is refused when the model is read."""
    scaling: tuple[tuple[str, Any], ...] = ()
    """The checkpoint's own parameters for `scaling_type`, sorted by name. A longrope that is to be short has no
    `long_factor`."""
    partial: float = 1.0
    """Share of a head that turns: its first elements. 0: the layer knows no positions but by the `temperature`."""
    interleaved: bool = False
    """Whether the checkpoint's heads turn in pairs of neighbours (2i, 2i + 1), which are read as halves: the same order
    for queries and keys changes no score."""

    temperature: tuple[float, int] | None = None
    """(a, n): queries are multiplied by 1 + a * log(1 + floor((position + 1) / n)) (Llama 4)."""

    def max_context(self, max_position_embeddings: int) -> int:
        """Longest sequence it is made for: YaRN reaches beyond the model's `max_position_embeddings`."""
        scaling = dict(self.scaling)
        if self.scaling_type == "longrope" and "long_factor" not in scaling:
            return int(scaling["original_max_position_embeddings"])
        if self.scaling_type != "yarn":
            return max_position_embeddings
        return max(max_position_embeddings, int(scaling["original_max_position_embeddings"] * scaling["factor"]))


def yarn_mscale(factor: float, weight: float) -> float:
    """How much YaRN sharpens attention over contexts that are `factor` times as long (arXiv 2309.00071)."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
