"""Owns the memory of one rank's weights. A Shard loads them from files, from tensors in memory, or from persistent
memory that an earlier process of the rank filled. It also moves them between host and device, and replaces them."""

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
from configs.model_config import ModelConfig
from configs.read_draft_head import draft_head_path
from configs.schema import EngineConfig
from configs.weight_dtypes import weight_dtypes
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

# torch's message if the node has no memory left.
_NO_MEMORY = "can't allocate memory"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "fp8_e4m3": FP8}


class Shard:
    """The weights of rank `group.rank`, not loaded yet. The arguments are those of `TPWorker`."""

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
        """The arithmetic of products with the weights."""
        self.decoder = self._new_decoder()
        """The layers that contain the weights."""
        self.num_bytes = 0
        """Bytes of the weights, once they are loaded."""
        self.persistent = persistent
        """Memory that outlives this process. If None, weights and KV are lost with the process."""
        self.in_use = threading.Lock()
        """Held while a step, which reads the weights, is launched, and while other weights are copied over them."""
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
        """Reads the weights from the checkpoint, unless persistent memory still holds them from an earlier process.

        Args:
            on_progress: gets the share done, 0 to 1.
            identity: identifies the weights.
            must_find: raise if persistent memory does not hold the weights, because no checkpoint has them.
            beside: other ranks are serving on the device. If the device has no room for these weights too, the weights
                are staged in host memory until `load_to_device`.

        Raises:
            CheckpointError: the files are invalid or do not fit the model.
            EngineError: the weights are lost, or have changed in memory.
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
                    raise EngineError(
                        f"rank {self._group.rank}'s weights, which came from memory, are lost; send them again"
                    )
                num_bytes = self._plan.weight_bytes(self._group.rank, self._config)
                waits = beside and self.persistent is not None and not has_room(self._device, num_bytes)
                self._weights.load(checkpoint, identity, on_progress, on_host=waits)
            if DTYPES[self._config.kv_dtype] is FP8:
                self.decoder.set_kv_scales(checkpoint.kv_scales())
            self.num_bytes = self._weights.num_bytes
        # The allocator still holds the memory in which the last part was before its move to persistent memory: 2.3 GiB
        # for 8B's embedding and LM head, by reckoning.
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
        """Moves the weights to the device if they are staged on the host.

        Raises:
            OutOfMemoryError: the device has no room for them.
            EngineError: the device failed.
        """
        with naming_the_rank(self._group.rank, self._device, "loading the weights to the device"):
            self._weights.load_to_device()

    @torch.inference_mode()
    def move_to_host(self) -> None:
        """Moves the weights to host memory until `load_to_device`. No runner may still use them.

        Raises:
            OutOfMemoryError: the host has no room for them. The process must be ended.
        """
        assert self.persistent is not None, "only weights in persistent memory can move to the host"
        with naming_the_rank(self._group.rank, self._device, "moving the weights to the host"):
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
        """Reads this rank's shard of other weights besides the serving ones. Runs on another thread during steps.

        Args:
            model: a model of the same shape.
            checkpoint: a directory on this node, or a checkpoint's tensors by name, on any device of this node.
            revision: the checkpoint's revision. Random weights depend on it.
            identity: identifies these weights.

        Returns:
            Whether they are staged in host memory, because the device has no room for them.

        Raises:
            CheckpointError: the files are invalid or do not fit the model.
            ConfigError: the FP8 scales of keys and values, or the dtype of some matrix, differ from the serving ones.
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
                raise ConfigError("the FP8 factors of keys and values differ from the serving ones; restart the server")
            on_host = not has_room(self._device, self.num_bytes)
            staged = self._weights.stage(other, source, identity, on_host=on_host)
        if self._staging is wanted:
            self._staged = staged
        else:
            staged.on_host.clear()
        return on_host

    @torch.inference_mode()
    def take_staged(self) -> None:
        """Replaces the serving weights by the staged ones from the next step on. Runs on another thread, between two
        steps: rank 0 has the last step's result, but another rank may still be launching the end of that step.

        Raises:
            EngineError: no weights are staged, or the device failed. The process must be ended.
        """
        with self.in_use, naming_the_rank(self._group.rank, self._device, "exchanging weights"):
            if self._staged is None:
                raise EngineError(f"rank {self._group.rank} has no staged weights; please report this bug")
            self._weights.take(self._staged)

    def drop_staged(self) -> None:
        """Frees the memory of the staged weights. If `stage` is still running, its weights are dropped when it ends."""
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
        # Older GPUs cannot multiply in FP8.
        multiplies_fp8 = self._device.type == "cpu" or torch.cuda.get_device_capability(self._device) >= (8, 9)
        found.keeps_fp8 = weight_dtypes(self._config, model).fp8 and multiplies_fp8
        return found


@contextmanager
def naming_the_rank(rank: int, device: torch.device, during: str) -> Iterator[None]:
    """Converts an error of the device or a kernel to an EngineError that names the rank and gives advice. A lack of
    memory, also on CPUs, becomes an OutOfMemoryError."""
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
        # CUDA reports a failed kernel at a later call. Only a blocking run names the kernel that failed.
        advice = "the calls in the log's traceback name the kernel if CUDA_LAUNCH_BLOCKING=1 is set in the runtime_env"
        raise EngineError(f"{where}; {advice}") from error
