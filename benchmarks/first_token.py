"""First tokens under load: the scheduler itself, on a clock that is moved on by what the steps of a device would take.

    python -m benchmarks.first_token [--clients 1,16,64,256] [--waves 6] [--budget N] [--steps-in-flight N]

No device, no HTTP: as `benchmarks.online` does, all clients send their first request at once, and each the next when
its answer ends. A step takes `--step-ms`, `--row-us` more for each row that decodes and `--token-us` for each prompt
token; `--overlap` hides the first behind the last, as a device does whose prompts are bound by arithmetic. A request
needs `--way-ms` there and back, and reaches the scheduler `--arrival-ms` after the one before it at the least.
Defaults are Qwen3-8B's on one H200. Prints means and 99th percentiles; the first tokens of a burst can come no sooner,
in the mean, than `least`: prompts one after the other and nothing else. `gap` is the longest time between two tokens
of an answer, its median.
"""

from __future__ import annotations

import argparse
import heapq
from collections import deque
from dataclasses import dataclass

import numpy as np

from benchmarks.report import table
from cluster.messages.engine import GenerateRequest, SamplingParams
from cluster.scheduling.limits import SchedulerLimits
from cluster.scheduling.scheduler import Scheduler
from worker.protocol import RowFlag, StepFrame, StepResult

_PAGE_SIZE = 64


@dataclass(frozen=True)
class Device:
    """Seconds that steps and ways take."""

    step_s: float
    row_s: float
    token_s: float
    overlaps: bool
    way_s: float
    arrival_s: float

    def step(self, frame: StepFrame) -> float:
        """Seconds of the frame's step."""
        num_prompt_tokens = len(frame.token_ids)
        prompts_s = num_prompt_tokens * self.token_s
        base_s = max(self.step_s - prompts_s, 0.0) if self.overlaps else self.step_s
        return base_s + prompts_s + (len(frame.rows) - _num_prompts(frame)) * self.row_s


@dataclass
class Times:
    """One request's, in seconds."""

    sent: float
    num_tokens: int
    first: float = 0.0
    last: float = 0.0
    longest_gap: float = 0.0


def _num_prompts(frame: StepFrame) -> int:
    return int(np.count_nonzero(frame.flags & RowFlag.HAS_TOKENS))


