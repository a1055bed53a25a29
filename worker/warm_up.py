"""The work of a process that is the same whichever rank it becomes, so that a spare has it behind it."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path

import torch

from configs.errors import EngineError
from configs.model_config import ModelConfig
from configs.schema import EngineConfig, resolved
from parallel.group import TensorParallelGroup
from parallel.numerics.arithmetic import ExactArithmetic
from parallel.plan import ShardPlan
from worker.memory import largest_frames
from worker.self_test import check_exactness
from worker.tp_worker import DTYPES, TPWorker, peer_sizes

_log = logging.getLogger(__name__)

# Kernels differ by how many rows a step has: steps of these rows, and with prompts of these tokens, load them all.
_STEPS = ((1, 16), (16, 64), (64, 128), (256, 1024))


def warm_up(config: EngineConfig, model: ModelConfig | None = None, device: torch.device | None = None) -> None:
    """Compiles and loads kernels, and does first uses of the libraries.

    Args:
        model: the model that is served; None: its kernels are not loaded.
        device: the GPU that the process is likely to get. None: on GPUs kernels are imported and no more.
    """
    if config.device != "cpu":  # a CPU install has no Triton
        from attention.kernels import decode, extend, step_metadata  # noqa: F401
        from parallel.kernels import all_reduce_norm  # noqa: F401
        from parallel.numerics.kernels import chain_gemm, node_gemm, skinny_gemm  # noqa: F401
        from worker.kernels import activation, adjustments, norm, rope, sampling  # noqa: F401

        if device is not None and model is not None:
            _load_kernels(config, model, device)
        return
    if config.parallel.threads_per_rank is not None:
        torch.set_num_threads(config.parallel.threads_per_rank)
    if config.is_exact:
        device = torch.device(config.device)
        backend = resolved(config.attention.decode_backend)
        check_exactness(ExactArithmetic(device), backend, DTYPES[config.dtype], device)


def _load_kernels(config: EngineConfig, model: ModelConfig, device: torch.device) -> None:
    """Runs steps of one layer of each kind as rank 0 would, with random weights and nobody to sum with. All memory is
    given back but for the context and the kernels. A device that has no room for that is left as it is."""
    began, size = time.monotonic(), config.tensor_parallel_size
    model = replace(model, layers=tuple(dict.fromkeys(model.layers)))
    config = config.model_copy(update={"load_format": "dummy"})
    plan = ShardPlan.create(model, size, exact=config.is_exact)
    max_rows, page_size = resolved(config.scheduler.max_num_seqs), config.kv_cache.page_size
    most_rows, most_tokens = _STEPS[-1]
    most_tokens = min(most_tokens, model.max_context)
    torch.cuda.set_device(device)
    worker = None
    try:
        sizes = replace(peer_sizes(config, model, plan), rows=most_tokens)
        sizes = replace(
            sizes, sum_bytes=sizes.sum_bytes * most_tokens // resolved(config.scheduler.max_num_batched_tokens)
        )
        group = TensorParallelGroup.alone(0, size, device, sizes)
        worker = TPWorker(config=config, model=model, model_path=Path(), plan=plan, group=group)
        worker.load()
        worker.allocate(-(-most_tokens // page_size) + most_rows, most_tokens, at_once=True)
        for rows, tokens in _STEPS:
            for frame in largest_frames(min(rows, max_rows), min(tokens, most_tokens), most_tokens, page_size):
                worker.launch(frame).result()
        _log.info("kernels are loaded on %s (%.1f s)", device, time.monotonic() - began)
    except (RuntimeError, EngineError) as error:
        _log.warning("the kernels are not loaded before they are needed: %s", str(error).split("\n", 1)[0])
    if worker is not None:
        worker.leave()
