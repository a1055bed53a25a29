"""The spec of Mamba2, a recurrent mixer of configs/layers.py."""

from __future__ import annotations

import math
from dataclasses import dataclass

from configs.errors import CheckpointError
from configs.fields import Fields
from configs.layers import Axis, Cut, HeadGroups, Linear, Role, StateTensor, TensorSpec, tensors_of
from configs.recurrent import RECENT_TOKENS, Recurrent, conv_state

_UNIT = 16  # elements of a head and of a state come in whole vectors of the kernels


@dataclass(frozen=True, kw_only=True)
class Mamba2(Recurrent):
    """A state space model with scalar decays. For each head, with its group's B and C:

    h = e^(-e^A_log dt) h + B (dt x)'; y = C'h + D x

    h is [state_size, head_size]. x, B and C pass a convolution with silu first. dt = softplus(dt + dt_bias), within
    limits. The output is norm(y silu(z)), projected. The norm is over all heads of a group, so ranks that share a group
    exchange their sums of squares.
    """

    hidden_size: int
    num_heads: int
    num_groups: int
    """A divisor of `num_heads`: equal groups of heads share B and C."""
    head_size: int
    """Elements of x, z and y of a head."""
    state_size: int
    """Elements of B and of C of a group."""
    width: int
    """Number of tokens that the convolution reads, including the current one."""
    name: str = "mamba"
    bias: bool = False
    """Whether both projections have a bias."""
    conv_bias: bool = True
    norm_eps: float | None
    """The eps of the norm. If None, there is no norm."""
    dt_limits: tuple[float, ...] = (0.0, math.inf)
    """The smallest and the largest dt. transformers applies them to prompts only; here they apply to all tokens, so
    that prompts and answers have the same bits."""
    factors: tuple[float, ...] = (1.0,) * 5
    """Factors of z, x, B, C and dt as they are projected (Falcon-H1)."""

    @property
    def into(self) -> tuple[Linear, ...]:
        """The projections to x, B, C, z and dt, in this order. The checkpoint stores them as one tensor, z first."""
        heads, groups = self.num_heads * self.head_size, self.num_groups * self.state_size
        return (
            self._into(Axis.MAMBA_HEADS, self.num_heads, self.head_size, heads),
            self._into(Axis.MAMBA_GROUPS, self.num_groups, self.state_size, 2 * heads),
            self._into(Axis.MAMBA_GROUPS, self.num_groups, self.state_size, 2 * heads + groups),
            self._into(Axis.MAMBA_HEADS, self.num_heads, self.head_size, 0),
            self._into(Axis.MAMBA_HEADS, self.num_heads, 1, 2 * heads + 2 * groups),
        )

    @property
    def conv(self) -> tuple[TensorSpec, ...]:
        """The weights of the convolution, of x, B and C, and its biases. The checkpoint stores each as one tensor."""
        sizes = [(it.out_features, it.cut) for it in self.into[:3]]
        name = f"{self.name}.conv1d"
        weights = tuple(TensorSpec(f"{name}.weight", (size, 1, self.width), Role.MATRIX, cut) for size, cut in sizes)
        biases = tuple(TensorSpec(f"{name}.bias", (size,), Role.BIAS, cut) for size, cut in sizes if self.conv_bias)
        return weights + biases

    @property
    def of_heads(self) -> tuple[TensorSpec, ...]:
        """A_log, dt_bias and D [num_heads], used in fp32."""
        cut = Cut(Axis.MAMBA_HEADS, 0)
        roles = {"A_log": Role.DECAY, "dt_bias": Role.BIAS, "D": Role.BIAS}
        return tuple(TensorSpec(f"{self.name}.{name}", (self.num_heads,), role, cut) for name, role in roles.items())

    @property
    def norm(self) -> TensorSpec | None:
        """The weight [num_heads * head_size] of the norm, used in fp32, or None if there is no norm."""
        if self.norm_eps is None:
            return None
        shape, cut = (self.num_heads * self.head_size,), Cut(Axis.MAMBA_HEADS, 0, self.head_size)
        return TensorSpec(f"{self.name}.norm.weight", shape, Role.NORM, cut)

    @property
    def out(self) -> Linear:
        """The output projection."""
        columns, cut = self.num_heads * self.head_size, Cut(Axis.MAMBA_HEADS, 1, self.head_size)
        return Linear(f"{self.name}.out_proj", self.hidden_size, columns, cut, self.bias, Role.ATTENTION_OUTPUT)

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        norm = () if self.norm is None else (self.norm,)
        return (*tensors_of(*self.into, self.out), *self.conv, *self.of_heads, *norm)

    @property
    def axes(self) -> tuple[HeadGroups]:
        return (HeadGroups(Axis.MAMBA_HEADS, self.num_heads, Axis.MAMBA_GROUPS, self.num_groups),)

    @property
    def state(self) -> tuple[StateTensor, ...]:
        """The convolution's two parts; h; and of recent tokens x and B after the convolution, and dt."""
        heads, groups = Axis.MAMBA_HEADS, Axis.MAMBA_GROUPS
        return (
            *conv_state(self.conv),
            StateTensor(((heads, self.state_size * self.head_size),), is_fp32=True),
            StateTensor(((heads, self.head_size), (groups, self.state_size)), num_recent=RECENT_TOKENS),
            StateTensor(((heads, 1),), num_recent=RECENT_TOKENS, is_fp32=True),
        )

    def _into(self, axis: Axis, count: int, width: int, first_row: int) -> Linear:
        shape, cut = (count * width, self.hidden_size), Cut(axis, 0, width)
        return Linear(f"{self.name}.in_proj", *shape, cut, self.bias, first_row=first_row)


def checked_mamba(mamba: Mamba2, where: str) -> Mamba2:
    """Returns `mamba`, from the file `where`. Raises CheckpointError if it cannot be served."""
    if mamba.num_heads % mamba.num_groups or mamba.head_size % _UNIT or mamba.state_size % _UNIT:
        raise CheckpointError(
            f"{where}: {mamba.num_heads} Mamba heads of {mamba.head_size} elements in {mamba.num_groups} groups with "
            f"states of {mamba.state_size} are not supported; groups must be equal, and sizes multiples of {_UNIT}"
        )
    return mamba


def read_mamba(fields: Fields, columns: int, norm_eps: float | None, factors: tuple[float, ...] = (1.0,) * 5) -> Mamba2:
    """The spec from the keys that Granite 4 and Falcon-H1 share. Raises CheckpointError if one is not supported.

    Args:
        columns: number of elements of x of all heads.
    """
    num_heads, is_auto = fields.count("mamba_n_heads", 128), fields.values.get("mamba_d_head", "auto") == "auto"
    mamba = Mamba2(
        hidden_size=fields.count("hidden_size"),
        num_heads=num_heads,
        num_groups=fields.count("mamba_n_groups", 1),
        head_size=columns // num_heads if is_auto else fields.count("mamba_d_head"),
        state_size=fields.count("mamba_d_state", 256),
        width=fields.count("mamba_d_conv", 4, at_most=8),
        bias=fields.flag("mamba_proj_bias", False),
        conv_bias=fields.flag("mamba_conv_bias", True),
        norm_eps=norm_eps,
        dt_limits=fields.numbers("time_step_limit", (0.0, math.inf)),
        factors=factors,
    )
    return checked_mamba(mamba, fields.where)
