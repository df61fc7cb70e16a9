"""Tokens from hash ids: prompts share tokens exactly as far as their ids say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.bench.traces.trace_lab import prompts, record, shared_blocks, shared_tokens

from kvolt.bench.traces import tokens_of
from kvolt.core.errors import ConfigError
from kvolt.core.trace import TraceRecord

VOCABULARY = 49152
pairs = st.integers(8, 20).flatmap(lambda size: st.tuples(prompts(size), prompts(size)))


@given(pairs, st.integers(0, 2**64 - 1))
def test_equal_prefixes_are_equal_and_different_ones_differ(
    pair: tuple[TraceRecord, TraceRecord], seed: int
) -> None:
    one, other = pair
    first, second = (tokens_of(each, VOCABULARY, seed) for each in pair)
    common = shared_tokens(one, other)
    assert first[:common] == second[:common]
    # Beyond, two tokens are the same by chance only, and hardly ever four in a row.
    rest = min(len(first), len(second)) - common
    if rest >= 4:
        assert first[common : common + 4] != second[common : common + 4]


@given(st.integers(1, 20).flatmap(prompts), st.integers(1, 2**32))
def test_the_length_is_exact_and_tokens_are_of_the_vocabulary(prompt: TraceRecord, vocabulary: int) -> None:
    tokens = tokens_of(prompt, vocabulary)
    assert len(tokens) == prompt.input_length
    assert all(0 <= token < vocabulary for token in tokens)


def test_an_equal_id_further_on_has_equal_tokens() -> None:
    tokens = tokens_of(record([5, 6, 5], block_size=32), VOCABULARY)
    assert tokens[:32] == tokens[64:]
    assert tokens[:32] != tokens[32:64]


def test_every_token_is_about_as_likely() -> None:
    tokens = tokens_of(record(range(100), block_size=512), 10)
    counts = [tokens.count(token) for token in range(10)]
    # 51,200 draws: 5,120 each, with a standard deviation of 68.
    assert all(abs(count - 5120) < 5 * 68 for count in counts)
    even, odd = tokens[::2], tokens[1::2]
    assert shared_blocks(even, odd) < 20, "the two halves of 64 bits are drawn apart"


def test_scaling_many_at_once_is_scaling_each() -> None:
    from kvolt.bench.traces.tokens import _noise, _scaled

    for num_words in (1, 2, 3, 16, 17):
        noise = _noise(b"b", 1, num_words, 4 * num_words)
        for size in (1, 7, VOCABULARY, 2**32):
            words = [
                int.from_bytes(noise[at : at + 4], "little") * size >> 32 for at in range(0, len(noise), 4)
            ]
            assert _scaled(noise, size) == b"".join(word.to_bytes(4, "little") for word in words)


def test_records_without_ids_share_nothing() -> None:
    bare = record((), length=50)
    one, other = (tokens_of(bare, VOCABULARY, index=index) for index in (0, 1))
    assert len(one) == 50
    assert shared_blocks(one, other) < 4
    assert one == tokens_of(bare, VOCABULARY, index=0)


def test_a_seed_makes_other_tokens() -> None:
    assert tokens_of(record([1]), VOCABULARY, 1) != tokens_of(record([1]), VOCABULARY, 2)


def test_tokens_do_not_change() -> None:
    """Other tokens would make runs that were measured before unlike those measured after."""
    assert tokens_of(record([1], 5, block_size=8), VOCABULARY, 3) == (16073, 35242, 39540, 27481, 15300)


@pytest.mark.parametrize("vocabulary", [0, -1, 2**32 + 1])
def test_a_vocabulary_must_be_one(vocabulary: int) -> None:
    with pytest.raises(ConfigError, match="vocabulary"):
        tokens_of(record([1]), vocabulary)


def test_too_few_ids_are_told() -> None:
    with pytest.raises(ConfigError, match="1 hash ids are too few for 5 tokens"):
        tokens_of(record([1], length=5), VOCABULARY)
