"""Recurrent mixers of configs/layers.py: layers with a state per request instead of keys and values per token.

The state is stored after every `STATE_CHUNK` tokens of a request, counted from its beginning. Of the tokens after that,
a running request stores what they add to the state. So a rejected draft costs nothing, and states exist exactly where
the pages of the prefix cache end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from configs.attention import Feature
from configs.layers import Amounts, Axis, Columns, Cut, Linear, Role, StateTensor, TensorSpec, tensors_of
from configs.rope import RopeConfig

STATE_CHUNK = 64
"""Tokens between two stored states."""
RECENT_INPUTS = 32
"""Inputs of convolutions that a running request stores: those before its next token, and those of drafts."""
RECENT_TOKENS = 2 * STATE_CHUNK
"""Tokens after the stored state, drafts included. A running request stores what each of them adds to the state."""
STATE_INTERVAL = 1024
"""Tokens of the KV pool's pages for which the prefix cache can store one state. So a prompt may leave one after each of
its parts of this length, and a sequence of twice this length one after its prompt and one after its answer."""


class Recurrent:
    """What all recurrent mixers have in common as a `Mixer`: they have neither keys nor positions."""

    rope: ClassVar = RopeConfig(theta=10000.0, partial=0.0)
    rotary_dim: ClassVar = 0
    window: ClassVar = None
    chunk: ClassVar = None
    head_dim: ClassVar = 0
    features: ClassVar = frozenset[Feature]()
    kv_scales: ClassVar = ()
    token_elements: ClassVar[Amounts] = {}
    pair_flops: ClassVar[Amounts] = {}


@dataclass(frozen=True)
class NoMixer(Recurrent):
    """The mixer of a layer that has only a feed-forward."""

    tensors: ClassVar[tuple[TensorSpec, ...]] = ()
    axes: ClassVar[tuple[Columns, ...]] = ()
    state: ClassVar[tuple[StateTensor, ...]] = ()


@dataclass(frozen=True, kw_only=True)
class ShortConvolution(Recurrent):
    """A gated convolution over the last `width` tokens: out(c * conv(b * x)), with b, c and x from one projection
    (LFM2)."""

    hidden_size: int
    width: int
    """Number of tokens that the convolution reads, including the current one."""
    bias: bool = False
    """Whether both projections and the convolution have a bias."""

    @property
    def into(self) -> tuple[Linear, Linear, Linear]:
        """The projections to b, c and x, in this order. The checkpoint stores them as one tensor."""
        size, cut = self.hidden_size, Cut(Axis.CHANNELS, 0)
        b, c, x = (Linear("conv.in_proj", size, size, cut, self.bias, first_row=i * size) for i in range(3))
        return b, c, x

    @property
    def conv(self) -> tuple[TensorSpec, ...]:
        """The weight [hidden_size, 1, width] of the convolution, and its bias if there is one."""
        cut, shape = Cut(Axis.CHANNELS, 0), (self.hidden_size, 1, self.width)
        bias = (TensorSpec("conv.conv.bias", shape[:1], Role.BIAS, cut),) if self.bias else ()
        return (TensorSpec("conv.conv.weight", shape, Role.MATRIX, cut), *bias)

    @property
    def out(self) -> Linear:
        """The output projection."""
        size, cut = self.hidden_size, Cut(Axis.CHANNELS, 1)
        return Linear("conv.out_proj", size, size, cut, self.bias, Role.ATTENTION_OUTPUT)

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        return (*tensors_of(*self.into, self.out), *self.conv)

    @property
    def axes(self) -> tuple[Columns]:
        return (Columns(Axis.CHANNELS, self.hidden_size),)

    @property
    def state(self) -> tuple[StateTensor, ...]:
        return conv_state(self.conv)


def conv_state(tensors: Sequence[TensorSpec]) -> tuple[StateTensor, StateTensor]:
    """The state of a convolution with weights [channels, 1, width] among `tensors`: the inputs before the stored
    state's end, and the recent inputs."""
    parts = tuple((it.cut.axis, it.cut.width) for it in tensors if it.role is Role.MATRIX and it.cut is not None)
    return StateTensor(parts, num_tokens=tensors[0].shape[2] - 1), StateTensor(parts, num_recent=RECENT_INPUTS)
