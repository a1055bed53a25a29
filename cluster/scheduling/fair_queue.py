"""The queue of waiting requests, and its order. It knows neither pages nor rows, and no time.

1. A lower `Terms.level` goes first: an operator granted it.
2. Clients of one level take turns by tokens (start-time fair queueing): the client that has been served least is next.
Prompts count when they are admitted, answers when they end. A client that is new, or returns after it had nothing
waiting, starts level with the clients served now. So idling saves no credit, and leaving clears no debt. The caller
names clients that come last, such as those that hold their share of rows already.
3. The requests of one client go by their own priority, lowest first. At one priority, preempted requests go first, the
latest one before the others. New requests are first come, first served.
4. Every sixteenth turn goes to the request that has waited longest, of any level, priority and client, except clients
that come last. So if n requests waited before a request of another client, at most 16 n are admitted before it.

The service of a client counts only while something waits at its level. Operations cost O(log n). In addition, `first`
passes over each client that comes last, and in every sixteenth turn over each of its requests.
"""

from __future__ import annotations

import bisect
import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable

from cluster.scheduling.request import Request

_OLDEST_EVERY = 16
_MAX_IDLE_CLIENTS = 4096
_MAX_IDLE_LEVELS = 64


def _place(request: Request) -> tuple[int, int]:
    """Sort key of a request among the waiting requests of its client."""
    return request.terms.priority, request.place


class FairQueue:
    """The waiting requests. `first` returns the next request, which the caller then pops, or sets aside to try the one
    after it."""

    def __init__(self) -> None:
        self._by_arrival: OrderedDict[int, Request] = OrderedDict()
        self._aside: list[Request] = []
        self._levels: dict[int, _Level] = {}
        self._order: list[int] = []  # the keys of the levels, ascending
        self._num_turns = 0
        self._num_pushed = 0
        self._num_tokens = 0
        self.clients: Counter[str] = Counter()
        """Number of waiting requests of each client. Clients with nothing waiting have no entry."""

    def __len__(self) -> int:
        """Number of waiting requests, including those set aside."""
        return len(self._by_arrival)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all waiting requests."""
        return self._num_tokens

    @property
    def oldest(self) -> Request | None:
        """The request that has waited longest."""
        return next(iter(self._by_arrival.values()), None)

    def push(self, request: Request) -> None:
        """Adds a request: a new one after the others of its client and priority, a preempted one before them."""
        level = self._levels.get(request.terms.level) or self._new_level(request.terms.level)
        level.num_requests += 1
        self._num_tokens += len(request.tokens)
        self._num_pushed += 1
        self.clients[request.terms.client] += 1
        self._by_arrival[request.id] = request
        request.place = self._num_pushed
        if request.num_preemptions:
            request.place = -self._num_pushed
            self._by_arrival.move_to_end(request.id, last=False)
        level.put(request)

    def remove(self, request: Request) -> None:
        """Removes a waiting request that is not set aside."""
        level = self._levels[request.terms.level]
        level.remove(request)
        self._forget(request, level)

    def first(self, comes_last: Callable[[str], bool] = lambda _: False, *, is_oldest: bool = False) -> Request | None:
        """The next request. None if all waiting requests are set aside.

        Args:
            comes_last: whether a client's turn comes after those of the other clients of its level.
            is_oldest: return the request that has waited longest. Preempted requests have waited longer than new ones.
        """
        if is_oldest or self._num_turns % _OLDEST_EVERY == _OLDEST_EVERY - 1:
            last: Request | None = None
            for request in self._by_arrival.values():
                if request not in self._aside:
                    if is_oldest or not comes_last(request.terms.client):
                        return request
                    last = last or request
            return last
        for level in self._order:
            if (first := self._levels[level].first(comes_last)) is not None:
                return first
        return None

    def pop(self, request: Request) -> None:
        """Removes the request that `first` has just returned: it is admitted."""
        level = self._levels[request.terms.level]
        level.take(request)
        self._num_turns += 1
        self._forget(request, level)

    def set_aside(self, request: Request) -> None:
        """Sets aside the request that `first` has just returned, until `put_back`. Its client's turn counts as used."""
        self._levels[request.terms.level].take(request)
        self._num_turns += 1
        self._aside.append(request)

    def put_back(self) -> None:
        """Returns all requests that were set aside to their positions."""
        while self._aside:
            request = self._aside.pop()
            self._levels[request.terms.level].put_back(request)
            self._num_turns -= 1

    def charge(self, request: Request, num_tokens: int) -> None:
        """Counts tokens of an admitted request's answer as service of its client, if something waits at its level."""
        level = self._levels.get(request.terms.level)
        if level is not None and level.num_requests:
            level.charge(request.terms.client, num_tokens)

    def check_integrity(self) -> set[int]:
        """Ids of all requests. Raises AssertionError if the orders contain different requests, or counts are wrong."""
        assert not self._aside, "a request was set aside and not put back"
        assert self._order == sorted(self._levels), "the order of the levels is wrong"
        ids: list[int] = []
        for key, level in self._levels.items():
            requests = level.requests()
            assert len(requests) == level.num_requests, f"requests of level {key} are miscounted"
            assert all(request.terms.level == key for request in requests), "a request waits at another level"
            ids += [request.id for request in requests]
        assert sorted(ids) == sorted(self._by_arrival), "a request is lost or twice"
        clients = Counter(request.terms.client for request in self._by_arrival.values())
        assert clients == self.clients and all(self.clients.values()), "waiting requests of clients are miscounted"  # noqa: PT018
        tokens = sum(len(request.tokens) for request in self._by_arrival.values())
        assert tokens == self._num_tokens, "waiting tokens are miscounted"
        return set(ids)

    def _new_level(self, key: int) -> _Level:
        if len(self._levels) >= _MAX_IDLE_LEVELS:
            self._levels = {key: level for key, level in self._levels.items() if level.num_requests}
            self._order = sorted(self._levels)
        bisect.insort(self._order, key)
        level = self._levels[key] = _Level()
        return level

    def _forget(self, request: Request, level: _Level) -> None:
        del self._by_arrival[request.id]
        self._num_tokens -= len(request.tokens)
        self.clients[request.terms.client] -= 1
        if not self.clients[request.terms.client]:
            del self.clients[request.terms.client]
        level.num_requests -= 1
        if not level.num_requests:
            level.begin_anew()


