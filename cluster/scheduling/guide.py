"""What makes an answer follow a grammar, as the scheduler sees it: tokens in, masks out, none of it waited for.

Implementations compute masks on threads of their own and wake the coordinator when one is there
(`Coordinator.wake`); the scheduler asks before each step and goes on with the other requests meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from configs.errors import GuideError
from worker.protocol import UInt32Array

__all__ = ["Guide", "GuideError"]


class Guide(Protocol):
    """Follows one request's answer. Called by one thread; no method blocks."""

    def accept(self, tokens: Sequence[int]) -> None:
        """Takes the tokens sampled since the last call; of a request that is resumed, its whole answer so far."""

    def poll(self) -> UInt32Array | None:
        """[mask_words(vocab_size)] of the tokens that may come next, as often as it is asked; None: not there yet.

        Raises:
            GuideError: the request must end with this error.
            OverloadedError: likewise, and its client may try again.
        """

    @property
    def is_finished(self) -> bool:
        """The answer, with all tokens accepted, is complete: nothing but end of sequence may follow."""

    def close(self) -> None:
        """The request has ended. Called once, also while a mask is computed."""
