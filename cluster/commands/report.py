"""The plan in readable form: what each rank stores, what the job requests from the cluster, and the endpoint's URL."""

from __future__ import annotations

import os
from collections.abc import Iterable
from fractions import Fraction
from operator import attrgetter
from pathlib import Path

from jinja2.exceptions import TemplateError
from rich.console import Console
from rich.table import Table

from cluster.commands.fit import fits, sizes_to_show
from cluster.commands.layers import print_layers
from cluster.engine.preflight import read_model
from cluster.serve.placement import group_bundles
from cluster.text.chat_template import ChatTemplate, read_template, template_sources
from cluster.text.formats import ModelFormats
from cluster.text.tools.generic import GenericTools
from configs.addresses import host_and_port
from configs.attention import installed_packages
from configs.cards import Card, shown, support
from configs.checkpoint import resolve_model_path
from configs.difference import Change, changes
from configs.errors import ConfigError
from configs.kv_pages import PoolRule, bytes_per_token, dtype_bytes, pages_within, pool_bytes
from configs.layers import Axis, HeadGroups
from configs.load import AppConfig, all_settings
from configs.model_config import ModelConfig
from configs.quantization import MXFP4_BYTES
from configs.read_draft_head import with_draft_head
from configs.recurrent import STATE_INTERVAL
from configs.resolve import Decision, HostFacts, ResolvedConfig, asks_for_gpus, resolve
from configs.schema import EngineConfig, resolved
from configs.weight_dtypes import weight_dtypes
from parallel.plan import ShardPlan

_MIB = 1 << 20
_GIB = 1 << 30
_WIDEST = 36  # a longer value, usually a path, shifts only its own line
_OPEN = ("kv_cache.num_tokens", "max_model_len")


def print_plan(
    app: AppConfig,
    console: Console | None = None,
    *,
    gpus: bool | None = None,
    gpu_memory_bytes: int | None = None,
    card: Card | None = None,
    settings: bool = False,
    layers: bool = False,
) -> None:
    """Prints model, ranks, memory and placement of one config file.

    Args:
        gpus: whether the ranks run on GPUs. If None, the config decides, and `device: auto` means cpu.
        gpu_memory_bytes: memory of each GPU. If given, also prints how many tokens fit on each number of GPUs.
        card: the GPUs. If None, nothing is decided by what they can do.
        settings: also print every setting, its value and its source.
        layers: also print the model's layers, their tensors and how they are cut.

    Raises:
        ConfigError: the file or the checkpoint is wrong, or they do not fit together.
    """
    console = console or Console(highlight=False)
    config = app.engine
    on_gpus = asks_for_gpus(config) or gpu_memory_bytes is not None if gpus is None else gpus
    model_path = resolve_model_path(config.model, config.revision, weights=config.has_local_weights)
    model = with_draft_head(read_model(config, model_path), config)
    # The placement will request one GPU per rank. Whether the cluster has enough is checked when it is joined.
    host = HostFacts(os.cpu_count() or 1, on_gpus * config.tensor_parallel_size, card, installed_packages())
    resolved = resolve(config, model, host)
    plan = ShardPlan.create(model, config.tensor_parallel_size, exact=resolved.config.is_exact)
    lines = [
        f"{resolved.config.model_names[0]}: {model.model_type}, {model.num_hidden_layers} layers, "
        f"{_heads(model)}, {resolved.config.dtype}, {resolved.config.numerics}",
        f"  from {model_path}",
        "",
        _rank_table(plan, resolved.config),
        "",
        *_memory_lines(plan, resolved.config),
        *([_card_line(card)] if on_gpus else []),
        _placement_line(config, gpus=on_gpus),
        f"tools      {_tools(config, model_path)}",
        f"endpoint   http://{host_and_port(app.host, app.port)}{app.route_prefix.rstrip('/')}/v1",
        "",
    ]
    if model.num_mtp_layers and config.speculation.method != "mtp":
        lines.insert(2, f"  without its {model.num_mtp_layers} layer(s) of MTP, which are not read")
    if gpu_memory_bytes is not None:
        lines += [_fit_table(model, resolved.config, gpu_memory_bytes), ""]
    if settings:
        lines += _settings_lines(app, resolved)
    else:
        lines += [f"  {decision}" for decision in resolved.decisions]
    if gpus is None and config.device == "auto" and not on_gpus:
        lines.append("  device: auto takes GPUs where the cluster has them; this is the plan without")
    for line in lines:
        # Lines are not wrapped, so that they can be searched and copied. A terminal wraps them by itself.
        console.print(line, soft_wrap=isinstance(line, str), markup=False)
    if layers:
        print_layers(plan, console)


