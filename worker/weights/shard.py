"""Owns the memory of one rank's weights. A Shard loads them from files, from memory or from what an earlier process of
the rank left, moves them between host and device, and has others take their place."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from attention.kv_pool import FP8
from configs.errors import ConfigError, EngineError, OutOfMemoryError
from configs.kept_types import kept_types
from configs.model_config import ModelConfig
from configs.read_draft_head import draft_head_path
from configs.schema import EngineConfig
from parallel.collectives.group import TensorParallelGroup
from parallel.numerics.arithmetic import FAST, ExactArithmetic
from parallel.persistent_memory import PersistentMemory
from parallel.plan import ShardPlan
from worker.models.decoder import Decoder
from worker.weights.checkpoint import AnyCheckpoint, Checkpoint
from worker.weights.dummy_weights import DummyCheckpoint
from worker.weights.host_memory import has_room, own_stream
from worker.weights.quantised_weights import QuantisedCheckpoint
from worker.weights.weight_memory import WeightMemory

_log = logging.getLogger(__name__)

# The words of torch where the node has no memory.
_NO_MEMORY = "can't allocate memory"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "fp8_e4m3": FP8}


class Shard:
    """The weights of rank `group.rank`, not loaded yet. Arguments are those of `TPWorker`."""

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        model_path: Path,
        plan: ShardPlan,
        group: TensorParallelGroup,
        persistent: PersistentMemory | None,
    ) -> None:
        self._config = config
        self._model = model
        self._model_path = model_path
        self._plan = plan
        self._group = group
        self._device = group.device
        self.dtype = DTYPES[config.dtype]
        """The type of activations."""
        self.arithmetic = ExactArithmetic(group.device) if config.is_exact else FAST
        """How they are multiplied with."""
        self.decoder = self._new_decoder()
        """The layers that they are in."""
        self.num_bytes = 0
        """Bytes of them, once they are loaded."""
        self.persistent = persistent
        """Memory for what outlives this process. None: weights and KV die with it."""
        self.in_use = threading.Lock()
        """Held while a step is launched, which reads the weights, and while others are copied over them."""
        self._weights = WeightMemory(self.decoder, persistent)
        self._staged: WeightMemory | None = None
        self._staging: object = None  # an id of the weights that are being read or staged

    @torch.inference_mode()
    def load(
        self,
        on_progress: Callable[[float], None] | None = None,
        identity: str = "",
        *,
        must_find: bool = False,
        beside: bool = False,
    ) -> None:
        """Reads the weights from the checkpoint, unless persistent memory still holds them from an earlier process of
        this rank.

        Args:
            on_progress: gets the share done, 0 to 1.
            identity: tells the weights from others.
            must_find: raise if persistent memory does not hold the weights, because no checkpoint has them.
            beside: other ranks serve on the device. If it has no room for the weights too, they wait in the host's
                memory until `load_to_device`.

        Raises:
            CheckpointError: the files are not what they should be.
            EngineError: the weights are lost, or not as they were.
            OutOfMemoryError: the device or the node has no room for the shard.
        """
        if self._device.type == "cpu" and self._config.parallel.threads_per_rank is not None:
            torch.set_num_threads(self._config.parallel.threads_per_rank)
        began = time.monotonic()
        with (
            naming_the_rank(self._group.rank, self._device, "loading the weights"),
            self._open(self._model, self._model_path, self._config.revision) as checkpoint,
        ):
            is_found = self._weights.find(checkpoint, identity, on_progress)
            if not is_found:
                if must_find:
                    raise EngineError(f"nothing is left of rank {self._group.rank}'s weights, which came from memory")
                num_bytes = self._plan.weight_bytes(self._group.rank, self._config)
                waits = beside and self.persistent is not None and not has_room(self._device, num_bytes)
                self._weights.load(checkpoint, identity, on_progress, on_host=waits)
            if DTYPES[self._config.kv_dtype] is FP8:
                self.decoder.set_kv_scales(checkpoint.kv_scales())
            self.num_bytes = self._weights.num_bytes
        # The allocator still has the memory in which the last part lay before it moved to persistent memory: of 8B's
        # embedding and LM head 2.3 GiB, by reckoning.
        torch.cuda.empty_cache()
        _log.info(
            "rank %d: %.2f GiB of weights %s in %.1f s",
            self._group.rank,
            self.num_bytes / (1 << 30),
            "found" if is_found else "read",
            time.monotonic() - began,
        )

    @torch.inference_mode()
    def load_to_device(self) -> None:
        """Moves the weights to the device if they wait on the host.

        Raises:
            OutOfMemoryError: the device has no room for them.
            EngineError: the device failed.
        """
        with naming_the_rank(self._group.rank, self._device, "bringing the weights"):
            self._weights.load_to_device()

    @torch.inference_mode()
    def move_to_host(self) -> None:
        """Moves the weights to the host's memory, until `load_to_device`; nothing is left that computes with them.

        Raises:
            OutOfMemoryError: the host has no room for them. The process has to be ended.
        """
        assert self.persistent is not None, "weights go back to persistent memory alone"
        with naming_the_rank(self._group.rank, self._device, "putting the weights away"):
            self._weights.move_to_host()
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def stage(
        self,
        model: ModelConfig,
        checkpoint: Path | Mapping[str, torch.Tensor],
        revision: str | None = None,
        identity: str = "",
    ) -> bool:
        """Reads this rank's shard of other weights beside those that serve; on another thread, while steps run.

        Args:
            model: of the same shape.
            checkpoint: a directory on this node, or the tensors of one by name, on any device here.
            revision: the checkpoint's; tells random weights apart.
            identity: tells these weights from others.

        Returns:
            Whether they wait in the host's memory, since the device has no room for them.

        Raises:
            CheckpointError: the files are not what they should be.
            ConfigError: keys and values in FP8 would have other factors, or other weights be in FP8, which graphs hold.
            OutOfMemoryError: the node has no room for the shard.
            EngineError: the device failed, or has no room for a layer.
        """
        wanted = self._staging = object()
        with (
            naming_the_rank(self._group.rank, self._device, "staging other weights"),
            own_stream(self._device),
            self._open(model, checkpoint, revision) as source,
        ):
            other = self._new_decoder()
            if DTYPES[self._config.kv_dtype] is FP8:
                other.set_kv_scales(source.kv_scales())
            if other.attention_layers != self.decoder.attention_layers:
                raise ConfigError("the factors of keys and values in FP8 differ from those that serve; start anew")
            on_host = not has_room(self._device, self.num_bytes)
            staged = self._weights.stage(other, source, identity, on_host=on_host)
        if self._staging is wanted:
            self._staged = staged
        else:
            staged.on_host.clear()
        return on_host

    @torch.inference_mode()
    def take_staged(self) -> None:
        """Has the staged weights serve from the next step on. On another thread, between two steps: rank 0 has the last
        one's result, and another rank may still launch the rest of that step.

        Raises:
            EngineError: there are none, or the device failed. The process has to be ended.
        """
        with self.in_use, naming_the_rank(self._group.rank, self._device, "exchanging weights"):
            if self._staged is None:
                raise EngineError(f"rank {self._group.rank} has no other weights")
            self._weights.take(self._staged)

    def drop_staged(self) -> None:
        """Frees the memory of the staged weights, or has none be staged by the `stage` that is under way."""
        staged, self._staged, self._staging = self._staged, None, None
        if staged is not None:
            staged.on_host.clear()
        torch.cuda.empty_cache()

    def _new_decoder(self) -> Decoder:
        """A decoder of the model's shape, not loaded."""
        return Decoder(
            self._model, self._plan, self._group, arithmetic=self.arithmetic, dtype=self.dtype, device=self._device
        )

    def _open(
        self, model: ModelConfig, checkpoint: Path | Mapping[str, torch.Tensor], revision: str | None
    ) -> AnyCheckpoint:
        found: AnyCheckpoint
        is_dummy = False
        draft_head = draft_head_path(self._config)
        if not isinstance(checkpoint, Path):
            found = Checkpoint.of_tensors(checkpoint, model, draft_head)
        elif is_dummy := self._config.load_format == "dummy":
            found = DummyCheckpoint(model, revision)
        else:
            found = Checkpoint.open(checkpoint, model, draft_head)
        if self._config.quantization == "fp8" or (is_dummy and model.weight_scales is not None):
            found = QuantisedCheckpoint(found, model)
        # Older GPUs have no products in FP8.
        multiplies_fp8 = self._device.type == "cpu" or torch.cuda.get_device_capability(self._device) >= (8, 9)
        found.keeps_fp8 = kept_types(self._config, model).fp8 and multiplies_fp8
        return found


@contextmanager
def naming_the_rank(rank: int, device: torch.device, during: str) -> Iterator[None]:
    """Turns what the device or a kernel raises into an EngineError that says where and what to do, and what says that
    memory is gone, on CPUs too, into an OutOfMemoryError."""
    try:
        yield
    except EngineError:
        raise
    except (RuntimeError, MemoryError) as error:
        what = str(error).strip().split("\n", 1)[0]
        where = f"rank {rank} on {device} failed in {during}: {type(error).__name__}: {what}"
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or _NO_MEMORY in what:
            advice = "lower kv_cache.memory_fraction or scheduler.max_num_batched_tokens, or use more ranks"
            raise OutOfMemoryError(f"{where}; {advice}") from error
        if device.type == "cpu":
            raise
        # CUDA reports a failed kernel at a later call: only a blocking run names the one that failed.
        advice = "the calls in the log's traceback name the kernel if CUDA_LAUNCH_BLOCKING=1 is set in the runtime_env"
        raise EngineError(f"{where}; {advice}") from error
