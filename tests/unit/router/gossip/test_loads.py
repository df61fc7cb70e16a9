"""Gossip between routers: complete states, so that lost messages do not matter."""

from __future__ import annotations

import math
import random

import msgspec
import pytest

from kvolt.core.ids import InstanceId
from kvolt.router.gossip.loads import MAX_LOADS, GossipOptions, LoadPublisher, LoadVector, ReplicaLoads
from kvolt.router.worker_rank import ReservedLoad, WorkerDpRank

OPTIONS = GossipOptions(period_s=0.1, heartbeat_s=1.0, announcements=1, ttl_periods=10, repeats=2)
W0, W1 = InstanceId("w0"), InstanceId("w1")


def load(instance: InstanceId, requests: float, queue_s: float = 0.0, dp_rank: int = 0) -> ReservedLoad:
    return ReservedLoad(
        instance, dp_rank, requests, requests / 2, 100 * requests, 8 * requests, 50.0, queue_s
    )


def vector(
    replica: str, version: int, *loads: ReservedLoad, epoch: int = 1, ttl_s: float = 1.0
) -> LoadVector:
    return LoadVector("ns.c.generate", replica, epoch, version, ttl_s, loads)


def requests_at(others: ReplicaLoads, instance: InstanceId, now: float = 0.0) -> float:
    return others.total(WorkerDpRank(instance, 0), now).requests


# --- publishing


def test_reservations_are_published_every_period() -> None:
    publisher = LoadPublisher("e", "a", 7, OPTIONS)
    vectors = [publisher.due([load(W0, 1)], 0.1 * turn) for turn in range(5)]
    assert [published_vector.version for published_vector in vectors if published_vector is not None] == [
        1,
        2,
        3,
        4,
        5,
    ]
    assert all(
        published_vector is not None
        and published_vector.epoch == 7
        and published_vector.ttl_s == pytest.approx(1.0)
        for published_vector in vectors
    )


def test_an_empty_vector_is_repeated_before_heartbeats() -> None:
    publisher = LoadPublisher("e", "a", 1, OPTIONS)
    assert publisher.due([load(W0, 1)], 0.0) is not None
    told_at = [turn for turn in range(1, 40) if publisher.due([], 0.1 * turn) is not None]
    assert told_at == [1, 2, 3, 13, 23, 33]
    last = publisher.leave()
    assert (last.ttl_s, last.loads, last.version) == (0.0, (), 8)


def test_a_new_router_announces_itself_repeatedly() -> None:
    publisher = LoadPublisher("e", "a", 1, GossipOptions(announcements=3))
    vectors = [publisher.due([], 5.0 + 0.1 * turn) for turn in range(13)]
    assert [turn for turn, published_vector in enumerate(vectors) if published_vector is not None] == [
        0,
        1,
        2,
        12,
    ]
    assert vectors[0] is not None
    assert (vectors[0].loads, vectors[0].ttl_s) == ((), 3.0)


def test_without_replicas_only_heartbeats_are_published() -> None:
    publisher = LoadPublisher("e", "a", 1, OPTIONS)
    published = [publisher.due([load(W0, 1)], 0.1 * turn, is_alone=True) for turn in range(21)]
    vectors = {
        turn: published_vector
        for turn, published_vector in enumerate(published)
        if published_vector is not None
    }
    assert list(vectors) == [0, 10, 20]
    assert all(
        published_vector.loads == (load(W0, 1),) and published_vector.ttl_s == 3.0
        for published_vector in vectors.values()
    )
    assert publisher.due([load(W0, 1)], 2.1) is not None, "a replica has joined"


def test_beyond_the_bound_the_busiest_ranks_are_published() -> None:
    loads = [load(InstanceId(f"w{number}"), number + 1.0) for number in range(MAX_LOADS + 2)]
    published_vector = LoadPublisher("e", "a", 1, OPTIONS).due(loads, 0.0)
    assert published_vector is not None
    assert len(published_vector.loads) == MAX_LOADS
    assert min(place.requests for place in published_vector.loads) == 3.0
    msgspec.msgpack.decode(msgspec.msgpack.encode(published_vector), type=LoadVector)


# --- what is heard


def test_replica_loads_are_summed_by_worker_rank() -> None:
    others = ReplicaLoads("a")
    others.receive(vector("b", 1, load(W0, 2), load(W1, 1), load(W0, 8, dp_rank=1)), 0.0)
    others.receive(vector("c", 1, load(W0, 4)), 0.0)
    others.receive(vector("a", 1, load(W0, 100)), 0.0)  # our own word comes back
    assert others.total(WorkerDpRank(W0, 0), 0.0) == ReservedLoad(W0, 0, 6, 3, 600, 48, 100)
    assert others.total(WorkerDpRank(W0, 1), 0.0).requests == 8
    assert requests_at(others, W1) == 1
    assert others.num_replicas == 2
    assert sorted(others.pop_changed()) == [(W0, 0), (W0, 1), (W1, 0)]
    assert others.pop_changed() == []


