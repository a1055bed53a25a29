"""What the replicas of one app ask each other, because a proxy sends a client's requests to any of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from configs.errors import RequestError


async def _no_others(question: str, arguments: tuple[Any, ...]) -> list[Any]:
    return []


class OtherReplicas:
    """The app's other replicas, and what this one answers them. Use it on the replica's event loop only."""

    def __init__(self) -> None:
        self.ask: Callable[[str, tuple[Any, ...]], Awaitable[list[Any]]] = _no_others
        """Asks the other replicas, and returns their answers. A RequestError is an answer too. Raises OverloadedError
        if a replica does not answer."""
        self.answers: dict[str, Callable[..., Any]] = {}
        """The function that answers each question. Other replicas get an iterator as a list."""

    async def answer(self, question: str, arguments: tuple[Any, ...]) -> Any:
        """Answers another replica's question. Returns a RequestError instead of raising it."""
        try:
            found = self.answers[question](*arguments)
        except RequestError as error:
            return error
        if not isinstance(found, Iterator):
            return found
        parts = []
        for part in found:
            parts.append(part)
            await asyncio.sleep(0)  # each part may take a millisecond, and streams wait
        return parts

    async def find(self, question: str, *arguments: Any) -> Any:
        """The answer of this replica, or of another one if this one's is a RequestError with status 404. Raises the
        RequestError of the replica that holds what was asked for, or this replica's if none does."""
        try:
            return self.answers[question](*arguments)
        except RequestError as error:
            if error.status == 404:
                for answer in await self.ask(question, arguments):
                    if not isinstance(answer, RequestError):
                        return answer
                    if answer.status != 404:
                        raise answer from None
            raise
