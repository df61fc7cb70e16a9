"""Block identities: growth does not matter, different inputs never share an encoding."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvolt.core.block_key import BlockKeyChain, BlockKeyContext
from kvolt.core.hashing import MediaExtent, SequenceHasher, local_hashes, media_by_block, sequence_hashes

quick = settings(deadline=None, max_examples=100)

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=60)
block_sizes = st.integers(1, 9)
digests = st.binary(min_size=16, max_size=24)
extents = st.lists(st.builds(MediaExtent, st.integers(0, 70), st.integers(1, 40), digests), max_size=4)
# Two letters and short texts, so that a join without lengths would collide within a few examples.
names = st.text("ab", max_size=2)
contexts = st.builds(
    BlockKeyContext,
    weights_hash=names,
    lora=st.none() | names,
    dtype=names,
    block_size=st.integers(1, 2),
    layout=names,
    salt=st.none() | names,
    format_version=st.integers(0, 1),
)


def pieces(sequence: list[int], cuts: list[int]) -> list[list[int]]:
    edges = [0, *sorted(min(cut, len(sequence)) for cut in cuts), len(sequence)]
    return [sequence[start:end] for start, end in pairwise(edges)]


@quick
@given(tokens, block_sizes, st.integers(0, 2**64 - 1))
def test_local_hashes_follow_the_definition(sequence: list[int], block_size: int, seed: int) -> None:
    expected = []
    for start in range(0, len(sequence) - block_size + 1, block_size):
        block = sequence[start : start + block_size]
        expected.append(xxh3_64_intdigest(b"".join(token.to_bytes(4, "little") for token in block), seed))
    assert local_hashes(sequence, block_size, seed) == expected


@quick
@given(tokens, block_sizes, extents, st.lists(st.integers(0, 60), max_size=6))
def test_growth_gives_what_the_whole_gives(
    sequence: list[int], block_size: int, media: list[MediaExtent], cuts: list[int]
) -> None:
    hasher = SequenceHasher(block_size, media=media)
    grown = [block for piece in pieces(sequence, cuts) for block in hasher.extend(piece)]
    num_blocks = len(sequence) // block_size
    local = local_hashes(sequence, block_size, media=media_by_block(media, block_size, num_blocks))
    assert grown == hasher.sequence == sequence_hashes(local)
    assert hasher.num_tokens == len(sequence)

    context = BlockKeyContext(weights_hash="w", dtype="d", block_size=block_size, layout="l")
    whole, parts = BlockKeyChain(context, media), BlockKeyChain(context, media[::-1])
    assert [key for piece in pieces(sequence, cuts) for key in parts.extend(piece)] == whole.extend(sequence)
    assert parts.keys == whole.keys
    assert len(whole.keys) == num_blocks


@quick
@given(extents, block_sizes, st.integers(0, 12))
def test_media_is_in_a_block_exactly_when_it_overlaps(
    media: list[MediaExtent], block_size: int, num_blocks: int
) -> None:
    expected = []
    for block in range(num_blocks):
        positions = range(block * block_size, (block + 1) * block_size)
        inside = [
            extent
            for extent in media
            if any(extent.start <= at < extent.start + extent.length for at in positions)
        ]
        expected.append(sorted(int(extent.digest.hex()[:16], 16) for extent in inside))
    assert media_by_block(media, block_size, num_blocks) == expected


def identity(context: BlockKeyContext) -> tuple[object, ...]:
    return (
        context.format_version,
        context.weights_hash,
        context.lora or "",
        context.dtype,
        context.block_size,
        context.layout,
        context.salt or "",
    )


@settings(deadline=None, max_examples=300)
@given(st.lists(contexts, min_size=2, max_size=12))
def test_contexts_share_a_key_only_when_they_are_equal(drawn: list[BlockKeyContext]) -> None:
    assert len({context.derive_key() for context in drawn}) == len({identity(context) for context in drawn})


@quick
@given(contexts, st.integers(0, 4))
def test_a_letter_that_moves_to_the_next_field_changes_the_key(context: BlockKeyContext, at: int) -> None:
    order = ["weights_hash", "lora", "dtype", "layout", "salt"]
    giver, taker = order[at], order[(at + 1) % len(order)]
    fields = {name: getattr(context, name) or "" for name in order}
    numbers = {"block_size": context.block_size, "format_version": context.format_version}
    before = BlockKeyContext(**{**fields, giver: fields[giver] + "c"}, **numbers)
    after = BlockKeyContext(**{**fields, taker: "c" + fields[taker]}, **numbers)
    assert before.derive_key() != after.derive_key()


small_extents = st.builds(
    MediaExtent,
    st.integers(0, 3),
    st.integers(1, 3),
    st.sampled_from([bytes(16), bytes(17), bytes(32), bytes(56)]),
)
prompts = st.tuples(
    st.lists(st.integers(0, 1), min_size=2, max_size=4).filter(lambda ids: len(ids) % 2 == 0),
    st.lists(small_extents, max_size=3),
)


@settings(deadline=None, max_examples=300)
@given(st.lists(prompts, min_size=2, max_size=12))
def test_prompts_share_a_key_only_when_tokens_and_media_are_equal(
    drawn: list[tuple[list[int], list[MediaExtent]]],
) -> None:
    """Digests of zeros in lengths that could pass for other frames: only framing distinguishes them."""
    context = BlockKeyContext(weights_hash="w", dtype="d", block_size=2, layout="l")
    keys, inputs = set(), set()
    for ids, media in drawn:
        visible = sorted((s.start, s.length, s.digest) for s in media if s.start < len(ids))
        keys.add(BlockKeyChain(context, media).extend(ids)[-1])
        inputs.add((tuple(ids), tuple(visible)))
    assert len(keys) == len(inputs)


@quick
@given(tokens, tokens, block_sizes)
def test_keys_are_shared_exactly_as_far_as_the_prefix(
    left: list[int], right: list[int], block_size: int
) -> None:
    common = left[: len(left) // 2]
    right = common + right
    context = BlockKeyContext(weights_hash="w", dtype="d", block_size=block_size, layout="l")
    ours, theirs = BlockKeyChain(context).extend(left), BlockKeyChain(context).extend(right)
    for index, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        end = (index + 1) * block_size
        assert (mine == other) == (left[:end] == right[:end])
