"""llguidance for one model: grammars to matchers, and matchers to masks over the model's token ids."""

from __future__ import annotations

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from cluster.scheduling.request import mask_of
from cluster.structured.checker_messages import Setup
from cluster.structured.compiler import clean_message
from cluster.structured.grammar_limits import PARSER_LIMITS
from worker.protocol import UInt32Array


class MatchError(Exception):
    """A grammar, or an answer to it, that llguidance gave up; says why."""


class Matchers:
    """Makes matchers and their masks. Both release the GIL and may be asked for from any thread."""

    def __init__(self, setup: Setup) -> None:
        """Holds the GIL for 0.3 s for 49k tokens. Raises ValueError for a tokenizer that llguidance cannot use."""
        eos = setup.eos_token_ids or None
        try:
            self._tokenizer = LLTokenizer(setup.tokenizer, n_vocab=setup.vocab_size, eos_token=eos)
        except ValueError:
            # It may have more ids than the model: masks are cut to the model's.
            self._tokenizer = LLTokenizer(setup.tokenizer, eos_token=eos)
        self._limits = LLParserLimits(**PARSER_LIMITS)
        size = setup.vocab_size
        self._ids = mask_of(range(size), size)
        self._ends = mask_of([id_ for id_ in self._tokenizer.eos_tokens if id_ < size], size)

    def build(self, grammar: str) -> LLMatcher:
        """A matcher of llguidance's JSON of a grammar; in its state of error where the grammar is wrong."""
        return LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)

    def mask(self, matcher: LLMatcher) -> UInt32Array | None:
        """[mask_words(vocab_size)] of the tokens that may come next; None: nothing but end of sequence may. Raises
        MatchError where `matcher` is in its state of error."""
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint32)[: len(self._ids)] & self._ids
        if matcher.is_error():
            raise MatchError(clean_message(matcher.get_error()))
        return None if matcher.is_stopped() or np.array_equal(mask, self._ends) else mask
