"""What was sent and has not begun: asked back only for a clear gain, once at a time, and never to and fro."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace
from tests.unit.engines.lab import make_request

from kvolt.core.delta import Usage
from kvolt.core.errors import Unavailable
from kvolt.core.ids import InstanceId
from kvolt.core.request import Request, Role, RoutingHints
from kvolt.router.port import Decision, Recall
from kvolt.router.queue.withdrawals import TakeBack, TakeBackOptions
from kvolt.runtime.endpoint.address import EndpointAddress, Instance

REQUEST = make_request()


@dataclass
class Fleet:
    """Workers with so many seconds of work before them each, as the router sees it."""

    queues: dict[str, float]
    free_s: float | None = 0.0
    """Until the first token at the best of the others."""
    booked: list[int] = field(default_factory=list)
    asked: list[frozenset[InstanceId]] = field(default_factory=list)
    numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def decision(self, name: str, predicted_ms: float = 1000.0) -> Decision:
        number = next(self.numbers)
        self.booked.append(number)
        instance = Instance(id=InstanceId(name), endpoint=EndpointAddress("n", "c", "e"), address="host:1")
        return Decision(instance, booking=number, predicted_ms=predicted_ms, recall=Recall())

    def try_route(self, request: Request, excluded: frozenset[InstanceId] = frozenset()) -> Decision | None:
        self.asked.append(excluded)
        left = [name for name in self.queues if name not in excluded]
        if not left:
            raise Unavailable("nobody")
        return None if self.free_s is None else replace(self.decision(left[-1], 0.0), recall=None)

    def foresee_s(self, request: Request, excluded: frozenset[InstanceId] = frozenset()) -> float | None:
        if all(name in excluded for name in self.queues):
            raise Unavailable("nobody")
        return self.free_s

    def queue_s(self, decision: Decision) -> float:
        return self.queues[decision.instance.id]

    def free(self, decision: Decision, usage: Usage | None, outcome: object = None) -> None:
        self.booked.remove(decision.booking)


class Scene:
    def __init__(self, options: TakeBackOptions | None = None, **queues: float) -> None:
        self.now = 100.0
        self.fleet = Fleet(dict(queues))
        self.back = TakeBack(self.fleet, lambda: self.now, options or TakeBackOptions())
        self.moved: list[tuple[str, str]] = []
        self.accepts = True

    def send(
        self, name: str, to: str, predicted_ms: float = 1000.0, request: Request = REQUEST, deaf: bool = False
    ) -> Decision:
        decision = self.fleet.decision(to, predicted_ms)

        def move(there: Decision) -> bool:
            self.moved.append((name, there.instance.id))
            return self.accepts

        assert decision.recall is not None
        decision.recall.move = None if deaf else move
        self.back.sent(decision, request, frozenset())
        return decision

    def told(self, there: Decision) -> bool:
        self.moved.append(("r", there.instance.id))
        return True

    def check(self, after_s: float = 0.05) -> int:
        self.now += after_s
        return self.back.check()


def test_the_last_of_the_longest_queue_goes_where_there_is_room() -> None:
    here = Scene(a=3.0, b=1.0, c=0.0)
    for name, to in (("a1", "a"), ("b1", "b"), ("a2", "a"), ("b2", "b"), ("a3", "a")):
        here.send(name, to)
    here.fleet.free_s = 0.8
    assert here.check() > 0
    assert here.moved[0] == ("a3", "c")
    assert here.fleet.asked[0] == {"a"}
    assert here.moved == [("a3", "c"), ("a2", "c")], "who is asked for is as good as gone: the first may stay"


@pytest.mark.parametrize(
    ("queue_s", "free_s", "is_moved"),
    [(1.0, 0.49, True), (1.0, 0.51, False), (1.0, None, False), (0.2, 0.0, False), (0.3, 0.04, True)],
)
def test_only_for_a_clear_gain(queue_s: float, free_s: float | None, is_moved: bool) -> None:
    here = Scene(a=queue_s, b=0.0)
    here.send("first", "a", deaf=True)
    here.send("last", "a")
    here.fleet.free_s = free_s
    here.check()
    assert here.moved == ([("last", "b")] if is_moved else [])
    assert len(here.fleet.booked) == 2 + is_moved


def test_one_that_is_alone_there_is_being_computed_unless_it_is_late() -> None:
    here = Scene(a=5.0, b=0.0)
    here.send("alone", "a", predicted_ms=5000.0)
    assert here.check(after_s=6.0) == 0
    assert here.check(after_s=5.0) == 1, "twice what was foreseen"
    assert here.moved == [("alone", "b")]
    assert here.check(after_s=5.0) == 0, "it was asked for"


def test_a_worker_that_keeps_its_first_waiting_is_taken_to_be_as_slow_for_the_others() -> None:
    here = Scene(a=0.2, b=0.0)
    here.send("first", "a", predicted_ms=500.0, deaf=True)
    here.send("last", "a")
    assert here.check(after_s=0.4) == 0, "on time, and nothing to gain"
    assert here.check(after_s=1.0) == 1, "almost three times as long as was foreseen"
    assert here.moved == [("last", "b")]


def test_who_has_begun_or_is_over_is_not_asked_for() -> None:
    here = Scene(a=3.0, b=0.0)
    decisions = [here.send(f"r{number}", "a") for number in range(3)]
    assert here.back.num_unstarted == 3
    for decision in decisions:
        here.back.forget(decision)
        here.back.forget(decision)
    assert (here.back.num_unstarted, here.back.is_due(1e9), here.check()) == (0, False, 0)


def test_who_cannot_be_moved_is_left_alone() -> None:
    here = Scene(a=3.0, b=0.0)
    pinned = replace(REQUEST, routing=RoutingHints(pins={Role.AGGREGATED: InstanceId("a")}))
    here.send("movable", "a")
    here.send("pinned", "a", request=pinned)
    here.send("deaf", "a", deaf=True)
    here.check()
    assert here.moved == [("movable", "b")]
    only = Scene(a=3.0)
    only.send("first", "a")
    only.send("nowhere", "a")
    assert only.check() == 0
    assert len(only.fleet.booked) == 2


def test_what_nobody_took_is_given_back() -> None:
    here = Scene(a=3.0, b=0.0)
    here.send("first", "a")
    here.send("last", "a")
    here.accepts = False
    assert here.check() == 0
    assert (len(here.fleet.booked), here.back.num_unstarted) == (2, 2)


def test_a_request_is_moved_a_few_times_at_most() -> None:
    here = Scene(TakeBackOptions(max_moves=2), a=3.0, b=0.0)
    current = here.send("r", "a")
    here.send("first of b", "b", deaf=True)
    here.send("first of a", "a", deaf=True)
    num_moves = 0
    for _ in range(20):
        before = len(here.moved)
        here.check(after_s=0.1)
        if len(here.moved) > before:
            num_moves += 1
            here.back.forget(current)
            place = here.back._places[
                next(each for each in here.back._places if each[0] == here.moved[-1][1])
            ]
            current = next(reversed(place.sent.values())).decision
            assert current.recall is not None
            current.recall.move = here.told
            here.fleet.queues = {"a": here.fleet.queues["b"], "b": here.fleet.queues["a"]}  # as bad there
    assert num_moves == 2
    assert Scene(TakeBackOptions(max_moves=0), a=3.0).back.is_due(1e9) is False


def test_looks_are_bounded_however_much_happens() -> None:
    here = Scene(a=3.0, b=0.0)
    for number in range(20):
        here.send(f"r{number}", "a")
    assert here.check() == 4
    assert here.check(after_s=0.001) == 0
    assert here.check() == 4


def test_with_moves_off_nothing_is_remembered() -> None:
    here = Scene(TakeBackOptions(max_moves=0), a=3.0, b=0.0)
    here.send("first", "a")
    here.send("last", "a")
    assert (here.back.num_unstarted, here.check()) == (0, 0)
