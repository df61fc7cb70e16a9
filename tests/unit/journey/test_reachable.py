"""Routing while workers are out of reach: who is waited for, how long, and what is said at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest
from tests.unit.engines.lab import make_request

from kvolt.core.endpoints import EndpointAddress, Instance
from kvolt.core.errors import Overloaded, Unavailable
from kvolt.core.ids import InstanceId
from kvolt.core.request import Handoff, Request, Role, RoutingHints
from kvolt.journey.reachable import route_when_reachable
from kvolt.router.port import Decision
from kvolt.testing.virtual.loop import run_virtual

A, B = InstanceId("a"), InstanceId("b")


class Fleet:
    """A client and a router over instances that come and go at set times."""

    stall_grace_s = 30.0
    replacement_at: float | None = None
    """When another one than those that were lost registers."""

    def __init__(self, unreachable: dict[InstanceId, float], reachable: tuple[InstanceId, ...] = ()) -> None:
        self._back_at = {**dict.fromkeys(reachable, 0.0), **unreachable}
        self.asked: list[tuple[float, frozenset[InstanceId]]] = []
        self.reason = "none_reachable"

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def recovering(self) -> frozenset[InstanceId]:
        return frozenset(each for each, at in self._back_at.items() if at > self._now())

    @property
    def awaits_replacement(self) -> bool:
        return self.replacement_at is not None and self._now() < self.replacement_at

    async def wait_change(self, timeout_s: float) -> None:
        if self.replacement_at is not None:
            await asyncio.sleep(min(timeout_s, self.replacement_at - self._now()))
            self._back_at.setdefault(B, self._now())
            return
        changes = [at - self._now() for at in self._back_at.values() if at > self._now()]
        await asyncio.sleep(min([timeout_s, *changes]))

    async def route(self, request: Request, excluded: frozenset[InstanceId]) -> Decision:
        self.asked.append((self._now(), excluded))
        pins = request.routing.pins
        for each, at in sorted(self._back_at.items()):
            if at <= self._now() and each not in excluded and (not pins or each in pins.values()):
                return Decision(
                    Instance(id=each, endpoint=EndpointAddress("ns", "c", "e"), address=f"{each}:1")
                )
        raise Unavailable("no instance can be reached", reason=self.reason)

    async def find(
        self,
        request: Request | None = None,
        excluded: frozenset[InstanceId] = frozenset(),
        unreachable: frozenset[InstanceId] = frozenset(),
    ) -> str:
        request = request or make_request()
        found = await route_when_reachable(self, self, request, excluded, unreachable)  # type: ignore[arg-type]
        return str(found.instance.id)


def virtual(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        run_virtual(test)

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


def now() -> float:
    return asyncio.get_running_loop().time()


@virtual
async def test_a_reachable_instance_is_taken_at_once() -> None:
    fleet = Fleet({A: 9.0}, reachable=(B,))
    assert await fleet.find() == "b"
    assert now() == 0.0


@virtual
async def test_the_first_that_comes_back_is_taken() -> None:
    fleet = Fleet({A: 9.0, B: 4.0})
    assert await fleet.find() == "b"
    assert now() == 4.0


@pytest.mark.parametrize(
    "started",
    [
        {"prior_tokens": (300,)},
        {"handoff": Handoff(ticket=b"", prefill_instance=InstanceId("p"), first_tokens=(300,))},
    ],
    ids=["prior tokens", "handoff"],
)
def test_an_answer_waits_for_a_replacement_of_the_last_worker_and_a_new_request_does_not(
    started: dict[str, Any],
) -> None:
    async def body() -> None:
        fleet = Fleet({})
        fleet.replacement_at = 12.0
        with pytest.raises(Unavailable):
            await fleet.find()
        assert now() == 0.0
        assert await fleet.find(msgspec.structs.replace(make_request(), **started)) == "b"
        assert now() == 12.0

    run_virtual(body)


@virtual
async def test_an_excluded_instance_is_asked_again_when_it_is_back() -> None:
    """It failed the request by being out of reach."""
    fleet = Fleet({A: 9.0})
    assert await fleet.find(excluded=frozenset([A])) == "a"
    assert fleet.asked == [(0.0, {A}), (9.0, frozenset())]


@virtual
async def test_an_excluded_instance_that_was_never_out_of_reach_stays_excluded() -> None:
    fleet = Fleet({A: 9.0}, reachable=(B,))
    assert await fleet.find(excluded=frozenset([B])) == "a"


@virtual
async def test_an_instance_that_was_out_of_reach_and_is_back_is_asked_again_if_no_other_is_left() -> None:
    fleet = Fleet({}, reachable=(A, B))
    assert await fleet.find(excluded=frozenset([A]), unreachable=frozenset([A])) == "b"
    assert await fleet.find(excluded=frozenset([A, B]), unreachable=frozenset([B])) == "b"
    assert now() == 0.0


@virtual
async def test_an_instance_that_is_still_out_of_reach_is_waited_for_while_no_other_is_back() -> None:
    fleet = Fleet({A: 5.0})
    assert await fleet.find(excluded=frozenset([A]), unreachable=frozenset([A])) == "a"
    assert now() == 5.0


@virtual
async def test_the_wait_ends_with_the_grace_and_says_what_to_do() -> None:
    fleet = Fleet({A: 99.0, B: 99.0})
    with pytest.raises(Unavailable) as caught:
        await fleet.find()
    assert now() == 30.0
    assert caught.value.message == (
        "no instance can be reached; waited 30 s, 2 of them still being dialed: check that the workers' processes run"
    )
    assert caught.value.fields["reason"] == "none_reachable"


@virtual
async def test_without_anyone_to_wait_for_it_fails_at_once() -> None:
    with pytest.raises(Unavailable, match=r"reached$"):
        await Fleet({}).find()
    assert now() == 0.0


@virtual
async def test_what_has_nothing_to_do_with_reach_is_not_waited_for() -> None:
    fleet = Fleet({A: 9.0})
    fleet.reason = "block_size"
    with pytest.raises(Unavailable):
        await fleet.find()

    async def full(request: Request, excluded: frozenset[InstanceId]) -> Decision:
        raise Overloaded("full", queue="router", limit=1)

    fleet.route = full  # type: ignore[method-assign]
    with pytest.raises(Overloaded):
        await fleet.find()
    assert now() == 0.0


@virtual
async def test_only_workers_that_the_caller_chose_are_waited_for() -> None:
    def choosing(**hints: Any) -> Request:
        return msgspec.structs.replace(make_request(), routing=RoutingHints(**hints))

    fleet = Fleet({A: 9.0}, reachable=(B,))
    for request in (choosing(pins={Role.AGGREGATED: InstanceId("c")}), choosing(allowed=(InstanceId("c"),))):
        with pytest.raises(Unavailable):
            await fleet.find(request, frozenset([B]))
    assert now() == 0.0
    assert await fleet.find(choosing(pins={Role.AGGREGATED: A})) == "a"
    assert now() == 9.0
