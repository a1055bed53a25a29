"""llguidance for one model: turns grammars into matchers, and matchers into masks over the model's token ids."""

from __future__ import annotations

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from cluster.scheduling.request import mask_of
from cluster.structured.checker_messages import Setup
from cluster.structured.compiler import clean_message
from cluster.structured.grammar_limits import PARSER_LIMITS
from worker.protocol import UInt32Array


class MatchError(Exception):
    """llguidance gave up on a grammar, or on an answer to one. The message says why."""


class Matchers:
    """Creates matchers and masks. Both operations release the GIL, and any thread may call them."""

    def __init__(self, setup: Setup) -> None:
        """Holds the GIL for 0.3 s for 49k tokens. Raises ValueError if llguidance cannot use the tokenizer."""
        eos = setup.eos_token_ids or None
        try:
            self._tokenizer = LLTokenizer(setup.tokenizer, n_vocab=setup.vocab_size, eos_token=eos)
        except ValueError:
            # The tokenizer may have more ids than the model. `mask` cuts its masks to the model's ids.
            self._tokenizer = LLTokenizer(setup.tokenizer, eos_token=eos)
        self._limits = LLParserLimits(**PARSER_LIMITS)
        size = setup.vocab_size
        self._ids = mask_of(range(size), size)
        self._ends = mask_of([id_ for id_ in self._tokenizer.eos_tokens if id_ < size], size)

    def build(self, grammar: str) -> LLMatcher:
        """A matcher for llguidance's JSON of a grammar. If the grammar is wrong, the matcher is in its error state."""
        return LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)

    def mask(self, matcher: LLMatcher) -> UInt32Array | None:
        """The mask of the next token [mask_words(vocab_size)]. None if only end of sequence may follow. Raises
        MatchError if `matcher` is in its error state."""
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint32)[: len(self._ids)] & self._ids
        if matcher.is_error():
            raise MatchError(clean_message(matcher.get_error()))
        return None if matcher.is_stopped() or np.array_equal(mask, self._ends) else mask
