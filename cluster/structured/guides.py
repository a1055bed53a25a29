"""The guides of a coordinator's requests: they receive tokens and return masks. Threads compute the masks and hold the
GIL only for microseconds.

The step loop never waits: it gives tokens to a guide and is woken when the mask is done. The grammars were checked
before (`checker`), so neither compiles nor masks take long.
"""

from __future__ import annotations

import logging
import queue
import resource
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
from llguidance import LLMatcher

from cluster.messages.engine import GenerateRequest
from cluster.scheduling.request import Guide, mask_of
from cluster.structured.bad_words import BadWordsGuide, BothGuides
from cluster.structured.checker_messages import Setup
from cluster.structured.grammar_limits import GUIDE_MEMORY_BYTES, MASK_CPU_S, TOKEN_CPU_S
from cluster.structured.matchers import MatchError, Matchers
from configs.errors import GuideError
from worker.protocol import UInt32Array

logger = logging.getLogger(__name__)

# With two threads, one computes masks while the other compiles the grammar of a new answer, for up to 40 ms.
_NUM_THREADS = 2
_MAX_TEMPLATES = 16
_Work = queue.SimpleQueue["GrammarGuide | None"]


class GrammarGuide:
    """A `cluster.scheduling.request.Guide` for one answer, created by `RequestGuides.open`."""

    def __init__(self, grammar: str, matchers: Matchers, copy: Callable[[str], LLMatcher], work: _Work) -> None:
        """`copy` makes the matcher of a new answer to a grammar."""
        self._grammar = grammar
        self._matchers = matchers
        self._copy = copy
        self._work = work
        # written by the step loop
        self._tokens: list[int] = []
        self._drafts: tuple[int, Sequence[int]] = (0, ())  # number of tokens before the drafts, and the drafts
        self._is_closed = False
        # Written by the thread that holds the lock. The step loop reads each in one operation.
        self._lock = threading.Lock()
        self._matcher: LLMatcher | None = None
        self._shares_lexer = True  # whether the lexer has states of other answers, which may have filled it
        self._num_taken = 0
        self._seconds_left = MASK_CPU_S
        # Number of tokens before the mask, the mask, and the masks after drafts.
        self._mask: tuple[int, UInt32Array, Sequence[UInt32Array]] | None = None
        self.is_finished = False
        self._error: GuideError | None = None

    def accept(self, tokens: Sequence[int], drafts: Sequence[int] = ()) -> None:
        self._drafts = len(self._tokens) + len(tokens), drafts
        self._tokens.extend(tokens)
        self._work.put(self)

    def poll(self) -> UInt32Array | None:
        if self._error is not None:
            raise self._error
        if self._mask is None or self._mask[0] != len(self._tokens):
            return None
        return self._mask[1]

    @property
    def ahead(self) -> Sequence[UInt32Array]:
        return () if self._mask is None else self._mask[2]

    def close(self) -> None:
        self._is_closed = True

    def advance(self) -> None:
        """Computes the mask after the tokens so far. Called by the threads of `RequestGuides`."""
        with self._lock:
            if self._is_closed or self.is_finished or self._error is not None:
                return
            try:
                self._take()
            except MatchError as error:
                self._end(str(error))
            except Exception as error:  # whatever failed, a request waits for this mask
                logger.exception("a grammar failed, and only its request ends")
                self._end(f"the grammar breaks the matcher ({type(error).__name__})")

    def _take(self) -> None:
        if self._seconds_left <= 0:
            raise MatchError("the grammar takes too much time; use a simpler one")
        if self._matcher is None:
            self._matcher = self._copy(self._grammar)
        began = time.thread_time()
        tokens = self._tokens[self._num_taken :]
        self._num_taken += len(tokens)
        self._matcher.consume_tokens(tokens)
        mask = self._next_mask()
        earned = self._seconds_left + TOKEN_CPU_S * len(tokens)
        self._seconds_left = min(MASK_CPU_S, earned) - (time.thread_time() - began)
        if mask is None:
            self.is_finished = True
        else:
            num_tokens, drafts = self._drafts
            # The time for masks after drafts is not taken from the answer's.
            self._mask = self._num_taken, mask, self._foresee(mask, drafts) if num_tokens == self._num_taken else ()

    def _next_mask(self) -> UInt32Array | None:
        assert self._matcher is not None, "it was copied"
        try:
            return self._matchers.mask(self._matcher)
        except MatchError:
            if not self._shares_lexer:
                raise
        # Other answers may have filled the lexer with states, so this answer gets a lexer of its own now.
        self._shares_lexer = False
        self._matcher = self._matchers.build(self._grammar)
        self._matcher.consume_tokens(self._tokens[: self._num_taken])
        return self._matchers.mask(self._matcher)

    def _foresee(self, mask: UInt32Array | None, drafts: Sequence[int]) -> list[UInt32Array]:
        """The masks after `drafts`, for `ahead`. `mask` is the mask of the first draft."""
        masks: list[UInt32Array] = []
        if not drafts or self._matcher is None:
            return masks
        matcher = self._matcher.deep_copy()
        try:
            for token in drafts:
                if mask is None or not mask[token >> 5] >> np.uint32(token & 31) & 1:
                    break
                matcher.consume_tokens([token])
                if (mask := self._matchers.mask(matcher)) is not None:
                    masks.append(mask)
        except MatchError:
            pass  # whether the answer continues is decided when the token comes
        return masks

    def _end(self, reason: str) -> None:
        self._matcher = None
        self._error = GuideError(f"The answer was ended: {reason}.")


