"""What the replicas of an app ask each other, without Ray: two of them that call each other's `answer`."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest

from cluster.requests.other_replicas import OtherReplicas
from configs.errors import RequestError


def pair() -> tuple[OtherReplicas, OtherReplicas]:
    """Two replicas. What they send each other is pickled, as Ray does."""
    first, second = OtherReplicas(), OtherReplicas()

    def asks(other: OtherReplicas) -> Any:
        async def ask(question: str, arguments: tuple[Any, ...]) -> list[Any]:
            answer = await other.answer(question, pickle.loads(pickle.dumps(arguments)))
            return [pickle.loads(pickle.dumps(answer))]

        return ask

    first.ask, second.ask = asks(second), asks(first)
    return first, second


def holds(**values: Any) -> Any:
    def look(name: str) -> Any:
        if name not in values:
            raise RequestError(f"There is no {name}.", status=404)
        if isinstance(values[name], Exception):
            raise values[name]
        return values[name]

    return look


def test_a_replica_asks_the_others_only_for_what_it_does_not_hold() -> None:
    first, second = pair()
    busy = RequestError("wait for it", status=409)
    first.answers["look"] = holds(both="of the first")
    second.answers["look"] = holds(both="of the second", one="here", parts=iter([b"a", b"b"]), busy=busy)

    async def main() -> None:
        assert await first.find("look", "both") == "of the first"
        assert await first.find("look", "one") == "here"
        assert await first.find("look", "parts") == [b"a", b"b"]
        with pytest.raises(RequestError, match="wait for it") as refused:
            await first.find("look", "busy")
        assert refused.value.status == 409
        with pytest.raises(RequestError, match="no such"):
            await second.find("look", "such")

    asyncio.run(main())


def test_a_replica_alone_has_nobody_to_ask() -> None:
    alone = OtherReplicas()
    alone.answers["look"] = holds(one=1)

    async def main() -> None:
        assert await alone.find("look", "one") == 1
        assert await alone.ask("look", ("one",)) == []
        with pytest.raises(RequestError, match="no two"):
            await alone.find("look", "two")

    asyncio.run(main())
