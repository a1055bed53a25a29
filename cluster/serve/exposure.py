"""Checks what other machines can reach in a replica. Refuses an endpoint that is open to everybody by mistake, and
closes a port at which Ray Serve accepts pickles from any caller."""

from __future__ import annotations

import ray.serve._private.replica as ray_replica
from ray.serve.context import _get_global_client

from configs.errors import EngineError
from configs.load import check_exposure
from configs.schema import EngineConfig


def check_serve_host(config: EngineConfig) -> None:
    """Raises ConfigError if Ray Serve listens where other machines reach it, and `config` has no keys. Blocks.

    `python -m cluster serve` checks this before it starts Serve. `serve deploy`, KubeRay and `serve.run` do not, and
    with HAProxy, Serve listens at every address by default.
    """
    client = _get_global_client(raise_if_no_controller_running=False)
    if client is not None:
        check_exposure(client.http_config.host or "0.0.0.0", config)


def keep_grpc_local() -> None:
    """Makes the gRPC server by which deployments call each other listen only on loopback in this replica's process.
    Call this before Ray Serve starts that server, which is after the replica's constructor.

    Ray Serve starts that server in every replica at every address, without Ray's token. This application has one
    deployment, so no other deployment calls it.

    Raises:
        EngineError: this version of Ray Serve starts the server in another way.
    """
    add_port = getattr(ray_replica, "add_port_to_grpc_server", None)
    if add_port is None:
        raise EngineError("Ray Serve's gRPC server cannot be bound to loopback; install a version of Ray as in README")

    def add_local_port(server: object, address: str) -> int:
        return int(add_port(server, address.replace("[::]", "127.0.0.1")))

    ray_replica.add_port_to_grpc_server = add_local_port  # type: ignore[attr-defined]  # imported there, not declared