def print_changes(before: AppConfig, after: AppConfig) -> None:
    """Prints how `after` differs, and the effect of each change on an app that runs with `before`."""
    console = Console(highlight=False)
    rows = [(it.key, _values(it), str(it.effect)) for it in changes(before, after)]
    widths = [max((len(row[i]) for row in rows), default=0) for i in (0, 1)]
    console.print(f"{len(rows) or 'no'} change{'' if len(rows) == 1 else 's'} to what runs", markup=False)
    for key, values, effect in rows:
        console.print(f"  {key:{widths[0]}}  {values:{widths[1]}}  {effect}", soft_wrap=True, markup=False)


def _values(change: Change) -> str:
    """Old and new value of a change. For an environment variable, which may be a secret, only whether it is set."""
    secret = ".env_vars." in change.key
    shown = ["-" if it is None else "(not shown)" if secret else str(it) for it in (change.before, change.after)]
    return " -> ".join(shown)


def _fit_table(model: ModelConfig, config: EngineConfig, memory_bytes: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="")
    for title in ("GPUs", "weights on the fullest", "KV tokens, about", "requests of 4,096 tokens"):
        table.add_column(title, justify="right")
    for fit in fits(model, config, sizes_to_show(model, config.tensor_parallel_size), memory_bytes):
        mark = " <" if fit.tp_size == config.tensor_parallel_size else "  "
        weights = f"{fit.weight_bytes / _GIB:.1f} of {memory_bytes / _GIB:.1f} GiB"
        cells = [f"{fit.kv_tokens:,}", f"{fit.kv_tokens // 4096:,}"] if fit.kv_tokens else ["does not fit", "-"]
        table.add_row(str(fit.tp_size), weights, cells[0], cells[1] + mark)
    return table


def _settings_lines(app: AppConfig, resolved: ResolvedConfig) -> list[str]:
    rows = []
    decided: dict[str, Decision] = {decision.key: decision for decision in resolved.decisions}
    for name in all_settings():
        value = attrgetter(name)(resolved.config)
        source = f"decided: {decided[name].why}" if name in decided else app.places.get(name, "default")
        shown = "open until the weights are loaded" if value is None and name in _OPEN else str(value)
        rows.append((name, shown, source))
    widths = [max(len(row[i]) for row in rows if len(row[i]) <= _WIDEST) for i in (0, 1)]
    return [f"  {name:{widths[0]}}  {shown:{widths[1]}}  {source}" for name, shown, source in rows]


def _heads(model: ModelConfig) -> str:
    kinds = dict.fromkeys(axis for layer in model.layers for axis in layer.axes if isinstance(axis, HeadGroups))
    return " or ".join(f"{kind.num_heads} {kind.heads}, {kind.num_groups} {kind.groups}" for kind in kinds)


def _rank_table(plan: ShardPlan, config: EngineConfig) -> Table:
    token_bytes = _kv_bytes_per_token(plan, config)
    table = Table(box=None, pad_edge=False, header_style="")
    axes = list(dict.fromkeys(axis for shards in plan.layers for axis in shards[0].spans))
    for title in ("rank", *axes, Axis.VOCABULARY, "weights", "pool per token"):
        table.add_column(title, justify="right")
    for rank in range(plan.tp_size):
        shards = [layer[rank] for layer in plan.layers]
        table.add_row(
            str(rank),
            *(_range(shard[axis].size for shard in shards if axis in shard.spans) for axis in axes),
            str(plan.vocab[rank].size),
            f"{plan.weight_bytes(rank, config) / _MIB:.0f} MiB",
            f"{token_bytes[rank] / 1024:.1f} KiB",
        )
    return table


def _kv_bytes_per_token(plan: ShardPlan, config: EngineConfig) -> list[float]:
    """Bytes of the pool per token on each rank. Layers with a window count by their share of all pages."""
    pages = [plan.kv_page_bytes(rank, config) for rank in range(plan.tp_size)]
    return [bytes_per_token(page, config.kv_cache.page_size, PoolRule.of(config, plan.model)) for page in pages]


def _range(sizes: Iterable[int]) -> str:
    """One number if the sizes are equal, else the smallest and the largest."""
    counts = list(sizes)
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low}-{high}"