class RequestGuides:
    """Creates the guides of a coordinator's requests, and owns the threads that compute masks of grammars."""

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int], wake: Callable[[], None]) -> None:
        """`wake` is called from a thread when a guide has a mask or an error."""
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._wake = wake
        self._every = mask_of(range(vocab_size), vocab_size)
        self.matchers: Matchers | None = None
        """None without a tokenizer that grammars can use."""
        self._work: _Work = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._templates: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()  # guards the templates
        self._enough_bytes = 0

    def set_tokenizer(self, tokenizer: str) -> None:
        """Enables grammars. Holds the GIL while it reads the tokenizer, so call this before any request arrives.

        Args:
            tokenizer: text of a tokenizer.json.
        """
        try:
            self.matchers = Matchers(Setup(tokenizer, self._vocab_size, self._eos_token_ids))
        except ValueError as error:
            logger.warning(
                "structured output is not available with this tokenizer; set `tokenizer` to another: %s", error
            )
            return
        self._enough_bytes = _memory_bytes() + GUIDE_MEMORY_BYTES
        for _ in range(_NUM_THREADS):
            self._threads.append(threading.Thread(target=self._run, name="grammar-guides", daemon=True))
            self._threads[-1].start()

    def make(self, request: GenerateRequest) -> Guide | None:
        """A guide for the grammar of `request`, its bad words or both. None if it has neither.

        Raises:
            GuideError: there is no tokenizer for the grammar, or a bad word has an id outside the vocabulary.
        """
        words = [word for word in request.sampling.bad_words if len(word) > 1]
        if any(not 0 <= token < self._vocab_size for word in words for token in word):
            raise GuideError(f"bad_words has an id outside 0 to {self._vocab_size - 1}; please report this bug")
        bad_words = BadWordsGuide(words, self._every) if words else None
        if request.sampling.grammar is None:
            return bad_words
        guide = self.open(request.sampling.grammar)
        return guide if bad_words is None else BothGuides(guide, bad_words)

    def open(self, grammar: str) -> GrammarGuide:
        """A guide for one answer to a checked grammar. A thread computes its first mask. Raises GuideError."""
        if self.matchers is None:
            raise GuideError("the engine has no tokenizer that grammars can use; try again later, or see its log")
        guide = GrammarGuide(grammar, self.matchers, self._copy, self._work)
        guide.accept(())
        return guide

    def close(self) -> None:
        """Ends the threads. Guides that wait for a mask get none."""
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join()

    def _copy(self, grammar: str) -> LLMatcher:
        """A matcher for a new answer. Raises MatchError if too much memory is in use."""
        assert self.matchers is not None, "a guide was opened"
        if _memory_bytes() > self._enough_bytes:
            raise MatchError("too many long grammars are in use; try again later")
        with self._lock:
            template = self._templates.pop(grammar, None)
        if template is None:
            template = self.matchers.build(grammar)
        # The template is compiled and warm, so another request with this grammar copies it in microseconds.
        with self._lock:
            self._templates[grammar] = template
            if len(self._templates) > _MAX_TEMPLATES:
                self._templates.popitem(last=False)
        return template.deep_copy()

    def _run(self) -> None:
        while (guide := self._work.get()) is not None:
            guide.advance()
            if self._work.empty():  # the next step can then take the rows of all these masks
                self._wake()


def _memory_bytes() -> int:
    """Bytes of memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
