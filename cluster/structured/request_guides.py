"""Which guides a request needs: one for its grammar, one for its bad words, both, or none."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cluster.engine.messages import GenerateRequest
from cluster.scheduling.request import Guide
from cluster.structured.bad_words import BadWordsGuide, BothGuides
from cluster.structured.checker_messages import Setup
from cluster.structured.guides import GrammarGuides
from configs.errors import GuideError


class RequestGuides:
    """Makes the guides of a coordinator's requests; nothing of a grammar is loaded before the first that needs it."""

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int], wake: Callable[[], None]) -> None:
        """`wake`: called, from a thread, when a guide has something to tell."""
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._wake = wake
        self._grammars: GrammarGuides | None = None

    def set_tokenizer(self, tokenizer: str) -> None:
        """Makes grammars possible. `tokenizer`: text of a tokenizer.json."""
        self._grammars = GrammarGuides(Setup(tokenizer, self._vocab_size, self._eos_token_ids), self._wake)

    def make(self, request: GenerateRequest) -> Guide | None:
        """A guide for `request`, if it needs one.

        Raises:
            GuideError: there is no tokenizer yet, or a bad word has an id outside the vocabulary.
        """
        words = [word for word in request.sampling.bad_words if len(word) > 1]
        if any(not 0 <= token < self._vocab_size for word in words for token in word):
            raise GuideError(f"bad_words has an id outside 0 to {self._vocab_size - 1}")
        bad_words = BadWordsGuide(words, self._vocab_size) if words else None
        grammar = request.sampling.grammar
        if grammar is None:
            return bad_words
        if self._grammars is None:
            raise GuideError("the engine has no tokenizer yet, which grammars need")
        guide = self._grammars.open(grammar)
        return guide if bad_words is None else BothGuides(guide, bad_words)

    def close(self) -> None:
        """Ends threads and processes, if there are any."""
        if self._grammars is not None:
            self._grammars.close()
