"""The number of replicas that the load requires: the policy of `autoscaling_config`.

The number of requests is a poor measure, because one request may be a hundred times the work of another. The policy
uses waiting prompt tokens, and the use of the KV pool and the batch. Ray Serve applies delays, factors and bounds.

The Serve controller runs the policy, and may lack our packages, so this module imports none of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

QUEUED_TOKENS = "queued_tokens"
"""Number of prompt tokens waiting in a replica."""
KV_USAGE = "kv_usage"
"""Share of a replica's KV pages that running requests use, 0 to 1."""
RUNNING_SHARE = "running_share"
"""Running requests as a share of `scheduler.max_num_seqs`, 0 to 1."""


class LoadPolicy:
    """Computes the number of replicas at which none of three averages over the replicas exceeds its target."""

    def __init__(
        self, target_queued_tokens: float = 8192, target_kv_usage: float = 0.8, target_running: float = 0.9
    ) -> None:
        """Raises ValueError if a target is not positive, or a share is above 1."""
        for name, target in (("target_kv_usage", target_kv_usage), ("target_running", target_running)):
            if not 0 < target <= 1:
                raise ValueError(f"{name}={target} must be above 0 and at most 1")
        if target_queued_tokens <= 0:
            raise ValueError(f"target_queued_tokens={target_queued_tokens} must be above 0")
        self._targets = {
            QUEUED_TOKENS: target_queued_tokens,
            KV_USAGE: target_kv_usage,
            RUNNING_SHARE: target_running,
        }

    def __call__(self, context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        """The number of replicas that the load requires, and the policy's state, which is always empty."""
        figures = context.aggregated_metrics or {}
        wanted = [
            sum(by_replica.values()) / target
            for name, target in self._targets.items()
            if (by_replica := figures.get(name))
        ]
        # Before the first report, the number of replicas stays as it is.
        return (max(wanted) if wanted else context.target_num_replicas), {}
