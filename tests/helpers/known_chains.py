"""The self-test of exact numerics, made for a run that starts hundreds of ranks: its expected sums are found once."""

from __future__ import annotations

from torch import Tensor

from worker import self_test


def keep() -> None:
    """Keeps what the contract's plain form, in fractions, says of equal inputs. It took most of a rank's start; what
    the rank computes is compared with it as ever."""
    chains, known = self_test._chains, dict[tuple[object, ...], Tensor]()
    if hasattr(chains, "is_kept"):
        return

    def known_chains(x: Tensor, weight: Tensor) -> Tensor:
        key = (*x.shape, *x.flatten().tolist(), *weight.shape, *weight.flatten().tolist())
        if key not in known:
            known[key] = chains(x, weight)
        return known[key]

    known_chains.is_kept = True  # type: ignore[attr-defined]
    self_test._chains = known_chains
