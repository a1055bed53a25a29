"""Host cost of one decode step: `next_step`, encode, decode of the result, `retire`, with a fake model.

    python -m benchmarks.scheduler --rows 256 --steps 1000

Prints median and 99th percentile in microseconds per step, of the whole and of each part. Steps in which requests are
admitted or prefilled are not counted. The garbage collector runs as usual.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections import deque

import numpy as np
import numpy.typing as npt

from cluster.messages.engine import GenerateRequest, SamplingParams
from cluster.scheduling.limits import SchedulerLimits
from cluster.scheduling.scheduler import Scheduler
from worker.protocol import RowFlag, StepFrame, StepResult

_PARTS = ("next_step", "encode", "decode", "retire")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--steps-in-flight", type=int, default=2)
    parser.add_argument("--churn", action="store_true", help="answers end at different steps and are replaced")
    args = parser.parse_args()
    times = measure(args.rows, args.steps, args.page_size, args.prompt_tokens, args.steps_in_flight, args.churn)
    report = [f"rows={args.rows} page_size={args.page_size} churn={args.churn} steps={len(times)}"]
    report.append(f"python {platform.python_version()} numpy {np.__version__}")
    for index, name in enumerate((*_PARTS, "total")):
        part = times.sum(axis=1) if name == "total" else times[:, index]
        median, p99 = np.percentile(part, (50, 99)) / 1e3
        report.append(f"{name:>10}: median {median:7.1f} us   p99 {p99:7.1f} us")
    sys.stdout.write("\n".join(report) + "\n")


def measure(
    num_rows: int, num_steps: int, page_size: int, num_prompt_tokens: int, steps_in_flight: int, churn: bool
) -> npt.NDArray[np.int64]:
    """[num_steps, 4] nanoseconds of each part of a step. With `churn` steps that prefill are counted too."""
    max_model_len = num_prompt_tokens + num_steps + num_rows + 64
    limits = SchedulerLimits(
        num_pages=num_rows * (max_model_len // page_size + 1),
        page_size=page_size,
        max_num_seqs=num_rows,
        max_num_batched_tokens=num_rows + 2048,
        prefill_chunk_size=2048,
        max_model_len=max_model_len,
        vocab_size=32000,
        max_num_queued_requests=1 << 20,
        max_num_queued_tokens=1 << 30,
        steps_in_flight=steps_in_flight,
        enable_prefix_caching=True,
        eos_token_ids=(2, 3),
    )
    scheduler = Scheduler(limits)
    rng = np.random.default_rng(0)
    next_id = 1

    def add() -> None:
        nonlocal next_id
        max_tokens = int(rng.integers(128, 384)) if churn else max_model_len - num_prompt_tokens
        prompt = rng.integers(10, 32000, num_prompt_tokens, np.int32).tobytes()
        sampling = SamplingParams(max_tokens=max_tokens, seed=next_id)
        refused = scheduler.add([GenerateRequest(id=next_id, prompt=prompt, sampling=sampling)])
        assert not refused, refused
        next_id += 1

    for _ in range(num_rows):
        add()
    times: list[tuple[int, ...]] = []
    results: deque[bytes] = deque()
    prefills: deque[bool] = deque()
    while len(times) < num_steps:
        begin = time.perf_counter_ns()
        frame = scheduler.next_step()
        planned = time.perf_counter_ns()
        assert frame is not None
        frame.encode()
        encoded = time.perf_counter_ns()
        results.append(_result(frame, rng))
        prefills.append(bool(len(frame.token_ids)))
        if len(results) < steps_in_flight:
            continue
        is_prefill = prefills.popleft()
        received = time.perf_counter_ns()
        result = StepResult.decode(results.popleft())
        decoded = time.perf_counter_ns()
        output = scheduler.retire(result)
        retired = time.perf_counter_ns()
        if churn or not (is_prefill or len(frame.token_ids)):
            times.append((planned - begin, encoded - planned, decoded - received, retired - decoded))
        for _ in output.finished:
            add()
    return np.array(times, np.int64)


def _result(frame: StepFrame, rng: np.random.Generator) -> bytes:
    num_sampled = int(np.count_nonzero(frame.flags & RowFlag.SAMPLE))
    return StepResult(frame.generation, frame.step, rng.integers(10, 32000, num_sampled, np.int32)).encode()


if __name__ == "__main__":
    main()
