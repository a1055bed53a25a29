"""One rank: its shard of the weights, its KV pool, and the loop that turns step frames into tokens. No Ray here."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from attention.kv_pool import ReqToTokenPool, TokenToKVPool
from attention.registry import create_backend
from configs.errors import ConfigError, EngineError
from configs.model_config import ModelConfig
from configs.schema import EngineConfig
from parallel.group import TensorParallelGroup
from parallel.plan import ShardPlan
from worker.layers.rotary import check_length
from worker.model_runner import ModelRunner
from worker.models.decoder import Decoder
from worker.protocol import FrameKind, RowFlag, StepFrame, StepResult
from worker.sampler import Sampler, default_params
from worker.weights import Checkpoint

_log = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class TPWorker:
    """Rank `group.rank` of a tensor-parallel group: `load`, `allocate`, then `step` or `run`, then `close`.

    Args:
        config: resolved; `auto` in dtype or attention_backend is refused.
        model: the whole model's shape.
        model_path: a directory or a .gguf file on this node.
        plan: made for `group.size` ranks.
        group: where the all-reduces run; closed by its owner, not by this.
    """

    def __init__(
        self,
        *,
        config: EngineConfig,
        model: ModelConfig,
        model_path: Path,
        plan: ShardPlan,
        group: TensorParallelGroup,
    ) -> None:
        if config.dtype not in _DTYPES or config.attention_backend == "auto":
            raise ConfigError(
                f"dtype={config.dtype} and attention_backend={config.attention_backend} must be resolved before a "
                "worker starts"
            )
        if plan.tp_size != group.size:
            raise ConfigError(f"a plan for tensor_parallel_size={plan.tp_size} does not fit {group.size} ranks")
        self._config = config
        self._model = model
        self._model_path = model_path
        self._group = group
        self._dtype = _DTYPES[config.dtype]
        self._device = group.device
        self._decoder = Decoder(model, plan, group, dtype=self._dtype, device=self._device)
        self._sampler = Sampler(model.vocab_size, self._device)
        self._params = default_params(config.scheduler.max_num_seqs + 1)
        self._runner: ModelRunner | None = None
        self._weight_bytes = 0

    @property
    def device(self) -> torch.device:
        """Where this rank's tensors are."""
        return self._device

    @property
    def weight_bytes(self) -> int:
        """Bytes of this rank's weights; 0 before `load`."""
        return self._weight_bytes

    @torch.inference_mode()
    def load(self, on_progress: Callable[[float], None] | None = None) -> None:
        """Reads this rank's shard. `on_progress` gets the share done, 0 to 1. Raises CheckpointError."""
        if self._device.type == "cpu" and self._config.parallel.threads_per_rank is not None:
            torch.set_num_threads(self._config.parallel.threads_per_rank)
        with Checkpoint.open(self._model_path, self._model) as checkpoint:
            self._decoder.load(checkpoint, on_progress)
            self._weight_bytes = checkpoint.bytes_loaded
            _log.info("rank %d: %d bytes of weights", self._group.rank, self._weight_bytes)

    def kv_bytes_per_page(self) -> int:
        """Bytes of one KV page on this rank: all layers, K and V."""
        page_size = self._config.kv_cache.page_size
        return TokenToKVPool.bytes_per_page(self._decoder.attention_layers, page_size, self._dtype)

    @torch.inference_mode()
    def allocate(self, num_pages: int, max_model_len: int) -> None:
        """Allocates the KV pool and page table.

        Args:
            num_pages: pages with ids 1 to num_pages; page 0 comes on top. The same on every rank.
            max_model_len: most tokens of one sequence.
        """
        check_length(self._model, max_model_len)
        page_size = self._config.kv_cache.page_size
        layers = self._decoder.attention_layers
        token_to_kv_pool = TokenToKVPool(
            layers, num_pages=num_pages, page_size=page_size, dtype=self._dtype, device=self._device
        )
        req_to_token_pool = ReqToTokenPool(self._config.scheduler.max_num_seqs, -(-max_model_len // page_size))
        self._decoder.set_max_positions(max_model_len)
        self._runner = ModelRunner(
            self._decoder,
            create_backend(self._config.attention_backend, layers, req_to_token_pool, token_to_kv_pool),
            req_to_token_pool,
            token_to_kv_pool,
            vocab_size=self._model.vocab_size,
            max_model_len=max_model_len,
            device=self._device,
        )

    @torch.inference_mode()
    def step(self, frame: StepFrame) -> StepResult:
        """Applies the frame's deltas, runs one forward pass and samples; every rank arrives at the same tokens.

        Raises:
            EngineError: the frame does not fit this rank's tables.
        """
        if self._runner is None:
            raise EngineError("a step before allocate()")
        self._set_params(frame)
        logits = self._runner.forward(frame)
        sampled = (frame.flags & RowFlag.SAMPLE) != 0
        if not sampled.any():
            return StepResult(generation=frame.generation, step=frame.step, tokens=np.empty(0, np.int32))
        # The noise key: the new token's index in its whole sequence, which preemption and recompute do not change.
        positions = (frame.starts + frame.lens)[sampled].astype(np.int64)
        result = self._sampler.sample(logits, self._params[frame.rows[sampled]], positions)
        self._runner.set_last_tokens(frame, result.tokens)
        return StepResult(
            generation=frame.generation,
            step=frame.step,
            tokens=result.tokens.cpu().numpy().astype(np.int32),
            logprob_rows=result.logprob_rows,
            logprobs=result.logprobs.cpu().numpy(),
            top_ids=result.top_ids.cpu().numpy().astype(np.int32),
            top_logprobs=result.top_logprobs.cpu().numpy(),
        )

    def run(self, recv: Callable[[], bytes], send: Callable[[bytes], None] | None) -> None:
        """Steps until a CLOSE frame. `send` gets the encoded results; None on ranks that return nothing.

        Raises:
            EngineError: a frame of another generation or out of order, or one that does not fit.
        """
        generation: int | None = None
        step = 0
        while True:
            frame = StepFrame.decode(recv())
            if generation is not None and (frame.generation, frame.step) != (generation, step + 1):
                raise EngineError(
                    f"rank {self._group.rank} got step {frame.step} of generation {frame.generation} after step {step} "
                    f"of generation {generation}"
                )
            generation, step = frame.generation, frame.step
            if frame.kind is FrameKind.CLOSE:
                return
            result = self.step(frame)
            if send is not None:
                send(result.encode())

    def close(self) -> None:
        """Drops the KV pool. Calling it again does nothing."""
        self._runner = None

    def _set_params(self, frame: StepFrame) -> None:
        rows = frame.params["row"]
        if len(rows) == 0:
            return
        if not ((rows >= 1) & (rows < len(self._params))).all():
            raise EngineError(f"sampling parameters of a row outside 1 to {len(self._params) - 1}")
        self._params[rows] = frame.params
