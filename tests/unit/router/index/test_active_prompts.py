"""ActivePrompts: prefixes shared at a worker and over all workers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvolt.router.index.active_prompts import ActivePrompts, PrefixSharing, prefix_sharing

PREFIX = tuple(range(100, 148))
"""48 blocks: sixteen that are kept one by one, and two more strides."""


def prompt(number: int, prefix: tuple[int, ...] = PREFIX) -> tuple[int, ...]:
    return (*prefix, *range(1000 * number, 1000 * number + 5))


def test_requests_of_one_worker_share_a_prefix() -> None:
    active = ActivePrompts()
    assert active.add_prompt(0, 1, prompt(1)) == 0
    assert active.add_prompt(0, 2, prompt(2)) == len(PREFIX)
    assert active.add_prompt(1, 3, prompt(3)) == 0, "another worker has its own blocks"
    assert active.add_prompt(0, 4, prompt(4, PREFIX[:10])) == 10
    assert active.remove_prompt(1) == len(PREFIX)
    assert active.remove_prompt(2) == 10
    assert active.remove_prompt(4) == 0
    assert active.remove_prompt(4) == 0, "it is not here any more"


def test_the_fleet_shares_what_any_worker_has() -> None:
    active = ActivePrompts()
    assert prefix_sharing(active.shared_depths(prompt(0))) == PrefixSharing()
    for number in range(1, 4):
        active.add_prompt(number, number, prompt(number))
    active.add_prompt(0, 9, prompt(9, PREFIX[:10]))
    assert active.shared_depths(prompt(0))[9] == (10, 4)
    assert prefix_sharing(active.shared_depths(prompt(0))) == PrefixSharing(48, 48, 3)
    assert active.shared_depths((7, *PREFIX)) == []
    active.drop_row(2)
    assert prefix_sharing(active.shared_depths(prompt(0))) == PrefixSharing(48, 48, 2)


def test_many_that_share_little_count_more_than_one_that_shares_more() -> None:
    assert prefix_sharing([(1, 30), (10, 30), (16, 2), (32, 2)]) == PrefixSharing(32, 10, 30)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 48)), min_size=1, max_size=12), st.randoms())
def test_removing_undoes_adding(prompts: list[tuple[int, int]], rng: object) -> None:
    active = ActivePrompts()
    shared = [0, 0, 0]
    for ticket, (row, length) in enumerate(prompts):
        shared[row] += active.add_prompt(row, ticket, prompt(ticket + 1, PREFIX[:length]))
    tickets = list(range(len(prompts)))
    rng.shuffle(tickets)  # type: ignore[attr-defined]
    for ticket in tickets:
        shared[prompts[ticket][0]] -= active.remove_prompt(ticket)
        assert min(shared) >= 0
    assert shared == [0, 0, 0]
    assert active.shared_depths(PREFIX) == []
