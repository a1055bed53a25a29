"""One rank: its shard of the weights, its KV pool, and the loop that turns step frames into tokens. Uses no Ray."""

from __future__ import annotations

import gc
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from attention.kv_pool import ReqToTokenPool, TokenToKVPool
from attention.persistent_kv import take_kv, take_states
from attention.registry import create_backend
from attention.state_pool import StatePool
from configs.errors import ConfigError, EngineError
from configs.kv_pages import PageBytes
from configs.model_config import ModelConfig
from configs.schema import EngineConfig, resolved
from parallel.collectives.group import TensorParallelGroup
from parallel.collectives.symmetric_memory import PeerSizes
from parallel.numerics.arithmetic import most_nodes
from parallel.persistent_memory import PersistentMemory, kv_block, state_block
from parallel.plan import ShardPlan
from parallel.step_cost import StepCost
from worker.device.memory import DeviceMemory, await_idle, free_bytes, profile_cuda
from worker.device.peaks import Peaks, measure_peaks
from worker.frame_checks import FrameLimits
from worker.layers.rotary import check_length
from worker.protocol import FrameKind, StepFrame, StepResult
from worker.sampling.sampler import Sampler
from worker.self_test import check_exactness, check_steps
from worker.step.model_runner import ModelRunner
from worker.step.pending_step import PendingStep
from worker.step.step_layout import launch_bound_tokens
from worker.weights.shard import DTYPES, Shard, naming_the_rank

_log = logging.getLogger(__name__)

_MAX_SUM_BYTES = 512 << 20


class FrameSource(Protocol):
    """The source of the step loop's frames: a `FrameReader` of parallel/channel/ring.py."""

    def recv(self, timeout_s: float) -> bytes:
        """Waits for the next frame and returns it."""

    def poll(self) -> bytes | None:
        """The next frame if it has arrived, else None."""


