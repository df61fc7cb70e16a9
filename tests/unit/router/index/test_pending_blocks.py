"""PendingBlocks: blocks of prompts in flight, until computed or removed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvolt.router.index.pending_blocks import PendingBlocks
from kvolt.router.index.prefix_index import MAX_SLOTS


def blocks(*rows: int) -> PendingBlocks:
    made = PendingBlocks()
    for row in rows:
        made.add_row(row)
    return made


def found(pending: PendingBlocks, *hashes: int, rows: tuple[int, ...] = (4, 7)) -> list[int]:
    depths = pending.find(hashes)
    slots = [pending.slot_of(row) for row in rows]
    return [0 if depths is None or slot is None else int(depths[slot]) for slot in slots]


def test_what_was_sent_is_expected_until_it_ends() -> None:
    pending = blocks(4, 7)
    assert pending.find((1, 2)) is None
    pending.add_prompt(7, 1, (1, 2, 3))
    assert found(pending, 1, 2, 9) == [0, 2]
    pending.remove_prompt(7, 1)
    assert found(pending, 1, 2, 9) == [0, 0]
    assert pending.num_prompts == 0


def test_what_another_prompt_has_stays() -> None:
    pending = blocks(4, 7)
    pending.add_prompt(4, 1, (1, 2, 3))
    pending.add_prompt(4, 2, (1, 2, 8))
    pending.remove_prompt(4, 1)
    assert found(pending, 1, 2, 3) == [2, 0]
    pending.remove_prompt(4, 1)
    pending.remove_prompt(4, 9)
    pending.remove_prompt(5, 1)
    pending.remove_prompt(4, 2)
    assert found(pending, 1) == [0, 0]


def test_a_removed_worker_drops_its_prompts() -> None:
    pending = blocks(4, 7)
    pending.add_prompt(4, 1, (1, 2))
    pending.drop_row(4)
    pending.drop_row(7)
    pending.remove_prompt(4, 1)
    pending.add_row(7)
    pending.add_prompt(7, 2, (5,))
    assert found(pending, 1, 2) == [0, 0]
    assert found(pending, 5) == [0, 1]


def test_a_prompt_without_blocks_expects_nothing() -> None:
    pending = blocks(4)
    pending.add_prompt(4, 1, ())
    assert pending.num_prompts == 0


def test_one_worker_more_than_there_is_room_for_is_expected_to_hold_nothing() -> None:
    pending = blocks(*range(MAX_SLOTS + 1))
    assert pending.slot_of(MAX_SLOTS - 1) is not None
    assert pending.slot_of(MAX_SLOTS) is None
    pending.add_prompt(MAX_SLOTS, 1, (1, 2))
    pending.remove_prompt(MAX_SLOTS, 1)
    pending.drop_row(MAX_SLOTS)
    assert pending.num_prompts == 0


def test_a_long_prompt_is_found_exactly_at_its_beginning_and_rounded_down_beyond() -> None:
    pending = blocks(4, 7)
    pending.add_prompt(4, 1, tuple(range(1, 201)))
    assert pending.num_kept < 32
    for num_alike in (1, 15, 16, 17, 31, 32, 33, 48, 100, 200):
        hashes = (*range(1, num_alike + 1), *range(1000, 1300))
        depths = found(pending, *hashes)[0]
        assert depths == (num_alike if num_alike <= 16 else num_alike // 16 * 16)
    assert found(pending, *range(1, 31)) == [16, 0]
    pending.add_prompt(4, 2, tuple(range(1, 101)))
    pending.remove_prompt(4, 1)
    assert found(pending, *range(1, 201)) == [96, 0]
    pending.remove_prompt(4, 2)
    assert found(pending, *range(1, 201)) == [0, 0]


Prompt = st.lists(st.integers(0, 2), min_size=1, max_size=6)


@given(st.lists(Prompt, min_size=1, max_size=8), st.data())
def test_what_is_left_is_what_those_have_that_are_left(prompts: list[list[int]], data: st.DataObject) -> None:
    # As real ones: a block's name is of all before it, too.
    chained = [tuple(hash(tuple(each[: end + 1])) % 2**64 for end in range(len(each))) for each in prompts]
    pending = blocks(1)
    for ticket, hashes in enumerate(chained):
        pending.add_prompt(1, ticket, hashes)
    left = dict(enumerate(chained))
    for ticket in data.draw(st.permutations(range(len(chained)))):
        pending.remove_prompt(1, ticket)
        del left[ticket]
        held = set().union(*left.values())
        for hashes in chained:
            wanted = next((at for at, each in enumerate(hashes) if each not in held), len(hashes))
            assert found(pending, *hashes, rows=(1,)) == [wanted]
