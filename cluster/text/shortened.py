"""Drops the oldest turns of a conversation that does not fit (`truncation: auto` of responses)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

from cluster.text.conversation import Conversation, Turn
from cluster.text.prompt_encoder import PromptEncoder
from configs.errors import ContextLengthError


def shortened_ids(encoder: PromptEncoder, conversation: Conversation, most: int) -> list[int]:
    """Token ids of `conversation`. If they are more than `most`, its oldest turns are dropped, until the rest fits or
    nothing more may be dropped. Has the errors of `PromptEncoder.encode_chat`."""
    turns, groups = conversation.turns, _groups(conversation.turns)
    found: dict[int, list[int]] = {}

    def encoded(num_dropped: int) -> list[int]:
        dropped = {i for group in groups[:num_dropped] for i in group}
        calls = {call.id for i in dropped for call in turns[i].calls} - {None}
        kept = [turn for i, turn in enumerate(turns) if i not in dropped and turn.call_id not in calls]
        return encoder.encode_chat(replace(conversation, turns=kept))

    def fits(num_dropped: int) -> bool:
        try:
            found[num_dropped] = encoded(num_dropped)
        except ContextLengthError:
            return False
        return len(found[num_dropped]) <= most

    num_dropped = 0 if fits(0) else 1 + bisect_left(range(1, len(groups)), True, key=fits)
    return found.get(num_dropped) or encoded(num_dropped)


def _groups(turns: Sequence[Turn]) -> list[list[int]]:
    """Indexes of the turns that may be dropped, oldest first, in groups that are dropped together: a turn of the user
    with its answer, and an answer with the results of its calls. Not dropped are turns of the system, the last turn of
    the user, and the last answer after it."""
    last = max((i for i, turn in enumerate(turns) if turn.role == "user"), default=-1)
    groups: list[list[int]] = []
    for i, turn in enumerate(turns):
        if turn.role != "system" and i != last:
            begins = turn.role == ("user" if i < last else "assistant")
            if not groups or begins or groups[-1][-1] < last < i:
                groups.append([])
            groups[-1].append(i)
    return groups[:-1] if groups and groups[-1][-1] > last else groups
