"""Fills docs/measured.md, docs/decode.svg and the figures of the README from the files in benchmarks/results.

docs/measured.yaml says which figure of which file goes where. `python docs/generate.py` writes the results, and a test
compares them with the files.
"""

from __future__ import annotations

import json
import re
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

import yaml

DOCS = Path(__file__).resolve().parent
RESULTS = DOCS.parent / "benchmarks" / "results"
_BEGIN, _END = "<!-- figures, made by docs/generate.py -->", "<!-- end of figures -->"


def measured() -> str:
    """The text of docs/measured.md."""
    lines = [
        "<!-- made by docs/generate.py from docs/measured.yaml -->",
        "# What was measured",
        "",
        "Every figure is read from the file in `benchmarks/results/` that its row names. Each file has its command, "
        "hardware and versions. Absolute times count only on the GPU that is named. FA3 is the wheel `tokenspeed-fa3`.",
    ]
    for table in _spec()["tables"]:
        columns: dict[str, list[str]] = table["columns"]
        lines += ["", f"## {table['title']}", "", table["text"].strip(), ""]
        lines += [f"| | {' | '.join(columns)} | measured | result |", "|---" * (len(columns) + 3) + "|"]
        for row in table["rows"]:
            cells = row.get("cells", columns)
            shown = [
                "-"
                if name in row.get("lacks", ())
                else ", ".join(_figure(row["file"], it.format_map(row)) for it in cells.get(name, ()))
                for name in columns
            ]
            lines.append(f"| {row['label']} | {' | '.join(shown)} | {_when(row['file'])} | `{row['file']}` |")
    return "\n".join(lines) + "\n"


def readme(text: str) -> str:
    """The README with its figures as they are in the results."""
    lines = [_BEGIN]
    for item in _spec()["highlights"]:
        figures = [_figure(it["file"], it["at"]) for it in item["figures"]]
        files = ", ".join(dict.fromkeys(f"`{Path(it['file']).name}`" for it in item["figures"]))
        lines.append(f"- {item['text'].format(*figures)} ({files})")
    before, _, rest = text.partition(_BEGIN)
    return before + "\n".join([*lines, ""]) + _END + rest.partition(_END)[2]


def picture() -> str:
    """docs/decode.svg: bars of decode steps, Lockstep above vLLM."""
    spec = _spec()["picture"]
    bars = [
        (
            it["label"],
            float(_figure(it["ours"], f"decode[batch={it['batch']}]/ms:.4f")),
            float(_figure("../peers.json", f"figures/{it['model']}/1/decode_ms/{it['batch']}:.4f")),
        )
        for it in spec["bars"]
    ]
    left, width, row = 170, 380, 46
    scale = width / max(max(ours, peer) for _, ours, peer in bars)
    height = 56 + row * len(bars)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 {height}" font-family="sans-serif" font-size="13">',
        f'<rect width="640" height="{height}" fill="white"/>',
        f'<text x="12" y="22" font-size="15">{escape(spec["title"])}</text>',
        '<rect x="12" y="32" width="11" height="11" fill="#2a6f97"/><text x="28" y="42">Lockstep</text>',
        '<rect x="100" y="32" width="11" height="11" fill="#b0b7bd"/><text x="116" y="42">vLLM 0.25.0</text>',
    ]
    for i, (label, ours, peer) in enumerate(bars):
        top = 56 + row * i
        parts.append(f'<text x="12" y="{top + 20}">{escape(label)}</text>')
        for y, value, colour in (top, ours, "#2a6f97"), (top + 18, peer, "#b0b7bd"):
            parts.append(f'<rect x="{left}" y="{y}" width="{value * scale:.1f}" height="15" fill="{colour}"/>')
            parts.append(f'<text x="{left + value * scale + 6:.1f}" y="{y + 12}">{value:.2f}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


@cache
def _spec() -> Any:  # the shape is that of docs/measured.yaml
    return yaml.safe_load((DOCS / "measured.yaml").read_text())


@cache
def _read(file: str) -> Any:
    path = RESULTS / file
    return json.loads(path.read_text()) if path.suffix == ".json" else path.read_text()


def _when(file: str) -> str:
    """Date and commit of a result; as far as the file has them."""
    found = _read(file)
    if isinstance(found, str):
        commit, date = re.search(r"commit ([0-9a-f]{7})", found), re.search(r"\d{4}-\d\d-\d\d", found + file)
        return ", ".join(it[it.lastindex or 0] for it in (date, commit) if it)
    found = found.get("circumstances", found)
    return ", ".join(found[key] for key in ("date", "commit") if key in found)


def _figure(file: str, cell: str) -> str:
    """The figure at `path:format` in a result. Raises KeyError, IndexError or ValueError if it is not there."""
    path, _, form = cell.rpartition(":")
    value = _read(file)
    if path.startswith("/"):
        match = re.search(path[1:-1], value, re.MULTILINE)
        if match is None:
            raise ValueError(f"{file} has nothing that matches {path}")
        return format(float(match[1].replace(",", "")), form)
    for step in path.split("/"):
        name, *wanted = re.split(r"\[|\]\[|\]", step)
        value = value[int(name) if isinstance(value, list) else name]
        for key, _, number in (it.partition("=") for it in wanted if it):
            value = [it for it in value if str(it[key]) == number]
        value = value[0] if any(wanted) else value
    return format(value, form)