class TPWorker:
    """Rank `group.rank` of a tensor-parallel group. Call `shard.load`, then `allocate`, `launch` or `run`, and `close`.

    Args:
        config: resolved. `auto` in dtype or attention is refused.
        model: the whole model's shape.
        model_path: a directory on this node.
        plan: made for `group.size` ranks.
        group: runs the all-reduces. Its owner closes it, not the worker.
        persistent: memory that outlives this process. If None, weights and KV are lost with the process.
    """

    def __init__(
        self,
        *,
        config: EngineConfig,
        model: ModelConfig,
        model_path: Path,
        plan: ShardPlan,
        group: TensorParallelGroup,
        persistent: PersistentMemory | None = None,
    ) -> None:
        if config.dtype not in DTYPES or config.attention.prefill_backend is None:
            raise ConfigError(f"dtype={config.dtype} and attention must be resolved before a worker starts")
        if plan.tp_size != group.size:
            raise ConfigError(f"a plan for tensor_parallel_size={plan.tp_size} does not fit {group.size} ranks")
        self.shard = Shard(config, model, model_path, plan, group, persistent)
        """The rank's weights."""
        self._config = config
        self._model = model
        self._group = group
        self._device = group.device
        self._plan = plan
        self._runner: ModelRunner | None = None
        self._kv: list[torch.Tensor] = []  # the pool's memory, which must not be freed while the device computes

    @property
    def device(self) -> torch.device:
        """The device of this rank's tensors."""
        return self._device

    @property
    def vocab_size(self) -> int:
        """The size of the model's vocabulary."""
        return self._model.vocab_size

    def kv_page_bytes(self) -> PageBytes:
        """Bytes of one KV page on this rank, K and V, and of one cached state."""
        return self._plan.kv_page_bytes(self._group.rank, self._config)

    @torch.inference_mode()
    def profile(self) -> DeviceMemory:
        """Memory that this rank may use for its KV pool. On CUDA the largest steps are run to find it, on CPUs it is
        the free memory. Call after `load`."""
        scheduler = self._config.scheduler
        if self._device.type == "cpu":
            # The ranks share the node's memory, and each has its own rows.
            states = sum(self._plan.state_bytes(rank, self._config) for rank in range(self._group.size))
            return DeviceMemory(free_bytes(self._device), table_bytes=states)
        max_rows, max_tokens = resolved(scheduler.max_num_seqs), resolved(scheduler.max_num_batched_tokens)
        began, page_size = time.monotonic(), self._config.kv_cache.page_size
        longest = min(self._model.max_context, max_tokens)
        num_pages = -(-max_tokens // page_size) + max_rows
        with naming_the_rank(self._group.rank, self._device, "the profile run"):
            memory = profile_cuda(
                lambda: self._new_runner(num_pages, longest),
                self._device,
                max_rows=max_rows,
                max_tokens=max_tokens,
                max_model_len=longest,
                page_size=page_size,
                speculation=self._config.speculation,
            )
        _log.info("rank %d: %s (profile run of %.1f s)", self._group.rank, memory, time.monotonic() - began)
        return memory

    def measure(self) -> Peaks:
        """Rates that this rank's device reaches in the model's dtype. Call before `allocate`, while memory is free."""
        with naming_the_rank(self._group.rank, self._device, "measuring the device"):
            peaks = measure_peaks(self._device, self.shard.dtype)
        _log.info("rank %d: %s", self._group.rank, peaks)
        return peaks

    @torch.inference_mode()
    def allocate(
        self,
        num_pages: int,
        max_model_len: int,
        num_window_pages: int | None = None,
        num_states: int | None = None,
        *,
        at_once: bool = False,
        later: bool = False,
        keeps_kv: bool = False,
    ) -> None:
        """Allocates the KV pool and page table, and captures steps if the attention backend can.

        A second call starts over: the state of all requests is lost. The KV of pages remains only if `keeps_kv`.

        Args:
            num_pages: number of pages, with ids 1 to num_pages. Page 0 is added. The same on every rank.
            max_model_len: maximum number of tokens of one sequence.
            num_window_pages: number of window pages, for layers with a window. If None, these have no separate pool.
            num_states: number of states in the prefix cache. None is the same as 0.
            at_once: requests are waiting. Graphs are captured when steps need them, and checks that the first ranks on
                these GPUs made are not repeated.
            later: capture only the largest graphs now, and the other ones by CAPTURE frames between steps.
            keeps_kv: reuse the pool that this rank had before, in this or an earlier process.

        Raises:
            EngineError: the pool to reuse is gone, or has another size; or exact numerics do not hold on this machine.
        """
        check_length(self._model, max_model_len)
        self.close()
        self._kv.clear()
        self.shard.load_to_device()
        with naming_the_rank(self._group.rank, self._device, "capturing the CUDA graphs"):
            allocate: Callable[[str, int], torch.Tensor] | None = None
            if (persistent := self.shard.persistent) is not None:
                block = persistent.existing if keeps_kv else persistent.new

                def allocate(name: str, num_bytes: int) -> torch.Tensor:
                    self._kv.append(block(name, num_bytes))
                    return self._kv[-1]

            self._runner = self._new_runner(num_pages, max_model_len, num_window_pages, num_states, allocate)
            if self.shard.arithmetic.choose(fast=False, exact=not at_once):
                if self._device.type == "cuda":
                    self.check_steps(min(num_pages, num_window_pages or num_pages), max_model_len)
                else:
                    backend = resolved(self._config.attention.decode_backend)
                    check_exactness(self.shard.arithmetic, backend, self.shard.dtype, self._device)
            self._runner.capture("none" if at_once else "largest" if later else "all")
        if self._device.type == "cuda":
            # Objects made until now stay alive, so the garbage collector, which may stop a step for milliseconds, skips
            # them from now on. If requests wait, garbage is not collected first and stays until `leave`.
            if not at_once:
                gc.collect()
            gc.freeze()

    @torch.inference_mode()
    def take_kv(
        self,
        layer_ids: Sequence[int],
        pages: npt.NDArray[np.int32],
        slots: npt.NDArray[np.int32],
        left: Sequence[PersistentMemory],
    ) -> None:
        """Takes over this rank's part of pages and states of some layers from a former group with another number of
        ranks. Call between `allocate` and the first step.

        Args:
            pages: ids of the pages, int32.
            slots: slots of the states in the state pool, int32.
            left: persistent memory of each former rank. Their pools have the same numbers of pages and slots.

        Raises:
            EngineError: the former ranks' memory has no such layers.
        """
        assert self._runner is not None, "take_kv() was called before allocate()"
        others = ShardPlan.create(self._model, len(left), exact=self._config.is_exact)
        taken, states = (torch.from_numpy(it).long().to(self._device) for it in (pages, slots))
        ranks = self._plan, self._group.rank, others, left
        for layer_id in layer_ids:
            mixer = self._model.all_layers[layer_id].mixer
            if mixer.token_elements:
                take_kv(self._runner.token_to_kv_pool, layer_id, taken, *ranks)
            if mixer.state and self._runner.state_pool is not None:
                take_states(self._runner.state_pool, layer_id, states, *ranks)

    @torch.inference_mode()
    def check_steps(self, num_pages: int, max_model_len: int) -> None:
        """Checks with the first `num_pages` of the pool that exact numerics hold (worker/self_test.py). Call on every
        rank, between `allocate` and the first step. Does nothing for fast numerics."""
        check = self.shard.arithmetic.choose(fast=None, exact=check_steps)
        if check is None:
            return
        began, scheduler, page_size = time.monotonic(), self._config.scheduler, self._config.kv_cache.page_size
        assert self._runner is not None, "check_steps() was called before allocate()"
        check(
            self.shard.arithmetic,
            self._runner,
            self.shard.decoder,
            self._group,
            num_tokens=min(num_pages * page_size, max_model_len, resolved(scheduler.max_num_batched_tokens)),
            max_rows=resolved(scheduler.max_num_seqs),
            page_size=page_size,
            vocab_size=self._model.vocab_size,
        )
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        _log.info("rank %d: computes exactly (checked in %.2f s)", self._group.rank, time.monotonic() - began)

    @torch.inference_mode()
    def launch(self, frame: StepFrame) -> PendingStep:
        """Applies the frame's deltas, starts one forward pass and samples. Every rank gets the same tokens.

        Raises:
            EngineError: the frame does not fit this rank's tables.
        """
        if self._runner is None:
            raise EngineError("launch() was called before allocate(); please report this bug")
        return self._runner.launch(frame)

    @torch.inference_mode()
    def capture_next(self) -> int:
        """Captures one CUDA graph that `allocate` left out, on every rank. Returns how many are left."""
        if self._runner is None:
            raise EngineError("capture_next() was called before allocate(); please report this bug")
        with self.shard.in_use:
            return self._runner.capture_next()

    def run(self, frames: FrameSource, send: Callable[[bytes], None] | None) -> None:
        """Runs steps until a CLOSE frame. Launches the next step before the last one's result is available.

        Args:
            send: gets the encoded results, in order. None on ranks that return nothing.

        Raises:
            EngineError: a frame has another generation, is out of order or does not fit; or the device failed.
        """
        pending: deque[PendingStep] = deque()
        generation: int | None = None
        step = 0
        with naming_the_rank(self._group.rank, self._device, "a step"):
            while True:
                frame = StepFrame.decode(self._next_frame(frames, pending, send))
                if frame.kind is FrameKind.CAPTURE:
                    assert not pending, "a capture while steps are in flight"
                    num_left = self.capture_next()
                    if send is not None:
                        send(StepResult(frame.generation, frame.step, np.array([num_left], np.int32)).encode())
                    continue
                if generation is not None and (frame.generation, frame.step) != (generation, step + 1):
                    raise EngineError(
                        f"rank {self._group.rank} got step {frame.step} of generation {frame.generation} after step "
                        f"{step} of generation {generation}; please report this bug"
                    )
                generation, step = frame.generation, frame.step
                if frame.kind is FrameKind.CLOSE:
                    return
                with self.shard.in_use:
                    launched = self.launch(frame)
                if send is not None:
                    pending.append(launched)

    def close(self) -> None:
        """Drops the KV pool and the graphs. Calling it again does nothing."""
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.close()

    def leave(self) -> None:
        """Frees everything but the weights, after a failure ended `run` or `allocate`. The device is idle afterwards.

        Another thread may abort the group meanwhile. The abort ends the device's wait for other ranks. It waits in turn
        for the graphs, which this method drops.

        Raises:
            EngineError: the device waits without end, or it is broken. The process must be ended.
        """
        self.close()
        if self._device.type != "cuda":
            return
        with naming_the_rank(self._group.rank, self._device, "leaving its group"):
            began = time.monotonic()
            await_idle(self._device)
            waited = time.monotonic()
            self._kv.clear()
            # Objects that `allocate` froze, or that the failure's traceback held, may be garbage now.
            gc.unfreeze()
            gc.collect()
            torch.cuda.empty_cache()
        _log.info(
            "left the failed generation: the device was idle after %.2f s, and its memory free %.2f s later",
            waited - began,
            time.monotonic() - waited,
        )

    @staticmethod
    def _next_frame(frames: FrameSource, pending: deque[PendingStep], send: Callable[[bytes], None] | None) -> bytes:
        """Returns the next frame. Sends finished results meanwhile."""
        # A result or a frame may come first, and no call waits for both, so this loop polls.
        while pending:
            if pending[0].is_done():
                assert send is not None, "only a rank that sends results has pending steps"
                send(pending.popleft().result().encode())
            elif (frame := frames.poll()) is not None:
                return frame
        # An idle group may wait for days, so the coordinator's death ends the wait, not a deadline.
        return frames.recv(float("inf"))

    def _new_runner(
        self,
        num_pages: int,
        max_model_len: int,
        num_window_pages: int | None = None,
        num_states: int | None = None,
        allocate: Callable[[str, int], torch.Tensor] | None = None,
    ) -> ModelRunner:
        """Makes a runner. `allocate` returns the memory of a pool's block with this name and number of bytes. If None,
        the pools allocate it."""
        scheduler, attention = self._config.scheduler, self._config.attention
        max_rows, page_size = resolved(scheduler.max_num_seqs), self._config.kv_cache.page_size
        flops = StepCost.of(self._plan, self.shard.dtype.itemsize).flops_per_token / self._group.size
        token_to_kv_pool = TokenToKVPool(
            self.shard.decoder.attention_layers,
            num_pages=num_pages,
            page_size=page_size,
            dtype=DTYPES[self._config.kv_dtype],
            compute_dtype=self.shard.dtype,
            device=self._device,
            num_window_pages=num_window_pages,
            allocate=None if allocate is None else lambda layer_id, size: allocate(kv_block(layer_id), size),
        )
        self.shard.decoder.set_max_positions(max_model_len)
        num_placed_pages = None if num_window_pages is None else num_pages
        return ModelRunner(
            self.shard.decoder,
            create_backend(
                resolved(attention.prefill_backend),
                resolved(attention.decode_backend),
                token_to_kv_pool,
                exact=self.shard.arithmetic.choose(fast=False, exact=True),
            ),
            ReqToTokenPool(max_rows, -(-max_model_len // page_size), self._device, num_placed_pages=num_placed_pages),
            token_to_kv_pool,
            Sampler(self._plan, self._group, max_rows + 1),
            self._group,
            FrameLimits(
                num_rows=max_rows + 1,
                vocab_size=self._model.vocab_size,
                max_model_len=max_model_len,
                max_samples=1 + self._config.speculation.num_drafts,
            ),
            max_rows=max_rows,
            max_tokens=resolved(scheduler.max_num_batched_tokens),
            max_sampled=self._config.speculation.max_sampled(max_rows),
            max_graph_tokens=launch_bound_tokens(flops / len(self._model.all_layers)),
            state_pool=self._new_state_pool(max_rows, num_states, allocate),
        )

    def _new_state_pool(
        self, max_rows: int, num_states: int | None, allocate: Callable[[str, int], torch.Tensor] | None
    ) -> StatePool | None:
        if not (layers := self.shard.decoder.state_layers):
            return None
        of_layer = None if allocate is None else lambda layer_id, size: allocate(state_block(layer_id), size)
        return StatePool(layers, max_rows, num_states or 0, self._device, of_layer)


def peer_sizes(config: EngineConfig, model: ModelConfig, plan: ShardPlan) -> PeerSizes:
    """The largest sizes of the ranks' contributions to one step's collectives."""
    num_tokens = resolved(config.scheduler.max_num_batched_tokens)
    row_bytes = model.hidden_size * DTYPES[config.dtype].itemsize
    of_row = model.hidden_size * torch.float32.itemsize * most_nodes(plan) if config.is_exact else row_bytes
    return PeerSizes(num_tokens, row_bytes, min(num_tokens * of_row, _MAX_SUM_BYTES))
