"""The queue of waiting requests, and which is next. Knows neither pages nor rows, and no time.

1. A lower priority goes first. Within a priority, what was preempted goes first, the last one before the others.
2. Clients of one priority take turns by tokens (start-time fair queueing): next is the client that has been served
   least. Prompts count when they are admitted, answers when they end. A client that comes new, or comes back after it
   had nothing waiting, starts level with those now served: idling saves no credit, and leaving clears no debt.
3. One client's requests of one priority go first come, first served.
4. Every sixteenth turn goes to the request that has waited longest, whatever its priority and client: under any load,
   each request is admitted after at most sixteen times as many others as were there before it.

What clients were served counts only while something waits at their priority. Every operation costs O(log n).
"""

from __future__ import annotations

import bisect
import heapq
from collections import OrderedDict

from cluster.scheduling.request import Request

_OLDEST_EVERY = 16
_MAX_IDLE_CLIENTS = 4096
_MAX_IDLE_LEVELS = 64


class FairQueue:
    """Waiting requests. `first` names the next one; then it is popped, or set aside so that others can be tried."""

    def __init__(self) -> None:
        self._by_arrival: OrderedDict[int, Request] = OrderedDict()
        self._aside: list[Request] = []
        self._levels: dict[int, _Level] = {}
        self._priorities: list[int] = []  # one for each level, ascending
        self._num_turns = 0
        self._num_tokens = 0

    def __len__(self) -> int:
        """Requests that wait, those set aside included."""
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
        level = self._levels.get(request.priority) or self._new_level(request.priority)
        level.num_requests += 1
        self._num_tokens += len(request.tokens)
        self._by_arrival[request.id] = request
        if request.num_preemptions:
            self._by_arrival.move_to_end(request.id, last=False)
            level.put_first(request)
        else:
            level.put_last(request)

    def remove(self, request: Request) -> None:
        """Forgets a waiting request that is not set aside."""
        level = self._levels[request.priority]
        level.remove(request)
        self._forget(request, level)

    def first(self) -> Request | None:
        """The next request; None if none waits but those set aside."""
        if self._num_turns % _OLDEST_EVERY == _OLDEST_EVERY - 1:
            return next((request for request in self._by_arrival.values() if request not in self._aside), None)
        for priority in self._priorities:
            if (request := self._levels[priority].first()) is not None:
                return request
        return None

    def pop(self, request: Request) -> None:
        """Removes the request that `first` has just named: it is admitted."""
        level = self._levels[request.priority]
        level.take(request)
        self._num_turns += 1
        self._forget(request, level)

    def set_aside(self, request: Request) -> None:
        """Passes over the request that `first` has just named, as if it had its turn, until `put_back`."""
        self._levels[request.priority].take(request)
        self._num_turns += 1
        self._aside.append(request)

    def put_back(self) -> None:
        """Gives all that were set aside their places again."""
        while self._aside:
            request = self._aside.pop()
            self._levels[request.priority].put_first(request)
            self._num_turns -= 1

    def charge(self, request: Request, num_tokens: int) -> None:
        """Counts tokens of an admitted request's answer as service that its client had."""
        level = self._levels.get(request.priority)
        if level is not None and level.num_requests:
            level.charge(request.client, num_tokens)

    def check_integrity(self) -> set[int]:
        """Ids of all requests. Raises AssertionError unless the orders hold the same ones."""
        assert not self._aside, "a request was set aside and not put back"
        assert self._priorities == sorted(self._levels), "priorities and levels disagree"
        ids: list[int] = []
        for priority, level in self._levels.items():
            requests = level.requests()
            assert len(requests) == level.num_requests, f"requests of priority {priority} are miscounted"
            assert all(request.priority == priority for request in requests), "a request waits at another priority"
            ids += [request.id for request in requests]
        assert sorted(ids) == sorted(self._by_arrival), "a request is lost or twice"
        tokens = sum(len(request.tokens) for request in self._by_arrival.values())
        assert tokens == self._num_tokens, "waiting tokens are miscounted"
        return set(ids)

    def _new_level(self, priority: int) -> _Level:
        if len(self._levels) >= _MAX_IDLE_LEVELS:
            self._levels = {key: level for key, level in self._levels.items() if level.num_requests}
            self._priorities = sorted(self._levels)
        bisect.insort(self._priorities, priority)
        level = self._levels[priority] = _Level()
        return level

    def _forget(self, request: Request, level: _Level) -> None:
        del self._by_arrival[request.id]
        self._num_tokens -= len(request.tokens)
        level.num_requests -= 1
        if not level.num_requests:
            level.begin_anew()


