"""The simulated model: a tokenizer that any text survives, and tokens that depend on seed and position only."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvolt.core.card import card_hash
from kvolt.engines.sim_model import SPECIAL, WORDS, next_token, sim_card, tokenizer_json, word_token_ids
from kvolt.frontend.text import Codec

CODEC = Codec(sim_card("m", 1000, 16))


def test_the_card_is_the_same_each_time() -> None:
    tokenizer_json.cache_clear()
    first = card_hash(sim_card("m", 1000, 16))
    tokenizer_json.cache_clear()
    assert card_hash(sim_card("m", 1000, 16)) == first


def test_every_word_is_one_token() -> None:
    ids = word_token_ids()
    assert len(ids) == len(WORDS)
    for word, token in zip(WORDS, ids, strict=True):
        assert CODEC.encode(f" {word}") == (token,)


def test_special_tokens_come_first() -> None:
    assert [CODEC.encode(token) for token in SPECIAL] == [(0,), (1,), (2,)]


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**40))
def test_a_token_is_a_word_and_a_function_of_its_place(seed: int, position: int) -> None:
    token = next_token(seed, position)
    assert token in word_token_ids()
    assert token == next_token(seed, position)
    assert token < CODEC.vocabulary_size


def test_tokens_are_spread() -> None:
    assert len({next_token(1, position) for position in range(200)}) > 80
    assert [next_token(1, i) for i in range(20)] != [next_token(2, i) for i in range(20)]
