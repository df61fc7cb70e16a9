"""Standalone: registered workers, posted events, decisions, reservations with a TTL."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from kvolt.core.card import Capacity, EngineInfo
from kvolt.core.delta import Usage
from kvolt.core.errors import InvalidRequest, NotFound, Overloaded, Unavailable
from kvolt.core.ids import CardHash, InstanceId, RequestId, SequenceHash
from kvolt.core.kv_events import Stored, Tier, pack_hashes
from kvolt.core.latency import LatencyModel
from kvolt.core.load import LoadReport, WorkerLoad
from kvolt.core.request import Request, Role, RoutingHints, StopConditions
from kvolt.router.breaker import Outcome
from kvolt.router.policy.policy import latency
from kvolt.router.service.standalone import Standalone, StandaloneOptions
from kvolt.router.service.standalone_state import StandaloneEvent

BLOCK = 16
A, B = InstanceId("a"), InstanceId("b")
INFO = EngineInfo(
    engine="theirs",
    role=Role.AGGREGATED,
    model="m",
    card=CardHash(""),
    block_size=BLOCK,
    capacity=Capacity(max_num_seqs=8, max_batch_tokens=4096, kv_total_blocks=1000),
    features=("KvEvents",),
    latency=LatencyModel(base_s=0.01, prefill_token_s=0.001),
)


class Scene:
    def __init__(self, options: StandaloneOptions | None = None) -> None:
        self.time_s = 100.0
        self.router = Standalone(BLOCK, latency(), lambda: self.time_s, random.Random(1), options=options)
        for worker in (A, B):
            self.router.register(worker, INFO)

    def requests(self) -> dict[str, float]:
        return {load.instance: load.requests for load in self.router.worker_loads()}


def prompt(*hashes: int, routing: RoutingHints | None = None, lora: str | None = None) -> Request:
    return Request(
        request_id=RequestId("r"),
        model="m",
        token_ids=(),
        stop=StopConditions(max_tokens=1),
        block_size=BLOCK,
        sequence_hashes=tuple(map(SequenceHash, hashes)),
        routing=routing or RoutingHints(),
        trace_prompt_length=len(hashes) * BLOCK + 1,
        lora=lora,
    )


def stored(*hashes: int) -> StandaloneEvent:
    return StandaloneEvent(Stored.from_hashes(hashes))


def test_a_prompt_goes_to_its_blocks_and_choosing_reserves_nothing() -> None:
    here = Scene()
    assert here.router.post(B, [stored(1, 2, 3)]) == 1
    for _ in range(3):
        choice = here.router.choose(prompt(1, 2, 3, 4))
        assert (choice.worker_rank.instance_id, choice.overlap_blocks) == (B, 3)
    assert here.requests() == {"a": 0, "b": 0}
    assert here.router.choose(prompt(1, 2, 3, 4), [B]).worker_rank.instance_id == A
    assert [row.instance for row in here.router.explain(prompt(1, 2, 3, 4))] == ["b", "a"]


def test_a_reservation_counts_until_it_is_freed_and_once() -> None:
    here = Scene()
    reservation = here.router.reserve(here.router.choose(prompt(1, 2)))
    chosen = reservation.choice.worker_rank.instance_id
    assert here.requests()[chosen] == 1
    here.time_s += 1e6
    assert here.requests()[chosen] == 1, "no age ends it"
    here.router.mark_first_token(reservation.id, cached_tokens=0)
    assert [load.decoding for load in here.router.worker_loads() if load.instance == chosen] == [1]
    here.router.release(reservation.id, Usage(32, 5))
    assert here.requests() == {"a": 0, "b": 0}
    assert here.router.num_reservations == here.router.selector.num_in_flight == 0
    for again in (
        lambda: here.router.release(reservation.id, None),
        lambda: here.router.mark_first_token(reservation.id, None),
        lambda: here.router.renew(reservation.id, 1.0),
    ):
        with pytest.raises(NotFound, match="no reservation"):
            again()


def test_a_time_that_was_chosen_ends_it_unless_it_is_renewed() -> None:
    here = Scene()
    short, renewed, freed = (here.router.reserve(here.router.choose(prompt(1)), ttl_s=10.0) for _ in range(3))
    here.router.release(freed.id, None)
    here.time_s += 9.0
    here.router.renew(renewed.id, 10.0)
    here.time_s += 1.0
    assert here.router.expire() == 1
    assert not here.router.has_reservation(short.id)
    assert here.router.has_reservation(renewed.id)
    here.time_s += 8.0
    here.router.renew(renewed.id, None)
    here.time_s += 1e6
    assert sum(here.requests().values()) == 1, "it has no time any more"
    here.router.release(renewed.id, None)
    assert here.router.num_expired == 1
    assert here.router.selector.num_in_flight == 0


def test_repeated_renewal_does_not_grow() -> None:
    here = Scene()
    reservation = here.router.reserve(here.router.choose(prompt(1)), ttl_s=10.0)
    for _ in range(1000):
        here.time_s += 1.0
        here.router.renew(reservation.id, 10.0)
    assert len(here.router._leases) < 100
    here.time_s += 10.0
    assert here.router.expire() == 1


def test_an_unregistered_worker_drops_its_reservations() -> None:
    here = Scene()
    pinned = RoutingHints(pins={Role.AGGREGATED: A})
    reservation = here.router.reserve(here.router.choose(prompt(1, routing=pinned)))
    here.router.post(A, [stored(1)])
    here.router.unregister(A)
    assert not here.router.has_reservation(reservation.id)
    assert here.router.selector.num_in_flight == 0
    assert here.router.event_index.index.num_pairs == 0
    assert here.requests() == {"b": 0}
    for unknown in (
        lambda: here.router.unregister(A),
        lambda: here.router.post(A, []),
        lambda: here.router.replace_blocks(A, {}),
        lambda: here.router.on_report(LoadReport(A, WorkerLoad())),
    ):
        with pytest.raises(NotFound, match="register it first"):
            unknown()


def test_excluded_workers_are_not_chosen() -> None:
    here = Scene()
    here.router.register(A, replace(INFO, loras=("sql",), taints=("spot",)))
    for wanted in (
        prompt(1, lora="sql"),
        prompt(1, routing=RoutingHints(required_taints=("spot",))),
        prompt(1, routing=RoutingHints(allowed=(A,))),
        prompt(1, routing=RoutingHints(pins={Role.AGGREGATED: A})),
    ):
        assert {here.router.choose(wanted).worker_rank.instance_id for _ in range(8)} == {A}
    with pytest.raises(Unavailable, match="no registered worker"):
        here.router.choose(prompt(1, lora="sql"), [A])


def test_what_cannot_be_compared_is_refused_with_the_field() -> None:
    here = Scene()
    for wrong, param in (
        (replace(INFO, block_size=32), "block_size"),
        (replace(INFO, hash_scheme="sha256"), "hash_scheme"),
    ):
        with pytest.raises(InvalidRequest) as refused:
            here.router.register(InstanceId("c"), wrong)
        assert refused.value.fields["param"] == param
    assert list(here.router.workers) == [A, B]


def test_of_a_worker_without_events_it_is_guessed_what_it_holds() -> None:
    here = Scene()
    for worker in (A, B):
        here.router.register(worker, replace(INFO, features=()))
    with pytest.raises(InvalidRequest, match="without KV events"):
        here.router.post(A, [stored(1)])
    reservation = here.router.reserve(here.router.choose(prompt(1, 2, 3)))
    here.router.mark_first_token(reservation.id, 0)
    here.router.release(reservation.id, None)
    here.time_s += 1.0
    again = here.router.choose(prompt(1, 2, 3))
    assert again.worker_rank == reservation.choice.worker_rank
    assert again.overlap_blocks == 3


def test_reports_and_snapshots_are_applied() -> None:
    here = Scene()
    here.router.on_report(LoadReport(A, WorkerLoad(running=5, kv_used_blocks=90)))
    assert here.requests() == {"a": 5, "b": 0}
    here.router.replace_blocks(A, {(0, Tier.DEVICE): pack_hashes([7, 8])})
    assert here.router.choose(prompt(7, 8)).overlap_blocks == 2


def test_everything_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Scene(StandaloneOptions(max_workers=2, max_reservations=3))
    with pytest.raises(Overloaded, match="2 workers already"):
        here.router.register(InstanceId("c"), INFO)
    here.router.register(A, INFO)
    for _ in range(3):
        here.router.reserve(here.router.choose(prompt(1)))
    with pytest.raises(Overloaded, match="3 reservations"):
        here.router.reserve(here.router.choose(prompt(1)))

    def full(*args: object) -> None:
        raise ValueError("an index has room for 1 workers")

    monkeypatch.setattr(here.router.event_index, "add_worker", full)
    with pytest.raises(Overloaded, match="room for 1 workers"):
        here.router.register(A, INFO)


def test_a_worker_that_fails_is_passed_over_until_its_back_off_is_over() -> None:
    scene = Scene()
    router = scene.router
    for _ in range(3):
        choice = router.choose(prompt(1, 2, routing=RoutingHints(pins={Role.AGGREGATED: A})))
        router.release(router.reserve(choice).id, None, Outcome.FAILED)
    assert {router.choose(prompt(1, 2)).worker_rank.instance_id for _ in range(8)} == {B}
    assert [row.instance for row in router.explain(prompt(1, 2))] == [B]
    assert router.choose(prompt(1, 2), excluded=[B]).worker_rank.instance_id == A, "there is no other"
    scene.time_s += 1.0
    rows = {row.instance: row.failure_rate for row in router.explain(prompt(1, 2))}
    assert rows == {A: pytest.approx(0.55, abs=0.01), B: 0.0}
    probe = router.reserve(router.choose(prompt(1, 2), excluded=[B]))
    assert [row.instance for row in router.explain(prompt(1, 2))] == [B], "one at a time"
    router.mark_first_token(probe.id, None)
    router.release(probe.id, Usage(32, 1, 0), Outcome.ANSWERED)
    assert len(router.explain(prompt(1, 2))) == 2
    router.unregister(A)
    assert not router.breakers
