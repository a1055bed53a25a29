"""Memory that a rank's device has left for KV pages. `configs.kv_pages.num_kv_pages` computes how many fit."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil  # type: ignore[import-untyped]  # ships no types
import torch

from configs.errors import EngineError
from configs.schema import SpeculationConfig
from worker.device.cgroup import available_bytes
from worker.protocol import MAX_PROMPT_LOGPROBS, PROMPT_LOGPROBS_DTYPE, RowFlag, StepFrame
from worker.sampling.sampler import default_params
from worker.step.model_runner import ModelRunner

_log = logging.getLogger(__name__)

_GIB = 1 << 30
_IDLE_TIMEOUT_S = 3.0  # two of the largest steps may be queued
_ROOM_TIMEOUT_S = 5.0
_ROOM_SLACK_BYTES = 2 << 30  # tolerated shortage: starts differ by little, and spares may have a context on the device
# Graphs of smaller shapes use the memory of the largest, except for their nodes, a few MiB each.
_GRAPH_RESERVE = 1.5
_GRAPH_FLOOR_BYTES = 256 << 20
_NUM_LOGPROBS = 20


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes that are free on a rank's device after loading, and the part that a step needs."""

    free_bytes: int
    activation_bytes: int = 0
    """Peak bytes that the largest eager step allocates."""
    graph_bytes: int = 0
    """Bytes for all CUDA graphs."""
    table_bytes: int = 0
    """Bytes of the tables of the sampler's rows, and of recurrent states."""

    @property
    def step_bytes(self) -> int:
        """Bytes that steps need."""
        return self.activation_bytes + self.graph_bytes + self.table_bytes

    @property
    def usable_bytes(self) -> int:
        """Bytes left for the KV pool, and for what `kv_cache.memory_fraction` leaves free."""
        return max(self.free_bytes - self.step_bytes, 0)

    def __str__(self) -> str:
        return (
            f"{self.free_bytes / _GIB:.2f} GiB free after loading, less {self.activation_bytes / _GIB:.2f} for the "
            f"largest step, {self.graph_bytes / _GIB:.2f} for CUDA graphs and {self.table_bytes / _GIB:.2f} for "
            f"sampling: {self.usable_bytes / _GIB:.2f} GiB"
        )


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on `device`. On CPU, all ranks share what the node or container has left."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    node, container = int(psutil.virtual_memory().available), available_bytes()
    return node if container is None else min(node, container)


def await_room(device: torch.device, num_bytes: int) -> int:
    """Waits some seconds until about `num_bytes` are free on the CUDA `device`, because the driver frees a process's
    memory only some time after its end. Returns the free bytes, which may still be fewer."""
    deadline = time.monotonic() + _ROOM_TIMEOUT_S
    while (free := free_bytes(device)) < num_bytes - _ROOM_SLACK_BYTES:
        if time.monotonic() > deadline:
            _log.warning(
                "%s has %.2f GiB free, but had %.2f at the first start; see which process has the rest",
                device,
                free / _GIB,
                num_bytes / _GIB,
            )
            break
        time.sleep(0.02)
    return free


def await_idle(device: torch.device) -> None:
    """Returns once the CUDA `device` has finished the work on its current stream. Never hangs.

    Raises:
        EngineError: the work was not finished after some seconds.
        RuntimeError: torch's error for a broken device.
    """
    done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch does not annotate it
    done.record(torch.cuda.current_stream(device))
    deadline = time.monotonic() + _IDLE_TIMEOUT_S
    while not done.query():
        if time.monotonic() > deadline:
            raise EngineError(f"{device} is not idle after {_IDLE_TIMEOUT_S:g} s: its work does not end")
        time.sleep(1e-3)


