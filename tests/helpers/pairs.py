"""Cases by pairs: any two values of two parameters come together in one of them, which a product of all makes many."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any


def pairs(*values: Sequence[Any], allowed: Callable[..., bool] = lambda *_: True) -> list[tuple[Any, ...]]:
    """Cases of one value of each parameter that are `allowed`; always the same ones. Where several would do, those of
    the first values."""
    wanted = dict[tuple[Any, ...], None]()
    having = defaultdict[tuple[Any, ...], list[tuple[int, ...]]](list)
    for case in itertools.product(*(range(len(it)) for it in values)):
        if allowed(*(it[i] for i, it in zip(case, values, strict=True))):
            for pair in itertools.combinations(enumerate(case), 2):
                wanted[pair] = None
                having[pair].append(case)
    cases = []
    while wanted:
        best = max(
            having[next(iter(wanted))],
            key=lambda case: sum(pair in wanted for pair in itertools.combinations(enumerate(case), 2)),
        )
        for pair in itertools.combinations(enumerate(best), 2):
            wanted.pop(pair, None)
        cases.append(tuple(it[i] for i, it in zip(best, values, strict=True)))
    return cases
