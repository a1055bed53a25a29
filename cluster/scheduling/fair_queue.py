"""Which waiting request is next. Knows neither pages nor rows, and no time.

1. A lower priority goes first. Within a priority, what was preempted goes first, the last one before the others.
2. Clients of one priority take turns by tokens (start-time fair queueing): next is the client that has been served
   least. Prompts count when they are admitted, answers when they end. A client that comes new, or comes back after it
   had nothing waiting, starts level with those now served: idling saves no credit, and leaving clears no debt.
3. One client's requests of one priority go first come, first served.
4. Every sixteenth turn goes to the request that has waited longest, whatever its priority and client: under any load,
   each request is admitted after at most sixteen times as many others as were there before it.

Clients and priorities are remembered only while something waits at the priority. Every operation costs O(log n).
"""

from __future__ import annotations

import bisect
import heapq
from collections import OrderedDict

from cluster.scheduling.request import Request

_OLDEST_EVERY = 16
_MAX_IDLE_CLIENTS = 4096


class FairQueue:
    """Waiting requests. `take` names the next one; then `admit` or `put_back` says what became of it."""

    def __init__(self) -> None:
        self._by_arrival: OrderedDict[int, Request] = OrderedDict()
        self._taken: OrderedDict[int, Request] = OrderedDict()
        self._levels: dict[int, _Level] = {}
        self._priorities: list[int] = []  # of the levels, ascending
        self._num_turns = 0
        self._num_tokens = 0

    def __len__(self) -> int:
        """Requests that wait, taken ones included."""
        return len(self._by_arrival)

    @property
    def num_tokens(self) -> int:
        """Tokens of all of them."""
        return self._num_tokens

    @property
    def oldest(self) -> Request | None:
        """The request that has waited longest."""
        return next(iter(self._by_arrival.values()), None)

    def push(self, request: Request) -> None:
        """Lets a request wait: a new one behind, a preempted one before all others of its priority."""
        level = self._levels.get(request.priority)
        if level is None:
            level = self._levels[request.priority] = _Level()
            bisect.insort(self._priorities, request.priority)
        level.num_requests += 1
        self._num_tokens += len(request.tokens)
        self._by_arrival[request.id] = request
        if request.num_preemptions:
            self._by_arrival.move_to_end(request.id, last=False)
            level.put_first(request)
        else:
            level.put_last(request)

    def remove(self, request: Request) -> None:
        """Forgets a waiting request that is not taken."""
        self._levels[request.priority].remove(request)
        self._forget(request)

    def take(self) -> Request | None:
        """The next request that is not taken yet; None if there is none."""
        request = None
        if self._num_turns % _OLDEST_EVERY == _OLDEST_EVERY - 1:
            request = next((r for r in self._by_arrival.values() if r.id not in self._taken), None)
            if request is not None:
                self._levels[request.priority].take_first_of(request)
        else:
            for priority in self._priorities:
                if (request := self._levels[priority].take()) is not None:
                    break
        if request is not None:
            self._taken[request.id] = request
            self._num_turns += 1
        return request

    def admit(self, request: Request) -> None:
        """A taken request no longer waits."""
        del self._taken[request.id]
        self._forget(request)

    def put_back(self) -> None:
        """Lets all taken requests wait as if they had not been taken."""
        while self._taken:
            _, request = self._taken.popitem()
            self._levels[request.priority].put_first(request)
            self._num_turns -= 1

    def charge(self, request: Request, num_tokens: int) -> None:
        """Counts tokens of an admitted request's answer as service that its client had."""
        level = self._levels.get(request.priority)
        if level is not None:
            level.charge(request.client, num_tokens)

    def check_integrity(self) -> set[int]:
        """Ids of all requests. Raises AssertionError unless the orders hold the same ones."""
        assert not self._taken, "a request was taken and neither admitted nor put back"
        assert self._priorities == sorted(self._levels), "priorities and levels disagree"
        ids: list[int] = []
        for priority, level in self._levels.items():
            requests = level.requests()
            assert len(requests) == level.num_requests > 0, f"requests of priority {priority} are miscounted"
            assert all(request.priority == priority for request in requests), "a request waits at another priority"
            ids += [request.id for request in requests]
        assert sorted(ids) == sorted(self._by_arrival), "a request is lost or twice"
        tokens = sum(len(request.tokens) for request in self._by_arrival.values())
        assert tokens == self._num_tokens, "waiting tokens are miscounted"
        return set(ids)

    def _forget(self, request: Request) -> None:
        del self._by_arrival[request.id]
        self._num_tokens -= len(request.tokens)
        level = self._levels[request.priority]
        level.num_requests -= 1
        if not level.num_requests:
            del self._levels[request.priority]
            del self._priorities[bisect.bisect_left(self._priorities, request.priority)]