def _memory_lines(plan: ShardPlan, config: EngineConfig) -> list[str]:
    dtypes, plain_bytes = weight_dtypes(config, plan.model), Fraction(dtype_bytes(config.dtype))
    weights = [plan.weight_bytes(rank, config) for rank in range(plan.tp_size)]
    kv, rule = config.kv_cache, PoolRule.of(config, plan.model)
    pages = [plan.kv_page_bytes(rank, config) for rank in range(plan.tp_size)]
    fullest = max(pages, key=lambda page: bytes_per_token(page, kv.page_size, rule))
    unused = 0
    for it in plan.model.tensors():
        is_fp8, is_mxfp4 = dtypes.fp8 and it.may_be_fp8, dtypes.mxfp4 and it.may_be_mxfp4
        unused += int((1 - it.share) * it.elements * (MXFP4_BYTES if is_mxfp4 else 1 if is_fp8 else plain_bytes))
    active = f"; a token uses {(sum(weights) - unused) / _MIB:.0f} MiB of them" if unused else ""
    line = f"weights    {sum(weights) / _MIB:.0f} MiB in all, {max(weights) / _MIB:.0f} MiB on the fullest rank{active}"
    num_pages = None
    if kv.num_tokens is not None:
        num_pages = -(-kv.num_tokens // kv.page_size)
        taken = pool_bytes(num_pages, fullest, rule)
        pool = f"{kv.num_tokens} tokens, {taken / _MIB:.0f} MiB on the fullest rank"
    elif kv.memory_bytes is not None:
        num_pages = max(pages_within(kv.memory_bytes, fullest, rule), 0)
        pool = f"{num_pages * kv.page_size} tokens, {kv.memory_bytes / _MIB:.0f} MiB a rank"
    else:
        pool = (
            f"{max(_kv_bytes_per_token(plan, config)) / 1024:.1f} KiB a token on the fullest rank; the pool takes "
            f"{resolved(kv.memory_fraction):g} of what is free after loading"
        )
    lines = [line, f"KV pool    {pool}"]
    rows = resolved(config.scheduler.max_num_seqs)
    if states := max(plan.state_bytes(rank, config) for rank in range(plan.tp_size)):
        line = f"states     {states / _MIB:.0f} MiB on the fullest rank for {rows} running requests"
        if rule.pages_per_state:
            cached = "" if num_pages is None else f"{rule.num_states(num_pages)}, "
            line += f"; in the KV pool {cached}one of {fullest.state / _MIB:.1f} MiB for each {STATE_INTERVAL} tokens"
        lines.append(line)
    if num_pages is not None:
        fit = min(rows, num_pages * kv.page_size // kv.typical_tokens)
        lines.append(f"requests   {fit} of {kv.typical_tokens} tokens fit at once")
    return lines


def _card_line(card: Card | None) -> str:
    if card is None:
        return "GPU        not known, and backends depend on it; name it with --gpu"
    capability, shared_kib = shown(card.compute_capability), card.shared_bytes >> 10
    peers = "" if card.has_peers else ", cannot read other GPUs' memory"
    facts = f"{card.name}, compute capability {capability}, {shared_kib} KiB of shared memory{peers}"
    return f"GPU        {facts}; {support(card.compute_capability)}"


def _placement_line(config: EngineConfig, *, gpus: bool) -> str:
    bundles = group_bundles(config, gpus=gpus)
    amounts = [_count(sum(bundle["CPU"] for bundle in bundles), "CPU")]
    if gpus:
        amounts.insert(0, _count(sum(bundle["GPU"] for bundle in bundles[1:]), "GPU"))
    groups = _count(config.num_replicas, "group")
    ranks = _count(config.tensor_parallel_size, "rank")
    return f"placement  {groups} of {ranks}; a group takes {' and '.join(amounts)} of Ray ({config.placement.strategy})"


def _tools(config: EngineConfig, model_path: Path) -> str:
    """How the model is shown tools, and the format of its calls."""
    given = config.server.chat_template
    tokenizer = Path(config.tokenizer or model_path).expanduser()
    if given is None and not tokenizer.exists():
        return "by the chat template, once the tokenizer is here"
    try:
        sources = template_sources(tokenizer) if given is None else read_template(given)
        template = None if sources is None else ChatTemplate(sources, {})
    except TemplateError as error:
        raise ConfigError(
            f"the chat template of {tokenizer} cannot be read; set server.chat_template to a Jinja file: {error}"
        ) from error
    if template is None:
        return "none: there is no chat template"
    match ModelFormats.of(template, config.server):
        case ModelFormats(generic=GenericTools(), calls=calls):
            return f"generic form, calls as {calls.name if calls else 'text'} (docs/guides/api.md)"
        case ModelFormats(takes_tools=True, calls=calls):
            return f"by the chat template, calls as {calls.name if calls else 'text'}"
        case _:
            return "none: the chat template shows none (server.tool_template=off)"


def _count(number: float, noun: str) -> str:
    return f"{number:g} {noun}" + ("" if round(number, 6) == 1 else "s")
