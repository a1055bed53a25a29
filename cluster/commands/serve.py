"""`python -m cluster serve`: deploys one config file, shows the start's progress, and removes the app when it ends."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import httpx
import psutil  # type: ignore[import-untyped]  # one use does not earn a stub package
import ray
from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from cluster.engine.coordinator_actor import Progress
from cluster.engine.preflight import check_checkpoint
from cluster.http.keys import open_keys
from cluster.ranks.host import known_card
from cluster.serve.app_replicas import coordinators
from cluster.serve.haproxy import METRICS_PORT
from cluster.serve.placement import NodeResources, group_bundles, uses_gpus
from cluster.serve.running_engine import describe
from cluster.serve.session import (
    ROOT,
    Session,
    check_port_free,
    cluster_address,
    ray_session,
    remove_own_files,
    unreachable,
)
from cluster.text.chat_template import read_template
from configs.addresses import host_and_port
from configs.errors import ConfigError, EngineError
from configs.load import AppConfig, load_app_config
from configs.resolve import asks_for_gpus

if TYPE_CHECKING:  # see `run`
    from cluster.serve.deployment import Deployment

_NVIDIA = Path("/dev/nvidiactl")
_POLL_S = 0.25
_WATCH_S = 1.0
_PROGRESS_TIMEOUT_S = 1.0
_URL_TIMEOUT_S = 10.0
# Phases of the coordinator with a clearer description for a person at the prompt.
_PHASES = {"starting": "starting the coordinator", "ready": "generating the first token"}
# Seconds after server.shutdown_timeout_s, the time for running requests: for Serve to end the replicas, and for this
# process to end Ray.
_STOP_MARGIN_S = 12.0
_GIVE_UP_MARGIN_S = 16.0
# `ray job stop` sends SIGTERM and, three seconds later, SIGKILL. The app must be deleted before the SIGKILL.
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_ERROR_LINE = re.compile(r"([A-Za-z_][\w.]*(?:Error|Exception|Timeout|Exit)): (.*)")
_OUR_ERRORS = "configs.errors."
# Errors that no retry can fix. Serve would try three times.
_FINAL_ERRORS = tuple(f"{_OUR_ERRORS}{name}: " for name in ("ConfigError", "CheckpointError", "PlacementError"))


class ServingJob:
    """One application of one config file, from deploy to delete."""

    def __init__(self, app_config: AppConfig, address: str | None, began: float) -> None:
        self._config = app_config
        self._address = address
        self._stop = threading.Event()
        self._hurry = threading.Event()  # set if a stop was requested twice
        self._ran = False
        self._replaced: set[str] = set()  # coordinators of the app's replicas from before this command
        self._console = Console(file=sys.stdout, highlight=False)
        self._began = began

    @classmethod
    def create(cls, file: Path, overrides: list[str], address: str | None, began: float) -> ServingJob:
        """Reads and checks `file`, and looks for the cluster. Raises ConfigError.

        Args:
            began: `time.monotonic` when the command began. The output shows times since then.
        """
        return cls(load_app_config(file, overrides), cluster_address(address), began)

    @property
    def url(self) -> str:
        """Base URL of the endpoint for clients on this machine."""
        return f"{self._root_url}/v1"

    @property
    def _root_url(self) -> str:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._config.host, self._config.host)
        return f"http://{host_and_port(host, self._config.port)}{self._config.route_prefix.rstrip('/')}"

    def run(self, *, detach: bool) -> None:
        """Serves until interrupted. With `detach`, returns once the app is ready.

        Raises:
            ConfigError: an error was found before anything was placed.
            EngineError: the app could not be started, or failed for good while it ran.
        """
        self._trap_signals()
        config = self._config.engine
        if config.is_local_model:
            describe(config, gpus=asks_for_gpus(config), announce=False)
            check_checkpoint(config)
        if config.server.chat_template is not None:
            read_template(config.server.chat_template)
        if self._address is None:
            if detach:
                raise ConfigError(
                    "--detach needs a Ray cluster that stays; start one with `ray start --head`, or leave it out"
                )
            check_port_free(self._config.host, self._config.port)
            open_keys(config.server)
        cpus = sum(bundle["CPU"] for bundle in group_bundles(config, gpus=False)) * config.num_replicas
        self._say("starting Ray" if self._address is None else f"joining Ray at {self._address}")
        # Starting Ray is mostly waiting, so the next modules, which take half a second, are imported meanwhile.
        threading.Thread(target=importlib.import_module, args=("cluster.serve.deployment",), daemon=True).start()
        if config.device != "cpu" and _NVIDIA.exists():
            threading.Thread(target=_read_ahead, daemon=True).start()
        try:
            with ray_session(self._address, min_cpus=cpus) as session:
                self._trap_signals()  # `ray.init` has installed handlers of its own
                if not self._stop.is_set():
                    self._serve_watchfully(session, detach=detach)
        except KeyboardInterrupt:
            self._stop.set()
        if self._stop.is_set():
            self._say("stopped")

    def _trap_signals(self) -> None:
        # nohup makes processes ignore SIGHUP, which is respected. Scripts make background processes ignore SIGINT, but
        # a SIGINT sent to this process means it, so it is handled.
        terminal = [] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [signal.SIGHUP]
        for number in (*_STOP_SIGNALS, *terminal):
            signal.signal(number, self._on_signal)

    def _on_signal(self, *_: object) -> None:
        (self._hurry if self._stop.is_set() else self._stop).set()
        # After a signal, Ray always prints how its own processes ended. Our own output goes to the console.
        sys.stdout = io.StringIO()

    def _serve_watchfully(self, session: Session, *, detach: bool) -> None:
        """Runs `_serve` in a thread, because Ray's calls wait a minute for a cluster that has ended."""
        with ThreadPoolExecutor(1) as pool:
            serving = pool.submit(self._serve, session, detach=detach)
            head = _head_processes() if session.own else []
            gcs_address = ray.get_runtime_context().gcs_address if session.own else ""
            while not serving.done() and not self._stop.is_set():
                wait([serving], _POLL_S)
                # The signal may have ended the Ray process too, and may arrive here a moment later.
                if not all(map(_lives, head)) and not self._stop.wait(_WATCH_S):
                    self._say("a process of Ray has ended (killed, or out of memory), and the app ends with it")
                    _end_at_once(2)
            # Before the app runs, there are no requests to wait for.
            patience_s = self._config.engine.server.shutdown_timeout_s if self._ran else 0.0
            deadline = time.monotonic() + patience_s + _GIVE_UP_MARGIN_S
            while session.own and not serving.done():
                # A SIGTERM to the process group makes Ray's head refuse all calls, long before it ends.
                if time.monotonic() > deadline or self._hurry.is_set() or unreachable(gcs_address) is not None:
                    self._say("stopped")
                    _end_at_once(0)
                wait([serving], _POLL_S)
            try:
                serving.result()
            except ray.exceptions.RayError:
                # The signal itself may have ended the cluster during a call.
                if not (session.own and self._stop.is_set()):
                    raise

    def _serve(self, session: Session, *, detach: bool) -> None:
        from cluster.commands.report import print_plan
        from cluster.serve.deployment import Deployment, serve_is_running

        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        gpus = uses_gpus(self._config.engine, NodeResources.from_ray(ray.nodes()))
        print_plan(self._config, self._console, gpus=gpus, card=known_card(ray.nodes()) if gpus else None)
        self._say("starting Ray Serve" if session.own else "deploying")
        deployment = Deployment.prepare(self._config, session)
        stays = serve_is_running()  # if a running app refuses its change, it stays as it is
        if stays:
            self._replaced = set(coordinators(self._config.name))
        try:
            deployment.submit()
            stays = False
            self._say("starting the replica")
            if not self._wait_until_running(deployment):
                return
            self._wait_until_answering()
            self._print_ready(detach=detach, session=session)
            if detach:
                stays = True
                return
            self._watch(deployment)
        finally:
            if not stays:
                self._delete(deployment, until_gone=session.own)

    def _delete(self, deployment: Deployment, *, until_gone: bool) -> None:
        """Asks Serve to end the app. If this command started the cluster, waits for the app's end."""
        from cluster.serve.deployment import serve_is_running

        if not serve_is_running():
            return
        deployment.delete()
        if until_gone:
            self._say("stopping")
        deadline = time.monotonic() + self._config.engine.server.shutdown_timeout_s + _STOP_MARGIN_S
        while until_gone and deployment.status()[0] != "NOT_STARTED" and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def _wait_until_running(self, deployment: Deployment) -> bool:
        """Returns True once the app runs, False if interrupted. Shows each phase once, on a terminal with progress."""
        shown, label = set[str](), ""
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        with Bars(*columns, console=self._console, transient=True, disable=not self._console.is_terminal) as bars:
            bar = bars.add_task("starting", total=None)
            while not self._stop.wait(_POLL_S):
                status, message = deployment.status()
                failed = status in ("DEPLOY_FAILED", "UNHEALTHY")
                if failed or any(kind in message for kind in _FINAL_ERRORS):
                    raise EngineError(f"{self._config.name} could not be started: {root_cause(message)}")
                # A phase may have begun and ended since the last look.
                progress = self._progress()
                phases = [_PHASES.get(name, name) for name in progress.phases] if progress is not None else []
                for phase in phases:
                    if phase not in shown:
                        shown.add(phase)
                        self._say(phase)
                if phases and phases[-1] != label:
                    label = phases[-1]
                    bars.reset(bar, total=None, description=label)
                if status == "RUNNING":
                    self._ran = True
                    return True
                if progress is not None and progress.done:
                    # The group waits for the slowest of its ranks.
                    bars.update(bar, total=1.0, completed=min(progress.done))
        return False

    def _progress(self) -> Progress | None:
        """The progress of the slowest replica's start, from its coordinator. None before a coordinator answers."""
        found: list[Progress] = []
        for name, coordinator in coordinators(self._config.name).items():
            if name in self._replaced:
                continue
            # A coordinator may end before the call, and answers slowly while it imports.
            with contextlib.suppress(ray.exceptions.RayError):
                answer: Any = ray.get(coordinator.progress.remote(), timeout=_PROGRESS_TIMEOUT_S)
                found.append(answer)
        return min(found, key=lambda progress: progress.phases[-1] == "ready", default=None)

    def _wait_until_answering(self) -> None:
        """Returns once the endpoint answers on this machine, since Serve's proxy learns of a new app a moment later."""
        deadline = time.monotonic() + _URL_TIMEOUT_S
        while not self._stop.wait(_POLL_S):
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self._root_url}/ready", timeout=_URL_TIMEOUT_S, trust_env=False).is_success:
                    return
            if time.monotonic() > deadline:
                self._say(f"{self.url} does not answer from this machine, though the app runs: is the proxy elsewhere?")
                return

    def _print_ready(self, *, detach: bool, session: Session) -> None:
        name = self._config.served_model_name
        # The tokens are limited, because a small model may fill its context. This only shows that the endpoint works.
        messages = [{"role": "user", "content": "Name the capital of France."}]
        body = {"model": name, "messages": messages, "max_tokens": 32}
        self._say("ready")
        self._print(f"\nserving {name} at {self.url}; try")
        key = "-H 'Authorization: Bearer '$API_KEY " if self._config.engine.server.api_keys else ""
        self._print(
            f"curl {self.url}/chat/completions {key}-H 'Content-Type: application/json' -d '{json.dumps(body)}'\n",
        )
        if detach:
            self._print(f"the app {self._config.name} stays; `serve shutdown` ends all apps of the cluster")
        elif session.own:
            self._print("Ctrl-C ends it")

    def _watch(self, deployment: Deployment) -> None:
        """Returns when interrupted. Prints changes of the app's status, and raises EngineError if the app is gone."""
        last = "RUNNING"
        while not self._stop.wait(_WATCH_S):
            status, message = deployment.status()
            if status != last:
                self._say(f"{status.value.lower()} {root_cause(message)}".rstrip())
                last = status
            if status == "DEPLOY_FAILED":
                raise EngineError(f"{self._config.name} failed: {root_cause(message)}")
            if status == "NOT_STARTED":
                raise EngineError(f"{self._config.name} was deleted by another command; start it again if it is needed")

    def _say(self, text: str) -> None:
        self._print(f"{time.monotonic() - self._began:6.1f} s  {text}")

    def _print(self, text: str) -> None:
        with contextlib.suppress(OSError):  # SIGHUP means that the terminal is gone
            self._console.print(text, soft_wrap=True, markup=False)


