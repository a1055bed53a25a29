"""The part of a rank process's start that is the same for every rank, so that a spare can do it in advance."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import time
from dataclasses import replace
from pathlib import Path

import torch

from attention.fa3_builds import load_provider
from configs.errors import ConfigError, EngineError
from configs.model_config import ModelConfig
from configs.schema import EngineConfig, resolved
from parallel.collectives.group import TensorParallelGroup
from parallel.numerics.arithmetic import ExactArithmetic
from parallel.plan import ShardPlan
from worker.device.memory import every_filter, free_bytes, new_rows
from worker.self_test import check_exactness
from worker.tp_worker import TPWorker, peer_sizes
from worker.weights.shard import DTYPES

_log = logging.getLogger(__name__)

# Kernels differ by the numbers of rows and tokens in a step, and by whether 16 divides them.
_NUM_ROWS = (1, 3, 16, 61, 128, 256)
_TOKENS_PER_ROW = 8
_SPARE_BYTES = 2 << 30
"""Device memory that must be free besides that for the weights, for the steps run here and for ranks that serve
meanwhile. With less, no steps are run."""


def warm_up(config: EngineConfig, model: ModelConfig | None = None, device: torch.device | None = None) -> None:
    """Compiles and loads kernels, and makes the first use of the libraries.

    Args:
        model: the served model. If None, its kernels are not loaded.
        device: the GPU that the process will probably get. If None, kernels for GPUs are only imported.
    """
    if config.device != "cpu":
        _import_kernels()
        if device is not None and model is not None:
            _load_kernels(config, model, device)
        return
    if config.parallel.threads_per_rank is not None:
        torch.set_num_threads(config.parallel.threads_per_rank)
    if config.is_exact:
        device = torch.device(config.device)
        backend = resolved(config.attention.decode_backend)
        check_exactness(ExactArithmetic(device), backend, DTYPES[config.dtype], device)


def read_ahead() -> None:
    """Imports what ranks on GPUs import, so that the files are in the node's page cache for them. Touches no device."""
    _import_kernels()
    with contextlib.suppress(ConfigError):  # the provider is not installed
        load_provider(None)


def _import_kernels() -> None:
    from attention.kernels import decode, extend, step_metadata  # noqa: F401
    from parallel.kernels import all_reduce_norm  # noqa: F401
    from parallel.numerics.kernels import chain_gemm, fp8_gemm, node_gemm, skinny_gemm  # noqa: F401
    from worker.sampling.kernels import sampling  # noqa: F401


def _load_kernels(config: EngineConfig, model: ModelConfig, device: torch.device) -> None:
    """Runs steps like rank 0, with one layer of each kind, random weights and no other ranks. Frees all memory but the
    CUDA context and the kernels. If the device has too little memory, only logs a warning."""
    began = time.monotonic()
    torch.cuda.set_device(device)
    try:
        _run_steps(config, replace(model, layers=tuple(dict.fromkeys(model.layers))), device)
        _log.info("kernels are loaded on %s (%.1f s)", device, time.monotonic() - began)
    except (RuntimeError, EngineError) as error:
        _log.warning(
            "the kernels could not be loaded in advance, so the first steps take longer: %s",
            str(error).split("\n", 1)[0],
        )
    gc.collect()
    torch.cuda.empty_cache()


def _run_steps(config: EngineConfig, model: ModelConfig, device: torch.device) -> None:
    config = config.model_copy(update={"load_format": "dummy"})
    plan = ShardPlan.create(model, config.tensor_parallel_size, exact=config.is_exact)
    needed = plan.weight_bytes(0, config) + _SPARE_BYTES
    if device.type == "cuda" and free_bytes(device) < needed:
        raise EngineError(f"{device} has no {needed >> 20} MiB free")
    scheduler, page_size = config.scheduler, config.kv_cache.page_size
    max_rows, max_tokens = resolved(scheduler.max_num_seqs), resolved(scheduler.max_num_batched_tokens)
    # Every second row starts after a cached page, and has one or several new tokens.
    most_rows = min(max_rows, _NUM_ROWS[-1])
    most_tokens = min(most_rows * (_TOKENS_PER_ROW + 1), max_tokens)
    row_len = min(page_size + _TOKENS_PER_ROW + 1, model.max_context)
    sizes = peer_sizes(config, model, plan)
    sizes = replace(sizes, rows=most_tokens, sum_bytes=sizes.sum_bytes * most_tokens // max_tokens)
    group = TensorParallelGroup.alone(0, config.tensor_parallel_size, device, sizes)
    worker = TPWorker(config=config, model=model, model_path=Path(), plan=plan, group=group)
    worker.shard.load()
    worker.allocate(most_rows * -(-row_len // page_size), row_len, at_once=True)
    batches = sorted({min(num_rows, max_rows) for num_rows in _NUM_ROWS})
    for step, (length, num_rows) in enumerate(itertools.product((1, _TOKENS_PER_ROW), batches), start=1):
        lens = [length + (length > 1 and row % 3 == 0) for row in range(num_rows)]
        starts = [row % 2 * min(page_size, row_len - length - 1) for row in range(num_rows)]
        if sum(lens) <= most_tokens:
            frame = new_rows(step, starts, lens, page_size)
            frame.params = every_filter(len(lens))[::2]
            worker.launch(frame).result()
    worker.leave()
