"""The figures of `benchmarks.engine` as lines and tables for people, beside a peer's where it has some."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import describe_circumstances, table

_PEERS = Path(__file__).with_name("peers.json")


def find_peer(model: str, tensor_parallel_size: int) -> dict[str, Any] | None:
    """vLLM's figures for the model directory `model`, with who, where and how; None when there are none.

    Returns:
        `name`, `hardware`, `method`; `decode_ms` by batch as a string, `workload_tok_s` and `prefill_tok_s`.
    """
    peers = json.loads(_PEERS.read_text(encoding="utf-8"))
    by_model = {name.lower(): sizes for name, sizes in peers["figures"].items()}
    figures = by_model.get(model.lower(), {}).get(str(tensor_parallel_size))
    return None if figures is None else {key: peers[key] for key in ("name", "hardware", "method")} | figures


def start_line(figures: Mapping[str, Any]) -> str:
    """The time that the start took and the memory that it left."""
    return (
        f"started in {figures['start_s']:.1f} s (weights {figures['load_s']:.1f} s), first token in "
        f"{figures['first_token_s']:.2f} s; KV pool of {figures['kv_tokens']:,} tokens, "
        f"max_model_len {figures['max_model_len']:,}"
    )


def decode_line(row: Mapping[str, Any]) -> str:
    """One batch of the decode part."""
    if "skipped" in row:
        return f"decode, batch {row['batch']}: skipped, {row['skipped']}"
    rounds = ", ".join(f"{ms:.3f}" for ms in row["rounds_ms"])
    others = "".join(f"; {name} {ms} ms" for name, ms in row.get("others_ms", {}).items())
    return f"decode, batch {row['batch']}: {row['ms']:.3f} ms a step (rounds: {rounds}){others}"


def workload_line(workload: Mapping[str, Any]) -> str:
    """The workload part."""
    what = (
        f"workload, {workload['requests']} requests, {workload['input_tokens']:,} tokens in and "
        f"{workload['output_tokens']:,} out: "
    )
    if "skipped" in workload:
        return what + f"skipped, {workload['skipped']}"
    return what + (
        f"{workload['tok_s']:,.0f} output tok/s ({workload['s']:.1f} s, {workload['num_steps']:,} steps, "
        f"{workload['total_preemptions']} preemptions)"
    )


def prefill_line(prefill: Mapping[str, Any]) -> str:
    """The prefill part."""
    what = f"prefill, {prefill['prompts']} x {prefill['tokens']:,}: "
    if "skipped" in prefill:
        return what + f"skipped, {prefill['skipped']}"
    rounds = ", ".join(f"{rate:,.0f}" for rate in prefill["rounds_tok_s"])
    return what + f"{prefill['tok_s']:,.0f} tok/s (rounds: {rounds})"


def ttft_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The ttft part: a line for each number of other requests."""
    by_beside: dict[int, list[str]] = {}
    for row in rows:
        outcome = f"{row['ms']:.1f} ms" if "ms" in row else f"skipped, {row['skipped']}"
        by_beside.setdefault(row["beside"], []).append(f"{row['tokens']:,} tokens {outcome}")
    return [
        "first token of one prompt, "
        + (f"beside {beside} that decode: " if beside else "idle engine: ")
        + "; ".join(outcomes)
        for beside, outcomes in by_beside.items()
    ]


def _attention(engine: Mapping[str, Any]) -> str:
    """Backends of prompts and of decodes; files of before 2026-11-23 have one name for both."""
    if "attention_backend" in engine:
        return str(engine["attention_backend"])
    attention = engine["attention"]
    return "+".join(dict.fromkeys((attention["prefill_backend"], attention["decode_backend"])))


def render(figures: Mapping[str, Any]) -> str:
    """All that `figures`, the JSON of one run, hold; parts that were not measured are left out."""
    lines = []
    if "config" in figures:
        lines.append(f"{figures['config']} {' '.join(figures['overrides'])}".strip())
        lines.append(describe_circumstances(dict(figures)))
    if "engine" in figures:
        engine = figures["engine"]
        lines.append(
            f"{figures['model']}, TP {figures['tensor_parallel_size']}, {engine['dtype']}, "
            f"{_attention(engine)}, {engine['parallel']['all_reduce']}"
        )
        lines.append(start_line(figures))
    if "copy_bandwidth_gb_s" in figures:
        lines.append(f"copy bandwidth {figures['copy_bandwidth_gb_s']:,.0f} GB/s, read and written bytes counted")
    peer = figures.get("peer")
    measured = [row for row in figures.get("decode", ()) if "ms" in row]
    if measured:
        lines += ["", _decode_table(measured, peer), ""]
    lines += [decode_line(row) for row in figures.get("decode", ()) if "skipped" in row]
    for part, line, key in (
        ("prefill", prefill_line, "prefill_tok_s"),
        ("workload", workload_line, "workload_tok_s"),
    ):
        if part in figures:
            lines.append(line(figures[part]) + _beside(figures[part], peer, key))
    if "ttft" in figures:
        lines += ttft_lines(figures["ttft"])
    if peer is not None:
        lines += ["", f"speed / {peer['name']}'s: above 1 is faster than it. {peer['hardware']}; {peer['method']}"]
    return "\n".join(lines)


def _decode_table(rows: list[Mapping[str, Any]], peer: Mapping[str, Any] | None) -> str:
    header = ["batch", "ms/step", "tok/s", "floor ms", "of floor"]
    if peer is not None:
        header += [f"{peer['name']} ms", "speed / its"]
    cells = []
    for row in rows:
        line = [str(row["batch"]), f"{row['ms']:.3f}", f"{row['tok_s']:,.0f}"]
        line += [f"{row['floor_ms']:.3f}", f"{100 * row['of_floor']:.0f} %"] if "floor_ms" in row else ["-", "-"]
        if peer is not None:
            theirs = peer["decode_ms"].get(str(row["batch"]))
            line += ["-", "-"] if theirs is None else [f"{theirs:.2f}", f"{theirs / row['ms']:.2f}"]
        cells.append(line)
    return table(header, cells)


def _beside(part: Mapping[str, Any], peer: Mapping[str, Any] | None, key: str) -> str:
    if peer is None or "tok_s" not in part:
        return ""
    return f"; {peer['name']} {peer[key]:,}, speed / its {part['tok_s'] / peer[key]:.2f}"
