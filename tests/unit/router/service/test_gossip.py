"""Gossip between routers: states, not changes, so that nothing has to arrive."""

from __future__ import annotations

import math
import random

import msgspec
import pytest

from kvolt.core.ids import InstanceId
from kvolt.router.place import Place
from kvolt.router.service.gossip import (
    MAX_PLACES,
    GossipOptions,
    LoadVector,
    OtherLoads,
    PlaceBookings,
    Teller,
)

OPTIONS = GossipOptions(period_s=0.1, heartbeat_s=1.0, greetings=1, lasting_periods=10, repeats=2)
W0, W1 = InstanceId("w0"), InstanceId("w1")


def load(instance: InstanceId, requests: float, queue_s: float = 0.0, dp_rank: int = 0) -> PlaceBookings:
    return PlaceBookings(
        instance, dp_rank, requests, requests / 2, 100 * requests, 8 * requests, 50.0, queue_s
    )


def vector(
    replica: str, version: int, *loads: PlaceBookings, epoch: int = 1, lasts_s: float = 1.0
) -> LoadVector:
    return LoadVector("ns.c.generate", replica, epoch, version, lasts_s, loads)


def requests_at(others: OtherLoads, instance: InstanceId, now: float = 0.0) -> float:
    return others.of(Place(instance, 0), now).requests


# --- what is told


def test_while_anything_is_booked_it_is_told_every_period() -> None:
    teller = Teller("e", "a", 7, OPTIONS)
    told = [teller.due([load(W0, 1)], 0.1 * turn) for turn in range(5)]
    assert [word.version for word in told if word is not None] == [1, 2, 3, 4, 5]
    assert all(word is not None and word.epoch == 7 and word.lasts_s == pytest.approx(1.0) for word in told)


def test_an_end_is_told_more_than_once_and_then_only_that_we_live() -> None:
    teller = Teller("e", "a", 1, OPTIONS)
    assert teller.due([load(W0, 1)], 0.0) is not None
    told_at = [turn for turn in range(1, 40) if teller.due([], 0.1 * turn) is not None]
    assert told_at == [1, 2, 3, 13, 23, 33]
    last = teller.leave()
    assert (last.lasts_s, last.places, last.version) == (0.0, (), 8)


def test_a_new_router_says_so_over_and_over_at_first() -> None:
    teller = Teller("e", "a", 1, GossipOptions(greetings=3))
    told = [teller.due([], 5.0 + 0.1 * turn) for turn in range(13)]
    assert [turn for turn, word in enumerate(told) if word is not None] == [0, 1, 2, 12]
    assert told[0] is not None
    assert (told[0].places, told[0].lasts_s) == ((), 3.0)


def test_with_nobody_there_only_heartbeats_tell_what_is_booked() -> None:
    teller = Teller("e", "a", 1, OPTIONS)
    words = [teller.due([load(W0, 1)], 0.1 * turn, is_alone=True) for turn in range(21)]
    told = {turn: word for turn, word in enumerate(words) if word is not None}
    assert list(told) == [0, 10, 20]
    assert all(word.places == (load(W0, 1),) and word.lasts_s == 3.0 for word in told.values())
    assert teller.due([load(W0, 1)], 2.1) is not None, "somebody has come"


def test_of_too_many_places_the_busiest_are_told() -> None:
    loads = [load(InstanceId(f"w{number}"), number + 1.0) for number in range(MAX_PLACES + 2)]
    word = Teller("e", "a", 1, OPTIONS).due(loads, 0.0)
    assert word is not None
    assert len(word.places) == MAX_PLACES
    assert min(place.requests for place in word.places) == 3.0
    msgspec.msgpack.decode(msgspec.msgpack.encode(word), type=LoadVector)


# --- what is heard


def test_what_the_others_have_is_summed_by_place() -> None:
    others = OtherLoads("a")
    others.hear(vector("b", 1, load(W0, 2), load(W1, 1), load(W0, 8, dp_rank=1)), 0.0)
    others.hear(vector("c", 1, load(W0, 4)), 0.0)
    others.hear(vector("a", 1, load(W0, 100)), 0.0)  # our own word comes back
    assert others.of(Place(W0, 0), 0.0) == PlaceBookings(W0, 0, 6, 3, 600, 48, 100)
    assert others.of(Place(W0, 1), 0.0).requests == 8
    assert requests_at(others, W1) == 1
    assert others.num_replicas == 2
    assert sorted(others.take_changed()) == [(W0, 0), (W0, 1), (W1, 0)]
    assert others.take_changed() == []


def test_a_place_that_is_not_told_of_any_more_has_nothing() -> None:
    others = OtherLoads("a")
    others.hear(vector("b", 1, load(W0, 2), load(W1, 1)), 0.0)
    others.take_changed()
    others.hear(vector("b", 3, load(W1, 1)), 0.1)
    assert requests_at(others, W0) == 0
    assert others.take_changed() == [(W0, 0)], "only what has changed"


