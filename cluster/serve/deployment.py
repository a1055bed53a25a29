"""Deploys an application to Ray Serve: declaratively if the cluster has a dashboard, else from this process.

With a declaration, a second run that changes only `deployments:` restarts nothing. Other applications stay unchanged.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from pydantic import ValidationError
from ray import serve
from ray.dashboard.modules.serve.sdk import ServeSubmissionClient
from ray.exceptions import RayError, RayTaskError
from ray.serve.schema import ApplicationStatus, ServeDeploySchema
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.ranks.host import environment_options
from cluster.serve.app import DEPLOYMENT, engine_app
from cluster.serve.haproxy import DIRECTORY, PROGRAM, SETTINGS, install_anew
from cluster.serve.session import Session, check_port_free
from configs.errors import ConfigError, EngineError
from configs.load import AppConfig, is_loopback

logger = logging.getLogger(__name__)

_POLL_S = 0.02
_INSTALL_TIMEOUT_S = 60.0  # includes the time in which a node fetches this checkout


@dataclass(frozen=True, eq=False)
class Deployment:
    """One application that is checked against the cluster and ready for Ray Serve."""

    config: AppConfig
    declaration: dict[str, Any]
    application: serve.Application
    client: ServeSubmissionClient | None
    """Declares the app to Ray Serve. None if this process deploys the app without a declaration."""
    environment: Mapping[str, str]

    @classmethod
    def prepare(cls, config: AppConfig, session: Session) -> Deployment:
        """Checks everything that can be checked before placement. Changes nothing.

        Raises:
            ConfigError: a setting, the checkpoint, the size of the cluster's nodes, or the port is wrong.
        """
        declaration = _declaration(config, session)
        application = engine_app(config.engine, _engine_options(declaration["applications"][0]), session.environment)
        client, details = find_dashboard(session.dashboard_url)
        _check_http_options(config, details.get("http_options") or {})
        if _others(details, config.name):
            client = None
        return cls(config, declaration, application, client, session.environment)

    def submit(self) -> None:
        """Starts Ray Serve if necessary, and deploys or replaces the app. Does not wait for the replicas.

        Raises:
            EngineError: Ray Serve refused the application.
        """
        if serve_is_running():
            self._deploy()
            return
        with ThreadPoolExecutor(1) as pool:
            starting = pool.submit(_start_serve, self.declaration, self.environment)
            while not starting.done() and not serve_is_running():
                time.sleep(_POLL_S)
            # The controller accepts the app and starts the replicas while Serve's proxies still start.
            try:
                if not starting.done() or starting.exception() is None:
                    self._deploy()
            finally:
                starting.result()

    def status(self) -> tuple[ApplicationStatus, str]:
        """The app's status, and Ray Serve's message about it."""
        overview = serve.status().applications.get(self.config.name)
        if overview is None:
            return ApplicationStatus.NOT_STARTED, ""
        details = [deployment.message for deployment in overview.deployments.values() if deployment.message]
        return overview.status, "\n".join([overview.message, *details]).strip()

    def delete(self) -> None:
        """Asks Ray Serve to end the app. Returns at once."""
        serve.delete(self.config.name, _blocking=False)

    def _deploy(self) -> None:
        if self.client is not None:
            try:
                self.client.deploy_applications(self.declaration)
            except (RuntimeError, OSError) as error:  # refused, or the dashboard is gone
                hint = ""
                if "No module named" in str(error):
                    hint = (
                        "; the dashboard reads `deployments:` itself but lacks this code: set autoscaling_config in "
                        "`args`, or make the code known to the head node"
                    )
                raise EngineError(f"Ray Serve refused the application: {error}{hint}") from None
            return
        target = serve.RunTarget(self.application, name=self.config.name, route_prefix=self.config.route_prefix)
        try:
            serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
        except RayTaskError as error:  # another app may have its route
            raise EngineError(f"Ray Serve refused the application: {error.cause}") from None


def serve_is_running() -> bool:
    """Whether the cluster has a Serve controller. Serve's own API would start one to find out."""
    return any(actor["namespace"] == "serve" for actor in ray.util.list_named_actors(all_namespaces=True))


