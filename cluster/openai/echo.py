"""The prompt as a part of an answer: its text, the offsets of its tokens, and their log probabilities."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cluster.openai.wire import PromptLogprob
from cluster.requests.engine_client import WholePromptLogprobs
from cluster.requests.json_parts import LOWEST_LOGPROB, finite
from cluster.text.tokenizer import Tokenizer

_BLOCK = 64  # positions that are converted at once
_TOKENS_AT_ONCE = 512  # tokens that are decoded at once: 5 ms with the slowest decoder


@dataclass(frozen=True, slots=True)
class Echo:
    """One prompt as the text that an answer begins with."""

    text: str
    offsets: list[int]
    """Number of characters of `text` before each of the prompt's tokens."""

    @classmethod
    async def of(
        cls, prompt: str | Sequence[int], ids: Sequence[int], tokenizer: Tokenizer, *, skip_special_tokens: bool
    ) -> Echo:
        """The echo of one prompt with the tokens `ids`. The event loop serves other requests meanwhile.

        Args:
            prompt: the prompt in the request. A text is returned unchanged; token ids are decoded.
        """
        given = prompt if isinstance(prompt, str) else None
        detokenizer = tokenizer.detokenizer((), skip_special_tokens=skip_special_tokens and given is None)
        starts = []
        length = 0
        pieces = []
        for i, id_ in enumerate(ids):
            if i % _TOKENS_AT_ONCE == 0:
                await asyncio.sleep(0)
            starts.append(length)
            pieces.append(detokenizer.push(id_))
            length += len(pieces[-1])
        decoded = "".join(pieces) + detokenizer.flush()
        if given is None:
            return cls(decoded, starts)
        # Special tokens that the tokenizer added in front are not part of the caller's text.
        added = len(decoded) - len(given) if decoded.endswith(given) else 0
        return cls(given, [min(max(start - added, 0), len(given)) for start in starts])


def prompt_top_logprobs(whole: WholePromptLogprobs, ids: Sequence[int], k: int) -> Iterator[list[tuple[int, float]]]:
    """For each prompt token after the first: (id, logprob) of the `k` likeliest tokens at its position. The token
    itself is added if `k` is above 0 and it is not one of them."""
    for first in range(0, len(whole.logprobs), _BLOCK):
        rows = slice(first, first + _BLOCK)
        tops = np.maximum(whole.top_logprobs[rows, :k], LOWEST_LOGPROB).tolist()
        own = ids[1 + first : 1 + first + _BLOCK]
        for token, logprob, top_ids, top in zip(
            own, whole.logprobs[rows].tolist(), whole.top_ids[rows, :k].tolist(), tops, strict=True
        ):
            likeliest = list(zip(top_ids, top, strict=True))
            if k and token not in top_ids:
                likeliest.append((token, finite(logprob)))
            yield likeliest


def prompt_logprobs_json(
    whole: WholePromptLogprobs, ids: Sequence[int], k: int, tokenizer: Tokenizer
) -> Iterator[dict[int, PromptLogprob] | None]:
    """The entries of the field `prompt_logprobs`: log probabilities of each token, and of the `k` likeliest tokens at
    its position."""
    name = tokenizer.token_text
    yield None
    for own, logprob, top in zip(ids[1:], whole.logprobs.tolist(), prompt_top_logprobs(whole, ids, k), strict=True):
        entry = {id_: PromptLogprob(lp, rank, name(id_)) for rank, (id_, lp) in enumerate(top, 1)}
        if len(top) > k or not k:
            entry[own] = PromptLogprob(finite(logprob), None, name(own))
        yield entry
