"""Blocks that are about to be held: as long as a prompt that has them is under way there, and no longer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvolt.router.index.pending_blocks import ExpectedBlocks
from kvolt.router.index.prefix_index import MAX_SLOTS


def blocks(*rows: int) -> ExpectedBlocks:
    made = ExpectedBlocks()
    for row in rows:
        made.add_row(row)
    return made


def found(expected: ExpectedBlocks, *hashes: int, rows: tuple[int, ...] = (4, 7)) -> list[int]:
    told = expected.find(hashes)
    slots = [expected.slot_of(row) for row in rows]
    return [0 if told is None or slot is None else int(told[slot]) for slot in slots]


def test_what_was_sent_is_expected_until_it_ends() -> None:
    expected = blocks(4, 7)
    assert expected.find((1, 2)) is None
    expected.send(7, 1, (1, 2, 3))
    assert found(expected, 1, 2, 9) == [0, 2]
    expected.end(7, 1)
    assert found(expected, 1, 2, 9) == [0, 0]
    assert expected.num_prompts == 0


def test_what_another_prompt_has_stays() -> None:
    expected = blocks(4, 7)
    expected.send(4, 1, (1, 2, 3))
    expected.send(4, 2, (1, 2, 8))
    expected.end(4, 1)
    assert found(expected, 1, 2, 3) == [2, 0]
    expected.end(4, 1)
    expected.end(4, 9)
    expected.end(5, 1)
    expected.end(4, 2)
    assert found(expected, 1) == [0, 0]


def test_a_worker_that_is_gone_takes_all_along() -> None:
    expected = blocks(4, 7)
    expected.send(4, 1, (1, 2))
    expected.drop_row(4)
    expected.drop_row(7)
    expected.end(4, 1)
    expected.add_row(7)
    expected.send(7, 2, (5,))
    assert found(expected, 1, 2) == [0, 0]
    assert found(expected, 5) == [0, 1]


def test_a_prompt_without_blocks_expects_nothing() -> None:
    expected = blocks(4)
    expected.send(4, 1, ())
    assert expected.num_prompts == 0


def test_one_worker_more_than_there_is_room_for_is_expected_to_hold_nothing() -> None:
    expected = blocks(*range(MAX_SLOTS + 1))
    assert expected.slot_of(MAX_SLOTS - 1) is not None
    assert expected.slot_of(MAX_SLOTS) is None
    expected.send(MAX_SLOTS, 1, (1, 2))
    expected.end(MAX_SLOTS, 1)
    expected.drop_row(MAX_SLOTS)
    assert expected.num_prompts == 0


def test_a_long_prompt_is_found_exactly_at_its_beginning_and_rounded_down_beyond() -> None:
    expected = blocks(4, 7)
    expected.send(4, 1, tuple(range(1, 201)))
    assert expected.num_kept < 32
    for num_alike in (1, 15, 16, 17, 31, 32, 33, 48, 100, 200):
        hashes = (*range(1, num_alike + 1), *range(1000, 1300))
        told = found(expected, *hashes)[0]
        assert told == (num_alike if num_alike <= 16 else num_alike // 16 * 16)
    assert found(expected, *range(1, 31)) == [16, 0]
    expected.send(4, 2, tuple(range(1, 101)))
    expected.end(4, 1)
    assert found(expected, *range(1, 201)) == [96, 0]
    expected.end(4, 2)
    assert found(expected, *range(1, 201)) == [0, 0]


Prompt = st.lists(st.integers(0, 2), min_size=1, max_size=6)


@given(st.lists(Prompt, min_size=1, max_size=8), st.data())
def test_what_is_left_is_what_those_have_that_are_left(prompts: list[list[int]], data: st.DataObject) -> None:
    # As real ones: a block's name is of all before it, too.
    chained = [tuple(hash(tuple(each[: end + 1])) % 2**64 for end in range(len(each))) for each in prompts]
    expected = blocks(1)
    for ticket, hashes in enumerate(chained):
        expected.send(1, ticket, hashes)
    left = dict(enumerate(chained))
    for ticket in data.draw(st.permutations(range(len(chained)))):
        expected.end(1, ticket)
        del left[ticket]
        held = set().union(*left.values())
        for hashes in chained:
            wanted = next((at for at, each in enumerate(hashes) if each not in held), len(hashes))
            assert found(expected, *hashes, rows=(1,)) == [wanted]