_Entry = tuple[int, int, str]
"""Tokens that a client was served, the id of its first request, its name."""


class _Client:
    """The waiting requests of one client at one priority."""

    __slots__ = ("busy_period", "entry", "served", "waiting")

    def __init__(self, busy_period: int) -> None:
        self.busy_period = busy_period
        """The one that `served` is of."""
        self.served = 0
        """Tokens, counted as if it had been there from the beginning and had as much as the others."""
        self.waiting: OrderedDict[int, Request] = OrderedDict()
        self.entry: _Entry | None = None
        """The client's latest entry in the level's heap."""


class _Level:
    """The requests of one priority. What its clients were served counts from when one waited again after none did."""

    def __init__(self) -> None:
        self.num_requests = 0
        """Requests set aside count too; kept by the owner."""
        self._preempted: OrderedDict[int, Request] = OrderedDict()
        self._clients: dict[str, _Client] = {}
        # Clients with something waiting. Lazy: what is not its client's latest, or with nothing waiting, is skipped.
        self._heap: list[_Entry] = []
        self._least = 0  # served to the one that had least when a client came last
        self._busy_period = 0

    def begin_anew(self) -> None:
        """Nothing waits: what was served so far no longer counts."""
        for _, _, name in self._heap:
            if (client := self._clients.get(name)) is not None:
                client.entry = None
        self._heap.clear()
        self._least = 0
        self._busy_period += 1

    def put_last(self, request: Request) -> None:
        client = self._clients.get(request.client)
        if client is None:
            client = self._new_client(request.client)
        elif client.busy_period != self._busy_period:
            client.busy_period, client.served = self._busy_period, 0
        if client.waiting:
            client.waiting[request.id] = request
            return
        if self._heap and (first := self._first_client()) is not None:
            self._least = first.served
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

    def first(self) -> Request | None:
        if self._preempted:
            return next(iter(self._preempted.values()))
        client = self._first_client() if self._heap else None
        return None if client is None else next(iter(client.waiting.values()))

    def take(self, request: Request) -> None:
        """Takes a request that is its client's first, or was preempted."""
        if request.num_preemptions:
            del self._preempted[request.id]
            return
        client = self._clients[request.client]
        _, first = client.waiting.popitem(last=False)
        assert first is request, "a request before it waits"
        client.served += len(request.tokens)
        if client.waiting:
            self._offer(request.client, client)

    def charge(self, name: str, num_tokens: int) -> None:
        client = self._clients.get(name)
        if client is not None and client.busy_period == self._busy_period:
            client.served += num_tokens
            if client.waiting:
                self._offer(name, client)

    def requests(self) -> list[Request]:
        """All that are not set aside."""
        waiting = [request for client in self._clients.values() for request in client.waiting.values()]
        kept = {id(entry) for entry in self._heap}
        for client in self._clients.values():
            assert client.entry is None or id(client.entry) in kept, "a client's entry is lost"
            assert not client.waiting or (client.entry is not None and client.entry[0] == client.served), (
                "a client's turn would come too late or never"
            )
        return [*self._preempted.values(), *waiting]

    def _first_client(self) -> _Client | None:
        """The client whose turn it is."""
        while self._heap:
            entry = self._heap[0]
            client = self._clients.get(entry[2])
            if client is not None and client.entry is entry:
                if client.waiting and client.served == entry[0]:
                    return client
                client.entry = None
            heapq.heappop(self._heap)
        return None

    def _offer(self, name: str, client: _Client) -> None:
        """Says when the client's next turn is."""
        if client.entry is not None and client.entry[0] == client.served:
            return
        client.entry = (client.served, next(iter(client.waiting)), name)
        heapq.heappush(self._heap, client.entry)
        if len(self._heap) > 2 * len(self._clients) + 64:
            self._heap = [entry for entry in self._heap if self._is_latest(entry)]
            heapq.heapify(self._heap)

    def _is_latest(self, entry: _Entry) -> bool:
        client = self._clients.get(entry[2])
        return client is not None and client.entry is entry

    def _new_client(self, name: str) -> _Client:
        if len(self._clients) > self.num_requests + _MAX_IDLE_CLIENTS:
            # Clients with nothing waiting are forgotten: memory must not grow with the names ever seen.
            self._clients = {name: client for name, client in self._clients.items() if client.waiting}
        client = self._clients[name] = _Client(self._busy_period)
        return client
