"""Reads tensors that stack all experts of a layer, as in some Qwen3.5 checkpoints, as if each expert had its own.

Gate and up are [num_experts, 2 * columns, hidden_size], gate's rows first, and down is [num_experts, hidden_size,
columns].
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING

from configs.model_config import ModelConfig
from parallel.plan import Span

if TYPE_CHECKING:  # checks of headers skip torch's slow import
    import torch

    from worker.weights.checkpoint import TensorFile

_STACKED = re.compile(r"(.+\.experts)\.(gate_up|down)_proj")
_PARTS = {"gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}


def by_expert(files: Sequence[TensorFile], model: ModelConfig) -> tuple[TensorFile, ...]:
    """`files`, with the matrices of each expert instead of stacked ones if `model` has the former."""
    if not any(_STACKED.fullmatch(name) for file in files for name in file.shapes()):
        return tuple(files)
    expected = model.stored_tensors().keys()
    return tuple(_ByExpert(file, expected) for file in files)


class _ByExpert:
    """Wraps a file. Divides its stacked tensors into the matrices in `expected`."""

    def __init__(self, file: TensorFile, expected: Set[str]) -> None:
        self._file = file
        self._shapes = dict(file.shapes())
        self._places = {name: (name, 0) for name in self._shapes}
        """For each tensor, its name in the file and its first row there, as `parallel.plan.as_matrix` counts rows."""
        for name, shape in file.shapes().items():
            found = _STACKED.fullmatch(name)
            if found is None or len(shape) != 3:
                continue
            parts = _PARTS[found[2]]
            size = shape[1] // len(parts)
            names = [f"{found[1]}.{i}.{it}.weight" for i in range(shape[0]) for it in parts]
            if expected >= set(names):
                del self._shapes[name], self._places[name]
                self._shapes |= dict.fromkeys(names, (size, shape[2]))
                self._places |= {part: (name, i * size) for i, part in enumerate(names)}

    @property
    def bytes_read(self) -> int:
        return self._file.bytes_read

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def scaled(self) -> set[str]:
        scaled = self._file.scaled()
        return {name for name, (stored, _) in self._places.items() if stored in scaled}

    def read(self, name: str, out: torch.Tensor, rows: Span, columns: Span | None) -> None:
        stored, first = self._places[name]
        self._file.read(stored, out, Span(first + rows.start, first + rows.stop), columns)

    def close(self) -> None:
        self._file.close()