def _read_ahead() -> None:
    """Starts a process that reads what the ranks will import: gigabytes that a new host has only on disk."""
    code = "from worker.warm_up import read_ahead; read_ahead()"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=False)


def _head_processes() -> list[psutil.Process]:
    """The child processes of this process without which its own cluster cannot work."""
    found = []
    for child in psutil.Process().children():
        # a child may have ended since, like `_read_ahead`'s
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.name() in ("gcs_server", "raylet"):
                found.append(child)
    return found


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def _end_at_once(exit_code: int) -> NoReturn:
    """Ends all processes below this one, all other processes of our own cluster, and this one, without Ray's help.

    The other processes are found by their environment: a signal to the process group ends Ray's raylet, and then
    processes below the raylet, such as HAProxy, have no parent.
    """
    below = psutil.Process().children(recursive=True)
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process in below or process.environ().get(METRICS_PORT) == os.environ[METRICS_PORT]:
                process.kill()
    remove_own_files()
    os._exit(exit_code)


def root_cause(message: str) -> str:
    """The part of a Serve status message that a person can act on: the error's text without its traceback.

    Serve passes on the traceback of the constructor that failed. The last line that names an error has the cause.
    """
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    errors = [match for line in lines if (match := _ERROR_LINE.match(line))]
    if not errors:
        return message
    ours = [match for match in errors if match[1].startswith(_OUR_ERRORS)]
    return ours[-1][2] if ours else errors[-1][0]