def _start_serve(declaration: dict[str, Any], environment: Mapping[str, str]) -> None:
    """Starts Ray Serve as the dashboard would, but from this process, which can enable HAProxy.

    Args:
        environment: variables that every process of the cluster starts with, as far as known.

    Raises:
        EngineError: Ray Serve refused its options, or did not start.
    """
    try:
        schema = ServeDeploySchema.model_validate({**declaration, "applications": []})
    except ValidationError as error:
        raise EngineError(f"Ray Serve refused the application: {error}") from None
    given = schema.controller_options.runtime_env if schema.controller_options is not None else None
    settings = {name: os.environ.get(name, value) for name, value in SETTINGS.items()}
    if is_loopback(schema.http_options.host) and sum(bool(node["Alive"]) for node in ray.nodes()) > 1:
        logger.warning("HAProxy is replaced by Ray's own proxy (host=%s, several nodes)", schema.http_options.host)
        # Replicas listen on the same address, at which HAProxy must reach them
        settings["RAY_SERVE_ENABLE_HA_PROXY"] = "0"
    if settings["RAY_SERVE_ENABLE_HA_PROXY"] == "1" and PROGRAM not in os.environ:
        settings |= _install_on_nodes()
    env_vars = {**settings, **(given or {}).get("env_vars", {})}
    try:
        serve.start(
            proxy_location=schema.proxy_location,
            http_options=schema.http_options.model_dump(),
            grpc_options=schema.grpc_options.model_dump(),
            logging_config=schema.logging_config,
            tracing_config=schema.tracing_config,
            controller_options=environment_options(env_vars, environment),
        )
    except RayError as error:  # a port of HAProxy may be in use
        raise EngineError(f"Ray Serve did not start: {str(error).strip().splitlines()[-1]}") from None


def _install_on_nodes() -> dict[str, str]:
    """Installs HAProxy's program at the same path on every node. Returns the environment with which Serve finds it."""
    user = f"{os.geteuid()} {ray.get_runtime_context().gcs_address}"
    directory = Path(f"{DIRECTORY}-{hashlib.sha256(user.encode()).hexdigest()[:8]}")
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    task = ray.remote(install_anew)
    on_node = (NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes)
    calls = [task.options(num_cpus=0, scheduling_strategy=where).remote(directory) for where in on_node]
    try:
        environments: list[dict[str, str]] = ray.get(calls, timeout=_INSTALL_TIMEOUT_S)
    except RayError as error:
        reason = str(error).strip().splitlines()[-1]
        raise EngineError(f"HAProxy could not be set up in {directory} of every node: {reason}") from None
    return environments[0]


def _declaration(config: AppConfig, session: Session) -> dict[str, Any]:
    """The config file with overrides, our defaults, and the location from which nodes fetch this code."""
    application = {**config.document["applications"][0], "name": config.name, "route_prefix": config.route_prefix}
    runtime_env = dict(application.get("runtime_env") or {})
    if session.working_dir is not None:
        runtime_env.setdefault("working_dir", session.working_dir)
    if runtime_env:
        application["runtime_env"] = runtime_env
    http_options = {**(config.document.get("http_options") or {}), "host": config.host, "port": config.port}
    return {**config.document, "http_options": http_options, "applications": [application]}


def _engine_options(application: dict[str, Any]) -> dict[str, Any]:
    """The file's entry in `deployments:`, without its name.

    Raises:
        ConfigError: the entry is for a deployment that does not exist, or contradicts `args`.
    """
    given = application.get("deployments") or []
    names = [entry.get("name") for entry in given]
    if names not in ([], [DEPLOYMENT]):
        raise ConfigError(
            f"applications[0].deployments names {', '.join(map(str, names))}; name only its one deployment, "
            f"{DEPLOYMENT}"
        )
    options = {key: value for entry in given for key, value in entry.items() if key != "name"}
    for key in ("num_replicas", "autoscaling_config"):
        if options.get("autoscaling_config") is not None and key in application["args"]:
            raise ConfigError(
                f"applications[0] sets both args.{key} and deployments[0].autoscaling_config; keep one of them"
            )
    return options


def find_dashboard(url: str | None) -> tuple[ServeSubmissionClient | None, dict[str, Any]]:
    """A client that declares applications, and the details of Ray Serve. None and {} if no dashboard is at `url`.

    A head node without `ray[default]` reports a dashboard that is not up. Another may be unreachable from this node.
    """
    if url is None:
        return None, {}
    try:
        client = ServeSubmissionClient(url)
        return client, client.get_serve_details()
    except (OSError, RuntimeError, ValueError, KeyError) as error:  # any program may answer at the URL
        reason = str(error).strip().split("\n")[0][:200]
        logger.warning(
            "the dashboard at %s is not up (%s: %s); deploying without it", url, type(error).__name__, reason
        )
        return None, {}


def _others(details: dict[str, Any], name: str) -> list[str]:
    """Names of the other declared apps. A declaration without them would delete them."""
    applications: dict[str, Any] = details.get("applications") or {}
    return [other for other, app in applications.items() if other != name and app.get("source") == "declarative"]


def _check_http_options(config: AppConfig, running: dict[str, Any]) -> None:
    """Raises ConfigError if the port is in use, or Ray Serve already listens on another port or host."""
    if not serve_is_running():
        check_port_free(config.host, config.port)
        return
    for option, wanted in (("host", config.host), ("port", config.port)):
        found = running.get(option)
        if found is not None and found != wanted:
            raise ConfigError(
                f"http_options.{option}={wanted}, but Ray Serve of this cluster already listens on {option} {found} "
                f"and cannot change it while it runs; use --set http_options.{option}={found}, or end Serve with "
                "`serve shutdown`"
            )
