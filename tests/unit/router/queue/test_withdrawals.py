"""Withdrawal of unstarted requests: only for a clear gain, bounded, never back and forth."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace
from tests.unit.engines.lab import make_request

from kvolt.core.delta import Usage
from kvolt.core.endpoints import EndpointAddress, Instance
from kvolt.core.errors import Unavailable
from kvolt.core.ids import InstanceId
from kvolt.core.request import Request, Role, RoutingHints
from kvolt.router.port import Decision, WithdrawHook
from kvolt.router.queue.withdrawals import WithdrawalOptions, WithdrawalPlanner

REQUEST = make_request()


@dataclass
class Fleet:
    """Workers with so many seconds of work before them each, as the router sees it."""

    queues: dict[str, float]
    free_s: float | None = 0.0
    """Until the first token at the best of the others."""
    reserved: list[int] = field(default_factory=list)
    exclusions: list[frozenset[InstanceId]] = field(default_factory=list)
    numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def decision(self, name: str, predicted_ms: float = 1000.0) -> Decision:
        number = next(self.numbers)
        self.reserved.append(number)
        instance = Instance(id=InstanceId(name), endpoint=EndpointAddress("n", "c", "e"), address="host:1")
        return Decision(
            instance, reservation_id=number, predicted_ms=predicted_ms, withdraw_hook=WithdrawHook()
        )

    def try_route(self, request: Request, excluded: frozenset[InstanceId] = frozenset()) -> Decision | None:
        self.exclusions.append(excluded)
        left = [name for name in self.queues if name not in excluded]
        if not left:
            raise Unavailable("nobody")
        return None if self.free_s is None else replace(self.decision(left[-1], 0.0), withdraw_hook=None)

    def predict_ttft_s(self, request: Request, excluded: frozenset[InstanceId] = frozenset()) -> float | None:
        if all(name in excluded for name in self.queues):
            raise Unavailable("nobody")
        return self.free_s

    def queue_s(self, decision: Decision) -> float:
        return self.queues[decision.instance.id]

    def reachable_ids(self) -> list[InstanceId]:
        return list(map(InstanceId, self.queues))

    def release(self, decision: Decision, usage: Usage | None, outcome: object = None) -> None:
        self.reserved.remove(decision.reservation_id)


class Scene:
    def __init__(self, options: WithdrawalOptions | None = None, **queues: float) -> None:
        self.now = 100.0
        self.fleet = Fleet(dict(queues))
        self.planner = WithdrawalPlanner(self.fleet, lambda: self.now, options or WithdrawalOptions())
        self.moved: list[tuple[str, str]] = []
        self.accepts = True

    def send(
        self,
        name: str,
        to: str,
        predicted_ms: float = 1000.0,
        request: Request = REQUEST,
        is_immovable: bool = False,
    ) -> Decision:
        decision = self.fleet.decision(to, predicted_ms)

        def move(there: Decision) -> bool:
            self.moved.append((name, there.instance.id))
            return self.accepts

        assert decision.withdraw_hook is not None
        decision.withdraw_hook.try_move = None if is_immovable else move
        self.planner.add(decision, request, frozenset())
        return decision

    def told(self, there: Decision) -> bool:
        self.moved.append(("r", there.instance.id))
        return True

    def withdraw_late(self, after_s: float = 0.05) -> int:
        self.now += after_s
        return self.planner.withdraw_late()


def test_the_last_request_of_the_longest_queue_moves() -> None:
    scene = Scene(a=3.0, b=1.0, c=0.0)
    for name, to in (("a1", "a"), ("b1", "b"), ("a2", "a"), ("b2", "b"), ("a3", "a")):
        scene.send(name, to)
    scene.fleet.free_s = 0.8
    assert scene.withdraw_late() > 0
    assert scene.moved[0] == ("a3", "c")
    assert scene.fleet.exclusions[0] == {"a"}
    assert scene.moved == [("a3", "c"), ("a2", "c")], (
        "requests being withdrawn do not count: the first may stay"
    )


@pytest.mark.parametrize(
    ("queue_s", "free_s", "is_moved"),
    [(1.0, 0.49, True), (1.0, 0.51, False), (1.0, None, False), (0.2, 0.0, False), (0.3, 0.04, True)],
)
def test_only_for_a_clear_gain(queue_s: float, free_s: float | None, is_moved: bool) -> None:
    scene = Scene(a=queue_s, b=0.0)
    scene.send("first", "a", is_immovable=True)
    scene.send("last", "a")
    scene.fleet.free_s = free_s
    scene.withdraw_late()
    assert scene.moved == ([("last", "b")] if is_moved else [])
    assert len(scene.fleet.reserved) == 2 + is_moved


def test_one_that_is_alone_there_is_being_computed_unless_it_is_late() -> None:
    scene = Scene(a=5.0, b=0.0)
    scene.send("alone", "a", predicted_ms=5000.0)
    assert scene.withdraw_late(after_s=6.0) == 0
    assert scene.withdraw_late(after_s=5.0) == 1, "twice what was foreseen"
    assert scene.moved == [("alone", "b")]
    assert scene.withdraw_late(after_s=5.0) == 0, "it was asked for"


def test_a_late_first_token_scales_the_predicted_wait() -> None:
    scene = Scene(a=0.2, b=0.0)
    scene.send("first", "a", predicted_ms=500.0, is_immovable=True)
    scene.send("last", "a")
    assert scene.withdraw_late(after_s=0.4) == 0, "on time, and nothing to gain"
    assert scene.withdraw_late(after_s=1.0) == 1, "almost three times as long as was foreseen"
    assert scene.moved == [("last", "b")]


def test_started_and_ended_requests_are_not_withdrawn() -> None:
    scene = Scene(a=3.0, b=0.0)
    decisions = [scene.send(f"r{number}", "a") for number in range(3)]
    assert scene.planner.num_unstarted == 3
    for decision in decisions:
        scene.planner.remove(decision)
        scene.planner.remove(decision)
    assert (scene.planner.num_unstarted, scene.planner.is_due(1e9), scene.withdraw_late()) == (0, False, 0)


def test_immovable_requests_stay() -> None:
    scene = Scene(a=3.0, b=0.0)
    pinned = replace(REQUEST, routing=RoutingHints(pins={Role.AGGREGATED: InstanceId("a")}))
    scene.send("movable", "a")
    scene.send("pinned", "a", request=pinned)
    scene.send("deaf", "a", is_immovable=True)
    scene.withdraw_late()
    assert scene.moved == [("movable", "b")]
    only = Scene(a=3.0)
    only.send("first", "a")
    only.send("nowhere", "a")
    assert only.withdraw_late() == 0
    assert len(only.fleet.reserved) == 2


def test_a_rejected_move_releases_its_reservation() -> None:
    scene = Scene(a=3.0, b=0.0)
    scene.send("first", "a")
    scene.send("last", "a")
    scene.accepts = False
    assert scene.withdraw_late() == 0
    assert (len(scene.fleet.reserved), scene.planner.num_unstarted) == (2, 2)


def test_a_request_is_moved_a_few_times_at_most() -> None:
    scene = Scene(WithdrawalOptions(max_moves=2), a=3.0, b=0.0)
    current = scene.send("r", "a")
    scene.send("first of b", "b", is_immovable=True)
    scene.send("first of a", "a", is_immovable=True)
    num_moves = 0
    for _ in range(20):
        before = len(scene.moved)
        scene.withdraw_late(after_s=0.1)
        if len(scene.moved) > before:
            num_moves += 1
            scene.planner.remove(current)
            place = scene.planner._queues[
                next(each for each in scene.planner._queues if each[0] == scene.moved[-1][1])
            ]
            current = next(reversed(place.sent.values())).decision
            assert current.withdraw_hook is not None
            current.withdraw_hook.try_move = scene.told
            scene.fleet.queues = {"a": scene.fleet.queues["b"], "b": scene.fleet.queues["a"]}  # as bad there
    assert num_moves == 2
    assert Scene(WithdrawalOptions(max_moves=0), a=3.0).planner.is_due(1e9) is False


def test_looks_are_bounded_however_much_happens() -> None:
    scene = Scene(a=3.0, b=0.0)
    for number in range(20):
        scene.send(f"r{number}", "a")
    assert scene.withdraw_late() == 4
    assert scene.withdraw_late(after_s=0.001) == 0
    assert scene.withdraw_late() == 4


def test_with_moves_off_nothing_is_remembered() -> None:
    scene = Scene(WithdrawalOptions(max_moves=0), a=3.0, b=0.0)
    scene.send("first", "a")
    scene.send("last", "a")
    assert (scene.planner.num_unstarted, scene.withdraw_late()) == (0, 0)


def test_a_held_request_moves_only_to_workers_that_joined_since() -> None:
    scene = Scene(a=3.0, b=0.0)
    scene.send("first", "a", is_immovable=True)
    held = scene.send("held", "a")
    assert held.withdraw_hook is not None
    held.withdraw_hook.known_workers = frozenset(map(InstanceId, "ab"))
    assert scene.withdraw_late() == 0
    assert scene.fleet.exclusions == []
    scene.fleet.queues["c"] = 0.0
    assert scene.withdraw_late() == 1
    assert scene.moved == [("held", "c")]
    assert scene.fleet.exclusions == [{"a", "b"}]


def test_a_held_request_moves_to_any_worker_if_its_own_is_late() -> None:
    """It was placed there by predictions that are wrong."""
    scene = Scene(a=3.0, b=0.0)
    scene.send("first", "a", is_immovable=True)
    held = scene.send("held", "a")
    assert held.withdraw_hook is not None
    held.withdraw_hook.known_workers = frozenset(map(InstanceId, "ab"))
    assert scene.withdraw_late(1.2) == 0
    assert scene.withdraw_late(0.1) == 1
    assert scene.moved == [("held", "b")]
