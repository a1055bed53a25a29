"""The slots of the recurrent layers' states in the prefix cache, and the copies of states that the ranks have to make.

Row r always has slot r (`attention/state_pool.py`). A state that should stay is copied to a slot of the cache, and from
there to each row that continues its prefix. A frame lists copies, and ranks make them in order, before the frame's
step. So a slot may be used again at once, and no slot is locked.

Each chunk of a prompt leaves a state, for rows that wait for this chunk. Once the prompt has its next state, most of
these are the first that are dropped: only one for each `STATE_INTERVAL` tokens counts as used.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from cluster.scheduling.prefix_cache import Node
from configs.recurrent import STATE_INTERVAL
from worker.protocol import Int32Array


class StateSlots:
    """Which nodes of the prefix cache have a state.

    Args:
        num_rows: number of rows. The slots of the cache come after theirs.
        num_slots: number of slots of the cache.
    """

    def __init__(self, num_rows: int, num_slots: int) -> None:
        self._first, self._num_slots = num_rows + 1, num_slots
        self._free = list(range(num_rows + num_slots, num_rows, -1))
        self._nodes: OrderedDict[Node, None] = OrderedDict()  # nodes with a state, the first is dropped first
        self._inside: dict[int, tuple[Node, int]] = {}  # by row: the last state inside its prompt, its number of tokens
        self._before: dict[int, int] = {}  # by row: number of tokens of the state before that one. 0 if there is none
        self._copies: list[tuple[int, int, int]] = []
        self.num_dropped = 0
        """Number of states that were dropped for others."""
        self._stored_by: dict[int, int] = {}  # for each slot, the step before which a state was last copied to it

    def adopt(self, row: int, node: Node, num_tokens: int) -> None:
        """Gives a row the state after `node`'s prefix of `num_tokens` tokens. The node must have a state."""
        self._go_past(row, num_tokens)
        self._before[row] = num_tokens
        self._nodes.move_to_end(node)
        self._copies.append((node.state, row, num_tokens))

    def keep(self, row: int, node: Node, num_tokens: int, *, is_inside: bool) -> None:
        """Stores the row's state, which covers `num_tokens` tokens, as the state after `node`'s prefix. The least
        recently used state is dropped if all slots are taken.

        Args:
            is_inside: whether this is a chunk's end inside a prompt, where no other prompt is known to part.
        """
        self._go_past(row, num_tokens)
        if node.state:
            self._nodes.move_to_end(node)
            return
        if not self._free:
            if not self._nodes:
                return
            self.num_dropped += 1
            self.drop(next(iter(self._nodes)))
        node.state = self._free.pop()
        self._stored_by.pop(node.state, None)
        self._nodes[node] = None
        self._copies.append((row, node.state, num_tokens))
        if is_inside:
            self._inside[row] = node, num_tokens

    def _go_past(self, row: int, num_tokens: int) -> None:
        """Decides on the row's last state inside its prompt, now that the row has one after `num_tokens` tokens."""
        if (inside := self._inside.pop(row, None)) is None:
            return
        node, num_inside = inside
        if num_tokens - self._before.get(row, 0) > STATE_INTERVAL:
            self._before[row] = num_inside
        elif node in self._nodes:
            self._nodes.move_to_end(node, last=False)

    def release(self, row: int) -> None:
        """Notes that the row ends, or that it was given no pages, so that its copy is not needed."""
        if self._copies and self._copies[-1][1] == row:
            self._copies.pop()
        self._inside.pop(row, None)
        self._before.pop(row, None)

    def drop(self, node: Node) -> None:
        """Removes the state of `node`."""
        del self._nodes[node]
        self._free.append(node.state)
        node.state = 0

    def lose(self, first_lost: int | None) -> list[int]:
        """Removes the states that no step before `first_lost` has stored, because the ranks did not store them, and
        forgets all copies. If `first_lost` is None, the ranks have lost all states.

        Returns:
            The rows that lost their state.
        """
        lost = {slot for slot, step in self._stored_by.items() if first_lost is None or step >= first_lost}
        for node in list(self._nodes):
            if node.state in lost or node.state not in self._stored_by:
                self.drop(node)
        self._copies.clear()
        return [slot for slot in lost if slot < self._first]

    def take_copies(self, step: int) -> Int32Array:
        """Returns the copies [n, 3] since the last call, which the ranks make before `step`, in order: source slot,
        target slot, number of tokens."""
        copies, self._copies = self._copies, []
        self._stored_by.update((target, step) for _, target, _ in copies)
        return np.array(copies, np.int32).reshape(-1, 3)

    @property
    def used(self) -> Int32Array:
        """Slots with states that are needed: those of nodes, and sources of copies."""
        return np.unique(np.array([node.state for node in self._nodes] + [it[0] for it in self._copies], np.int32))

    def check_integrity(self) -> None:
        """Raises AssertionError unless every slot is free or has one node."""
        slots = [node.state for node in self._nodes] + self._free
        assert sorted(slots) == list(range(self._first, self._first + self._num_slots)), "a slot is lost or taken twice"
