"""Reads tensors that a checkpoint stores group by group, as if all groups' rows of one part were together."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate, pairwise

import torch

from parallel.numerics.tensor_source import TensorSource
from parallel.plan import Span


class InterleavedRows(TensorSource):
    """Wraps a checkpoint. The rows of some of its tensors are groups of parts, such as the query rows and the gate rows
    of each head; here, the rows of each part are consecutive.

    Args:
        parts: for each such tensor, the number of rows that a group has of each part, in the order of the parts.
        num_groups: the number of groups.
    """

    def __init__(self, source: TensorSource, parts: Mapping[str, tuple[int, ...]], num_groups: int) -> None:
        self._source = source
        self._parts = parts
        self._num_groups = num_groups

    def scale_block(self, name: str) -> tuple[int, int] | None:
        """None for reordered tensors, which are read in the activations' dtype."""
        return None if name in self._parts else self._source.scale_block(name)

    def read_fp8(self, name: str, out: torch.Tensor, scales: torch.Tensor, *, rows: Span, columns: Span) -> None:
        self._source.read_fp8(name, out, scales, rows=rows, columns=columns)

    def read(self, name: str, out: torch.Tensor, *, rows: Span | None = None, columns: Span | None = None) -> None:
        """Reads rows of one part of a reordered tensor, in whole groups or within one group, or any tensor."""
        if name not in self._parts:
            self._source.read(name, out, rows=rows, columns=columns)
            return
        assert rows is not None, "rows of one part are asked for"
        sizes, num_groups = self._parts[name], self._num_groups
        bounds = [num_groups * bound for bound in accumulate(sizes, initial=0)]
        part = next(i for i in range(len(sizes)) if rows.start < bounds[i + 1])
        assert rows.stop <= bounds[part + 1], "rows of one part are asked for"
        before, size, of_group = sum(sizes[:part]), sizes[part], sum(sizes)
        at = rows.start - bounds[part]
        for taken in torch.split(out, [it.size for it in _in_groups(Span(at, at + rows.size), size)]):
            group, offset = divmod(at, size)
            first = group * of_group + before + offset
            self._source.read(name, taken, rows=Span(first, first + len(taken)), columns=columns)
            at += len(taken)


def _in_groups(rows: Span, size: int) -> list[Span]:
    """The parts of `rows` in each group of `size` rows."""
    borders = [rows.start, *range((rows.start // size + 1) * size, rows.stop, size), rows.stop]
    return [Span(start, stop) for start, stop in pairwise(borders)]
