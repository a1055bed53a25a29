"""The prompt as a part of an answer: its text, where its tokens stand in it, and their log probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.engine_client import PromptScores
from cluster.openai.tokenizer import Tokenizer
from cluster.openai.wire import PromptLogprob, PromptLogprobsJson

_LOWEST_LOGPROB = -9999.0  # JSON has no -inf; this is what clients know


def finite(logprob: float) -> float:
    """`logprob`, or the lowest number clients know for minus infinity."""
    return max(logprob, _LOWEST_LOGPROB)


@dataclass(frozen=True, slots=True)
class Echo:
    """One prompt as text."""

    text: str
    offsets: list[int]
    """Characters of `text` before each of the prompt's tokens."""

    @classmethod
    def of(
        cls, prompt: str | Sequence[int], ids: Sequence[int], tokenizer: Tokenizer, *, skip_special_tokens: bool
    ) -> Echo:
        """
        Args:
            prompt: as the request has it. Text comes back as it is; token ids are decoded.
            ids: its tokens.
        """
        given = prompt if isinstance(prompt, str) else None
        detokenizer = tokenizer.detokenizer((), skip_special_tokens=skip_special_tokens and given is None)
        starts = []
        length = 0
        pieces = []
        for id_ in ids:
            starts.append(length)
            pieces.append(detokenizer.push(id_))
            length += len(pieces[-1])
        decoded = "".join(pieces) + detokenizer.flush()
        if given is None:
            return cls(decoded, starts)
        # Special tokens that the tokenizer put in front are no text of the caller's.
        added = len(decoded) - len(given) if decoded.endswith(given) else 0
        return cls(given, [min(max(start - added, 0), len(given)) for start in starts])


def prompt_tops(scores: PromptScores, ids: Sequence[int], k: int) -> list[list[tuple[int, float]]]:
    """For each token after the first: (id, logprob) of the `k` likeliest in its place, and of its own if it is none of
    them and `k` is not 0."""
    tops = []
    top_ids, top_logprobs = scores.top_ids[:, :k].tolist(), scores.top_logprobs[:, :k].tolist()
    for own, logprob, row_ids, row in zip(ids[1:], scores.logprobs.tolist(), top_ids, top_logprobs, strict=True):
        top = [(id_, finite(lp)) for id_, lp in zip(row_ids, row, strict=True)]
        if k and own not in row_ids:
            top.append((own, finite(logprob)))
        tops.append(top)
    return tops


def prompt_logprobs_json(scores: PromptScores, ids: Sequence[int], k: int, tokenizer: Tokenizer) -> PromptLogprobsJson:
    """The field `prompt_logprobs`: each token's own and the `k` likeliest in its place."""
    entries: PromptLogprobsJson = [None]
    tops = prompt_tops(scores, ids, k)
    for own, logprob, top in zip(ids[1:], scores.logprobs.tolist(), tops, strict=True):
        entry = {
            id_: PromptLogprob(lp, rank if rank <= k else None, tokenizer.token_text(id_))
            for rank, (id_, lp) in enumerate(top, 1)
        }
        entry.setdefault(own, PromptLogprob(finite(logprob), None, tokenizer.token_text(own)))
        entries.append(entry)
    return entries
