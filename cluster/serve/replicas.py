"""The number of replicas, as options for Ray Serve."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from cluster.serve.autoscaling import LoadPolicy
from configs.errors import ConfigError
from configs.schema import EngineConfig

_POLICY = "cluster.serve.autoscaling:LoadPolicy"


def replica_options(config: EngineConfig) -> dict[str, Any]:
    """Options of the deployment that set the number of replicas.

    Raises:
        ConfigError: Ray Serve does not accept `autoscaling_config`.
    """
    scaling = _autoscaling(config.autoscaling_config)
    options: dict[str, Any] = {"num_replicas": config.num_replicas} if scaling is None else {}
    if scaling is not None:
        options["autoscaling_config"] = scaling
    return options


def _autoscaling(given: dict[str, Any] | None) -> AutoscalingConfig | None:
    """Ray Serve's autoscaling options, with our policy if `given` names none. None for a fixed number of replicas."""
    if given is None:
        return None
    known = AutoscalingConfig.model_fields
    if unknown := [key for key in given if key not in known]:
        raise ConfigError(
            f"autoscaling_config has unknown keys: {', '.join(unknown)}; Ray Serve knows {', '.join(sorted(known))}"
        )
    policy = {"policy_function": _POLICY, **(given.get("policy") or {})}
    try:
        if policy["policy_function"] == _POLICY:
            LoadPolicy(**policy.get("policy_kwargs", {}))
        return AutoscalingConfig(**{**given, "policy": AutoscalingPolicy(**policy)})
    except ValidationError as error:
        wrong = [
            ".".join(map(str, ("autoscaling_config", *each["loc"]))) + ": " + each["msg"] for each in error.errors()
        ]
        raise ConfigError("\n".join(wrong)) from None
    except (TypeError, ValueError, ImportError) as error:
        raise ConfigError(f"autoscaling_config.policy: {error}") from None
