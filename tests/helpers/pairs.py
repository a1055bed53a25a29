"""Cases by pairs: any two values of two parameters come together in one of them, which a product of all makes many."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any


def pairs(*values: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Cases of one value of each parameter; always the same ones."""
    sizes = [len(it) for it in values]
    places = itertools.combinations(range(len(values)), 2)
    wanted = {(i, a, j, b) for i, j in places for a in range(sizes[i]) for b in range(sizes[j])}
    cases = []
    while wanted:
        i, a, j, b = min(wanted)
        chosen = {i: a, j: b}
        for k in set(range(len(values))) - {i, j}:
            new = [
                sum((*min((k, c), it), *max((k, c), it)) in wanted for it in chosen.items()) for c in range(sizes[k])
            ]
            chosen[k] = new.index(max(new))
        wanted -= {first + second for first, second in itertools.combinations(sorted(chosen.items()), 2)}
        cases.append(tuple(it[chosen[k]] for k, it in enumerate(values)))
    return cases