def _cost(request: Request) -> int:
    """Tokens that a turn costs. A preempted request paid for its prompt when it was first admitted."""
    return 0 if request.num_preemptions else len(request.tokens)


_Entry = tuple[int, int, str]
"""Sort key of a client: tokens served, when it began to wait, name."""


class _Client:
    """The waiting requests of one client at one level."""

    __slots__ = ("began", "busy_period", "entry", "served", "waiting")

    def __init__(self, busy_period: int) -> None:
        self.busy_period = busy_period
        """The level's busy period in which `served` was counted. In a later period, `served` starts again from 0."""
        self.served = 0
        """Tokens served. A client that begins to wait gets at least the number of the client served least."""
        self.began = 0
        """Absolute value of `Request.place` of the request with which the client began to wait."""
        self.waiting: list[Request] = []
        """Sorted by `_place`."""
        self.entry: _Entry | None = None
        """The client's latest entry in the level's heap."""


class _Level:
    """The waiting requests of one level. Once none waits, the level no longer counts what its clients were served."""

    def __init__(self) -> None:
        self.num_requests = 0
        """Number of requests, including those set aside. FairQueue writes it."""
        self._clients: dict[str, _Client] = {}
        # Heap of clients with waiting requests. Entries that are not the client's latest, and entries of clients with
        # nothing waiting, are skipped.
        self._heap: list[_Entry] = []
        self._least = 0  # service of the least served client when a client was last added
        self._busy_period = 0

    def begin_anew(self) -> None:
        """Begins a new busy period, because nothing waits: the service so far no longer counts."""
        for _, _, name in self._heap:
            if (client := self._clients.get(name)) is not None:
                client.entry = None
        self._heap.clear()
        self._least = 0
        self._busy_period += 1

    def put(self, request: Request) -> None:
        """Adds a request."""
        client = self._clients.get(request.terms.client)
        if client is None:
            client = self._new_client(request.terms.client)
        elif client.busy_period != self._busy_period:
            client.busy_period, client.served = self._busy_period, 0
        if not client.waiting:
            if self._heap and (first := self._first_client()) is not None:
                self._least = first.served
            client.served = max(client.served, self._least)
            client.began = abs(request.place)
        bisect.insort(client.waiting, request, key=_place)
        self._offer(request.terms.client, client)

    def put_back(self, request: Request) -> None:
        """Adds a request again that `take` removed, and undoes the cost of its turn."""
        client = self._clients[request.terms.client]
        client.served -= _cost(request)
        bisect.insort(client.waiting, request, key=_place)
        self._offer(request.terms.client, client)

    def remove(self, request: Request) -> None:
        waiting = self._clients[request.terms.client].waiting
        index = bisect.bisect_left(waiting, _place(request), key=_place)
        assert waiting[index] is request, "a request is not where it waits"
        del waiting[index]

    def first(self, comes_last: Callable[[str], bool]) -> Request | None:
        passed: list[_Entry] = []
        client = self._first_client() if self._heap else None
        while client is not None and comes_last(self._heap[0][2]):
            passed.append(heapq.heappop(self._heap))
            client = self._first_client()
        for entry in passed:
            heapq.heappush(self._heap, entry)
        if client is None and passed:
            client = self._clients[passed[0][2]]
        return None if client is None else client.waiting[0]

    def take(self, request: Request) -> None:
        """Removes a request and counts its cost as a turn of its client."""
        self.remove(request)
        client = self._clients[request.terms.client]
        client.served += _cost(request)
        if client.waiting:
            self._offer(request.terms.client, client)

    def charge(self, name: str, num_tokens: int) -> None:
        client = self._clients.get(name)
        if client is not None and client.busy_period == self._busy_period:
            client.served += num_tokens
            if client.waiting:
                self._offer(name, client)

    def requests(self) -> list[Request]:
        """All requests that are not set aside."""
        waiting = [request for client in self._clients.values() for request in client.waiting]
        kept = {id(entry) for entry in self._heap}
        for client in self._clients.values():
            assert client.entry is None or id(client.entry) in kept, "a client's entry is lost"
            assert not client.waiting or (client.entry is not None and client.entry[0] == client.served), (
                "a client's turn would come too late or never"
            )
            assert client.waiting == sorted(client.waiting, key=_place), "the requests of a client are out of order"
        return waiting

    def _first_client(self) -> _Client | None:
        """The client that has the next turn."""
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
        """Pushes the client's next turn to the heap."""
        if client.entry is not None and client.entry[0] == client.served:
            return
        client.entry = (client.served, client.began, name)
        heapq.heappush(self._heap, client.entry)
        if len(self._heap) > 2 * len(self._clients) + 64:
            self._heap = [entry for entry in self._heap if self._is_latest(entry)]
            heapq.heapify(self._heap)

    def _is_latest(self, entry: _Entry) -> bool:
        client = self._clients.get(entry[2])
        return client is not None and client.entry is entry

    def _new_client(self, name: str) -> _Client:
        if len(self._clients) > self.num_requests + _MAX_IDLE_CLIENTS:
            # Drops clients with nothing waiting, so that memory does not grow with the number of names ever seen.
            self._clients = {name: client for name, client in self._clients.items() if client.waiting}
        client = self._clients[name] = _Client(self._busy_period)
        return client
