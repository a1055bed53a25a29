"""Stores responses in memory for later requests. Their number, bytes and age are limited, for each client by itself.

A response is stored on the replica that made it, where the app's other replicas find it, and lost with that replica.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import msgspec

from cluster.openai.responses.response_writer import ResponseBuilder
from cluster.requests.job import Run
from configs.errors import OverloadedError, RequestError


@dataclass(slots=True, kw_only=True, eq=False)
class StoredResponse:
    """A response, and what a later request needs to continue it."""

    builder: ResponseBuilder
    items: list[dict[str, Any]]
    """The conversation that the response answers, including earlier turns."""
    run: Run | None
    """The run of a response in progress. None once it has ended."""
    num_bytes: int
    """Approximate bytes of the conversation and the response."""
    error: RequestError | None = None
    """The error that ended the response. None without an error."""

    @property
    def id(self) -> str:
        return self.builder.response.id

    def output(self) -> list[dict[str, Any]]:
        """The items of the response, without log probabilities."""
        said: list[dict[str, Any]] = msgspec.to_builtins(self.builder.response.output, enc_hook=lambda _: [])
        return said

    def conversation(self) -> list[dict[str, Any]]:
        """The conversation including the response, which the next turn continues."""
        # An empty answer counts as a turn, because turns must alternate.
        said = self.output()
        return [*self.items, *(said or [{"type": "message", "role": "assistant", "content": []}])]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLimits:
    """Limits of the store."""

    responses_per_client: int = 1024
    bytes_per_client: int = 32 << 20
    bytes_in_all: int = 256 << 20
    ttl_s: float = 3600.0
    """Seconds after which a response is dropped, since it was last stored or read."""


@dataclass(slots=True)
class _Shelf:
    """One client's responses, least recently used first."""

    entries: OrderedDict[str, tuple[StoredResponse, float]] = field(default_factory=OrderedDict)
    num_bytes: int = 0


class ResponseStore:
    """The stored responses of one replica. Use them on its event loop only."""

    def __init__(self, limits: StoreLimits | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits or StoreLimits()
        self._clock = clock
        self._shelves: OrderedDict[str, _Shelf] = OrderedDict()
        self.num_bytes = 0
        """Bytes of all stored responses."""

    def __len__(self) -> int:
        return sum(len(shelf.entries) for shelf in self._shelves.values())

    def put(self, client: str, stored: StoredResponse) -> None:
        """Stores `stored`. If a limit is reached, drops the least recently used finished responses. Raises
        OverloadedError if responses in progress take all of the limit."""
        self._expire()
        shelf = self._shelves.setdefault(client, _Shelf())
        if not self._make_room(client, 1, stored.num_bytes):
            raise OverloadedError("Too many stored responses are in progress; use store: false, or try again later.")
        shelf.entries[stored.id] = (stored, self._clock())
        self._count(shelf, stored.num_bytes)

    def grow(self, client: str, stored: StoredResponse, num_bytes: int) -> None:
        """Adds `num_bytes` to the size of `stored`, if `stored` has not been removed."""
        shelf = self._shelves.get(client)
        if shelf is None or stored.id not in shelf.entries:
            return
        stored.num_bytes += num_bytes
        self._count(shelf, num_bytes)
        self._make_room(client, 0, 0)

    def get(self, client: str, response_id: str) -> StoredResponse:
        """Returns a response. Raises RequestError (404) if none with this id is stored for the client."""
        self._expire()
        shelf = self._shelves.get(client)
        if shelf is None or response_id not in shelf.entries:
            raise RequestError(
                f"There is no stored response {response_id[:100]!r}; send the conversation as input instead.",
                code="response_not_found",
                param="response_id",
                status=404,
            )
        stored, _ = shelf.entries[response_id]
        shelf.entries[response_id] = (stored, self._clock())
        shelf.entries.move_to_end(response_id)
        return stored

    def items(self, client: str, ids: Sequence[str]) -> list[dict[str, Any]]:
        """Returns items of finished responses. Raises RequestError (404) if one of `ids` is not among the client's."""
        self._expire()
        entries = self._shelves.get(client, _Shelf()).entries.values()
        ended = [stored for stored, _ in entries if stored.run is None]
        found = {item.id: stored for stored in ended for item in stored.builder.response.output}
        if missing := [id_ for id_ in ids if id_ not in found]:
            message = f"There is no stored item {missing[0][:100]!r}; send the item itself."
            raise RequestError(message, code="item_not_found", param="input", status=404)
        return [next(item for item in found[id_].output() if item["id"] == id_) for id_ in ids]

    def delete(self, client: str, response_id: str) -> StoredResponse:
        """Removes a response and returns it. Raises RequestError (404) if none with this id is stored for the
        client."""
        stored = self.get(client, response_id)
        self._remove(client, response_id)
        return stored

    def discard(self, client: str, stored: StoredResponse) -> None:
        """Removes `stored`, unless it has been removed already."""
        shelf = self._shelves.get(client)
        if shelf is not None and stored.id in shelf.entries:
            self._remove(client, stored.id)

    def _expire(self) -> None:
        oldest = self._clock() - self._limits.ttl_s
        for client in list(self._shelves):
            entries = self._shelves[client].entries.items()
            for response_id, (stored, _) in list(takewhile(lambda entry: entry[1][1] < oldest, entries)):
                if stored.builder.ended:
                    self._remove(client, response_id)
            if not entries:
                del self._shelves[client]

    def _make_room(self, client: str, num_more: int, num_bytes: int) -> bool:
        """Drops finished responses until `num_more` with `num_bytes` fit. Returns whether they fit."""
        limits, shelf = self._limits, self._shelves[client]

        def has_room() -> bool:
            count, size = len(shelf.entries) + num_more, shelf.num_bytes + num_bytes
            return count <= limits.responses_per_client and size <= limits.bytes_per_client

        while not has_room() and self._forget_one(client):
            pass
        while self.num_bytes + num_bytes > limits.bytes_in_all:
            # The client with the most stored bytes loses responses first.
            by_size = sorted(self._shelves, key=lambda other: -self._shelves[other].num_bytes)
            if not any(self._forget_one(other) for other in by_size):
                return False
        return has_room()

    def _forget_one(self, client: str) -> bool:
        entries = self._shelves[client].entries
        ended = next((id_ for id_, (stored, _) in entries.items() if stored.builder.ended), None)
        if ended is None:
            return False
        self._remove(client, ended)
        return True

    def _remove(self, client: str, response_id: str) -> None:
        shelf = self._shelves[client]
        stored, _ = shelf.entries.pop(response_id)
        self._count(shelf, -stored.num_bytes)

    def _count(self, shelf: _Shelf, num_bytes: int) -> None:
        shelf.num_bytes += num_bytes
        self.num_bytes += num_bytes