def limits_of(budget: int, max_model_len: int, steps_in_flight: int = 2) -> SchedulerLimits:
    """Limits with pages for all of 256 requests, in steps of `budget` tokens."""
    return SchedulerLimits(
        num_pages=256 * (max_model_len // _PAGE_SIZE + 1),
        page_size=_PAGE_SIZE,
        max_num_seqs=256,
        max_num_batched_tokens=budget,
        prefill_chunk_size=budget,
        max_model_len=max_model_len,
        vocab_size=32000,
        max_num_queued_requests=1 << 20,
        max_num_queued_tokens=1 << 30,
        steps_in_flight=steps_in_flight,
        enable_prefix_caching=True,
        eos_token_ids=(),
    )


def simulate(
    limits: SchedulerLimits, device: Device, clients: int, waves: int, lengths: tuple[int, int], spread: float = 0.0
) -> tuple[list[Times], int]:
    """Times of `waves` requests of each client, in the order they were sent, and the number of steps.

    Args:
        lengths: tokens in and out, each drawn evenly from (1 - spread) to (1 + spread) times these.
    """
    now, free = 0.0, 0.0  # `free`: when the device has done what was launched
    scheduler = Scheduler(limits, clock=lambda: now)
    rng = np.random.default_rng(0)
    factors = rng.uniform(1 - spread, 1 + spread, (clients * waves, 2))
    tokens = np.maximum(1, np.rint(factors * lengths)).astype(int).tolist()
    times: list[Times] = []
    coming: list[tuple[float, int]] = []  # when each request reaches the scheduler, and its id
    running: deque[tuple[float, StepResult]] = deque()
    door = 0.0

    def send(at: float) -> None:
        nonlocal door
        times.append(Times(at, tokens[len(times)][1]))
        door = max(door + device.arrival_s, at + device.way_s / 2)
        heapq.heappush(coming, (door, len(times)))

    for _ in range(clients):
        send(0.0)
    while coming or scheduler.has_work:
        while coming and coming[0][0] <= now:
            _, request_id = heapq.heappop(coming)
            num_in, num_out = tokens[request_id - 1]
            prompt = rng.integers(0, limits.vocab_size, num_in, np.int32).tobytes()
            sampling = SamplingParams(max_tokens=num_out, ignore_eos=True)
            assert not scheduler.add([GenerateRequest(id=request_id, prompt=prompt, sampling=sampling)])
        while (frame := scheduler.next_step()) is not None:
            free = max(free, now) + device.step(frame)
            num_sampled = int(np.count_nonzero(frame.flags & RowFlag.SAMPLE))
            running.append((free, StepResult(frame.generation, frame.step, np.zeros(num_sampled, np.int32))))
        if not running:
            now = coming[0][0]
            continue
        # Requests that come meanwhile are taken when the step has ended, which is how the coordinator's loop does it.
        now, result = running.popleft()
        output = scheduler.retire(result)
        for request_id in np.frombuffer(output.ids, "<i8").tolist():
            one, there = times[request_id - 1], now + device.way_s / 2
            one.first = one.first or there
            one.longest_gap = max(one.longest_gap, there - (one.last or there))
            one.last = there
        for _ in output.finished:
            if len(times) < clients * waves:
                send(now + device.way_s / 2)
    return times, scheduler.last_step


def row_of(times: list[Times], num_steps: int, clients: int, least_s: float) -> list[str]:
    """The table's cells for one number of clients."""
    ttft = np.array([one.first - one.sent for one in times])
    tpot = np.array([(one.last - one.first) / max(1, one.num_tokens - 1) for one in times])
    gaps = np.array([one.longest_gap for one in times])
    figures = [least_s, ttft[:clients].mean(), ttft.mean(), np.percentile(ttft, 99), tpot.mean(), np.median(gaps)]
    rate = sum(one.num_tokens for one in times) / max(one.last for one in times)
    return [str(clients), *(f"{1e3 * figure:,.1f}" for figure in figures), f"{rate:,.0f}", str(num_steps)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=lambda text: [int(n) for n in text.split(",")], default=[1, 16, 64, 256])
    parser.add_argument("--waves", type=int, default=6, help="requests of each client")
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--spread", type=float, default=0.0, help="lengths differ by up to this share")
    parser.add_argument("--budget", type=int, default=8192, help="scheduler.max_num_batched_tokens")
    parser.add_argument("--steps-in-flight", type=int, default=2)
    parser.add_argument("--step-ms", type=float, default=4.4)
    parser.add_argument("--row-us", type=float, default=23.0)
    parser.add_argument("--token-us", type=float, default=23.0)
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("--way-ms", type=float, default=6.0)
    parser.add_argument("--arrival-ms", type=float, default=0.5)
    args = parser.parse_args()
    limits = limits_of(args.budget, 2 * (args.input_len + args.output_len), args.steps_in_flight)
    device = Device(
        args.step_ms / 1e3,
        args.row_us / 1e6,
        args.token_us / 1e6,
        args.overlap,
        args.way_ms / 1e3,
        args.arrival_ms / 1e3,
    )
    titles = ["clients", "least", "burst TTFT", "TTFT ms", "p99", "TPOT ms", "gap", "out tok/s", "steps"]
    rows = []
    for clients in args.clients:
        lengths = args.input_len, args.output_len
        times, num_steps = simulate(limits, device, clients, args.waves, lengths, args.spread)
        rows.append(row_of(times, num_steps, clients, (clients + 1) / 2 * args.input_len * device.token_s))
    print(table(titles, rows))


if __name__ == "__main__":
    main()
