"""A rank of a benchmark: a process with a worker of its own, without Ray."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch.distributed import TCPStore

from configs.read_config import read_model_config
from configs.read_draft_head import with_draft_head
from configs.schema import EngineConfig, resolved
from parallel.collectives.group import TensorParallelGroup
from parallel.plan import ShardPlan
from worker.tp_worker import TPWorker, peer_sizes

TIMEOUT_S = 300.0


def start_worker(rank: int, config: EngineConfig, path: Path, port: int) -> tuple[TPWorker, TensorParallelGroup]:
    """Meets the other ranks through the store at `port`, and loads.

    More ranks than GPUs share them, by NCCL alone; it refuses two ranks on a GPU of one host, so each names another.

    Args:
        config: resolved.
        path: of the model.
    """
    size, num_gpus = config.tensor_parallel_size, torch.cuda.device_count()
    model = with_draft_head(read_model_config(path), config)
    device = torch.device("cpu" if config.device == "cpu" else f"cuda:{rank % num_gpus}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if num_gpus < size:
            os.environ.update(NCCL_HOSTID=f"rank{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    plan = ShardPlan.create(model, size, exact=config.is_exact)
    group = TensorParallelGroup.single(device)
    strategy = config.parallel.all_reduce
    assert strategy != "auto", "the strategy is resolved"
    if size > 1:
        group = TensorParallelGroup.create(
            rank=rank,
            size=size,
            store=TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False),
            device=device,
            strategy=strategy,
            timeout_s=TIMEOUT_S,
            spin_us=resolved(config.parallel.spin_us),
            sizes=peer_sizes(config, model, plan),
        )
    worker = TPWorker(config=config, model=model, model_path=path, plan=plan, group=group)
    worker.shard.load()
    return worker, group
