"""Experts that tokens are sent to, on CPUs: packed weights, and the sum over a token's experts and the ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch

from configs.layers import Axis, Cut
from parallel.numerics.arithmetic import LayerPlace
from parallel.numerics.kernels.cpu_products import TILE, Mixture, mixed_products, pack
from parallel.numerics.weight import CpuWeight
from worker.layers.step import Padding

_CUT = Cut(Axis.EXPERT_COLUMNS, 1)


class RoutedExperts:
    """y = sum over a token's experts e of weight[e] * down_e(act(gate_up_e(x))) over this rank's columns, summed.

    Each leaf of the sum over columns is one over ascending experts first, so that only whole sums go to other ranks.

    Args:
        act: makes [num_rows, 2 * columns], gate then up, what `down` takes, and writes it to its second argument.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        act: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        place: LayerPlace,
    ) -> None:
        self._place = place
        self._act = act
        self._hidden_size = hidden_size
        self._columns = place.shard.span_of(_CUT).size
        self._leaves = place.arithmetic.leaves(_CUT, place)
        self._sum = place.arithmetic.rank_sum(hidden_size, _CUT, place, of_weight=False)
        self._gate_up: dict[int, CpuWeight] = {}
        self._down = place.empty(num_experts, -(-hidden_size // TILE), self._columns, TILE)

    def keep(
        self, expert: int, gate_up: torch.Tensor, down: torch.Tensor, gate_up_bias: torch.Tensor | None = None
    ) -> None:
        """Packs a copy of one expert: [2 * columns, hidden_size], [hidden_size, columns] and perhaps [2 * columns]."""
        self._gate_up[expert] = CpuWeight.of_packed(pack(gate_up), len(gate_up), gate_up_bias)
        pack(down, self._down[expert])

    def __call__(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The sum [num_tokens, hidden_size] as a RankSum has it, in memory of the caller's own.

        Args:
            experts: [num_tokens, top_k] int64; the number of experts is none.
            weights: [num_tokens, top_k] fp32.
        """
        chosen = experts.flatten()
        order = chosen.argsort(stable=True)
        ends = chosen.bincount(minlength=len(self._down) + 1)[:-1].cumsum(0)
        tokens = order // experts.shape[1]
        hidden = self._hidden(x, tokens, ends.tolist())
        mixture = Mixture(ends, tokens, weights.flatten()[order])

        def part(out: torch.Tensor | None) -> torch.Tensor:
            if out is None:
                out = self._place.empty(len(x), self._hidden_size)
            leaves = self._leaves
            nodes = out.view(len(leaves.nodes), len(x), self._hidden_size)
            mixed_products(hidden, self._down, leaves.width, leaves.nodes, mixture, nodes)
            return out

        return self._sum(len(x), part)

    def _hidden(self, x: torch.Tensor, tokens: torch.Tensor, ends: list[int]) -> torch.Tensor:
        """[num_pairs, columns], expert after expert."""
        hidden, begin = x.new_empty(ends[-1], self._columns), 0
        for expert, end in enumerate(ends):
            if begin < end:
                gate_up = self._gate_up[expert](x.index_select(0, tokens[begin:end]))
                self._act(gate_up, hidden[begin:end])
                begin = end
        return hidden


def choose(logits: torch.Tensor, k: int, padding: Padding) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The k highest of each row, of equal ones the first; whose they are, padding's nobody's; and what is no padding.

    Returns:
        ([num_tokens, k], [num_tokens, k] int64, [num_tokens, 1] bool).
    """
    live = (padding.token_slots() >= padding.first_slot).unsqueeze(1)
    kept, experts = top(logits, k)
    return kept, experts.where(live, logits.shape[1]), live


def top(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k highest of each row and their columns; of equal ones the first, as the kernels choose."""
    values, columns = scores.sort(dim=1, descending=True, stable=True)
    return values[:, :k], columns[:, :k]
