"""The coordinator: one loop that turns requests into step frames and step results into outputs.

A process of its own, because a busy Python thread beside the HTTP server ruins stream latency. It owns the
scheduler and the socket to the Engine replica; it knows the ranks only as a writer of frames and a reader of results.
No Ray and no torch here: the actor around it (cluster/engine/coordinator_actor.py) has the ranks started and watched
(cluster/ranks/rank_group.py).
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

import msgspec

from cluster.engine.messages import Abort, EngineStats, Finished, FlushCache, StepOutput, Submit
from cluster.engine.socket import EngineSocket
from cluster.engine.state import EngineLife, EngineState
from cluster.observability.steps import StepMeter
from cluster.ranks.rank_clock import RankClock
from cluster.ranks.recovery import Recovery
from cluster.scheduling.scheduler import Scheduler
from configs.errors import DeadlineError, EngineError, LockstepError, StepHungError
from parallel.channel import STEP_TIMEOUT, FrameReader, FrameWriter
from parallel.step_cost import StepCost
from worker.protocol import FrameKind, StepFrame, StepResult

logger = logging.getLogger(__name__)

_IDLE_POLL_S = 1.0
# A dead rank breaks connections, and its peers' deadlines pass with the coordinator's: whoever watches the ranks gets
# this long to say what happened.
_BLAME_S = 2.0
_FLUSH_S = 1.0
# A mask takes a tenth of this, a step several times as long.
_MASK_WAIT_S = 0.001
# How often a step that is awaited is looked after.
_LOOK_S = 0.2
# A step may take so many times what the slowest one like it took.
_HUNG_FACTOR = 3.0
# The same words each time: what happens twice to one request is not tried again.
_HUNG = "a step hangs: it has run for longer than such steps take by more than recovery.hang_timeout_s={:g}"
# While a step runs longer than this, or the group is rebuilt, the figures go out all the same.
_WATCH_S = 1.0
# A step that has used up this share of its deadline counts as stuck: what its ranks do is worth a line in the log.
_STUCK_SHARE = 0.25

_T = TypeVar("_T")
Channel = tuple[FrameWriter, FrameReader]


Exchange = Callable[[int, Callable[[], None]], tuple[Channel, StepCost]]
"""Makes other ranks run: given a generation, and what tells those that run to leave their loops, the channel to whoever
runs then, and what steps cost them. Raises LockstepError when none do."""


class Coordinator:
    """Schedules, launches and retires steps until closed or failed.

    Args:
        scheduler: owns requests, pages and order.
        frames: to every rank.
        results: from rank 0.
        step_timeout_s: `parallel.step_timeout_s`.
        cost: of the steps, all ranks together.
        heartbeat_ages: seconds since each rank last took or awaited a frame; nothing where that is not known.
        devices: of the ranks, as in Location.
        on_stuck: called once for a step that takes suspiciously long, with its age in seconds; must not block.
        recovery: whether a group that failed is rebuilt. None: never.
        peaks: FLOP/s and bytes/s that all ranks together were measured to do.
        rank_clock: of the ranks; None: a step that hangs is found by `step_timeout_s` alone.
        hang_timeout_s: `recovery.hang_timeout_s`.
        rebuild: makes ranks and channel anew, given a generation and what ended the one before; called on a thread of
            its own.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        frames: FrameWriter,
        results: FrameReader,
        step_timeout_s: float,
        cost: StepCost,
        heartbeat_ages: Callable[[], Sequence[float]] = tuple,
        devices: Callable[[], Sequence[str]] = tuple,
        on_stuck: Callable[[float], None] | None = None,
        recovery: Recovery | None = None,
        rebuild: Callable[[int, LockstepError], Channel] | None = None,
        peaks: tuple[float, float] = (math.inf, math.inf),
        rank_clock: RankClock | None = None,
        hang_timeout_s: float = math.inf,
    ) -> None:
        self.scheduler = scheduler
        self._frames = frames
        self._results = results
        self._step_timeout_s = step_timeout_s
        self._socket = EngineSocket()
        self._closing = threading.Event()
        self._blamed = threading.Event()  # `fail` was called
        self._failure: LockstepError | None = None
        self._heartbeat_ages = heartbeat_ages
        self._devices = devices
        self._on_stuck = on_stuck
        self._recovery = recovery
        self._rebuild = rebuild
        self._exchange: tuple[Exchange, Future[float]] | None = None  # asked for and not done
        self.num_rebuilds = 0
        """How often the group was rebuilt."""
        self.life = EngineLife()
        """Of the engine: RUNNING from `run` on."""
        self._meter = StepMeter(cost, peaks=peaks)
        self._rank_clock = rank_clock
        self._possible_s = math.inf  # of the last step's duration, what the ranks could use
        self._hang_timeout_s = hang_timeout_s
        # Control threads ask the scheduler for its figures; a step holds the lock only while it computes.
        self._lock = threading.Lock()

    @property
    def address(self) -> str:
        """Where the Engine replica connects."""
        return self._socket.address

    @property
    def engine_pid(self) -> int | None:
        """Process id of the Engine, while it is connected."""
        return self._socket.peer_pid

    @property
    def failure(self) -> str | None:
        """Why the engine failed; None while it is healthy."""
        return None if self._failure is None else str(self._failure)

    @property
    def num_steps(self) -> int:
        """Steps launched so far."""
        return self._meter.num_steps

    def inspect(self, read: Callable[[Scheduler], _T]) -> _T:
        """What `read` makes of the scheduler, between two of the loop's own uses; callable from another thread."""
        with self._lock:
            return read(self.scheduler)

    def close(self) -> None:
        """Makes `run` return after the step in flight; callable from another thread, any number of times."""
        self._closing.set()
        self._socket.wake()

    def wake(self) -> None:
        """Makes an idle loop look at the scheduler again, whose guides have a mask; callable from any thread."""
        self._socket.wake()

    def fail(self, error: LockstepError) -> None:
        """Makes `run` end every request with `error` and raise it; callable from another thread. The first counts."""
        if self._failure is None:
            self._failure = error
        self._blamed.set()
        self._frames.fail(str(error))
        self._results.fail(str(error))
        self._socket.wake()

    def exchange(self, ranks: Exchange) -> Future[float]:
        """Has `ranks` put others in the place of these ranks after the steps in flight; callable from another thread.
        Requests wait meanwhile. One at a time.

        Returns:
            Seconds that the requests were held; what `ranks` raised, or EngineError where the engine ends before.
        """
        done: Future[float] = Future()
        self._exchange = (ranks, done)
        self._socket.wake()
        return done

    def run(self) -> None:
        """The loop; to be called once. Returns when closed; the socket is gone with it.

        Raises:
            LockstepError: the engine failed. Every request has been told.
        """
        try:
            self._socket.start()
            self.life.enter(EngineState.RUNNING)
            while (failure := self._serve()) is not None:
                while failure is not None:
                    failure = self._recover(failure)
        except Exception as error:  # noqa: BLE001 -- whatever ended the loop, the requests must not wait for it
            failure = self._blame(error)
            self._fail_all(failure)
            raise failure from None
        finally:
            self.life.enter(EngineState.DEAD)
            self._socket.close()
            self._exchanged(EngineError("the engine ended"))

    def _serve(self) -> LockstepError | None:
        """Steps until closed. Returns why the ranks failed, where that is what ended it; raises what else did."""
        busy = False
        try:
            while not self._closing.is_set():
                if not busy:
                    self._rest()
                self._take_messages(0.0 if busy else _IDLE_POLL_S)
                if self._failure is not None:
                    raise self._failure
                if self._exchange is not None:
                    self._exchange_ranks(*self._exchange)
                busy = self._advance()
            self._leave()
        except LockstepError as error:
            failure = self._blame(error)
            is_of_ranks = self._blamed.is_set() or isinstance(error, DeadlineError)
            if is_of_ranks and not self._closing.is_set():
                return failure
            raise
        return None

    def _recover(self, failure: LockstepError) -> LockstepError | None:
        """Has the group rebuilt after `failure`, its requests held meanwhile; returns why that failed, if it did.

        Raises `failure` where the group is not to be rebuilt.
        """
        self._failure = failure
        with self._lock:
            lost = self.scheduler.requeue_all(self.scheduler.generation + 1)
        self._meter.lost()
        if self._recovery is None or self._rebuild is None:
            raise failure
        if (reason := self._recovery.reason_against(failure, lost)) is not None:
            logger.error("the group is not rebuilt: %s", reason)
            raise failure
        logger.warning("the group is rebuilt, %d requests wait: %s", len(self.scheduler.live_ids()), failure)
        began = time.monotonic()
        self._failure = None
        self._blamed.clear()
        rebuilt = self._hold(self._rebuild, self.scheduler.generation, failure)
        if self._closing.is_set():
            raise failure
        try:
            self._frames, self._results = rebuilt.result()
        except LockstepError as error:
            return error
        self.num_rebuilds += 1
        self._resume()
        logger.warning("the group is rebuilt after %.2f s", time.monotonic() - began)
        return None

    def _exchange_ranks(self, ranks: Exchange, done: Future[float]) -> None:
        """As `exchange` has it. Raises what went wrong where no ranks are left that run, for `_recover`."""
        while self.scheduler.num_in_flight:
            self._retire()
        began = time.monotonic()
        with self._lock:
            self.scheduler.requeue_all(self.scheduler.generation + 1)
        self._meter.lost()
        logger.info("the ranks are exchanged, %d requests wait", len(self.scheduler.live_ids()))
        exchanged = self._hold(ranks, self.scheduler.generation, self._dismiss)
        try:
            if self._closing.is_set():
                raise EngineError("the engine was closed while its ranks were exchanged")
            (self._frames, self._results), self._meter.cost = exchanged.result()
        except LockstepError as error:
            self._exchanged(error)
            self._failure = error
            self._blamed.set()
            raise
        self._resume()
        self._exchange = None
        done.set_result(time.monotonic() - began)

    def _exchanged(self, error: LockstepError) -> None:
        """Tells whoever asked for other ranks that there will be none."""
        if self._exchange is not None:
            (_, done), self._exchange = self._exchange, None
            done.set_exception(error)

    def _hold(self, make: Callable[..., _T], *args: object) -> Future[_T]:
        """What came of `make`, on a thread of its own; requests are taken meanwhile and wait. Pending when closed."""
        self.life.enter(EngineState.REBUILDING)
        made: Future[_T] = Future()
        made.add_done_callback(lambda _: self._socket.wake())
        threading.Thread(target=_run_into, args=(made, make, *args), name="rebuild", daemon=True).start()
        while not made.done() and not self._closing.is_set():
            self._socket.send(StepOutput(stats=self._report()))
            self._take_messages(_WATCH_S)
        return made

    def _resume(self) -> None:
        self.life.enter(EngineState.RUNNING)
        self._socket.send(StepOutput(stats=self._report()))  # the replica is ready again now, and not in a second

    def _blame(self, error: Exception) -> LockstepError:
        """What ended the loop: a rank that failed, where one did, rather than what that did to the channel."""
        if isinstance(error, LockstepError):
            if self._failure is None:
                self._blamed.wait(_BLAME_S)
        else:
            logger.exception("the step loop failed")
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
                # Nobody is left to read: free what the lost Engine's requests hold.
                self.scheduler.abort(self.scheduler.live_ids())
        if refused:
            self._socket.send(StepOutput(finished=refused))

    def _advance(self) -> bool:
        """Launches what may be launched, then retires one step. False: nothing can go on without a message or wake."""
        if self.scheduler.num_in_flight and self.scheduler.is_awaiting_masks:
            self._await_masks()
        with self._lock:
            while (frame := self.scheduler.next_step()) is not None:
                self._frames.send(frame.encode(), self._step_timeout_s)
                self._meter.launched(frame)
            self._send(self.scheduler.drain_finished())
        if self.scheduler.num_in_flight:
            self._retire()
            return True
        if self.scheduler.has_work and not self.scheduler.is_awaiting_masks:
            raise EngineError("the scheduler has work but neither launched a step nor has one in flight")
        return False

    def _retire(self) -> None:
        result = StepResult.decode(self._receive())
        with self._lock:
            output = self.scheduler.retire(result)
            self._meter.retired(len(result.tokens), self._possible_s)
            self._send(output)

    def _await_masks(self) -> None:
        """Gives guides a moment, so that their rows join the next step; the ranks have one to run meanwhile.

        A row that misses it is sampled in every third step where it could be in every second.
        """
        deadline = time.monotonic() + _MASK_WAIT_S
        while (left := deadline - time.monotonic()) > 0:
            with self._lock:
                if not self.scheduler.poll_guides():
                    return
            self._take_messages(left)

    def _rest(self) -> None:
        """Nothing can go on: reports, unless it is only a mask that is awaited and the last report is young."""
        if not self.scheduler.has_work:
            self._meter.rest()
        elif not self._meter.is_due():
            return
        self._socket.send(StepOutput(stats=self._report()))

    def _receive(self) -> bytes:
        """The oldest step's result; reports while it is awaited.

        Raises:
            DeadlineError: it did not come within `parallel.step_timeout_s`, or the ranks hang.
        """
        began = reported = time.monotonic()
        stuck_at = began + self._step_timeout_s * _STUCK_SHARE
        self._possible_s = math.inf
        if self._rank_clock is not None:
            self._rank_clock.restart()
        while True:
            waited = time.monotonic() - began
            try:
                return self._results.recv(min(_LOOK_S, self._step_timeout_s - waited))
            except DeadlineError:
                if (now := time.monotonic()) - began >= self._step_timeout_s:
                    raise DeadlineError(f"no result came within {STEP_TIMEOUT}={self._step_timeout_s:g}") from None
            if now - reported >= _WATCH_S:
                reported = now
                self._socket.send(StepOutput(stats=self._report()))
            is_hung = self._is_hung()
            if (is_hung or now >= stuck_at) and self._on_stuck is not None:
                stuck_at = math.inf
                self._on_stuck(now - began)
            if is_hung:
                self.fail(StepHungError(_HUNG.format(self._hang_timeout_s)))

    def _is_hung(self) -> bool:
        """Whether the oldest step has had far more time than it can need."""
        if self._rank_clock is None:
            return False
        possible_s = self._rank_clock.look()
        self._possible_s = possible_s + 2 * _LOOK_S  # before the first look and after the last
        return possible_s >= self._hang_timeout_s + _HUNG_FACTOR * self._meter.expected_s()

    def _send(self, output: StepOutput | None) -> None:
        """Sends `output`, with a report where one is due."""
        if output is None:
            return
        if self._meter.is_due():
            output = msgspec.structs.replace(output, stats=self._report())
        self._socket.send(output)

    def _report(self) -> EngineStats:
        state = self.life.state
        ages = [] if state is EngineState.REBUILDING else list(self._heartbeat_ages())
        stats = self._meter.report(self.scheduler.stats(), ages)
        devices = list(self._devices())
        return msgspec.structs.replace(stats, num_rebuilds=self.num_rebuilds, state=state, devices=devices)

    def _fail_all(self, error: LockstepError) -> None:
        with self._lock:
            told = error.told if isinstance(error, EngineError) else None
            output = self.scheduler.fail_all(str(error), told)
        logger.error("%d requests ended: %s", len(output.finished), error)
        self._socket.send(output)
        self._socket.flush(_FLUSH_S)

    def _leave(self) -> None:
        """Retires what is in flight, then has the ranks leave."""
        self.life.enter(EngineState.DRAINING)
        while self.scheduler.num_in_flight:
            self.scheduler.retire(StepResult.decode(self._results.recv(self._step_timeout_s)))
        self._dismiss()

    def _dismiss(self) -> None:
        """Tells the ranks to leave their loops."""
        leave = StepFrame(self.scheduler.generation, self.scheduler.last_step + 1, kind=FrameKind.CLOSE)
        self._frames.send(leave.encode(), self._step_timeout_s)


def _run_into(future: Future[_T], function: Callable[..., _T], *args: object) -> None:
    """Gives `future` what `function` returns or raises."""
    try:
        future.set_result(function(*args))
    except LockstepError as error:
        future.set_exception(error)
    except Exception as error:
        logger.exception("a rebuild failed")
        future.set_exception(EngineError(f"a rebuild failed: {error!r}"))
