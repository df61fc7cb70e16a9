"""Made traces: decided by recipe and seed, in order, with the prefixes that the recipe asks for."""

from __future__ import annotations

from itertools import pairwise
from statistics import fmean, median, pstdev

import pytest
from msgspec.structs import replace
from tests.unit.bench.traces.trace_lab import shared_blocks

from kvolt.bench.traces import RECIPES, Given, Lognormal, Recipe, analyze, make_trace, small_trace
from kvolt.core.errors import ConfigError
from kvolt.core.trace import TraceRecord

SMALL = RECIPES["small"]


def gaps(records: list[TraceRecord]) -> list[float]:
    return [later.timestamp - earlier.timestamp for earlier, later in pairwise(records)]


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_makes_a_trace_that_could_be_read(name: str) -> None:
    recipe = replace(RECIPES[name], requests=400)
    records = list(make_trace(recipe))
    assert len(records) == 400
    assert all(gap >= 0 for gap in gaps(records))
    for each in records:
        assert len(each.hash_ids) == -(-each.input_length // recipe.block_size)
        assert each.block_size == recipe.block_size
        assert each.input_length >= 1
        assert each.output_length >= 1
        assert each.input_length + each.output_length <= recipe.max_context


def test_a_seed_is_a_trace() -> None:
    assert small_trace() == list(make_trace(SMALL))
    assert small_trace() != list(make_trace(replace(SMALL, seed=1)))
    shorter = list(make_trace(replace(SMALL, requests=50)))
    assert small_trace()[:50] == shorter, "a longer one goes on where a shorter one ends"


def test_the_small_trace_has_what_tests_need_of_one() -> None:
    found = analyze(small_trace(), (64, 1024))
    assert found.requests == 300
    assert found.sessions is not None
    assert found.sessions.turns.max >= 5
    assert found.reuse is not None
    assert 0.5 < found.reuse.hit_rate < 0.95
    assert found.reuse.lru[0].hit_rate < found.reuse.lru[1].hit_rate <= found.reuse.hit_rate
    assert 2 < found.rate.mean < 5


def test_turns_repeat_their_session() -> None:
    last: dict[str, TraceRecord] = {}
    turns = 0
    for each in small_trace():
        assert each.session is not None
        before = last.get(each.session)
        if before is not None:
            turns += 1
            assert each.input_length > before.input_length + before.output_length
            full = before.input_length // SMALL.block_size
            assert shared_blocks(before.hash_ids, each.hash_ids) == full
            assert each.timestamp >= before.timestamp + 1000 * before.output_length * SMALL.token_s - 0.01
        last[each.session] = each
    assert turns > 100


def test_sessions_share_system_prompts_only() -> None:
    recipe = replace(SMALL, system_prompts=2, system=Given((64,)), turns=1.0)
    records = list(make_trace(recipe))
    shared = [shared_blocks(one.hash_ids, other.hash_ids) for one, other in pairwise(records)]
    assert set(shared) == {0, 64 // recipe.block_size}
    firsts = [each.hash_ids[0] for each in records]
    assert len(set(firsts)) == 2
    assert firsts.count(0) / firsts.count(4) == pytest.approx(2, rel=0.3), "the first is asked twice as often"
    alone = list(make_trace(replace(recipe, system_prompts=0)))
    assert len({each.hash_ids[0] for each in alone}) == len(alone)


def test_arrivals_are_poisson_or_come_in_bursts() -> None:
    base = Recipe(requests=4000, turns=1.0, rate_per_s=10.0)
    for burstiness, spread in ((1.0, 1.0), (0.1, 10**0.5), (100.0, 0.1)):
        found = gaps(list(make_trace(replace(base, burstiness=burstiness))))
        assert fmean(found) == pytest.approx(100, rel=0.15)
        assert pstdev(found) / fmean(found) == pytest.approx(spread, rel=0.15)


def test_lengths_are_lognormal_or_given() -> None:
    base = Recipe(requests=3000, turns=1.0, system_prompts=0)
    question = Lognormal(median=200, sigma=1.0, max=1000)
    found = [each.input_length for each in make_trace(replace(base, question=question))]
    assert median(found) == pytest.approx(200, rel=0.1)
    assert max(found) == 1000
    given = [each.input_length for each in make_trace(replace(base, question=Given((3, 7, 7))))]
    assert set(given) == {3, 7}
    assert given.count(7) / given.count(3) == pytest.approx(2, rel=0.15)


def test_a_full_context_ends_a_session() -> None:
    recipe = replace(SMALL, turns=1000.0, max_context=200, rate_per_s=1.0)
    assert all(each.input_length + each.output_length <= 200 for each in make_trace(recipe))
    tiny = replace(SMALL, max_context=2, think_s=0.0)
    assert {(each.input_length, each.output_length) for each in make_trace(tiny)} == {(1, 1)}


@pytest.mark.parametrize(
    "wrong",
    [
        {"requests": 0},
        {"rate_per_s": 0.0},
        {"rate_per_s": float("nan")},
        {"burstiness": -1.0},
        {"turns": 0.5},
        {"max_context": 1},
        {"block_size": 0},
        {"system_prompts": -1},
        {"think_s": -1.0},
    ],
)
def test_impossible_recipes_are_told(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        make_trace(replace(SMALL, **wrong))