class _Client:
    """What one client has waiting at one priority."""

    __slots__ = ("served", "waiting")

    def __init__(self) -> None:
        self.served = 0
        """Tokens, counted as if it had been there from the level's beginning and had as much as the others."""
        self.waiting: OrderedDict[int, Request] = OrderedDict()


class _Level:
    """The requests of one priority."""

    def __init__(self) -> None:
        self.num_requests = 0
        """Taken ones included; kept by the owner."""
        self._preempted: OrderedDict[int, Request] = OrderedDict()
        self._clients: dict[str, _Client] = {}
        # (served, id of its first request, name) of clients with something waiting. Lazy: an entry with another
        # `served` is out of date.
        self._heap: list[tuple[int, int, str]] = []
        self._least = 0  # served to the one that had least when a client came last

    def put_last(self, request: Request) -> None:
        client = self._clients.get(request.client)
        if client is None:
            self._drop_idle_clients()
            client = self._clients[request.client] = _Client()
        if client.waiting:
            client.waiting[request.id] = request
            return
        first = self._first_client()
        self._least = self._least if first is None else first[1].served
        client.served = max(client.served, self._least)
        client.waiting[request.id] = request
        self._offer(request.client, client)

    def put_first(self, request: Request) -> None:
        """Undoes a take, or lets a preempted request wait: it paid for its prompt when it was first admitted."""
        if request.num_preemptions:
            self._preempted[request.id] = request
            self._preempted.move_to_end(request.id, last=False)
            return
        client = self._clients[request.client]
        client.served -= len(request.tokens)
        client.waiting[request.id] = request
        client.waiting.move_to_end(request.id, last=False)
        self._offer(request.client, client)

    def remove(self, request: Request) -> None:
        if request.num_preemptions:
            del self._preempted[request.id]
        else:
            del self._clients[request.client].waiting[request.id]

    def take(self) -> Request | None:
        if self._preempted:
            return self._preempted.popitem(last=False)[1]
        first = self._first_client()
        return None if first is None else self._take_first(*first)

    def take_first_of(self, request: Request) -> None:
        """Takes a request that is the first of its client, or preempted."""
        if request.num_preemptions:
            del self._preempted[request.id]
        else:
            first = self._take_first(request.client, self._clients[request.client])
            assert first is request, "the request that waits longest is not its client's first"

    def charge(self, name: str, num_tokens: int) -> None:
        client = self._clients.get(name)
        if client is not None:
            client.served += num_tokens
            if client.waiting:
                self._offer(name, client)

    def requests(self) -> list[Request]:
        """All that are not taken."""
        waiting = [request for client in self._clients.values() for request in client.waiting.values()]
        offered = {(served, name) for served, _, name in self._heap}
        for name, client in self._clients.items():
            assert not client.waiting or (client.served, name) in offered, "a client's turn would never come"
        return [*self._preempted.values(), *waiting]

    def _first_client(self) -> tuple[str, _Client] | None:
        """Whose turn it is."""
        while self._heap:
            if self._is_current(self._heap[0]):
                name = self._heap[0][2]
                return name, self._clients[name]
            heapq.heappop(self._heap)
        return None

    def _take_first(self, name: str, client: _Client) -> Request:
        _, request = client.waiting.popitem(last=False)
        client.served += len(request.tokens)
        if client.waiting:
            self._offer(name, client)
        return request

    def _offer(self, name: str, client: _Client) -> None:
        """Says when the client's next turn is."""
        heapq.heappush(self._heap, (client.served, next(iter(client.waiting)), name))
        if len(self._heap) > 2 * len(self._clients) + 64:
            self._heap = [entry for entry in self._heap if self._is_current(entry)]
            heapq.heapify(self._heap)

    def _is_current(self, entry: tuple[int, int, str]) -> bool:
        client = self._clients.get(entry[2])
        return client is not None and bool(client.waiting) and client.served == entry[0]

    def _drop_idle_clients(self) -> None:
        """Bounds what is remembered of clients that have nothing waiting."""
        if len(self._clients) <= self.num_requests + _MAX_IDLE_CLIENTS:
            return
        self._clients = {name: client for name, client in self._clients.items() if client.waiting}
