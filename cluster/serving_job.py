"""`python -m cluster serve`: deploy one config file, show how the start goes, and take the app down at the end."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any, cast

import ray
from ray import serve
from ray.serve.schema import ApplicationStatus
from rich.console import Console

from cluster.app import build_app
from cluster.coordinator_actor import Progress
from cluster.placement import group_bundles
from cluster.rank_group import NAMESPACE
from cluster.report import print_plan
from cluster.session import check_port_free, ray_session
from configs.errors import EngineError
from configs.load import AppConfig, load_app_config

_POLL_S = 0.25
_ERROR_LINE = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Timeout|Exit)\b: ")
_PROGRESS_TIMEOUT_S = 2.0
# `ray job stop` sends SIGTERM and, three seconds later, SIGKILL: the delete must be on its way before that.
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class ServingJob:
    """One application of one config file, from deploy to delete."""

    def __init__(self, app_config: AppConfig, address: str | None) -> None:
        self._config = app_config
        self._address = address
        self._stop = threading.Event()
        self._console = Console(highlight=False)

    @classmethod
    def create(cls, file: Path, overrides: list[str], address: str | None) -> ServingJob:
        """Reads and checks `file`. Raises ConfigError."""
        return cls(load_app_config(file, overrides), address)

    @property
    def url(self) -> str:
        """Base URL of the endpoint, as clients on this machine see it."""
        host = "127.0.0.1" if self._config.host in ("0.0.0.0", "::") else self._config.host
        return f"http://{host}:{self._config.port}{self._config.route_prefix.rstrip('/')}/v1"

    def run(self, *, detach: bool) -> None:
        """Serves until interrupted, or until ready when `detach`.

        Raises:
            ConfigError: before anything was placed.
            EngineError: the app could not be started, or failed for good while it ran.
        """
        engine = self._config.engine
        cpus = sum(bundle["CPU"] for bundle in group_bundles(engine, gpus=False)) * engine.num_replicas
        with ray_session(self._address, min_cpus=cpus) as own_cluster:
            if own_cluster:
                check_port_free(self._config.host, self._config.port)
            # After ray.init, which installs handlers of its own.
            for number in _STOP_SIGNALS:
                signal.signal(number, lambda *_: self._stop.set())
            logging.getLogger("ray.serve").setLevel(logging.WARNING)
            print_plan(self._config, self._console)
            app = build_app(engine.model_dump(mode="python"))
            serve.start(http_options={"host": self._config.host, "port": self._config.port})
            try:
                serve.run_many(
                    [serve.RunTarget(app, name=self._config.name, route_prefix=self._config.route_prefix)],
                    wait_for_ingress_deployment_creation=False,
                    wait_for_applications_running=False,
                )
                if not self._wait_until_running():
                    return
                self._print_ready()
                if detach:
                    return
                self._watch()
            finally:
                if own_cluster:
                    serve.shutdown()
                elif not detach or self._stop.is_set():
                    serve.delete(self._config.name, _blocking=False)

    def _status(self) -> tuple[ApplicationStatus, str]:
        overview = serve.status().applications.get(self._config.name)
        if overview is None:
            return ApplicationStatus.NOT_STARTED, ""
        details = [deployment.message for deployment in overview.deployments.values() if deployment.message]
        return overview.status, "\n".join([overview.message, *details]).strip()

    def _wait_until_running(self) -> bool:
        """True once the app answers, False when interrupted; shows each phase once and the weights as they load."""
        began = time.monotonic()
        shown = ""
        with self._console.status("starting") as spinner:
            while not self._stop.wait(_POLL_S):
                status, message = self._status()
                if status == ApplicationStatus.RUNNING:
                    self._console.print(f"ready after {time.monotonic() - began:.1f} s")
                    return True
                if status in (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY):
                    raise EngineError(f"the app could not be started\n{root_cause(message)}")
                progress = self._progress()
                if progress is None:
                    continue
                percent = f" {100 * sum(progress.loaded) / len(progress.loaded):.0f} %" if progress.loaded else ""
                spinner.update(progress.phase + percent)
                if progress.phase != shown:
                    shown = progress.phase
                    self._console.print(f"{time.monotonic() - began:6.1f} s  {shown}")
        return False

    def _progress(self) -> Progress | None:
        """What the first replica's coordinator says of its start; None while there is none."""
        for actor in ray.util.list_named_actors(all_namespaces=True):
            name = actor["name"]
            if actor["namespace"] == NAMESPACE and name.startswith(f"{self._config.name}:") and ":tp" not in name:
                # It may end between the listing and the call, and is slow to answer while it imports.
                with contextlib.suppress(ValueError, ray.exceptions.RayError):
                    coordinator = ray.get_actor(name, namespace=NAMESPACE)
                    answer: Any = ray.get(coordinator.progress.remote(), timeout=_PROGRESS_TIMEOUT_S)
                    return cast(Progress, answer)
        return None

    def _print_ready(self) -> None:
        body = {"model": self._config.served_model_name, "messages": [{"role": "user", "content": "Hello!"}]}
        self._console.print(f"serving {self._config.served_model_name} at {self.url}")
        self._console.print(
            f"curl {self.url}/chat/completions -H 'Content-Type: application/json' -d '{json.dumps(body)}'",
            soft_wrap=True,
        )

    def _watch(self) -> None:
        """Returns when interrupted; prints what changes, raises when the app is gone for good."""
        last = ApplicationStatus.RUNNING
        while not self._stop.wait(1.0):
            status, message = self._status()
            if status != last:
                self._console.print(f"{status}: {root_cause(message)}")
                last = status
            if status in (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.NOT_STARTED):
                raise EngineError(f"the app ended\n{root_cause(message)}")
        self._console.print("stopping")


def root_cause(message: str) -> str:
    """What a person can act on in a Serve status message: the text of the error itself, without its traceback.

    Serve hands on the traceback of the constructor it gave up on; the error is its last line that names one.
    """
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR_LINE.match(line)]
    if not errors:
        return message
    kind, _, text = errors[-1].partition(": ")
    return text if kind.startswith("configs.errors.") else errors[-1]