def test_a_rank_missing_in_the_next_vector_has_no_load() -> None:
    others = ReplicaLoads("a")
    others.receive(vector("b", 1, load(W0, 2), load(W1, 1)), 0.0)
    others.pop_changed()
    others.receive(vector("b", 3, load(W1, 1)), 0.1)
    assert requests_at(others, W0) == 0
    assert others.pop_changed() == [(W0, 0)], "only what has changed"


def test_older_vectors_are_ignored_and_epochs_replace() -> None:
    others = ReplicaLoads("a")
    others.receive(vector("b", 5, load(W0, 2)), 0.0)
    for late in (vector("b", 4, load(W0, 9)), vector("b", 5, load(W0, 9)), vector("b", 99, epoch=0)):
        others.receive(late, 0.0)
    assert requests_at(others, W0) == 2
    others.receive(vector("b", 1, load(W0, 1), epoch=2), 0.0)
    assert requests_at(others, W0) == 1


def test_silent_replicas_expire_and_leaving_ones_end_at_once() -> None:
    others = ReplicaLoads("a")
    others.receive(vector("b", 1, load(W0, 2)), 0.0)
    others.receive(vector("c", 1, load(W0, 4), ttl_s=1e9), 0.5)
    others.receive(vector("d", 1, load(W1, 4)), 0.5)
    others.pop_changed()
    assert others.expire(0.99) == []
    assert others.expire(1.0) == ["b"]
    assert requests_at(others, W0) == 4
    others.receive(vector("d", 2, ttl_s=0.0), 1.0)
    assert others.pop_changed() == [(W0, 0), (W1, 0)]
    assert others.num_replicas == 1
    assert others.expire(60.5) == ["c"], "every TTL is bounded"
    assert requests_at(others, W0) == 0


def test_a_leave_of_one_that_was_never_heard_of_leaves_nothing() -> None:
    others = ReplicaLoads("a")
    others.receive(vector("b", 2, ttl_s=0.0), 0.0)
    assert others.num_replicas == 0


def test_a_replica_queue_shrinks_between_vectors() -> None:
    others = ReplicaLoads("a")
    others.receive(vector("b", 1, load(W0, 1, queue_s=0.5)), 10.0)
    others.receive(vector("c", 1, load(W0, 1, queue_s=0.1)), 10.2)
    assert others.total(WorkerDpRank(W0, 0), 10.2).queue_s == pytest.approx(0.4)
    assert others.total(WorkerDpRank(W0, 0), 11.5).queue_s == 0.0


def test_memory_is_bounded() -> None:
    others = ReplicaLoads("a", max_replicas=3)
    for number in range(10):
        others.receive(vector(f"r{number}", 1, load(W0, 1)), 0.0)
    assert (others.num_replicas, others.num_refused) == (3, 7)
    others.receive(vector("r0", 2, load(W0, 5)), 0.0)
    assert requests_at(others, W0) == 7, "known replicas still update"


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_nonsense_is_not_decoded(bad: float) -> None:
    payload = msgspec.msgpack.encode(vector("b", 1, ReservedLoad(W0, 0, bad)))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(payload, type=LoadVector)


def test_mark_all_changed_names_every_rank() -> None:
    others = ReplicaLoads("a")
    others.receive(vector("b", 1, load(W0, 1)), 0.0)
    others.pop_changed()
    others.mark_all_changed()
    assert others.pop_changed() == [(W0, 0)]


@pytest.mark.parametrize("seed", range(20))
def test_the_newest_vector_wins_over_loss_and_reordering(seed: int) -> None:
    """Three routers book and free at random; a third of all words is lost, some come late or twice. One word that
    arrives from each is enough."""
    rng = random.Random(seed)
    names = ["a", "b", "c"]
    publishers = {name: LoadPublisher("e", name, 1, OPTIONS) for name in names}
    others = {name: ReplicaLoads(name) for name in names}
    truth = {name: dict.fromkeys([W0, W1], 0) for name in names}
    on_the_way: list[LoadVector] = []
    for turn in range(200):
        now = turn * 0.1
        for name in names:
            reserved = truth[name]
            for instance in reserved:
                reserved[instance] = max(reserved[instance] + rng.randint(-2, 2), 0)
            loads = [load(instance, number) for instance, number in reserved.items() if number]
            published_vector = publishers[name].due(loads, now)
            is_last = turn == 199
            if published_vector is not None and (is_last or rng.random() > 0.33):
                on_the_way.append(published_vector)
                if rng.random() < 0.2:
                    on_the_way.append(published_vector)
            elif is_last:
                on_the_way.append(publishers[name]._vector(tuple(loads), 1.0))
        rng.shuffle(on_the_way)
        arriving = len(on_the_way) if turn == 199 else rng.randint(0, len(on_the_way))
        for published_vector in on_the_way[:arriving]:
            for name in names:
                others[name].receive(published_vector, now)
        del on_the_way[:arriving]
        for name in names:
            others[name].expire(now)
    for name in names:
        for instance in (W0, W1):
            expected = sum(truth[other][instance] for other in names if other != name)
            assert requests_at(others[name], instance) == expected
