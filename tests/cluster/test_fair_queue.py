"""Turns of waiting requests: by level, by what each client was served, and never too late."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np

from cluster.messages.engine import GenerateRequest, SamplingParams, Terms
from cluster.scheduling.fair_queue import FairQueue
from cluster.scheduling.request import Request
from tests.helpers.fake_engine import LIMITS

SAMPLING = SamplingParams(max_tokens=1)


class Arrivals:
    """A queue and the requests that were pushed to it, with ids from 1."""

    def __init__(self) -> None:
        self.queue = FairQueue()
        self.count = 0

    def push(self, client: str = "", *, level: int = 0, priority: int = 0, num_tokens: int = 10) -> Request:
        self.count += 1
        prompt = np.zeros(num_tokens, np.int32).tobytes()
        message = GenerateRequest(
            id=self.count,
            prompt=prompt,
            sampling=SAMPLING,
            terms=Terms(level=level, priority=priority, client=client),
        )
        request = Request.create(message, LIMITS)
        self.queue.push(request)
        self.queue.check_integrity()
        return request

    def admit(self) -> Request:
        request = self.queue.first()
        assert request is not None
        self.queue.pop(request)
        self.queue.check_integrity()
        return request

    def admit_all(self) -> list[Request]:
        return [self.admit() for _ in range(len(self.queue))]


def test_a_lower_priority_goes_first_and_equal_ones_in_order_of_arrival() -> None:
    arrivals = Arrivals()
    for priority in (5, 0, -3, 0, 5, 2**62):
        arrivals.push(priority=priority)
    assert [request.id for request in arrivals.admit_all()] == [3, 2, 4, 1, 5, 6]
    assert arrivals.queue.first() is None


def test_a_priority_counts_among_the_requests_of_its_own_client_alone() -> None:
    arrivals = Arrivals()
    for _ in range(3):
        arrivals.push("plain")
    for priority in (0, -(2**53) + 1, -5):
        arrivals.push("pushy", priority=priority)
    assert [request.id for request in arrivals.admit_all()] == [1, 5, 2, 6, 3, 4]


def test_a_granted_level_goes_before_every_other_one_whatever_the_priority() -> None:
    arrivals = Arrivals()
    for level, priority in ((0, -9), (1, -99), (-1, 99), (0, 0)):
        arrivals.push(str(level), level=level, priority=priority)
    assert [request.id for request in arrivals.admit_all()] == [3, 1, 4, 2]


def test_clients_that_come_last_have_a_turn_when_no_other_client_waits() -> None:
    arrivals = Arrivals()
    for _ in range(3):
        arrivals.push("last")
    arrivals.push("first", num_tokens=1000)
    arrivals.push("last", level=-1)
    clients = []
    while (request := arrivals.queue.first(lambda client: client == "last")) is not None:
        arrivals.queue.pop(request)
        arrivals.queue.check_integrity()
        clients.append((request.terms.level, request.terms.client))
    assert clients == [(-1, "last"), (0, "first"), (0, "last"), (0, "last"), (0, "last")]


def test_clients_take_turns_whoever_has_more_waiting() -> None:
    arrivals = Arrivals()
    for client in 10 * ["many"] + 3 * ["few"]:
        arrivals.push(client)
    order = [request.terms.client for request in arrivals.admit_all()]
    assert order[:7] == ["many", "few", "many", "few", "many", "few", "many"]


def test_turns_are_counted_in_prompt_tokens() -> None:
    arrivals = Arrivals()
    for _ in range(100):
        arrivals.push("long", num_tokens=100)
        arrivals.push("short", num_tokens=10)
    served = Counter(arrivals.admit().terms.client for _ in range(55))
    assert 4 <= served["long"] <= 8


def test_the_tokens_of_answers_count_when_they_end() -> None:
    arrivals = Arrivals()
    for _ in range(20):
        arrivals.push("talker")
        arrivals.push("listener")
    talker, listener = arrivals.admit(), arrivals.admit()
    assert (talker.terms.client, listener.terms.client) == ("talker", "listener")
    arrivals.queue.charge(talker, 55)
    assert [arrivals.admit().terms.client for _ in range(7)] == 6 * ["listener"] + ["talker"]
    # Of a client with nothing at this level there is nothing to count.
    arrivals.queue.charge(Arrivals().push("stranger", level=7), 5)


def test_who_comes_late_starts_level_and_who_comes_back_has_saved_nothing() -> None:
    arrivals = Arrivals()
    for _ in range(40):
        arrivals.push("steady")
    for _ in range(10):
        arrivals.admit()
    arrivals.push("late")
    assert [arrivals.admit().terms.client for _ in range(3)].count("late") == 1
    for _ in range(10):  # one at a time, again as soon as the last one was admitted
        arrivals.push("late")
        assert sorted(arrivals.admit().terms.client for _ in range(2)) == ["late", "steady"]


def test_what_was_preempted_goes_first_of_its_client_and_priority_the_last_one_before_the_others() -> None:
    arrivals = Arrivals()
    first, second, third = (arrivals.push("a") for _ in range(3))
    urgent = arrivals.push("a", priority=-1)
    admitted = [arrivals.admit() for _ in range(3)]
    assert admitted == [urgent, first, second]
    for request in (second, first):
        request.num_preemptions += 1
        arrivals.queue.push(request)
    again = arrivals.push("a", priority=-1)
    assert arrivals.admit_all() == [again, first, second, third]


def test_what_is_put_back_keeps_its_place_and_costs_nothing() -> None:
    def order(looks: int) -> list[int]:
        arrivals, generator = Arrivals(), random.Random(1)
        for _ in range(60):
            arrivals.push(
                generator.choice("abc"),
                level=generator.randrange(2),
                priority=generator.randrange(2),
                num_tokens=generator.randrange(1, 9),
            )
        ids = []
        while len(arrivals.queue):
            for _ in range(looks):
                if (request := arrivals.queue.first()) is not None:
                    arrivals.queue.set_aside(request)
            arrivals.queue.put_back()
            arrivals.queue.check_integrity()
            ids.append(arrivals.admit().id)
        return ids

    assert order(0) == order(1) == order(5)


def test_under_a_flood_of_new_clients_at_a_better_level_everyone_is_admitted_in_time() -> None:
    arrivals = Arrivals()
    patient = [arrivals.push("patient", level=9, num_tokens=1000) for _ in range(5)]
    waited: dict[int, int] = {}
    for turn in range(200):
        arrivals.push(f"new {turn}")
        arrivals.push(f"new {turn} too")
        request = arrivals.admit()
        if request in patient:
            waited[request.id] = turn
    assert [waited[request.id] for request in patient] == [15, 31, 47, 63, 79]


def test_what_is_remembered_of_clients_is_bounded() -> None:
    arrivals = Arrivals()
    arrivals.push("last", level=0)
    for index in range(30_000):
        request = Request.create(
            GenerateRequest(id=2 + index, prompt=bytes(4), sampling=SAMPLING, terms=Terms(client=str(index))), LIMITS
        )
        arrivals.queue.push(request)
        first = arrivals.queue.first()
        assert first is not None
        arrivals.queue.pop(first)
    [level] = arrivals.queue._levels.values()
    assert len(level._clients) < 5000
    assert len(level._heap) < 10_100
    arrivals.admit_all()
    for level in range(1000):
        arrivals.push(level=level)
        arrivals.admit()
    assert len(arrivals.queue._levels) <= 64


def test_being_passed_over_for_long_costs_no_memory() -> None:
    arrivals = Arrivals()
    for client in "aab":
        arrivals.push(client)
    for _ in range(5000):
        for _ in range(2):
            first = arrivals.queue.first()
            assert first is not None
            arrivals.queue.set_aside(first)
        arrivals.queue.put_back()
    [level] = arrivals.queue._levels.values()
    assert len(level._heap) < 100
    assert [request.terms.client for request in arrivals.admit_all()] == ["a", "b", "a"]


def test_what_was_served_is_forgotten_once_nothing_waits() -> None:
    arrivals = Arrivals()
    for _ in range(10):
        arrivals.push("heavy", num_tokens=1000)
    arrivals.push("light")
    arrivals.admit_all()
    for client in ("heavy", "light", "heavy", "light"):
        arrivals.push(client)
    assert [request.terms.client for request in arrivals.admit_all()] == ["heavy", "light", "heavy", "light"]


def test_any_sequence_of_operations_loses_no_request_and_repeats_none() -> None:
    for seed in range(20):
        rng, arrivals = random.Random(seed), Arrivals()
        waiting: dict[int, Request] = {}
        admitted: list[Request] = []
        for _ in range(300):
            event = rng.random()
            if event < 0.4:
                request = arrivals.push(
                    rng.choice("abcdef"),
                    level=rng.randrange(2),
                    priority=rng.randrange(3),
                    num_tokens=rng.randrange(1, 50),
                )
                waiting[request.id] = request
            elif event < 0.5 and waiting:
                arrivals.queue.remove(waiting.pop(rng.choice(list(waiting))))
            elif event < 0.6 and admitted:
                request = admitted.pop(rng.randrange(len(admitted)))
                request.num_preemptions += 1
                arrivals.queue.push(request)
                waiting[request.id] = request
            elif event < 0.65 and admitted:
                arrivals.queue.charge(admitted.pop(), rng.randrange(100))
            elif waiting:
                for _ in range(rng.randrange(1, 6)):
                    last = rng.choice("abcdef")
                    first = arrivals.queue.first(lambda client, last=last: client == last, is_oldest=rng.random() < 0.1)
                    if first is not None and rng.random() < 0.5:
                        arrivals.queue.pop(waiting.pop(first.id))
                        admitted.append(first)
                    elif first is not None:
                        arrivals.queue.set_aside(first)
                arrivals.queue.put_back()
            assert arrivals.queue.check_integrity() == set(waiting)
            assert arrivals.queue.num_tokens == sum(len(request.tokens) for request in waiting.values())
        assert {request.id for request in arrivals.admit_all()} == set(waiting)
