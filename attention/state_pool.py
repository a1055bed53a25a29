"""The states of recurrent layers on one rank: of running requests, and of prefixes in the prefix cache.

Slots 1 to the number of rows hold the states of running requests: slot r belongs to row r. The slots after them hold
cached states. Slot 0 is padding. A slot's state covers the first `num_covered` tokens of its request, a multiple of
`configs.recurrent.STATE_CHUNK`. A running row also has recent entries, for the tokens after its state.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from attention.kv_pool import parts_of
from configs.errors import EngineError
from configs.layers import Mixer
from configs.recurrent import STATE_CHUNK
from parallel.numerics.arithmetic import LayerContext


@dataclass(frozen=True, slots=True)
class StateLayer:
    """The state of one recurrent layer on one rank."""

    layer_id: int
    tensors: tuple[tuple[int, int, torch.dtype], ...]
    """For each `StateTensor` of the spec: `num_recent`, the number of elements of an entry on this rank, and their
    dtype."""

    @classmethod
    def of(cls, layer_id: int, spec: Mixer, context: LayerContext) -> StateLayer:
        """The state of a layer with mixer `spec`."""
        return cls(
            layer_id,
            tuple(
                (it.num_recent, context.shard.amount(it.elements), torch.float32 if it.is_fp32 else context.dtype)
                for it in spec.state
            ),
        )


@dataclass(frozen=True)
class RowStates:
    """Which states a step's rows read and write. Tensors are int32 [num_rows] on the device, unless said otherwise."""

    pool: StatePool
    num_tokens: int
    """Number of the step's tokens, those of padding rows included."""
    is_decode: bool
    """Whether each row, padding too, has one token."""
    rows: torch.Tensor
    """The row of each of the step's rows in the request table, which is its slot too. 0 for padding."""
    cu_seqlens_q: torch.Tensor
    """[num_rows + 1]: start of each row's input tokens in the batch, and the end of the last row's."""
    ends: torch.Tensor
    """Number of each row's tokens, those of this step included."""
    before: torch.Tensor
    """Number of tokens that the slot's state covers before the step."""
    after: torch.Tensor
    """Number of tokens that the slot's state covers after the step. Drafts of the step are not among them."""

    @cached_property
    def row_of_token(self) -> torch.Tensor:
        """[num_tokens] int32: the index in `rows` of the row of each of the step's tokens."""
        tokens = torch.arange(self.num_tokens, dtype=torch.int32, device=self.rows.device)
        return torch.searchsorted(self.cu_seqlens_q[1:], tokens, right=True, out_int32=True)


def slot_tensors(
    num_slots: int, entries: Sequence[tuple[int, torch.dtype]], allocate: Callable[[int], torch.Tensor]
) -> list[torch.Tensor]:
    """A layer's stored states [num_slots + 1, elements], one tensor for each (elements, dtype) of `entries`. `allocate`
    returns their memory [num_bytes] uint8."""
    parts = parts_of([(num_slots + 1) * size * dtype.itemsize for size, dtype in entries], allocate)
    return [part.view(dtype).view(-1, size) for part, (size, dtype) in zip(parts, entries, strict=True)]


