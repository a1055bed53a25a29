"""Shows a model as its specs describe it: its layers, their tensors, how these are cut, and the state of a token."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from configs.layers import Axis, LayerSpec, TensorSpec
from parallel.plan import LayerShard, ShardPlan

_TITLES = ("tensor", "shape", "cut along", "on a rank")


def print_layers(plan: ShardPlan, console: Console) -> None:
    """Prints each kind of layer once. Tensors that differ only in the number of their expert are also printed once."""
    model = plan.model
    kinds: dict[LayerSpec, list[int]] = {}
    for number, layer in enumerate(model.all_layers):
        kinds.setdefault(layer, []).append(number)
    console.print(f"{model.model_type}, tensors of no layer", markup=False)
    vocabulary = [LayerShard({Axis.VOCABULARY: span}) for span in plan.vocab]
    console.print(_tensor_table(model.outer_tensors, vocabulary))
    for layer, numbers in kinds.items():
        of_drafts = " (draft head)" if numbers[-1] == len(model.layers) else ""
        console.print(f"\nlayers {_ranges(numbers)}{of_drafts}", markup=False)
        state = (
            f"{count} elements" + (" on every rank" if axis is None else f" per {axis.removesuffix('s')}")
            for axis, count in layer.mixer.token_elements.items()
        )
        memory = [f"state of a token: {', '.join(state)}"] * bool(layer.mixer.token_elements)
        memory += ["state of a request"] * bool(layer.mixer.state)
        parts = [] if layer.feed_forward is None else [_described(layer.feed_forward)]
        for line in (_described(layer.mixer), *memory, *parts):
            console.print(f"  {line}", soft_wrap=True, markup=False)
        console.print(_tensor_table(layer.tensors, [shard for number in numbers for shard in plan.layers[number]]))


def _tensor_table(tensors: Iterable[TensorSpec], shards: Sequence[LayerShard]) -> Table:
    """A table with one line per tensor. `shards`: of every rank and every layer with these tensors; the last column
    shows their smallest and largest part."""
    table = Table(box=None, padding=(0, 2), header_style="")
    for title in _TITLES:
        table.add_column(title, no_wrap=True)
    kinds = Counter((re.sub(r"\.\d+\.", ".N.", it.name), it.shape, it.cut) for it in tensors)
    for (name, shape, cut), number in kinds.items():
        axis, part = "", "all of it"
        if cut is not None:
            axis = f"dimension {cut.dim}: {cut.axis}" + (f" x {cut.width}" if cut.width > 1 else "")
            sizes = [shard.span_of(cut).size for shard in shards]
            part = "-".join(map(str, sorted({min(sizes), max(sizes)})))
        table.add_row(f"{name} ({number} times)" if number > 1 else name, str(list(shape)), axis, part)
    return table


def _described(spec: Any) -> str:
    """The class of a spec, and the fields that do not have their default value."""
    given = {it.name: getattr(spec, it.name) for it in fields(spec) if getattr(spec, it.name) != it.default}
    values = (f"{name}={_described(it) if is_dataclass(it) else it}" for name, it in given.items())
    return f"{type(spec).__name__}({', '.join(values)})"


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers written as ranges, such as 0-4, 6-10."""
    ends = [i for i, number in enumerate(numbers) if number + 1 not in numbers[i + 1 : i + 2]]
    starts = [0, *(end + 1 for end in ends[:-1])]
    parts = zip((numbers[i] for i in starts), (numbers[i] for i in ends), strict=True)
    return ", ".join(f"{low}-{high}" if low < high else str(low) for low, high in parts)
