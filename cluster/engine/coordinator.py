"""The coordinator: a loop that turns requests into step frames and step results into outputs.

The coordinator is a separate process, because a busy Python thread beside the HTTP server makes stream latency worse.
It owns the scheduler and the socket to the Engine replica. It knows the ranks only as a writer of frames and a reader
of results. This module uses neither Ray nor torch: the actor around it (cluster/engine/coordinator_actor.py) starts and
watches the ranks (cluster/ranks/rank_group.py).
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

import msgspec

from cluster.engine.changes import Change
from cluster.engine.socket import EngineSocket
from cluster.messages.engine import Abort, EngineStats, Finished, FlushCache, StepOutput, Submit, Weights
from cluster.messages.state import EngineLife, EngineState
from cluster.messages.steps import StepMeter
from cluster.ranks.liveness import LOOK_S, Liveness
from cluster.ranks.recovery import Recovery
from cluster.scheduling.pages import Kept
from cluster.scheduling.scheduler import Scheduler
from configs.errors import DeadlineError, EngineError, LockstepError, OutOfMemoryError
from parallel.channel.ring import STEP_TIMEOUT
from parallel.sockets import num_descriptors_left
from worker.protocol import FrameKind, StepFrame, StepResult

if TYPE_CHECKING:
    from cluster.ranks.rank_group import RankGroup

logger = logging.getLogger(__name__)

_IDLE_POLL_S = 1.0
# Seconds in which the ranks' watcher should name a failed rank. A dead rank also breaks connections and deadlines of
# other ranks, and the errors of those may come first.
_BLAME_S = 2.0
_FLUSH_S = 1.0
# Seconds to wait for masks. Computing a mask takes a tenth of this, and a step takes several times this.
_MASK_WAIT_S = 0.001
# Seconds between reports while a step runs for longer, or the group is rebuilt.
_WATCH_S = 1.0
# A step that has used this share of its deadline counts as stuck, and the ranks' stacks are logged.
_STUCK_SHARE = 0.25
# File descriptors that new ranks need in this process. Without them, the engine and all its requests would end.
_RANKS_DESCRIPTORS = 32
_DESCRIPTORS_WAIT_S = 30.0

_T = TypeVar("_T")


class Coordinator:
    """Schedules, launches and retires steps until it is closed or fails.

    Args:
        scheduler: owns requests, pages and their order.
        ranks: the ranks that compute the steps.
        step_timeout_s: `parallel.step_timeout_s`.
        recovery: decides whether failed ranks are replaced.
        liveness: detects steps that hang.
        fewer: returns a group with fewer ranks, not started, to continue with if some ranks cannot be replaced. None if
            there is no such group.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        ranks: RankGroup,
        *,
        step_timeout_s: float,
        recovery: Recovery,
        liveness: Liveness,
        fewer: Callable[[RankGroup], RankGroup | None] = lambda ranks: None,
    ) -> None:
        self.scheduler = scheduler
        self.ranks = ranks
        """The ranks that compute the steps now."""
        self._first_size = ranks.size
        self._step_timeout_s = step_timeout_s
        self._recovery = recovery
        self._liveness = liveness
        self._fewer = fewer
        self._socket = EngineSocket()
        self._closing = threading.Event()
        self._ranks_failed = threading.Event()  # set when ranks have failed, by `fail` or by a change
        self._failure: LockstepError | None = None
        self.is_preparing = True
        """Whether CUDA graphs may be left that the ranks have not captured. They capture while the engine is idle."""
        self._change: tuple[Change, Future[float]] | None = None  # the requested change, until it is made
        self.weights: Weights | None = None
        """The weights that replaced the ones of the start. None if none did."""
        self.num_rebuilds = 0
        """Number of times that failed ranks were replaced."""
        self.life = EngineLife()
        """The engine's state, RUNNING once `run` is called."""
        self._meter = StepMeter(ranks.cost)
        # Other threads read the scheduler's figures and empty its prefix cache. The loop takes this lock while it
        # launches and retires steps.
        self._lock = threading.Lock()

    @property
    def address(self) -> str:
        """The address to which the Engine replica connects."""
        return self._socket.address

    @property
    def engine_pid(self) -> int | None:
        """Process id of the Engine replica while it is connected."""
        return self._socket.peer_pid

    @property
    def failure(self) -> str | None:
        """The reason why the engine failed. None while it is healthy."""
        return None if self._failure is None else str(self._failure)

    @property
    def num_steps(self) -> int:
        """Number of steps launched so far."""
        return self._meter.num_steps

    def inspect(self, read: Callable[[Scheduler], _T]) -> _T:
        """Returns `read(scheduler)`, called while the loop does not use the scheduler. Any thread may call this."""
        with self._lock:
            return read(self.scheduler)

    def close(self) -> None:
        """Makes `run` return after the step in flight. Any thread may call this, any number of times."""
        self._closing.set()
        self._socket.wake()

    def wake(self) -> None:
        """Wakes an idle loop, because a guide has made a mask. Any thread may call this."""
        self._socket.wake()

    def fail(self, error: LockstepError) -> None:
        """Makes `run` end every request with `error` and raise it. Any thread may call this; the first call counts."""
        if self._failure is None:
            self._failure = error
        self._ranks_failed.set()
        self.ranks.frames.fail(str(error))
        self.ranks.results.fail(str(error))
        self._socket.wake()

    def change(self, change: Change) -> Future[float]:
        """Makes `change`, which is loaded already, once the steps in flight have retired. Requests wait meanwhile. Any
        thread may call this, but only one change at a time is possible.

        Returns:
            The pause in seconds, or an error: the change failed and the engine continues as before, or the engine
                ended.
        """
        done: Future[float] = Future()
        self._change = (change, done)
        self._socket.wake()
        return done

    def run(self) -> None:
        """Runs the loop. Returns when closed, with the socket closed. Call this once.

        Raises:
            LockstepError: the engine failed. Every request has ended with an error.
        """
        try:
            self._socket.start()
            self.life.enter(EngineState.RUNNING)
            failure = self._serve()
            while failure is not None:
                failure = self._recover(failure)
                if failure is None:
                    failure = self._serve()
        except Exception as error:  # noqa: BLE001 -- the requests must not wait for a loop that has ended
            failure = self._root_cause(error)
            self._fail_all(failure)
            raise failure from None
        finally:
            self.life.enter(EngineState.DEAD)
            self._socket.close()
            if self._change is not None:
                self._change[1].set_exception(EngineError("the engine ended"))

    def _serve(self) -> LockstepError | None:
        """Runs steps until closed, then returns None. Returns the failure if ranks failed and may be replaced. Raises
        every other error."""
        busy = self.scheduler.has_work  # requests may have waited during a rebuild
        try:
            while not self._closing.is_set():
                if not busy:
                    self._rest()
                is_capturing = not busy and self._capture_graph()
                self._take_messages(0.0 if busy or is_capturing else _IDLE_POLL_S)
                if self._failure is not None:
                    raise self._failure
                if self._change is not None:
                    self._make(*self._change)
                busy = self._advance()
            self._leave()
        except LockstepError as error:
            failure = self._root_cause(error)
            is_of_ranks = self._ranks_failed.is_set() or isinstance(error, DeadlineError)
            if is_of_ranks and not self._closing.is_set():
                if isinstance(failure, OutOfMemoryError):
                    logger.warning(
                        "a rank ran out of memory, so steps have at most %d tokens from now on; lower "
                        "kv_cache.memory_fraction to leave more",
                        self.scheduler.halve_steps(),
                    )
                return failure
            raise
        return None

    def _recover(self, failure: LockstepError) -> LockstepError | None:
        """Replaces ranks after `failure`, and returns the error if that failed. Raises `failure` if ranks must not be
        replaced."""
        self._failure = failure
        keeps_kv = self.ranks.keeps_kv(failure)
        lost = self.requeue(keeps_kv=keeps_kv, keeps_states=keeps_kv)
        num_tokens = self.scheduler.num_answer_tokens
        if (reason := self.ranks.reason_never or self._recovery.reason_against(failure, lost, num_tokens)) is not None:
            logger.error(
                "the engine ends, and its replica with it, because its failed ranks are not replaced: %s", reason
            )
            raise failure
        logger.warning("replacing failed ranks while %d requests wait: %s", len(self.scheduler.live_ids()), failure)
        began = time.monotonic()
        try:
            self._rebuild(failure, self.kept() if keeps_kv else None)
        except LockstepError as error:
            if self._closing.is_set():
                raise
            return error
        self.num_rebuilds += 1
        logger.warning("replaced the failed ranks after %.2f s; requests continue", time.monotonic() - began)
        self.send_report()
        return None

    def _rebuild(self, failure: LockstepError, kept: Kept | None) -> None:
        """Replaces the ranks, or continues with fewer ranks if some cannot be replaced. Raises LockstepError if no
        ranks run."""
        try:
            self.replace_ranks(failure, kept)
        except LockstepError as error:
            fewer = None if self._closing.is_set() else self._fewer(self.ranks)
            if fewer is None:
                raise
            logger.error(
                "some ranks could not be replaced, so the group continues with tensor_parallel_size=%d; resize it when "
                "devices are back: %s",
                fewer.size,
                error,
            )
            self.requeue()
            self.replace_ranks(fewer)
            self.fit_ranks()

    def _make(self, change: Change, done: Future[float]) -> None:
        """Makes a change if it is due. Raises the change's error if it leaves no ranks running."""
        if not change.is_due(self.scheduler):
            return
        while self.scheduler.num_in_flight:
            self._retire()
        began = time.monotonic()
        try:
            change.take(self)
        except LockstepError as failure:
            if self._closing.is_set():
                raise
            failed = change.after_failure(self, failure, time.monotonic() - began)
            self._change = None
            done.set_exception(failed.reported)
            if failed.fatal is not None:
                raise failed.fatal from None
            return
        self._change = None
        done.set_result(time.monotonic() - began)
        change.wait_until_resumed(self)

    # Parts of changes and rebuilds, called on the loop's thread.

    def requeue(self, *, keeps_kv: bool = False, keeps_states: bool = False) -> frozenset[tuple[int, int]]:
        """Starts a generation in which all requests wait. Returns the result of `Scheduler.requeue_all`."""
        self._meter.lost()
        with self._lock:
            return self.scheduler.requeue_all(
                self.scheduler.generation + 1, keeps_kv=keeps_kv, keeps_states=keeps_states
            )

    def kept(self) -> Kept:
        """`Scheduler.kept`."""
        with self._lock:
            return self.scheduler.kept

    def replace_ranks(self, how: LockstepError | RankGroup, kept: Kept | None = None) -> None:
        """Runs `RankGroup.replace_ranks` on another thread. Meanwhile, new requests wait. Raises its LockstepError."""
        self._failure = None
        self._ranks_failed.clear()
        self.life.enter(EngineState.REBUILDING)
        closed = how if isinstance(how, LockstepError) else EngineError("closed while its ranks were exchanged")
        replaced = self.run_apart(closed, self.ranks.replace_ranks, self.scheduler.generation, how, kept)
        if isinstance(error := replaced.exception(), LockstepError):
            self._failure = error
            self.mark_ranks_failed()
            raise error
        self.ranks, self.is_preparing = replaced.result(), True
        self._meter.cost = self.ranks.cost
        self.life.enter(EngineState.RUNNING)

    def fit_ranks(self) -> None:
        """Adapts hang detection and the number of pages to new ranks, before their first step."""
        self._liveness.begin(min(1.0, self.ranks.size / self._first_size))
        with self._lock:
            self.scheduler.set_pool((pool := self.ranks.pool).num_pages, pool.num_window_pages, pool.num_states)

    def begin_weights(self, weights: Weights, *, recompute: bool) -> None:
        """Notes that steps use `weights` from now on. `recompute` is explained in `Scheduler.change_weights`."""
        with self._lock:
            self.scheduler.change_weights(recompute=recompute)
        self.weights = weights

    def sleep_until(self, is_over: threading.Event) -> float | None:
        """Accepts requests until `is_over`, then restarts the ranks.

        Returns:
            Seconds that the ranks took to start, or None if the engine was closed meanwhile. Raises LockstepError if
            they do not start.
        """
        while not is_over.is_set():
            if self._closing.is_set():
                return None
            self.send_report()
            self._take_messages(_IDLE_POLL_S)
        began = time.monotonic()
        self.replace_ranks(EngineError("the engine slept"))
        return time.monotonic() - began

    def send_report(self) -> None:
        """Sends the current figures to the Engine replica."""
        self._socket.send(StepOutput(stats=self._report()))

    def mark_ranks_failed(self) -> None:
        """Makes the loop treat the error that it is about to raise as a failure of ranks, which it may replace."""
        self._ranks_failed.set()

    def wait_for_watcher(self) -> None:
        """Waits for the watcher of the ranks' processes to name the failed rank. Afterwards, the error counts as a
        failure of ranks in any case."""
        self._ranks_failed.wait(_BLAME_S)
        self.mark_ranks_failed()

    def run_apart(self, closed: LockstepError, function: Callable[..., _T], *args: object) -> Future[_T]:
        """Runs a function of the ranks on a thread of its own. New requests are accepted meanwhile, and wait. Raises
        `closed` if the coordinator is closed meanwhile."""
        done: Future[_T] = Future()
        done.add_done_callback(lambda _: self._socket.wake())
        threading.Thread(target=_run_into, args=(done, function, *args), name="rebuild", daemon=True).start()
        while not done.done():
            if self._closing.is_set():
                raise closed
            self.send_report()
            self._take_messages(_WATCH_S)
        return done

    def _root_cause(self, error: Exception) -> LockstepError:
        """The root cause of `error`: the failure of a rank, if known, instead of the channel error after it."""
        if isinstance(error, LockstepError):
            if self._failure is None:
                self._ranks_failed.wait(_BLAME_S)
        else:
            logger.exception("the step loop failed, and the engine ends; please report this bug")
            error = EngineError(f"the step loop failed: {error!r}")
        self._failure = self._failure or error
        return self._failure

    def _take_messages(self, timeout_s: float) -> None:
        messages, lost = self._socket.poll(timeout_s)
        with self._lock:
            refused: list[Finished] = []
            for message in messages:
                match message:
                    case Submit():
                        refused += self.scheduler.add(message.requests())
                    case Abort(ids):
                        self.scheduler.abort(ids)
                    case FlushCache():
                        self.scheduler.flush_cache()
            if lost:
                # The requests end and free their rows and pages, because the lost Engine cannot read their tokens.
                self.scheduler.abort(self.scheduler.live_ids())
        if refused:
            self._socket.send(StepOutput(finished=refused))

    def _advance(self) -> bool:
        """Launches all steps that may be launched, then retires one. Returns False if only a message or a mask can make
        the next step possible."""
        if self.scheduler.num_in_flight and self.scheduler.is_awaiting_masks:
            self._await_masks()
        with self._lock:
            while (frame := self.scheduler.next_step()) is not None:
                self.ranks.frames.send(frame.encode(), self._step_timeout_s)
                self._meter.launched(frame)
            self._send(self.scheduler.drain_finished())
        if self.scheduler.num_in_flight:
            self._retire()
            return True
        # Requests that wait for a change of weights are not stuck, because the change will let them run.
        if self.scheduler.has_work and not self.scheduler.is_awaiting_masks and self._change is None:
            raise EngineError(
                "the scheduler has work but neither launched a step nor has one in flight; please report this bug"
            )
        return False

    def _retire(self) -> None:
        result = StepResult.decode(self._receive())
        with self._lock:
            output = self.scheduler.retire(result)
            self._liveness.ended(self._meter.retired(len(result.tokens)))
            self._send(output)

    def _await_masks(self) -> None:
        """Waits briefly for masks while the ranks run a step, so that rows with new masks join the next step.

        With two steps in flight, a guided row can join every second step, or every third if its mask is late.
        """
        deadline = time.monotonic() + _MASK_WAIT_S
        while (left := deadline - time.monotonic()) > 0:
            with self._lock:
                if not self.scheduler.poll_guides():
                    return
            self._take_messages(left)

    def _capture_graph(self) -> bool:
        """Makes the ranks capture one more CUDA graph if no request waits, and waits for them. Returns whether another
        graph may be captured now. A request that arrives meanwhile waits for one graph at most."""
        if self.is_preparing and not self.scheduler.has_work:
            frame = StepFrame(self.scheduler.generation, self.scheduler.last_step, kind=FrameKind.CAPTURE)
            self.ranks.frames.send(frame.encode(), self._step_timeout_s)
            result = StepResult.decode(self.ranks.results.recv(self._step_timeout_s))
            self.is_preparing = bool(result.tokens[0])
        return self.is_preparing and not self.scheduler.has_work

    def _rest(self) -> None:
        """Sends a report, because the loop is about to wait. While only a mask is missing, not more often than due."""
        if not self.scheduler.has_work:
            self._meter.rest()
        elif not self._meter.is_due():
            return
        self.send_report()

    def _receive(self) -> bytes:
        """Waits for the oldest step's result, and sends reports meanwhile.

        Raises:
            DeadlineError: the result did not come within `parallel.step_timeout_s`, or the ranks hang.
        """
        began = reported = time.monotonic()
        stuck_at = began + self._step_timeout_s * _STUCK_SHARE
        self._liveness.began(*self._meter.oldest)
        while True:
            waited = time.monotonic() - began
            try:
                return self.ranks.results.recv(min(LOOK_S, self._step_timeout_s - waited))
            except DeadlineError:
                if (now := time.monotonic()) - began >= self._step_timeout_s:
                    raise DeadlineError(
                        f"no result came within {STEP_TIMEOUT}={self._step_timeout_s:g}; see what holds the ranks up, "
                        "or raise it"
                    ) from None
            if now - reported >= _WATCH_S:
                reported = now
                self.send_report()
            hang = self._liveness.hang(self.ranks.pids.values())
            if hang is not None or now >= stuck_at:
                stuck_at = math.inf
                self.ranks.log_stacks(now - began)
            if hang is not None:
                self.fail(hang)

    def _send(self, output: StepOutput | None) -> None:
        """Sends `output`, with a report if one is due."""
        if output is None:
            return
        if self._meter.is_due():
            output = msgspec.structs.replace(output, stats=self._report())
        self._socket.send(output)

    def _report(self) -> EngineStats:
        state = self.life.state
        ages = [] if state is EngineState.REBUILDING else self.ranks.heartbeat_ages()
        stats = self._meter.report(self.scheduler.stats(), ages)
        return msgspec.structs.replace(
            stats,
            num_rebuilds=self.num_rebuilds,
            state=state,
            is_preparing=self.is_preparing,
            devices=self.ranks.devices,
            weights=self.weights,
        )

    def _fail_all(self, error: LockstepError) -> None:
        with self._lock:
            message = error.public_message if isinstance(error, EngineError) else None
            output = self.scheduler.fail_all(str(error), message)
        logger.error("%d requests ended: %s", len(output.finished), error)
        self._socket.send(output)
        self._socket.flush(_FLUSH_S)

    def _leave(self) -> None:
        """Retires the steps in flight, then sends the ranks a CLOSE frame, with which they end."""
        self.life.enter(EngineState.DRAINING)
        while self.scheduler.num_in_flight:
            self.scheduler.retire(StepResult.decode(self.ranks.results.recv(self._step_timeout_s)))
        leave = StepFrame(self.scheduler.generation, self.scheduler.last_step + 1, kind=FrameKind.CLOSE)
        self.ranks.frames.send(leave.encode(), self._step_timeout_s)


def _run_into(future: Future[_T], function: Callable[..., _T], *args: object) -> None:
    """Sets the result of `function` in `future`. Waits first until `_RANKS_DESCRIPTORS` descriptors are free."""
    deadline = time.monotonic() + _DESCRIPTORS_WAIT_S
    while (left := num_descriptors_left()) < _RANKS_DESCRIPTORS and time.monotonic() < deadline:
        logger.warning("the ranks wait for file descriptors: %d are left; raise ulimit -n", left)
        time.sleep(_WATCH_S)
    try:
        future.set_result(function(*args))
    except LockstepError as error:
        future.set_exception(error)
    except Exception as error:
        logger.exception("changing the ranks failed; a rebuild follows while recovery.max_rebuilds allows")
        future.set_exception(EngineError(f"changing the ranks failed: {error!r}"))