class StatePool:
    """The states of all recurrent layers of a rank.

    Args:
        num_rows: number of rows of the request table, without padding.
        num_cached: number of slots for states in the prefix cache.
        allocate: allocates the memory of a layer's slots, [num_bytes] uint8 on `device` with finite numbers, given the
            layer's index and num_bytes. If None, the pool allocates it.
    """

    def __init__(
        self,
        layers: Sequence[StateLayer],
        num_rows: int,
        num_cached: int,
        device: torch.device,
        allocate: Callable[[int, int], torch.Tensor] | None = None,
    ) -> None:
        self.num_rows = num_rows
        self.num_slots = num_rows + num_cached
        self._num_covered = torch.zeros(self.num_slots + 1, dtype=torch.int32, device=device)
        if allocate is None:

            def allocate(_layer_id: int, num_bytes: int) -> torch.Tensor:
                return torch.zeros(num_bytes, dtype=torch.uint8, device=device)

        self._tensors = {layer.layer_id: self._tensors_of(layer, allocate, device) for layer in layers}

    def _tensors_of(
        self, layer: StateLayer, allocate: Callable[[int, int], torch.Tensor], device: torch.device
    ) -> tuple[torch.Tensor, ...]:
        stored = [(size, dtype) for num_recent, size, dtype in layer.tensors if not num_recent]
        slots = iter(slot_tensors(self.num_slots, stored, functools.partial(allocate, layer.layer_id)))
        # Zeros, because recent entries that no token has written are read with a weight of zero.
        return tuple(
            torch.zeros(self.num_rows + 1, num_recent, size, dtype=dtype, device=device) if num_recent else next(slots)
            for num_recent, size, dtype in layer.tensors
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of all states."""
        return sum(tensor.nbytes for tensors in self._tensors.values() for tensor in tensors)

    def tensors(self, layer_id: int) -> tuple[torch.Tensor, ...]:
        """The layer's tensors in the order of its spec: [num_slots + 1, elements], or with recent entries [num_rows +
        1, num_recent, elements], where token t has entry t % num_recent."""
        return self._tensors[layer_id]

    def slots(self, layer_id: int) -> list[torch.Tensor]:
        """The layer's tensors without recent entries: [num_slots + 1, elements] each."""
        return [it for it in self._tensors[layer_id] if it.dim() == 2]

    def check(self, copies: npt.NDArray[np.int32]) -> None:
        """Raises EngineError if a copy in `copies` is outside the pool. See `copy`."""
        if len(copies) and not (
            (copies > 0).all() and (copies[:, :2] <= self.num_slots).all() and not (copies[:, 2] % STATE_CHUNK).any()
        ):
            raise EngineError(f"a copy of states is outside {self.num_slots} slots; please report this bug")

    def copy(self, copies: npt.NDArray[np.int32]) -> None:
        """Copies states between slots, in order. `copies` [n, 3]: source, target, and the number of tokens that the
        state covers."""
        slots = [it for layer_id in self._tensors for it in self.slots(layer_id)]
        for source, target, num_covered in copies.tolist():
            self._num_covered[target] = num_covered
            # In one kernel for many tensors
            torch._foreach_copy_([it[target] for it in slots], [it[source] for it in slots])

    def repeat_first_row(self, num_rows: int) -> None:
        """Gives rows 2 to `num_rows` the state and the recent entries of row 1. A self-test uses this."""
        for tensor in (self._num_covered, *(it for tensors in self._tensors.values() for it in tensors)):
            tensor[2 : num_rows + 1] = tensor[1]

    def begin(
        self,
        num_tokens: int,
        rows: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        ends: torch.Tensor,
        num_drafts: torch.Tensor,
        *,
        is_decode: bool = False,
    ) -> RowStates:
        """Starts a step: decides which of its rows' states move forward. A graph may capture this.

        Args:
            num_tokens: `RowStates.num_tokens`.
            rows: `RowStates.rows`.
            cu_seqlens_q: `RowStates.cu_seqlens_q`.
            ends: `RowStates.ends`.
            num_drafts: [num_rows] int32, device: how many of each row's inputs, at their end, are unverified drafts.
            is_decode: `RowStates.is_decode`.
        """
        # A row that begins is that of another request than before.
        begins = ends == cu_seqlens_q.diff()
        before = self._num_covered.index_select(0, rows).masked_fill(begins, 0)
        after = torch.maximum(before, (ends - num_drafts).div(STATE_CHUNK, rounding_mode="floor") * STATE_CHUNK)
        self._num_covered.index_copy_(0, rows.long(), after)
        return RowStates(self, num_tokens, is_decode, rows, cu_seqlens_q, ends, before, after)
