"""Policies: costs, and picking the lowest."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvolt.router.policy import policy as policy_module
from kvolt.router.policy.policy import (
    ClassicWeights,
    LatencyWeights,
    RequestView,
    WorkersView,
    classic,
    cost_terms,
    latency,
    pick_index,
)

ASKED = RequestView(prompt_tokens=640, block_size=64, output_tokens=128)


def workers(**given: list[float]) -> WorkersView:
    size = len(next(iter(given.values())))
    names = WorkersView.__struct_fields__
    return WorkersView(**{name: np.array(given.get(name, [0.0] * size), dtype=float) for name in names})


def best(costs: np.ndarray) -> int:
    return int(costs.argmin())


def test_classic_adds_blocks_to_prefill_and_blocks_in_use() -> None:
    seen = workers(overlap_blocks=[0, 5, 10], prefill_tokens=[0, 640, 0], blocks=[0, 0, 30])
    assert classic()(ASKED, seen).tolist() == [10 + 10, 15 + 10, 0 + 40]
    assert classic(ClassicWeights(overlap=3.0))(ASKED, seen).tolist() == [30 + 10, 45 + 10, 40]


def test_latency_waits_for_what_is_held_only_as_long_as_it_pays() -> None:
    holder_is_busy = workers(queue_s=[0.4, 0.0], prefill_s=[0.1, 0.6])
    assert best(latency()(ASKED, holder_is_busy)) == 0
    holder_is_too_busy = workers(queue_s=[0.6, 0.0], prefill_s=[0.1, 0.6])
    assert best(latency()(ASKED, holder_is_too_busy)) == 1


def test_latency_counts_the_answer_and_what_it_adds_to_others() -> None:
    slower = workers(prefill_s=[0.1, 0.1], step_s=[0.012, 0.01])
    assert latency()(ASKED, slower).tolist() == pytest.approx([0.1 + 128 * 0.002, 0.1])
    crowded = workers(prefill_s=[0.1, 0.1], beside=[5.0, 1.0], slowdown_s=[0.05, 0.05])
    assert latency()(ASKED, crowded).tolist() == pytest.approx([0.1 * 6 + 4 * 0.05, 0.1 * 2])
    holder_is_slower = workers(prefill_s=[0.1, 0.3], step_s=[0.012, 0.01])
    assert best(latency()(ASKED, holder_is_slower)) == 1, (
        "the answer takes longer there than the prompt elsewhere"
    )


def test_latency_minds_those_that_wait_for_the_prompt() -> None:
    decoding = workers(prefill_s=[0.2, 0.1], queue_s=[0.0, 0.2], beside=[3, 5])
    assert latency()(ASKED, decoding).tolist() == pytest.approx([0.2 * 4, 0.2 + 0.1 * 6])
    behind = workers(queue_s=[1.0, 1.2], prefill_s=[0.5, 0.4])
    assert best(latency()(ASKED, behind)) == 0
    many_come = msgspec.structs.replace(ASKED, arrivals_per_s=2.0)
    assert best(latency()(many_come, behind)) == 1, "less is left of it there, and others come behind it"


def test_latency_makes_a_copy_that_others_will_use() -> None:
    seen = workers(prefill_s=[0.1, 0.6], copy_s=[0.0, 0.7])
    assert best(latency()(ASKED, seen)) == 1


def test_latency_avoids_a_cache_that_would_overflow() -> None:
    seen = workers(prefill_s=[0.1, 0.3], room_s=[1.0, 0.0])
    assert best(latency()(ASKED, seen)) == 1
    assert best(latency(LatencyWeights(room=0.1))(ASKED, seen)) == 0
    waiting = workers(prefill_s=[0.1, 0.1], queue_s=[2.0, 1.5], room_s=[1.0, 1.8])
    assert latency()(ASKED, waiting).tolist() == pytest.approx([2.1, 1.9]), "room is made while it waits"


def test_the_lowest_cost_wins_and_ties_are_random() -> None:
    rng = random.Random(1)
    assert pick_index(np.array([3.0, 1.0, 2.0]), rng) == 1
    drawn = Counter(pick_index(np.array([1.0, 1.0, 2.0]), rng) for _ in range(2000))
    assert set(drawn) == {0, 1}
    assert abs(drawn[0] - 1000) < 150


def test_a_temperature_prefers_the_less_costly_whatever_the_unit() -> None:
    drawn = []
    for unit in (1.0, 1000.0):
        rng = random.Random(2)
        drawn.append(Counter(pick_index(np.array([0.0, 1.0, 4.0]) * unit, rng, 0.5) for _ in range(3000)))
    assert drawn[0] == drawn[1]
    assert drawn[0][0] > drawn[0][1] > drawn[0][2] > 0
    rng = random.Random(3)
    assert len(Counter(pick_index(np.array([2.0, 2.0]), rng, 0.5) for _ in range(50))) == 2


@given(
    st.lists(st.floats(-1e12, 1e12, allow_nan=False), min_size=1, max_size=40),
    st.floats(0, 3),
    st.integers(0, 100),
)
def test_always_one_of_them(costs: list[float], temperature: float, seed: int) -> None:
    assert 0 <= pick_index(np.array(costs), random.Random(seed), temperature) < len(costs)


@pytest.mark.parametrize("policy", [classic(), latency()])
def test_one_candidate_is_enough(policy: object) -> None:
    assert callable(policy)
    assert policy(ASKED, workers(prefill_s=[0.1])).shape == (1,)


# --- in one pass

SECONDS = st.floats(0, 1e4)


@given(st.lists(st.tuples(*[SECONDS] * 9), min_size=1, max_size=8))
def test_the_terms_add_up_to_the_cost(amounts: list[tuple[float, ...]]) -> None:
    names = (
        "beside",
        "prefill_s",
        "step_s",
        "slowdown_s",
        "queue_s",
        "room_s",
        "copy_s",
        "transfer_s",
        "affinity",
    )
    columns = {name: list(values) for name, values in zip(names, zip(*amounts, strict=True), strict=True)}
    seen = workers(**columns, overlap_blocks=[3.0] * len(amounts), blocks=[7.0] * len(amounts))
    request_view = msgspec.structs.replace(ASKED, arrivals_per_s=2.0)
    for policy in (latency(LatencyWeights(0.5, 0.25)), classic(ClassicWeights(2.0, 3.0))):
        costs = policy(request_view, seen)
        terms = cost_terms(policy, request_view, seen, costs)
        assert sum(terms.values()).tolist() == pytest.approx(costs.tolist(), rel=1e-9, abs=1e-6)


def test_a_policy_without_terms_has_one() -> None:
    seen = workers(queue_s=[1.0, 2.0])
    terms = cost_terms(lambda request, workers: workers.queue_s, ASKED, seen, seen.queue_s)
    assert {name: each.tolist() for name, each in terms.items()} == {"policy": [1.0, 2.0]}


@pytest.mark.skipif(policy_module.native_latency is None, reason="it is not built here")
@given(st.lists(st.tuples(*[SECONDS] * 9), min_size=1, max_size=8), st.tuples(*[st.floats(0, 10)] * 3))
def test_native_latency_costs_equal_numpy(
    workers: list[tuple[float, ...]], given: tuple[float, float, float]
) -> None:
    names = (
        *("beside", "prefill_s", "step_s", "slowdown_s", "queue_s", "room_s", "affinity"),
        *("copy_s", "transfer_s"),
    )
    columns = dict(zip(names, np.array(workers).T.copy(), strict=True))
    others = {name: np.zeros(len(workers)) for name in WorkersView.__struct_fields__ if name not in names}
    seen = WorkersView(**columns, **others)
    policy = latency(LatencyWeights(*given[:2]))
    request_view = msgspec.structs.replace(ASKED, arrivals_per_s=given[2])
    native = policy(request_view, seen)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy_module, "native_latency", None)
        assert native.tolist() == pytest.approx(policy(request_view, seen).tolist(), rel=1e-9, abs=1e-9)


@pytest.mark.skipif(policy_module.native_latency is None, reason="it is not built here")
@pytest.mark.parametrize("wrong", [np.zeros(1), np.zeros(2, dtype=np.int64), np.zeros(4)[::2]])
def test_what_is_no_double_for_each_worker_is_refused(wrong: Any) -> None:
    native = policy_module.native_latency
    assert native is not None
    right = np.zeros(2)
    for at in range(9):
        arrays = [right] * 9
        arrays[at] = wrong
        with pytest.raises((ValueError, BufferError)):
            native(1.0, 1.0, 1.0, 1.0, *arrays)


def test_a_cost_that_is_not_a_number_is_the_highest() -> None:
    rng = random.Random(1)
    assert {pick_index(np.array([np.nan, 0.2, 0.1]), rng) for _ in range(20)} == {2}
    assert pick_index(np.array([np.nan, np.nan]), rng) in (0, 1)
    assert pick_index(np.array([np.nan, 0.2, 0.1]), rng, temperature=0.5) in (0, 1, 2)
