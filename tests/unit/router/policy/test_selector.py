"""The decision by itself: places, slots, saturation, what is booked, what people are told."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from msgspec.structs import replace
from tests.unit.engines.lab import make_request
from tests.unit.router.policy.test_roster import info

from kvolt.core.card import Capacity, EngineInfo
from kvolt.core.errors import Unavailable
from kvolt.core.ids import InstanceId, SequenceHash
from kvolt.core.latency import LatencyModel
from kvolt.core.load import LoadReport, WorkerLoad
from kvolt.core.request import Handoff, LinkCosts, Request, RoutingHints
from kvolt.router.index.overlap import NoHolders
from kvolt.router.place import Place
from kvolt.router.policy.policy import Policy, classic, latency
from kvolt.router.policy.selector import Selector
from kvolt.runtime.config.router_settings import RouterSettings

BLOCK = 16
A, B, C = InstanceId("a"), InstanceId("b"), InstanceId("c")
PRICE = LatencyModel(base_s=0.01, prefill_token_s=0.0001)


class Held:
    """Holders by hand: a set of blocks for each place."""

    def __init__(self, **blocks: Iterable[int]) -> None:
        self.blocks = {self._place(name): set(held) for name, held in blocks.items()}
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

    def find_below(self, hashes: tuple[int, ...]) -> npt.NDArray[np.int32] | None:
        if not self.host and not self.disk:
            return None
        rows = [self.find(hashes)]
        reached = dict(self.blocks)
        for tier in (self.host, self.disk):
            reached = {place: held | tier.get(place, set()) for place, held in reached.items()}
            rows.append(_depths(hashes, reached))
        return np.array([*rows, rows[-1], rows[-1]], dtype=np.int32)

    def find(self, hashes: tuple[int, ...]) -> npt.NDArray[np.int32]:
        return _depths(hashes, self.blocks)


def _depths(hashes: tuple[int, ...], blocks: dict[tuple[str, int], set[int]]) -> npt.NDArray[np.int32]:
    depths = [
        next((at for at, each in enumerate(hashes) if each not in held), len(hashes))
        for held in blocks.values()
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


class Scene:
    def __init__(
        self,
        workers: dict[InstanceId, EngineInfo | None],
        held: Held | None = None,
        policy: Policy | None = None,
        **settings: Any,
    ) -> None:
        self.time_s = 0.0
        self.selector = Selector(
            held or NoHolders(),
            policy or latency(),
            lambda: self.time_s,
            random.Random(1),
            RouterSettings(**({"correct_times": False} | ENOUGH | settings)),
        )
        self.selector.set_workers(workers)
        self.allowed = tuple(workers)

    def where(self, request: Request) -> tuple[str, int]:
        return self.selector.choose(request, self.allowed).place

    def book(self, request: Request) -> int:
        return self.selector.book(self.selector.choose(request, self.allowed))


# --- places


def test_each_rank_has_its_own_blocks() -> None:
    here = Scene(
        {A: worker(dp_ranks=(0, 1)), B: worker(dp_ranks=(0, 1))}, Held(a0=[1], a1=[1, 2], b1=[1, 2, 3])
    )
    choice = here.selector.choose(prompt(1, 2, 3, 4), here.allowed)
    assert (choice.place, choice.overlap_blocks) == ((B, 1), 3)
    pinned = here.selector.choose(prompt(1, 2, 3, 4, pinned_dp_rank=0), here.allowed)
    assert (pinned.place, pinned.overlap_blocks) == ((A, 0), 1)
    with pytest.raises(Unavailable, match="rank 7"):
        here.where(prompt(1, pinned_dp_rank=7))


# --- tiers below the device

GIVERS = (Place(A, 0), Place(B, 0))


def test_blocks_below_the_device_count_almost_as_much() -> None:
    held = Held(a=[1], b=[1, 2], c=[])
    held.host = {("a", 0): {1, 2, 3, 4, 5}}
    here = Scene({A: worker(), B: worker(), C: worker()}, held)
    choice = here.selector.choose(prompt(1, 2, 3, 4, 5, 6), here.allowed)
    assert choice.place == (A, 0)
    assert choice.held_blocks == 1
    assert choice.overlap_blocks == int(1 + 0.9 * 4)
    assert choice.source is None, "nobody has more"


def test_a_disk_counts_less_and_a_device_more() -> None:
    held = Held(a=[], b=[], c=[])
    held.disk = {("a", 0): {1, 2, 3, 4}}
    held.host = {("b", 0): {1, 2, 3, 4}}
    here = Scene({A: worker(), B: worker(), C: worker()}, held)
    overlaps = {
        each.instance: each.overlap_blocks
        for each in here.selector.explain(prompt(1, 2, 3, 4, 5), here.allowed)
    }
    assert overlaps == {A: pytest.approx(0.7 * 4), B: pytest.approx(0.9 * 4), C: 0.0}


def test_what_tiers_count_can_be_set() -> None:
    held = Held(a=[], b=[1])
    held.host = {("a", 0): {1, 2, 3}}
    here = Scene({A: worker(), B: worker()}, held, host_weight=0.0)
    assert here.where(prompt(1, 2, 3, 4)) == (B, 0)


def test_blocks_below_the_device_take_room_on_it() -> None:
    held = Held(a=[], b=[])
    held.host = {("a", 0): set(range(40))}
    here = Scene({A: worker(), B: worker()}, held)
    for each in (A, B):
        here.selector.on_report(LoadReport(each, WorkerLoad(running=1, kv_used_blocks=990)))
    told = {each.instance: each for each in here.selector.explain(prompt(*range(60)), here.allowed)}
    assert told[A].room_s == told[B].room_s > 0


def test_a_worker_that_brings_blocks_in_time_is_not_held_to_be_slow() -> None:
    held = Held(a=[], b=[])
    held.host = {("a", 0): set(range(100))}
    infos = {A: replace(worker(), has_tiers=True), B: replace(worker(), has_tiers=True)}
    here = Scene(infos, held, correct_times=True)
    request = prompt(*range(100), more_tokens=1)
    for _ in range(40):
        choice = here.selector.choose(request, (A,))
        ticket = here.selector.book(choice)
        here.time_s += choice.predicted_s
        here.selector.begun(ticket, 100 * BLOCK)
        here.selector.free(ticket, None)
        here.time_s += 1.0
    assert here.where(request) == (A, 0)
    [at_a] = [each for each in here.selector.explain(request, here.allowed) if each.instance == A]
    assert at_a.pace < 2.0


def test_who_has_more_is_named() -> None:
    held = Held(a=[1, 2, 3, 4], b=[1])
    held.host = {("a", 0): {5, 6}, ("b", 0): {2}}
    here = Scene({A: worker(), B: worker()}, held)
    choice = here.selector.choose(prompt(1, 2, 3, 4, 5, 6, 7), (B,))
    assert choice.source is None, "nobody else was asked about"
    choice = here.selector.choose(prompt(1, 2, 3, 4, 5, 6, 7), (B,), givers=GIVERS)
    assert (choice.place, choice.source, choice.source_blocks) == ((B, 0), (A, 0), 6)
    for _ in range(40):  # until the other has less to do
        choice = here.selector.choose(prompt(1, 2, 3, 4, 5, 6, 7), here.allowed, GIVERS)
        if choice.place == (B, 0):
            break
        here.book(prompt(*range(100, 140), pinned_dp_rank=0))
    assert choice.place == (B, 0)
    assert (choice.source, choice.source_blocks) == ((A, 0), 6)


def test_each_rank_has_its_own_load() -> None:
    here = Scene({A: worker(dp_ranks=(0, 1))}, policy=classic())
    first = here.where(prompt(1, 2))
    here.selector.on_report(LoadReport(A, WorkerLoad(running=5, kv_used_blocks=99, dp_rank=first[1])))
    here.selector.on_report(LoadReport(A, WorkerLoad(running=5, kv_used_blocks=99, dp_rank=7)))
    assert here.where(prompt(1, 2)) == (A, 1 - first[1])
    assert [(load.dp_rank, load.requests) for load in here.selector.loads()] == sorted(
        [(first[1], 5.0), (1 - first[1], 0.0)]
    )


def test_a_place_that_is_not_in_the_index_holds_nothing() -> None:
    held = Held(b0=[1, 2])
    here = Scene({A: worker(), B: worker(), C: worker()}, held)
    assert here.where(prompt(1, 2, 3)) == (B, 0)


def test_slots_are_looked_up_once_until_they_change() -> None:
    held = Held(a0=[1, 2])
    here = Scene({A: worker(), B: worker()}, held)
    for _ in range(5):
        assert here.where(prompt(1, 2, 3)) == (A, 0)
    assert held.num_looked_up == 2
    held.blocks = {("b", 0): {1, 2}}
    held.slots_version += 1
    assert here.where(prompt(1, 2, 3)) == (B, 0)
    assert held.num_looked_up == 4


def test_nobody_to_choose_from_is_unavailable() -> None:
    here = Scene({A: worker()})
    with pytest.raises(Unavailable):
        here.selector.choose(prompt(1), ())
    with pytest.raises(Unavailable):
        here.selector.choose(prompt(1), (B,))


# --- bookings


def test_choosing_books_nothing_and_what_is_over_leaves_nothing() -> None:
    here = Scene({A: worker(), B: worker()})
    for _ in range(3):
        here.where(prompt(1, 2))
    assert here.selector.num_under_way == 0
    tickets = [here.book(prompt(number)) for number in range(4)]
    assert here.selector.num_under_way == 4
    here.selector.begun(tickets[0], 0)
    for ticket in (*tickets, *tickets, 99):
        here.selector.free(ticket, None)
        here.selector.begun(ticket, None)
    assert here.selector.num_under_way == 0
    assert here.selector._under_way == {}
    assert here.selector._expected.num_prompts == 0


def test_what_an_answer_goes_on_after_is_computed_with_its_prompt() -> None:
    here = Scene({A: worker()}, Held(a=range(1, 3)))
    whole, rest = prompt(1, 2, more_tokens=0), replace(prompt(1, 2, more_tokens=0), resume=(5,) * 40)
    choices = [here.selector.choose(request, (A,)) for request in (whole, rest)]
    assert [choice.overlap_blocks for choice in choices] == [1, 2], "the prompt's last token is not the last"
    assert [choice.prefill_tokens for choice in choices] == [BLOCK, 40]
    here.selector.book(choices[1])
    [load] = here.selector.loads()
    assert load.prefill_tokens == 40


def test_a_place_that_is_gone_cannot_be_booked() -> None:
    here = Scene({A: worker()})
    choice = here.selector.choose(prompt(1), here.allowed)
    here.selector.set_workers({B: worker()})
    with pytest.raises(Unavailable, match="gone"):
        here.selector.book(choice)


def test_a_prediction_is_the_queue_and_the_prompt() -> None:
    here = Scene({A: worker()})
    here.book(prompt(1, 2))
    choice = here.selector.choose(prompt(8, 9), here.allowed)
    one = 0.01 + 33 * 0.0001
    assert (choice.queue_s, choice.prefill_s) == (pytest.approx(one), pytest.approx(one))
    assert choice.predicted_s == pytest.approx(2 * one)


# --- saturation


def test_who_has_all_that_it_computes_at_once_gets_no_more_while_there_are_others() -> None:
    here = Scene({A: worker(seqs=2), B: worker(seqs=100)}, Held(a0=range(1, 40)))
    asked = prompt(*range(1, 40))
    placed = []
    for _ in range(4):
        choice = here.selector.choose(asked, here.allowed)
        assert not choice.is_saturated
        placed.append(choice.place.instance_id)
        here.selector.begun(here.selector.book(choice), None)
    assert placed == [A, A, B, B]


def test_who_is_behind_with_prompts_gets_no_more_while_there_are_others() -> None:
    here = Scene({A: worker(batch=100)}, saturated_batches=1.5)
    tickets = []
    for number, saturated in enumerate((False, False, False, True, True)):
        choice = here.selector.choose(prompt(10 * number, more_tokens=44), here.allowed)  # 60 tokens
        assert choice.is_saturated is saturated
        tickets.append(here.selector.book(choice))
    for ticket in tickets[:3]:
        here.selector.begun(ticket, None)
    assert not here.selector.choose(prompt(1), here.allowed).is_saturated


def test_to_wait_for_what_is_held_may_be_best_even_where_there_is_much_to_do() -> None:
    here = Scene({A: worker(batch=100), B: worker(batch=100)}, Held(a0=range(40)), saturated_batches=0.5)
    here.selector.book(here.selector.choose(prompt(90, 91, 92, 93), (A,)))
    choice = here.selector.choose(prompt(*range(40)), here.allowed)
    assert (choice.place, choice.is_saturated) == ((A, 0), False), "B could have taken it at once"
    here.selector.book(here.selector.choose(prompt(80, 81, 82, 83), (B,)))
    choice = here.selector.choose(prompt(*range(40)), here.allowed)
    assert (choice.place, choice.is_saturated) == ((A, 0), True)


def test_when_all_are_saturated_it_says_so_and_names_the_best() -> None:
    here = Scene({A: worker(seqs=1), B: worker(seqs=1)}, Held(b0=[1, 2, 3]))
    for number in (50, 60):
        here.selector.begun(here.book(prompt(number)), None)
    choice = here.selector.choose(prompt(1, 2, 3, 4), here.allowed)
    assert choice.is_saturated
    assert choice.place == (B, 0)


def test_of_whom_nothing_is_known_is_never_saturated() -> None:
    here = Scene({A: None})
    for _ in range(100):
        here.selector.begun(here.book(prompt(1)), None)
    assert not here.selector.choose(prompt(1), here.allowed).is_saturated


def test_a_temperature_leaves_out_who_is_saturated_too() -> None:
    here = Scene({A: worker(seqs=1), B: worker(), C: worker()}, temperature=5.0)
    while here.selector.choose(prompt(1), here.allowed).place != (A, 0):
        pass
    here.selector.begun(here.selector.book(here.selector.choose(prompt(1), (A,))), None)
    assert {here.where(prompt(1)) for _ in range(60)} == {(B, 0), (C, 0)}


def test_a_worker_without_room_is_avoided_for_as_long_as_an_answer_holds_it() -> None:
    slow = replace(worker(), latency=LatencyModel(base_s=0.1, prefill_token_s=0.0001))
    here = Scene({A: slow, B: slow}, Held(a0=range(30)))
    here.selector.begun(here.selector.book(here.selector.choose(prompt(100), (A,))), None)
    here.selector.on_report(LoadReport(A, WorkerLoad(running=1, kv_used_blocks=995)))
    held = here.selector.choose(prompt(*range(30)), here.allowed)
    assert (held.place, held.overlap_blocks, held.room_s) == ((A, 0), 30, 0.0), "what it holds needs no room"
    more = prompt(*range(500, 600))
    assert here.where(more) == (B, 0)
    (of_a,) = [each for each in here.selector.explain(more, here.allowed) if each.instance == A]
    assert of_a.room_s == pytest.approx((995 + 101 - 1000) / 1000 * 8 * 0.1)
    waits = here.selector.choose(more, (A,))
    assert waits.predicted_s == pytest.approx(of_a.room_s + waits.prefill_s)


# --- what a request says


def test_a_request_may_weigh_for_itself() -> None:
    here = Scene({A: worker(), B: worker()}, Held(a0=range(4)), policy=classic())
    for _ in range(3):
        here.selector.begun(here.selector.book(here.selector.choose(prompt(90), (A,))), None)
    asked = prompt(*range(6))
    assert here.where(asked) == (B, 0)
    assert here.where(prompt(*range(6), weights={"overlap": 50.0})) == (A, 0)


def test_a_request_may_have_a_temperature_of_its_own() -> None:
    here = Scene({A: worker(), B: worker()}, Held(a0=range(9)))
    asked = prompt(*range(9), temperature=50.0)
    assert {here.where(prompt(*range(9))) for _ in range(30)} == {(A, 0)}
    assert {here.where(asked) for _ in range(30)} == {(A, 0), (B, 0)}


def test_preferred_taints_lower_the_cost_and_unwanted_ones_raise_it() -> None:
    here = Scene({A: worker(taints=("gpu", "old")), B: worker(taints=("cpu",)), C: worker()})
    assert here.where(prompt(1, preferred_taints={"gpu": 1.0})) == (A, 0)
    assert {here.where(prompt(1, preferred_taints={"gpu": -1.0, "none": 9.0})) for _ in range(20)} == {
        (B, 0),
        (C, 0),
    }


def test_a_session_comes_back_unless_it_costs_more_than_that_is_worth() -> None:
    here = Scene({A: worker(), B: worker(), C: worker()}, affinity_s=0.05, affinity_half_life_s=10.0)
    first = here.selector.choose(prompt(1, session="s"), here.allowed)
    ticket = here.selector.book(first)
    here.selector.begun(ticket, None)
    here.selector.free(ticket, None)
    for _ in range(10):
        assert here.where(prompt(2, session="s")) == first.place
    assert len({here.where(prompt(2, session="other")) for _ in range(40)}) == 3
    assert len({here.where(prompt(2, session="s", tenant="t")) for _ in range(40)}) == 3
    for _ in range(5):
        here.selector.book(here.selector.choose(prompt(*range(100, 130)), (first.place.instance_id,)))
    assert here.where(prompt(2, session="s")) != first.place
    assert here.selector.num_sessions == 1


def test_a_session_that_never_began_is_bound_to_nobody() -> None:
    here = Scene({A: worker(), B: worker()})
    here.selector.free(here.book(prompt(1, session="s")), None)
    assert here.selector.num_sessions == 0


# --- for people


def test_every_term_of_each_candidate_is_told() -> None:
    here = Scene({A: worker(), B: worker(seqs=1, taints=("gpu",))}, Held(a0=[1, 2]))
    here.selector.begun(here.selector.book(here.selector.choose(prompt(9), (B,))), None)
    asked = prompt(1, 2, 3, preferred_taints={"gpu": 0.1})
    first, second = here.selector.explain(asked, here.allowed)
    assert (first.instance, first.is_chosen, first.is_saturated, first.overlap_blocks) == (A, True, False, 2)
    assert (second.instance, second.is_chosen, second.is_saturated, second.decoding) == (B, False, True, 1)
    assert second.preference == 0.1
    assert first.cost < second.cost
    assert first.prefill_s == pytest.approx(0.01 + 17 * 0.0001)
    assert here.selector.num_under_way == 1


# --- handoffs

LINKS = LinkCosts(token_s=0.001, by_peer={B: 0.0, C: 0.1})


def test_the_kv_of_a_handoff_goes_over_a_fast_link() -> None:
    selector = Scene({each: worker() for each in (A, B, C)}, Held(a=(), b=(), c=())).selector
    handoff = Handoff(ticket=b"", prefill_instance=InstanceId("p"))
    asked = replace(prompt(1, 2, links=LINKS), handoff=handoff)
    told = {each.instance: each for each in selector.explain(asked, (A, B, C))}
    assert [told[each].transfer_s for each in (A, B, C)] == pytest.approx([0.033, 0.0, 3.3])
    choice = selector.choose(asked, (A, B, C))
    assert choice.place.instance_id == B
    assert selector.choose(asked, (A, C)).predicted_s == pytest.approx(0.033 + choice.predicted_s)
    forecast = selector.forecast(asked, (A, C))
    assert (forecast.instance, forecast.transfer_s) == (A, pytest.approx(0.033))


def test_what_a_worker_holds_is_not_moved_to_it() -> None:
    selector = Scene({each: worker() for each in (A, B, C)}, Held(a=(1, 2), b=(), c=())).selector
    handoff = Handoff(ticket=b"", prefill_instance=InstanceId("p"))
    asked = replace(prompt(1, 2, links=LinkCosts(token_s=0.001)), handoff=handoff)
    told = {each.instance: each.transfer_s for each in selector.explain(asked, (A, B))}
    assert told == pytest.approx({A: 0.001, B: 0.033})


def test_where_a_prompt_is_computed_all_of_it_leaves() -> None:
    selector = Scene({each: worker() for each in (A, B, C)}, Held(a=(1, 2), b=(), c=())).selector
    asked = replace(prompt(1, 2, links=LINKS), prefill_only=True)
    told = {each.instance: each.transfer_s for each in selector.explain(asked, (A, B, C))}
    assert told == pytest.approx({A: 0.033, B: 0.0, C: 3.3})
    assert selector.choose(asked, (C,)).predicted_s < 1.0, "its own part is over before"