def test_an_older_word_changes_nothing_and_a_new_life_begins_anew() -> None:
    others = OtherLoads("a")
    others.hear(vector("b", 5, load(W0, 2)), 0.0)
    for late in (vector("b", 4, load(W0, 9)), vector("b", 5, load(W0, 9)), vector("b", 99, epoch=0)):
        others.hear(late, 0.0)
    assert requests_at(others, W0) == 2
    assert others.num_old == 3
    others.hear(vector("b", 1, load(W0, 1), epoch=2), 0.0)
    assert requests_at(others, W0) == 1


def test_who_is_silent_is_forgotten_and_who_leaves_at_once() -> None:
    others = OtherLoads("a")
    others.hear(vector("b", 1, load(W0, 2)), 0.0)
    others.hear(vector("c", 1, load(W0, 4), lasts_s=1e9), 0.5)
    others.hear(vector("d", 1, load(W1, 4)), 0.5)
    others.take_changed()
    assert others.expire(0.99) == []
    assert others.expire(1.0) == ["b"]
    assert requests_at(others, W0) == 4
    others.hear(vector("d", 2, lasts_s=0.0), 1.0)
    assert others.take_changed() == [(W0, 0), (W1, 0)]
    assert others.num_replicas == 1
    assert others.expire(60.5) == ["c"], "nobody's word lasts for ever"
    assert requests_at(others, W0) == 0


def test_a_leave_of_one_that_was_never_heard_of_leaves_nothing() -> None:
    others = OtherLoads("a")
    others.hear(vector("b", 2, lasts_s=0.0), 0.0)
    assert others.num_replicas == 0


def test_a_queue_gets_shorter_while_nothing_is_told() -> None:
    others = OtherLoads("a")
    others.hear(vector("b", 1, load(W0, 1, queue_s=0.5)), 10.0)
    others.hear(vector("c", 1, load(W0, 1, queue_s=0.1)), 10.2)
    assert others.of(Place(W0, 0), 10.2).queue_s == pytest.approx(0.4)
    assert others.of(Place(W0, 0), 11.5).queue_s == 0.0


def test_memory_is_bounded() -> None:
    others = OtherLoads("a", max_replicas=3)
    for number in range(10):
        others.hear(vector(f"r{number}", 1, load(W0, 1)), 0.0)
    assert (others.num_replicas, others.num_refused) == (3, 7)
    others.hear(vector("r0", 2, load(W0, 5)), 0.0)
    assert requests_at(others, W0) == 7, "who is known is still heard"


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_nonsense_is_not_decoded(bad: float) -> None:
    payload = msgspec.msgpack.encode(vector("b", 1, PlaceBookings(W0, 0, bad)))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(payload, type=LoadVector)


def test_all_changed_again_names_every_place() -> None:
    others = OtherLoads("a")
    others.hear(vector("b", 1, load(W0, 1)), 0.0)
    others.take_changed()
    others.change_all()
    assert others.take_changed() == [(W0, 0)]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_lost_or_late_the_last_word_is_the_truth(seed: int) -> None:
    """Three routers book and free at random; a third of all words is lost, some come late or twice. One word that
    arrives from each is enough."""
    rng = random.Random(seed)
    names = ["a", "b", "c"]
    tellers = {name: Teller("e", name, 1, OPTIONS) for name in names}
    others = {name: OtherLoads(name) for name in names}
    truth = {name: dict.fromkeys([W0, W1], 0) for name in names}
    on_the_way: list[LoadVector] = []
    for turn in range(200):
        now = turn * 0.1
        for name in names:
            booked = truth[name]
            for instance in booked:
                booked[instance] = max(booked[instance] + rng.randint(-2, 2), 0)
            loads = [load(instance, number) for instance, number in booked.items() if number]
            word = tellers[name].due(loads, now)
            is_last = turn == 199
            if word is not None and (is_last or rng.random() > 0.33):
                on_the_way.append(word)
                if rng.random() < 0.2:
                    on_the_way.append(word)
            elif is_last:
                on_the_way.append(tellers[name]._word(tuple(loads), 1.0))
        rng.shuffle(on_the_way)
        arriving = len(on_the_way) if turn == 199 else rng.randint(0, len(on_the_way))
        for word in on_the_way[:arriving]:
            for name in names:
                others[name].hear(word, now)
        del on_the_way[:arriving]
        for name in names:
            others[name].expire(now)
    for name in names:
        for instance in (W0, W1):
            expected = sum(truth[other][instance] for other in names if other != name)
            assert requests_at(others[name], instance) == expected
