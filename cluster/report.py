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
from configs.schema import EngineConfig, resolved
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
    model_path = resolve_model_path(config.model, config.revision, weights=config.load_format != "dummy")
    model = read_model_config(model_path)
    # One GPU a rank is what the placement will ask for; whether the cluster has them is checked when it is joined.
    host = HostFacts(num_cores=os.cpu_count() or 1, num_gpus=config.tensor_parallel_size if on_gpus else 0)
    resolved = resolve(config, model, host)
    plan = ShardPlan.create(model, config.tensor_parallel_size)
    lines = [
        f"{resolved.config.served_model_name}: {model.model_type}, {model.num_hidden_layers} layers, "
        f"{model.num_attention_heads} query heads, {model.num_key_value_heads} KV heads, {resolved.config.dtype}",
        f"  from {model_path}",
        "",
        _rank_table(plan, dtype_bytes(resolved.config.dtype)),
        "",
        *_memory_lines(plan, resolved.config),
        _placement_line(config, gpus=on_gpus),
        f"endpoint   http://{app.host}:{app.port}{app.route_prefix.rstrip('/')}/v1",
        "",
        *(f"  {decision}" for decision in resolved.decisions),
    ]
    if gpus is None and config.device == "auto":
        lines.append("  device: auto takes GPUs where the cluster has them; this is the plan without")
    for line in lines:
        # Not wrapped: a line is for grep and for copying too, and a terminal wraps by itself.
        console.print(line, soft_wrap=isinstance(line, str), markup=False)


def _rank_table(plan: ShardPlan, element_bytes: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="")
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
    lines = [f"weights    {sum(weights) / _MIB:.0f} MiB in all, {max(weights) / _MIB:.0f} MiB on the fullest rank"]
    kv = config.kv_cache
    if kv.num_tokens is not None:
        pool = f"{kv.num_tokens} tokens, {kv.num_tokens * max(per_token) / _MIB:.0f} MiB on the fullest rank"
    elif kv.memory_bytes is not None:
        pool = f"{kv.memory_bytes // max(per_token)} tokens, {kv.memory_bytes / _MIB:.0f} MiB a rank"
    else:
        pool = (
            f"{max(per_token) / 1024:.1f} KiB a token on the fullest rank; the pool takes "
            f"{resolved(kv.memory_fraction):g} of what is free after loading"
        )
    return [*lines, f"KV pool    {pool}"]


def _placement_line(config: EngineConfig, *, gpus: bool) -> str:
    bundles = group_bundles(config, gpus=gpus)
    amounts = [_count(sum(bundle["CPU"] for bundle in bundles), "CPU")]
    if gpus:
        amounts.insert(0, _count(sum(bundle["GPU"] for bundle in bundles[1:]), "GPU"))
    groups = _count(config.num_replicas, "group")
    ranks = _count(config.tensor_parallel_size, "rank")
    return f"placement  {groups} of {ranks}; a group takes {' and '.join(amounts)} of Ray ({config.placement.strategy})"


def _count(number: float, noun: str) -> str:
    return f"{number:g} {noun}" + ("" if round(number, 6) == 1 else "s")
