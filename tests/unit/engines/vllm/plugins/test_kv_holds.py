"""Holds: how each ends, what renews them, and that an ended one is never intact again."""

from __future__ import annotations

import pytest

from kvolt.engines.vllm.plugins.kv_holds import Holds


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_hold_is_intact_until_it_expires(clock: Clock) -> None:
    holds = Holds(clock)
    holds.begin("a", 30.0)
    clock.now += 29.9
    assert holds.end_expired() == []
    assert holds.is_intact("a")
    clock.now += 0.1
    assert holds.end_expired() == ["a"]
    assert not holds.is_intact("a")
    assert not holds
    assert not holds.end("a")


def test_a_released_hold_is_gone_at_once(clock: Clock) -> None:
    holds = Holds(clock)
    holds.begin("a", 30.0)
    assert holds.end("a")
    assert not holds.is_intact("a")
    assert not holds.end("a")


def test_a_reader_that_waits_keeps_it(clock: Clock) -> None:
    holds = Holds(clock)
    holds.begin("a", 30.0)
    holds.begin("b", 30.0)
    for _ in range(10):
        clock.now += 20.0
        holds.renew(["a", "unknown"])
        ended = holds.end_expired()
        assert "a" not in ended
    assert holds.is_intact("a")
    assert not holds.is_intact("b")
    assert not holds.is_intact("unknown")


def test_no_renewal_extends_it_beyond_the_deadline(clock: Clock) -> None:
    holds = Holds(clock)
    holds.begin("a", 30.0, deadline_s=50.0)
    holds.begin("b", 30.0, deadline_s=5.0)
    clock.now += 5.0
    holds.renew(["a", "b"])
    assert holds.end_expired() == ["b"]
    clock.now += 25.0
    holds.renew(["a"])
    clock.now += 20.0
    assert holds.end_expired() == ["a"]


def test_a_renewal_never_shortens_it(clock: Clock) -> None:
    holds = Holds(clock)
    holds.begin("a", 30.0, deadline_s=30.0)
    clock.now += 1.0
    holds.renew(["a"])
    clock.now += 28.9
    assert holds.end_expired() == []


def test_an_expired_hold_that_was_not_collected_yet_can_be_renewed(clock: Clock) -> None:
    """Its blocks are held until the owner's next step collects it: a renewal in a long step of the owner counts."""
    holds = Holds(clock)
    holds.begin("a", 30.0)
    clock.now += 40.0
    holds.renew(["a"])
    assert holds.end_expired() == []
    assert holds.is_intact("a")
