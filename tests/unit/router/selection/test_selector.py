"""The Selector: worker ranks, slots, saturation, reservations, explanations."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from msgspec.structs import replace
from tests.unit.engines.lab import make_request
from tests.unit.router.selection.test_roster import info

from kvolt.core.card import Capacity, EngineInfo
from kvolt.core.errors import Unavailable
from kvolt.core.ids import InstanceId, SequenceHash
from kvolt.core.latency import LatencyModel
from kvolt.core.load import LoadReport, WorkerLoad
from kvolt.core.request import Handoff, LinkCosts, Request, RoutingHints
from kvolt.router.policy.policy import Policy, classic, latency
from kvolt.router.selection.selector import Selector
from kvolt.router.worker_rank import WorkerDpRank
from kvolt.runtime.config.router_settings import RouterSettings

BLOCK = 16
A, B, C = InstanceId("a"), InstanceId("b"), InstanceId("c")
PRICE = LatencyModel(base_s=0.01, prefill_token_s=0.0001)


class Held:
    """PrefixIndex by hand: a set of blocks for each place."""

    def __init__(self, **blocks: Iterable[int]) -> None:
        self.blocks = {self._place(name): set(holdings) for name, holdings in blocks.items()}
        self.host: dict[tuple[str, int], set[int]] = {}
        self.disk: dict[tuple[str, int], set[int]] = {}
        self.slots_version = 0
        self.num_looked_up = 0

    @staticmethod
    def _place(name: str) -> tuple[str, int]:
        return name.rstrip("0123456789"), int(name.lstrip("abc") or 0)

    def slot_of(self, instance_id: InstanceId, dp_rank: int = 0) -> int | None:
        self.num_looked_up += 1
        place = (instance_id, dp_rank)
        return list(self.blocks).index(place) if place in self.blocks else None

    def find_local_tiers(self, hashes: tuple[int, ...]) -> npt.NDArray[np.int32] | None:
        if not self.host and not self.disk:
            return None
        rows = [self.find(hashes)]
        reached = dict(self.blocks)
        for tier in (self.host, self.disk):
            reached = {place: holdings | tier.get(place, set()) for place, holdings in reached.items()}
            rows.append(_depths(hashes, reached))
        return np.array([*rows, rows[-1], rows[-1]], dtype=np.int32)

    def find(self, hashes: tuple[int, ...]) -> npt.NDArray[np.int32]:
        return _depths(hashes, self.blocks)


def _depths(hashes: tuple[int, ...], blocks: dict[tuple[str, int], set[int]]) -> npt.NDArray[np.int32]:
    depths = [
        next((at for at, each in enumerate(hashes) if each not in holdings), len(hashes))
        for holdings in blocks.values()
    ]
    return np.array(depths, dtype=np.int32)


def prompt(*hashes: int, more_tokens: int = 1, **hints: Any) -> Request:
    return replace(
        make_request(),
        token_ids=tuple(range(1, len(hashes) * BLOCK + more_tokens + 1)),
        block_size=BLOCK,
        sequence_hashes=tuple(SequenceHash(each) for each in hashes),
        routing=RoutingHints(**hints),
    )


def worker(seqs: int = 8, batch: int = 1000, **given: Any) -> EngineInfo:
    capacity = Capacity(max_num_seqs=seqs, max_batch_tokens=batch, kv_total_blocks=1000)
    return replace(info(latency=PRICE, **given), capacity=capacity)


ENOUGH: dict[str, Any] = {"saturated_seqs": 1.0, "saturated_batches": 8.0}


class EmptyPrefixIndex:
    """An index without blocks: routing by load alone."""

    slots_version = 0

    def find(self, hashes: tuple[int, ...]) -> npt.NDArray[np.int32]:
        return np.zeros(0, dtype=np.int32)

    def find_local_tiers(self, hashes: tuple[int, ...]) -> None:
        return None

    def slot_of(self, instance_id: InstanceId, dp_rank: int = 0) -> int | None:
        return None


class Scene:
    def __init__(
        self,
        workers: dict[InstanceId, EngineInfo | None],
        holdings: Held | None = None,
        policy: Policy | None = None,
        **settings: Any,
    ) -> None:
        self.time_s = 0.0
        self.selector = Selector(
            holdings or EmptyPrefixIndex(),
            policy or latency(),
            lambda: self.time_s,
            random.Random(1),
            RouterSettings(**({"correct_times": False} | ENOUGH | settings)),
        )
        self.selector.set_workers(workers)
        self.allowed = tuple(workers)

    def where(self, request: Request) -> tuple[str, int]:
        return self.selector.choose(request, self.allowed).worker_rank

    def book(self, request: Request) -> int:
        return self.selector.reserve(self.selector.choose(request, self.allowed))


# --- places


def test_each_rank_has_its_own_blocks() -> None:
    scene = Scene(
        {A: worker(dp_ranks=(0, 1)), B: worker(dp_ranks=(0, 1))}, Held(a0=[1], a1=[1, 2], b1=[1, 2, 3])
    )
    choice = scene.selector.choose(prompt(1, 2, 3, 4), scene.allowed)
    assert (choice.worker_rank, choice.overlap_blocks) == ((B, 1), 3)
    pinned = scene.selector.choose(prompt(1, 2, 3, 4, pinned_dp_rank=0), scene.allowed)
    assert (pinned.worker_rank, pinned.overlap_blocks) == ((A, 0), 1)
    with pytest.raises(Unavailable, match="rank 7"):
        scene.where(prompt(1, pinned_dp_rank=7))


# --- tiers below the device

GIVERS = (WorkerDpRank(A, 0), WorkerDpRank(B, 0))


def test_blocks_below_the_device_count_almost_as_much() -> None:
    holdings = Held(a=[1], b=[1, 2], c=[])
    holdings.host = {("a", 0): {1, 2, 3, 4, 5}}
    scene = Scene({A: worker(), B: worker(), C: worker()}, holdings)
    choice = scene.selector.choose(prompt(1, 2, 3, 4, 5, 6), scene.allowed)
    assert choice.worker_rank == (A, 0)
    assert choice.held_blocks == 1
    assert choice.overlap_blocks == int(1 + 0.9 * 4)
    assert choice.source is None, "no worker has more"


def test_a_disk_counts_less_and_a_device_more() -> None:
    holdings = Held(a=[], b=[], c=[])
    holdings.disk = {("a", 0): {1, 2, 3, 4}}
    holdings.host = {("b", 0): {1, 2, 3, 4}}
    scene = Scene({A: worker(), B: worker(), C: worker()}, holdings)
    overlaps = {
        each.instance: each.overlap_blocks
        for each in scene.selector.explain(prompt(1, 2, 3, 4, 5), scene.allowed)
    }
    assert overlaps == {A: pytest.approx(0.7 * 4), B: pytest.approx(0.9 * 4), C: 0.0}


def test_what_tiers_count_can_be_set() -> None:
    holdings = Held(a=[], b=[1])
    holdings.host = {("a", 0): {1, 2, 3}}
    scene = Scene({A: worker(), B: worker()}, holdings, host_weight=0.0)
    assert scene.where(prompt(1, 2, 3, 4)) == (B, 0)


def test_blocks_below_the_device_take_room_on_it() -> None:
    holdings = Held(a=[], b=[])
    holdings.host = {("a", 0): set(range(40))}
    scene = Scene({A: worker(), B: worker()}, holdings)
    for each in (A, B):
        scene.selector.on_report(LoadReport(each, WorkerLoad(running=1, kv_used_blocks=990)))
    costs = {each.instance: each for each in scene.selector.explain(prompt(*range(60)), scene.allowed)}
    assert costs[A].room_s == costs[B].room_s > 0


def test_onboarding_does_not_change_the_pace() -> None:
    holdings = Held(a=[], b=[])
    holdings.host = {("a", 0): set(range(100))}
    infos = {A: replace(worker(), has_tiers=True), B: replace(worker(), has_tiers=True)}
    scene = Scene(infos, holdings, correct_times=True)
    request = prompt(*range(100), more_tokens=1)
    for _ in range(40):
        choice = scene.selector.choose(request, (A,))
        ticket = scene.selector.reserve(choice)
        scene.time_s += choice.predicted_s
        scene.selector.mark_first_token(ticket, 100 * BLOCK)
        scene.selector.release(ticket, None)
        scene.time_s += 1.0
    assert scene.where(request) == (A, 0)
    [at_a] = [each for each in scene.selector.explain(request, scene.allowed) if each.instance == A]
    assert at_a.pace < 2.0


def test_the_best_kv_source_is_named() -> None:
    holdings = Held(a=[1, 2, 3, 4], b=[1])
    holdings.host = {("a", 0): {5, 6}, ("b", 0): {2}}
    scene = Scene({A: worker(), B: worker()}, holdings)
    choice = scene.selector.choose(prompt(1, 2, 3, 4, 5, 6, 7), (B,))
    assert choice.source is None, "no KV sources were given"
    choice = scene.selector.choose(prompt(1, 2, 3, 4, 5, 6, 7), (B,), kv_sources=GIVERS)
    assert (choice.worker_rank, choice.source, choice.source_blocks) == ((B, 0), (A, 0), 6)
    for _ in range(40):  # until the other has less to do
        choice = scene.selector.choose(prompt(1, 2, 3, 4, 5, 6, 7), scene.allowed, GIVERS)
        if choice.worker_rank == (B, 0):
            break
        scene.book(prompt(*range(100, 140), pinned_dp_rank=0))
    assert choice.worker_rank == (B, 0)
    assert (choice.source, choice.source_blocks) == ((A, 0), 6)


def test_each_rank_has_its_own_load() -> None:
    scene = Scene({A: worker(dp_ranks=(0, 1))}, policy=classic())
    first = scene.where(prompt(1, 2))
    scene.selector.on_report(LoadReport(A, WorkerLoad(running=5, kv_used_blocks=99, dp_rank=first[1])))
    scene.selector.on_report(LoadReport(A, WorkerLoad(running=5, kv_used_blocks=99, dp_rank=7)))
    assert scene.where(prompt(1, 2)) == (A, 1 - first[1])
    assert [(load.dp_rank, load.requests) for load in scene.selector.worker_loads()] == sorted(
        [(first[1], 5.0), (1 - first[1], 0.0)]
    )


def test_a_rank_without_a_slot_holds_nothing() -> None:
    holdings = Held(b0=[1, 2])
    scene = Scene({A: worker(), B: worker(), C: worker()}, holdings)
    assert scene.where(prompt(1, 2, 3)) == (B, 0)


def test_slots_are_looked_up_once_until_they_change() -> None:
    holdings = Held(a0=[1, 2])
    scene = Scene({A: worker(), B: worker()}, holdings)
    for _ in range(5):
        assert scene.where(prompt(1, 2, 3)) == (A, 0)
    assert holdings.num_looked_up == 2
    holdings.blocks = {("b", 0): {1, 2}}
    holdings.slots_version += 1
    assert scene.where(prompt(1, 2, 3)) == (B, 0)
    assert holdings.num_looked_up == 4


def test_no_candidates_is_unavailable() -> None:
    scene = Scene({A: worker()})
    with pytest.raises(Unavailable):
        scene.selector.choose(prompt(1), ())
    with pytest.raises(Unavailable):
        scene.selector.choose(prompt(1), (B,))


# --- reservations


def test_choosing_reserves_nothing_and_releases_leave_nothing() -> None:
    scene = Scene({A: worker(), B: worker()})
    for _ in range(3):
        scene.where(prompt(1, 2))
    assert scene.selector.num_in_flight == 0
    tickets = [scene.book(prompt(number)) for number in range(4)]
    assert scene.selector.num_in_flight == 4
    scene.selector.mark_first_token(tickets[0], 0)
    for ticket in (*tickets, *tickets, 99):
        scene.selector.release(ticket, None)
        scene.selector.mark_first_token(ticket, None)
    assert scene.selector.num_in_flight == 0
    assert scene.selector._in_flight == {}
    assert scene.selector._pending_blocks.num_prompts == 0


def test_prior_tokens_are_computed_with_the_prompt() -> None:
    scene = Scene({A: worker()}, Held(a=range(1, 3)))
    whole, rest = prompt(1, 2, more_tokens=0), replace(prompt(1, 2, more_tokens=0), prior_tokens=(5,) * 40)
    choices = [scene.selector.choose(request, (A,)) for request in (whole, rest)]
    assert [choice.overlap_blocks for choice in choices] == [1, 2], "the prompt's last token is not the last"
    assert [choice.prefill_tokens for choice in choices] == [BLOCK, 40]
    scene.selector.reserve(choices[1])
    [load] = scene.selector.worker_loads()
    assert load.prefill_tokens == 40


def test_a_removed_worker_cannot_be_reserved() -> None:
    scene = Scene({A: worker()})
    choice = scene.selector.choose(prompt(1), scene.allowed)
    scene.selector.set_workers({B: worker()})
    with pytest.raises(Unavailable, match="gone"):
        scene.selector.reserve(choice)


def test_a_prediction_is_the_queue_and_the_prompt() -> None:
    scene = Scene({A: worker()})
    scene.book(prompt(1, 2))
    choice = scene.selector.choose(prompt(8, 9), scene.allowed)
    one = 0.01 + 33 * 0.0001
    assert (choice.queue_s, choice.prefill_s) == (pytest.approx(one), pytest.approx(one))
    assert choice.predicted_s == pytest.approx(2 * one)


def test_a_queue_among_decoding_requests_includes_a_step() -> None:
    scene = Scene({A: worker()})
    scene.selector.mark_first_token(scene.selector.reserve(scene.selector.choose(prompt(1), (A,))), None)
    between = scene.selector.choose(prompt(2), (A,))
    scene.selector.reserve(between)
    [load] = scene.selector.worker_loads()
    assert (between.queue_s, between.step_s) == (0.0, pytest.approx(0.01))
    assert load.queue_s == pytest.approx(between.prefill_s + between.step_s)


# --- saturation


def test_a_full_worker_gets_no_requests_while_others_are_not_full() -> None:
    scene = Scene({A: worker(seqs=2), B: worker(seqs=100)}, Held(a0=range(1, 40)))
    sent_request = prompt(*range(1, 40))
    placed = []
    for _ in range(4):
        choice = scene.selector.choose(sent_request, scene.allowed)
        assert not choice.is_saturated
        placed.append(choice.worker_rank.instance_id)
        scene.selector.mark_first_token(scene.selector.reserve(choice), None)
    assert placed == [A, A, B, B]


def test_a_worker_with_many_pending_prompts_gets_no_more() -> None:
    scene = Scene({A: worker(batch=100)}, saturated_batches=1.5)
    tickets = []
    for number, saturated in enumerate((False, False, False, True, True)):
        choice = scene.selector.choose(prompt(10 * number, more_tokens=44), scene.allowed)  # 60 tokens
        assert choice.is_saturated is saturated
        tickets.append(scene.selector.reserve(choice))
    for ticket in tickets[:3]:
        scene.selector.mark_first_token(ticket, None)
    assert not scene.selector.choose(prompt(1), scene.allowed).is_saturated


def test_to_wait_for_what_is_held_may_be_best_even_where_there_is_much_to_do() -> None:
    scene = Scene({A: worker(batch=100), B: worker(batch=100)}, Held(a0=range(40)), saturated_batches=0.5)
    scene.selector.reserve(scene.selector.choose(prompt(90, 91, 92, 93), (A,)))
    choice = scene.selector.choose(prompt(*range(40)), scene.allowed)
    assert (choice.worker_rank, choice.is_saturated) == ((A, 0), False), "B could have taken it at once"
    scene.selector.reserve(scene.selector.choose(prompt(80, 81, 82, 83), (B,)))
    choice = scene.selector.choose(prompt(*range(40)), scene.allowed)
    assert (choice.worker_rank, choice.is_saturated) == ((A, 0), True)


def test_when_all_are_saturated_the_best_is_chosen_and_marked() -> None:
    scene = Scene({A: worker(seqs=1), B: worker(seqs=1)}, Held(b0=[1, 2, 3]))
    for number in (50, 60):
        scene.selector.mark_first_token(scene.book(prompt(number)), None)
    choice = scene.selector.choose(prompt(1, 2, 3, 4), scene.allowed)
    assert choice.is_saturated
    assert choice.worker_rank == (B, 0)


def test_a_worker_without_limits_is_never_saturated() -> None:
    scene = Scene({A: None})
    for _ in range(100):
        scene.selector.mark_first_token(scene.book(prompt(1)), None)
    assert not scene.selector.choose(prompt(1), scene.allowed).is_saturated


def test_sampling_skips_full_workers() -> None:
    scene = Scene({A: worker(seqs=1), B: worker(), C: worker()}, temperature=5.0)
    while scene.selector.choose(prompt(1), scene.allowed).worker_rank != (A, 0):
        pass
    scene.selector.mark_first_token(scene.selector.reserve(scene.selector.choose(prompt(1), (A,))), None)
    assert {scene.where(prompt(1)) for _ in range(60)} == {(B, 0), (C, 0)}


def test_a_worker_without_room_is_avoided_for_as_long_as_an_answer_holds_it() -> None:
    slow = replace(worker(), latency=LatencyModel(base_s=0.1, prefill_token_s=0.0001))
    scene = Scene({A: slow, B: slow}, Held(a0=range(30)))
    scene.selector.mark_first_token(scene.selector.reserve(scene.selector.choose(prompt(100), (A,))), None)
    scene.selector.on_report(LoadReport(A, WorkerLoad(running=1, kv_used_blocks=995)))
    holdings = scene.selector.choose(prompt(*range(30)), scene.allowed)
    assert (holdings.worker_rank, holdings.overlap_blocks, holdings.room_s) == ((A, 0), 30, 0.0), (
        "what it holds needs no room"
    )
    more = prompt(*range(500, 600))
    assert scene.where(more) == (B, 0)
    (of_a,) = [each for each in scene.selector.explain(more, scene.allowed) if each.instance == A]
    assert of_a.room_s == pytest.approx((995 + 101 - 1000) / 1000 * 8 * 0.1)
    waits = scene.selector.choose(more, (A,))
    assert waits.predicted_s == pytest.approx(of_a.room_s + waits.prefill_s)


# --- what a request says


def test_a_request_may_weigh_for_itself() -> None:
    scene = Scene({A: worker(), B: worker()}, Held(a0=range(4)), policy=classic())
    for _ in range(3):
        scene.selector.mark_first_token(scene.selector.reserve(scene.selector.choose(prompt(90), (A,))), None)
    sent_request = prompt(*range(6))
    assert scene.where(sent_request) == (B, 0)
    assert scene.where(prompt(*range(6), weights={"overlap": 50.0})) == (A, 0)


def test_a_request_may_have_a_temperature_of_its_own() -> None:
    scene = Scene({A: worker(), B: worker()}, Held(a0=range(9)))
    sent_request = prompt(*range(9), temperature=50.0)
    assert {scene.where(prompt(*range(9))) for _ in range(30)} == {(A, 0)}
    assert {scene.where(sent_request) for _ in range(30)} == {(A, 0), (B, 0)}


def test_preferred_taints_lower_the_cost_and_unwanted_ones_raise_it() -> None:
    scene = Scene({A: worker(taints=("gpu", "old")), B: worker(taints=("cpu",)), C: worker()})
    assert scene.where(prompt(1, preferred_taints={"gpu": 1.0})) == (A, 0)
    assert {scene.where(prompt(1, preferred_taints={"gpu": -1.0, "none": 9.0})) for _ in range(20)} == {
        (B, 0),
        (C, 0),
    }


def test_a_session_returns_unless_it_costs_more_than_the_bonus() -> None:
    scene = Scene({A: worker(), B: worker(), C: worker()}, affinity_s=0.05, affinity_half_life_s=10.0)
    first = scene.selector.choose(prompt(1, session="s"), scene.allowed)
    ticket = scene.selector.reserve(first)
    scene.selector.mark_first_token(ticket, None)
    scene.selector.release(ticket, None)
    for _ in range(10):
        assert scene.where(prompt(2, session="s")) == first.worker_rank
    assert len({scene.where(prompt(2, session="other")) for _ in range(40)}) == 3
    assert len({scene.where(prompt(2, session="s", tenant="t")) for _ in range(40)}) == 3
    for _ in range(5):
        scene.selector.reserve(
            scene.selector.choose(prompt(*range(100, 130)), (first.worker_rank.instance_id,))
        )
    assert scene.where(prompt(2, session="s")) != first.worker_rank
    assert scene.selector._affinity.num_sessions == 1


def test_a_session_without_a_first_token_has_no_affinity() -> None:
    scene = Scene({A: worker(), B: worker()})
    scene.selector.release(scene.book(prompt(1, session="s")), None)
    assert scene.selector._affinity.num_sessions == 0


# --- for people


def test_explain_has_every_term_of_each_candidate() -> None:
    scene = Scene({A: worker(), B: worker(seqs=1, taints=("gpu",))}, Held(a0=[1, 2]))
    scene.selector.mark_first_token(scene.selector.reserve(scene.selector.choose(prompt(9), (B,))), None)
    sent_request = prompt(1, 2, 3, preferred_taints={"gpu": 0.1})
    first, second = scene.selector.explain(sent_request, scene.allowed)
    assert (first.instance, first.is_chosen, first.is_saturated, first.overlap_blocks) == (A, True, False, 2)
    assert (second.instance, second.is_chosen, second.is_saturated, second.decoding) == (B, False, True, 1)
    assert second.preference == 0.1
    assert first.cost < second.cost
    assert second.cost_terms["preference"] < 0.0 == first.cost_terms["preference"]
    for each in (first, second):
        assert sum(each.cost_terms.values()) == pytest.approx(each.cost)
    assert first.prefill_s == pytest.approx(0.01 + 17 * 0.0001)
    assert scene.selector.num_in_flight == 1


# --- handoffs

LINKS = LinkCosts(token_s=0.001, by_peer={B: 0.0, C: 0.1})


def test_a_handoff_prefers_a_fast_link() -> None:
    selector = Scene({each: worker() for each in (A, B, C)}, Held(a=(), b=(), c=())).selector
    handoff = Handoff(ticket=b"", prefill_instance=InstanceId("p"))
    sent_request = replace(prompt(1, 2, link_costs=LINKS), handoff=handoff)
    costs = {each.instance: each for each in selector.explain(sent_request, (A, B, C))}
    assert [costs[each].transfer_s for each in (A, B, C)] == pytest.approx([0.033, 0.0, 3.3])
    choice = selector.choose(sent_request, (A, B, C))
    assert choice.worker_rank.instance_id == B
    assert selector.choose(sent_request, (A, C)).predicted_s == pytest.approx(0.033 + choice.predicted_s)
    forecast = selector.forecast(sent_request, (A, C))
    assert (forecast.instance, forecast.transfer_s) == (A, pytest.approx(0.033))


def test_what_a_worker_holds_is_not_moved_to_it() -> None:
    selector = Scene({each: worker() for each in (A, B, C)}, Held(a=(1, 2), b=(), c=())).selector
    handoff = Handoff(ticket=b"", prefill_instance=InstanceId("p"))
    sent_request = replace(prompt(1, 2, link_costs=LinkCosts(token_s=0.001)), handoff=handoff)
    costs = {each.instance: each.transfer_s for each in selector.explain(sent_request, (A, B))}
    assert costs == pytest.approx({A: 0.001, B: 0.033})


def test_where_a_prompt_is_computed_all_of_it_leaves() -> None:
    selector = Scene({each: worker() for each in (A, B, C)}, Held(a=(1, 2), b=(), c=())).selector
    sent_request = replace(prompt(1, 2, link_costs=LINKS), prefill_only=True)
    costs = {each.instance: each.transfer_s for each in selector.explain(sent_request, (A, B, C))}
    assert costs == pytest.approx({A: 0.033, B: 0.0, C: 3.3})
    assert selector.choose(sent_request, (C,)).predicted_s < 1.0, "its own part is over before"
