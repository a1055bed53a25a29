"""The plan as a person reads it: what each rank holds, what the job asks of the cluster, where it will answer."""

from __future__ import annotations

import os
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from cluster.placement import group_bundles
from configs.checkpoint import resolve_model_path
from configs.load import AppConfig
from configs.model_config import read_model_config
from configs.resolve import HostFacts, dtype_bytes, resolve
from configs.schema import EngineConfig
from parallel.plan import ShardPlan

_MIB = 1 << 20


def print_plan(app: AppConfig, console: Console | None = None, *, gpus: bool | None = None) -> None:
    """Prints model, ranks, memory and placement of one config file.

    Args:
        gpus: whether the ranks run on GPUs; None takes the config's word, and cpu for `device: auto`.

    Raises:
        ConfigError: the file, the checkpoint or the two together are wrong.
    """
    console = console or Console(highlight=False)
    config = app.engine
    on_gpus = config.device == "cuda" if gpus is None else gpus
    model_path = resolve_model_path(config.model, config.revision)
    model = read_model_config(model_path)
    # One GPU a rank is what the placement will ask for; whether the cluster has them is checked when it is joined.
    host = HostFacts(num_cores=os.cpu_count() or 1, num_gpus=config.tensor_parallel_size if on_gpus else 0)
    resolved = resolve(config, model, host)
    plan = ShardPlan.create(model, config.tensor_parallel_size)
    console.print(
        f"{resolved.config.served_model_name}: {model.model_type}, {model.num_hidden_layers} layers, "
        f"{model.num_attention_heads} query heads, {model.num_key_value_heads} KV heads, {resolved.config.dtype}"
    )
    console.print(f"  from {model_path}", soft_wrap=True)
    console.print(_rank_table(plan, dtype_bytes(resolved.config.dtype)))
    for line in (*_memory_lines(plan, resolved.config), _placement_line(config, gpus=on_gpus)):
        console.print(line)
    for decision in resolved.decisions:
        console.print(f"  {decision}")
    console.print(f"endpoint: http://{app.host}:{app.port}{app.route_prefix.rstrip('/')}/v1")


def _rank_table(plan: ShardPlan, element_bytes: int) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("rank", "query heads", "KV heads", "MLP columns", "vocabulary rows", "weights", "KV per token"):
        table.add_column(title, justify="right")
    for rank in range(plan.tp_size):
        shards = [layer[rank] for layer in plan.layers]
        table.add_row(
            str(rank),
            _range(shard.q_heads.size for shard in shards),
            _range(shard.kv_heads.size for shard in shards),
            _range(shard.mlp.size for shard in shards),
            str(plan.vocab[rank].size),
            f"{plan.weight_elements(rank) * element_bytes / _MIB:.0f} MiB",
            f"{plan.kv_elements_per_token(rank) * element_bytes / 1024:.1f} KiB",
        )
    return table


def _range(sizes: Iterable[int]) -> str:
    """One number where every layer has the same, else the least and the most."""
    counts = list(sizes)
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low}-{high}"


def _memory_lines(plan: ShardPlan, config: EngineConfig) -> list[str]:
    element_bytes = dtype_bytes(config.dtype)
    weights = [plan.weight_elements(rank) * element_bytes for rank in range(plan.tp_size)]
    per_token = [plan.kv_elements_per_token(rank) * element_bytes for rank in range(plan.tp_size)]
    lines = [f"weights: {sum(weights) / _MIB:.0f} MiB in all, heaviest rank {max(weights) / _MIB:.0f} MiB"]
    kv = config.kv_cache
    if kv.num_tokens is not None:
        lines.append(
            f"KV pool: {kv.num_tokens} tokens (kv_cache.num_tokens), "
            f"{kv.num_tokens * max(per_token) / _MIB:.0f} MiB on the fullest rank"
        )
    elif kv.memory_bytes is not None:
        tokens = kv.memory_bytes // max(per_token)
        lines.append(f"KV pool: {kv.memory_bytes / _MIB:.0f} MiB a rank (kv_cache.memory_bytes) hold {tokens} tokens")
    else:
        lines.append(
            f"KV pool: {kv.memory_fraction:g} of the memory that is free once the weights are loaded "
            f"(kv_cache.memory_fraction), {max(per_token)} bytes a token on the fullest rank"
        )
    return lines


def _placement_line(config: EngineConfig, *, gpus: bool) -> str:
    bundles = group_bundles(config, gpus=gpus)
    cpus = sum(bundle["CPU"] for bundle in bundles)
    num_gpus = sum(bundle.get("GPU", 0.0) for bundle in bundles)
    group = f"{num_gpus:g} GPUs and {cpus:g} CPUs" if gpus else f"{cpus:g} CPUs"
    replicas = config.num_replicas
    total = f"{num_gpus * replicas:g} GPUs" if gpus else f"{cpus * replicas:g} CPUs"
    return (
        f"placement: {replicas} x tensor_parallel_size {config.tensor_parallel_size}; "
        f"a group takes {group} ({config.placement.strategy}), {total} in all"
    )
