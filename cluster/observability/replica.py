"""Makes a Serve replica's telemetry: its labels, metrics exported to Ray, and a tracer if spans have a consumer."""

from __future__ import annotations

from ray.serve.context import ReplicaContext

from cluster.messages.state import EngineLife
from cluster.observability.ray_export import RayExport
from cluster.observability.record import Identity
from cluster.observability.telemetry import Telemetry
from cluster.observability.tracing import open_tracer
from configs.schema import EngineConfig


def replica_telemetry(config: EngineConfig, context: ReplicaContext, life: EngineLife) -> Telemetry:
    """The telemetry of the replica of `context`, which runs with the resolved `config`. Raises ConfigError if
    `observability.otlp_traces_endpoint` is set and cannot be used."""
    settings = config.observability
    identity = Identity(
        model_name=config.model_names[0],
        application=context.app_name,
        deployment=context.deployment,
        replica=context.replica_id.unique_id,
    )
    telemetry = Telemetry(identity, life)
    telemetry.export = RayExport(telemetry.metrics, identity.model_name).flush
    telemetry.tracer = open_tracer(settings.otlp_traces_endpoint, identity)
    return telemetry
