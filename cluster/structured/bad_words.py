"""Words of several tokens that must not occur in an answer: a word's last token is banned after its other tokens.

A word of one token needs no guide, because a bias bans it everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cluster.scheduling.request import Guide
from worker.protocol import UInt32Array


class BadWordsGuide:
    """A `cluster.scheduling.request.Guide` that keeps `words` out of an answer."""

    def __init__(self, words: Sequence[Sequence[int]], every: UInt32Array) -> None:
        """Args:
        words: the token ids of each word, at least two, all in the vocabulary.
        every: the mask that allows the whole vocabulary.
        """
        self._words = [(list(word[:-1]), word[-1]) for word in words]
        self._num_kept = max(len(before) for before, _ in self._words)
        self._last: list[int] = []  # the answer's last tokens, as many as any word has before its last token
        self._every = every
        self._drafts: list[int] = []

    def accept(self, tokens: Sequence[int], drafts: Sequence[int] = ()) -> None:
        self._last, self._drafts = [*self._last, *tokens][-self._num_kept :], list(drafts)

    def poll(self) -> UInt32Array:
        return self._mask(self._last)

    @property
    def ahead(self) -> Sequence[UInt32Array]:
        drafts = self._drafts
        return [self._mask([*self._last, *drafts[: place + 1]]) for place in range(len(drafts))]

    def _mask(self, tokens: list[int]) -> UInt32Array:
        banned = [last for before, last in self._words if tokens[-len(before) :] == before]
        if not banned:
            return self._every
        mask = self._every.copy()
        for token in banned:
            mask[token >> 5] &= ~(np.uint32(1) << np.uint32(token & 31))
        return mask

    @property
    def is_finished(self) -> bool:
        return False

    def close(self) -> None:
        pass


class BothGuides:
    """A guide that allows the tokens that two other guides both allow."""

    def __init__(self, first: Guide, second: Guide) -> None:
        self._both = (first, second)

    def accept(self, tokens: Sequence[int], drafts: Sequence[int] = ()) -> None:
        for guide in self._both:
            guide.accept(tokens, drafts)

    def poll(self) -> UInt32Array | None:
        first, second = (guide.poll() for guide in self._both)
        return None if first is None or second is None else first & second

    @property
    def ahead(self) -> Sequence[UInt32Array]:
        return [one & other for one, other in zip(*(guide.ahead for guide in self._both), strict=False)]

    @property
    def is_finished(self) -> bool:
        return any(guide.is_finished for guide in self._both)

    def close(self) -> None:
        for guide in self._both:
            guide.close()
