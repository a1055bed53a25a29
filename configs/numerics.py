"""Exact numerics: what cannot be exact, the leaves of sums over columns, the contract's version."""

from __future__ import annotations

from typing import Literal

from configs.errors import ConfigError
from configs.layers import Columns, HeadGroups
from configs.model_config import ModelConfig

CONTRACT = 2
"""The version of the section "One answer" in docs/concepts.md. Raise it with each change that gives an exact answer
other bits. It is part of `system_fingerprint`, so equal fingerprints still promise equal bits."""
_LARGEST_LEAF = 512
# Number of leaves for few columns, if these allow it. Up to this number of ranks get an even share, within a third.
_FEWEST_LEAVES = 12
# With many columns, the time to add leaves on GPUs matters more. On an H200, with 12288 columns, 256 rows and the norm
# after them: 8 leaves 56 us, 12 leaves 65, 24 leaves 80, and 45 if cuBLAS chooses the order.
_LEAVES_OF_COLUMNS = ((16384, 16), (4096, 8))
_WIDE_LEAF_UNIT = 64
MOST_LEAVES = 127
"""Largest number of leaves of a matrix in the kernels of GPUs."""


def check_exact(model: ModelConfig, device: Literal["cpu", "cuda"], tp_size: int) -> None:
    """Raises ConfigError with the reason if `numerics: exact` is impossible for `model`, `device` or this number of
    ranks."""
    for columns in (axis for layer in model.all_layers for axis in layer.axes if isinstance(axis, Columns)):
        num_leaves = columns.size // leaf_columns(columns.size)
        if device == "cuda" and num_leaves > MOST_LEAVES:
            raise ConfigError(
                f"exact sums over {columns.size} {columns.axis} have {num_leaves} parts, and GPUs add {MOST_LEAVES}"
            )
    for axis in (axis for layer in model.all_layers for axis in layer.mixer.axes if isinstance(axis, HeadGroups)):
        num_leaves = axis.num_heads // axis.leaf_heads
        if tp_size > num_leaves:
            raise ConfigError(
                f"exact sums over this model's heads have {num_leaves} parts, and tensor_parallel_size={tp_size} ranks "
                f"would have to share one; choose at most {num_leaves}"
            )


def leaf_columns(size: int) -> int:
    """Columns per leaf of the exact sums over `size` columns. It depends on the matrix alone, not on the number of
    ranks: an eighth of 4096 or more columns, a sixteenth of 16384 or more. For fewer columns, and columns that cannot
    be divided so, the largest power of two up to 512 that gives at least 12 leaves, or else the most leaves. If that
    gives more than 127 leaves, several of them form one, so that at least 12 remain."""
    for least, num_leaves in _LEAVES_OF_COLUMNS:
        if size >= least and size % (num_leaves * _WIDE_LEAF_UNIT) == 0:
            return size // num_leaves
    leaf = _LARGEST_LEAF
    while leaf > 1 and (size % leaf or size // leaf < _FEWEST_LEAVES):
        leaf //= 2
    most = size // leaf
    if most <= MOST_LEAVES:
        return leaf
    fitting = (count for count in range(_FEWEST_LEAVES, MOST_LEAVES + 1) if most % count == 0)
    return size // next(fitting, most)