def profile_cuda(
    make_runner: Callable[[], ModelRunner],
    device: torch.device,
    *,
    max_rows: int,
    max_tokens: int,
    max_model_len: int,
    page_size: int,
    speculation: SpeculationConfig,
) -> DeviceMemory:
    """Runs the largest steps and captures the largest graphs on a runner with a small pool, to measure their memory.

    This also compiles the kernels and makes the libraries' workspaces, so memory that is free afterwards stays free.
    Every rank of the group must call it with the same sizes.
    """
    free = free_bytes(device)
    runner = make_runner()
    base = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    for frame in _largest_frames(max_rows, max_tokens, max_model_len, page_size, speculation):
        runner.launch(frame).result()
    activation = torch.cuda.max_memory_allocated(device) - base
    torch.cuda.empty_cache()
    before_graph = free_bytes(device)
    runner.capture("largest")
    graph = int((before_graph - free_bytes(device)) * _GRAPH_RESERVE) + _GRAPH_FLOOR_BYTES
    tables = runner.table_bytes
    del runner
    gc.collect()
    torch.cuda.empty_cache()
    return DeviceMemory(min(free, free_bytes(device)), activation, graph, tables)


def new_rows(step: int, starts: Sequence[int], lens: Sequence[int], page_size: int) -> StepFrame:
    """A step with a new row for each of `lens`, after `starts` cached tokens each. All rows are sampled greedily."""
    num_rows = len(lens)
    num_pages = [-(-(start + length) // page_size) for start, length in zip(starts, lens, strict=True)]
    places = [(row, index) for row, pages in enumerate(num_pages, start=1) for index in range(pages)]
    return StepFrame(
        generation=1,
        step=step,
        rows=np.arange(1, num_rows + 1, dtype=np.int32),
        starts=np.array(starts, np.int32),
        lens=np.array(lens, np.int32),
        flags=np.full(num_rows, RowFlag.HAS_TOKENS | RowFlag.SAMPLE, np.int32),
        token_ids=np.zeros(sum(lens), np.int32),
        page_deltas=np.array([(*place, page) for page, place in enumerate(places, start=1)], np.int32).reshape(-1, 3),
    )


def _largest_frames(
    max_rows: int, max_tokens: int, max_model_len: int, page_size: int, speculation: SpeculationConfig
) -> list[StepFrame]:
    """A prefill of `max_tokens` in the fewest rows, with the maximum number of prompt log probabilities; and a decode
    of every row with the maximum number of drafts, every filter and logprobs. All rows are sampled."""
    lens = [max_model_len] * (max_tokens // max_model_len)
    if rest := max_tokens % max_model_len:
        lens.append(rest)
    lens = lens[:max_rows]
    most = min(speculation.num_drafts, max_model_len - 1)
    num_drafts = min(speculation.max_sampled(max_rows) - max_rows, max_tokens)
    num_samples = 1 + np.clip(num_drafts - most * np.arange(max_rows), 0, most)
    frames = [
        new_rows(1, [0] * len(lens), lens, page_size),
        new_rows(2, [0] * max_rows, num_samples.tolist(), page_size),
    ]
    if num_drafts:
        frames[1].num_samples = num_samples.astype(np.int32)
        frames[1].num_wanted = np.ones(max_rows, np.int32)  # ranks without a draft head ignore it
    if (num_prompt_logprobs := min(MAX_PROMPT_LOGPROBS, lens[0] - 1)) > 0:
        frames[0].prompt_runs = np.array([(1, 0, num_prompt_logprobs, _NUM_LOGPROBS)], PROMPT_LOGPROBS_DTYPE)
        frames[0].prompt_targets = np.zeros(num_prompt_logprobs, np.int32)
    frames[-1].params = every_filter(max_rows)
    return frames


def every_filter(num_rows: int) -> npt.NDArray[np.void]:
    """Parameters of rows 1 to `num_rows` that need all of the sampler's kernels and most of its memory."""
    params = default_params(num_rows)
    params["row"] = np.arange(1, num_rows + 1)
    params["temperature"], params["top_k"], params["top_p"], params["num_logprobs"] = 1.0, 50, 0.9, _NUM_LOGPROBS
    params["repetition_penalty"] = 1.1
    return params
