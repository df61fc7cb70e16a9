"""Hash ids of another block size: equal prefixes stay equal, other ones become nobody else's."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st
from tests.unit.bench.traces.trace_lab import prompts, record, shared_blocks, shared_tokens

from kvolt.bench.traces import reblock
from kvolt.bench.traces.prefixes import block_ids
from kvolt.core.trace import TraceRecord

sizes = st.integers(1, 9)
pairs = sizes.flatmap(lambda size: st.tuples(prompts(size), prompts(size)))


@given(pairs, sizes)
@example((record([0, 0, 5]), record([0, 0], 5)), 2)
def test_what_two_prompts_share_stays_shared_and_no_more(
    pair: tuple[TraceRecord, TraceRecord], size: int
) -> None:
    one, other = pair
    first, second = reblock(pair, size)
    common = shared_tokens(one, other)
    whole = one.input_length == other.input_length == common
    blocks = len(first.hash_ids) if whole else common // size
    if one.block_size == size and not whole:
        # Nothing is made anew: what is shared is what the trace says, partial blocks and all.
        blocks = shared_blocks(one.hash_ids, other.hash_ids)
    assert shared_blocks(first.hash_ids, second.hash_ids) == blocks
    assert not set(first.hash_ids[blocks:]) & set(second.hash_ids[blocks:]) or one.block_size == size


@given(sizes.flatmap(prompts), sizes)
def test_there_is_an_id_for_every_block(prompt: TraceRecord, size: int) -> None:
    (found,) = reblock([prompt], size)
    assert found.block_size == size
    assert found.input_length == prompt.input_length
    assert len(found.hash_ids) == -(-prompt.input_length // size)
    assert all(0 <= key < 2**63 for key in found.hash_ids)
    if size != prompt.block_size:
        assert len(set(found.hash_ids)) == len(found.hash_ids)


@given(pairs, sizes, sizes)
def test_a_detour_over_another_size_shares_no_more(
    pair: tuple[TraceRecord, TraceRecord], between: int, size: int
) -> None:
    direct = list(reblock(pair, size))
    detour = list(reblock(reblock(pair, between), size))
    shared = [shared_blocks(one.hash_ids, other.hash_ids) for one, other in (direct, detour)]
    assert shared[1] <= shared[0]


def test_a_partial_block_is_not_the_full_one_that_begins_so() -> None:
    short, long = reblock([record([1, 2], 6), record([1, 2], 8)], 2)
    assert shared_blocks(short.hash_ids, long.hash_ids) == 3
    short, long = reblock([record([1, 2], 5), record([1, 2], 8)], 2)
    assert shared_blocks(short.hash_ids, long.hash_ids) == 2, "one token of the third is less than the third"


def test_a_partial_blocks_length_is_no_segments_key() -> None:
    assert not set(block_ids([(7, 4), (3, 4)], 4)) & set(block_ids([(7, 4), (9, 3)], 4)[1:])
    assert block_ids([(7, 4), (3, 4)], 4)[1] != block_ids([(7, 7)], 4)[1]


def test_larger_blocks_and_records_without_ids() -> None:
    found = list(reblock([record([1, 2, 3]), record([1, 2, 4]), record((), 10)], 8))
    assert [len(each.hash_ids) for each in found] == [2, 2, 0]
    assert shared_blocks(found[0].hash_ids, found[1].hash_ids) == 1
    assert found[2].block_size == 8


def test_ids_do_not_change() -> None:
    """Another id would make traces that were converted before unlike those converted after."""
    found = block_ids([(0, 512), (1, 100)], 256)
    assert found == (3758705347847823962, 3758705347847823963, 4235191144950587566)
